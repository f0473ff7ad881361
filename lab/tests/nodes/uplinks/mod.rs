//! Ways out of a node other than the overlay's device: what leaves by each has an address that answers
//! find, in both families.

mod kit;
mod ports;
mod sums;
mod tun;
mod ways;
