//! Packets between pods of two nodes go past the kernel's routes and VXLAN device where that is possible, and by them where not.

mod across;
mod again;
mod auto;
mod bursts;
mod congestion;
mod fabric;
mod firewall;
mod limits;
mod load;
mod machine;
mod mixed;
mod moves;
mod native;
mod native_mtu;
mod next_hop;
mod odd;
mod order;
mod over_ipv6;
mod policy;
mod proxy;
mod seen;
mod sizes;
mod sums;
mod three;
mod uplinks;
mod ways;
mod world;

use again::{PORT, leave_again};
use ipnet::IpNet;
use load::{BEFORE_EVENTS, PHASE, ROUTER, ROUTER_IPV6, talk, watched};
use sinabro_common::{
    api::{NodeReport, PathCounts, PathPackets, PeerPath, PeerProbe, Request as Ask, Response},
    names,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    amount::amount,
    confinement,
    node::{KERNEL_FLAG as KERNEL, SERVICES_FLAGS as FLAGS},
    traffic::{
        device, icmp, offload,
        path::Path,
        snmp,
        stream::Stream,
        tcp, udp,
        unbroken::{Pace, Traffic},
    },
    wait::eventually,
};
use sinabro_netlink::{Request, route::Route, sysctl};
use sizes::{MTUS, OUTSIDE, OUTSIDE_IPV6, every_pair, large, set_mtu, stream_len};
use std::{array::from_fn, fs, net::SocketAddr, time::Duration};
use world::{
    NOTHING, World, exchange, exchange_between, goes_direct, is_both_ways, other, said_of, shown,
    start, why,
};

const PATIENCE: Duration = Duration::from_secs(2);
const AUTO: &str = "--routing=auto";
const ASKS: &str = "--peer-probe=true";
const ASKS_NOBODY: &str = "--peer-probe=false";
