//! Every operation against the real kernel, each test in network namespaces of its own.
//!
//! Needs CAP_SYS_ADMIN and CAP_NET_ADMIN.

#![allow(clippy::unwrap_used)] // also in the helpers that are no tests themselves

mod addrs;
mod conn;
mod links;
mod monitor;
mod neighbours;
mod netfilter;
mod netns;
mod routes;
mod sysctl;

use ipnet::IpNet;
use sinabro_netlink::{
    Conn, NetNs,
    veth::Veth,
    vxlan::{Vxlan, VxlanSettings},
};
use std::net::IpAddr;

const MAC_A: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0a];
const MAC_B: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0b];

/// A pair `a`, `b` in the calling thread's namespace; the index of `a`.
fn pair(conn: &mut Conn) -> u32 {
    let veth = Veth {
        name: "a",
        mac: MAC_A,
        mtu: 1500,
        peer_name: "b",
        peer_mac: MAC_B,
        peer_netns: None,
    };
    conn.create_veth(&veth).unwrap().index
}

/// A link of this name whose other end is to be the `eth0` of another namespace.
fn to_pod<'a>(name: &'a str, pod: &'a NetNs) -> Veth<'a> {
    Veth {
        name,
        mac: MAC_A,
        mtu: 1400,
        peer_name: "eth0",
        peer_mac: MAC_B,
        peer_netns: Some(pod),
    }
}

/// A VXLAN device `vx`, down, from an address to the usual port; its index.
fn vxlan(conn: &mut Conn, local: &str) -> u32 {
    let vxlan = Vxlan {
        name: "vx",
        mac: MAC_A,
        mtu: 1400,
        settings: VxlanSettings::new(1, 8472, ip(local)),
    };
    conn.execute(vxlan.create()).unwrap();
    conn.link_by_name("vx").unwrap().index
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}
