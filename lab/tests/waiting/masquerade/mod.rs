//! What pods send to the outside leaves with their node's address, and whatever comes back finds them:
//! data, errors about it, packets in parts; IPv4 and IPv6.

mod big_tcp;
mod bursts;
mod crowds;
mod done;
mod early;
mod ends;
mod exchange;
mod exhausted;
mod floods;
mod forwarding;
mod fragments;
mod host_port;
mod hostile;
mod kept;
mod kit;
mod limits;
mod mapping;
mod path_mtu;
mod pressure;
mod stale;
mod time_wait;
mod tools;
