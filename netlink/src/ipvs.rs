//! Services of the kernel's load balancer IPVS, by generic netlink (linux/ip_vs.h).

use crate::{
    Conn, NetNs, Request, Result,
    generic::{self, attr, header, nested},
    wire::Raw,
};
use std::net::{IpAddr, SocketAddr};

const NEW_SERVICE: u8 = 1;
const NEW_DESTINATION: u8 = 5;
const SERVICE: u16 = 1;
const DESTINATION: u16 = 2;
/// IP_VS_CONN_F_MASQ: translated, as kube-proxy has it.
const MASQUERADES: u32 = 0;

/// IPVS of a network namespace.
#[derive(Debug)]
pub struct Ipvs {
    conn: Conn,
    family: u16,
}

impl Ipvs {
    /// # Errors
    /// If the kernel has no IPVS.
    pub fn in_netns(netns: &NetNs) -> Result<Self> {
        let (conn, family) = generic::open(netns, "IPVS")?;
        Ok(Self { conn, family })
    }

    /// Has packets of a protocol to an address and port be translated to these servers in turn.
    ///
    /// # Errors
    /// If there is such a service, or IPVS does not take one.
    pub fn add(&mut self, proto: u8, at: SocketAddr, servers: &[SocketAddr]) -> Result<()> {
        let what = format!("add IPVS service {at}");
        self.execute(what, NEW_SERVICE, &nested(SERVICE, &service(proto, at)))?;
        for server in servers {
            let what = format!("add {server} to IPVS service {at}");
            let service = nested(SERVICE, &identity(proto, at));
            let attrs = [service, nested(DESTINATION, &destination(*server))].concat();
            self.execute(what, NEW_DESTINATION, &attrs)?;
        }
        Ok(())
    }

    fn execute(&mut self, what: String, command: u8, attrs: &[u8]) -> Result<()> {
        let body = [&header(command)[..], attrs].concat();
        let request = Request::new(what, self.family, 0, &Raw(&body));
        self.conn.execute(request)
    }
}

/// What a service is known by.
fn identity(proto: u8, at: SocketAddr) -> Vec<u8> {
    let family = if at.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    [
        attr(1, &(family as u16).to_ne_bytes()),
        attr(2, &u16::from(proto).to_ne_bytes()),
        attr(3, &address(at.ip())),
        attr(4, &at.port().to_be_bytes()),
    ]
    .concat()
}

fn service(proto: u8, at: SocketAddr) -> Vec<u8> {
    // Of IPv6 it is the prefix' length.
    let netmask = if at.is_ipv4() { u32::MAX } else { 128 };
    [
        identity(proto, at),
        attr(6, b"rr\0"),
        // `struct ip_vs_flags`: none of all.
        attr(7, &[[0; 4], [0xff; 4]].concat()),
        // Persistence: none.
        attr(8, &0u32.to_ne_bytes()),
        attr(9, &netmask.to_ne_bytes()),
    ]
    .concat()
}

fn destination(at: SocketAddr) -> Vec<u8> {
    [
        attr(1, &address(at.ip())),
        attr(2, &at.port().to_be_bytes()),
        attr(3, &MASQUERADES.to_ne_bytes()),
        attr(4, &1u32.to_ne_bytes()),
        // Thresholds: none.
        attr(5, &0u32.to_ne_bytes()),
        attr(6, &0u32.to_ne_bytes()),
    ]
    .concat()
}

/// `union nf_inet_addr`.
fn address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            bytes
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;

    #[test]
    fn a_service_is_written_as_the_kernel_reads_it() {
        let bytes = service(6, "192.0.2.1:80".parse().unwrap());
        let attrs: Vec<_> = wire::attrs(&bytes).map(|attr| attr.unwrap()).collect();
        let kinds: Vec<_> = attrs.iter().map(|attr| attr.kind).collect();
        assert_eq!(kinds, [1, 2, 3, 4, 6, 7, 8, 9]);
        assert_eq!(attrs[2].value[..5], [192, 0, 2, 1, 0]);
        assert_eq!(attrs[3].value, [0, 80]);
        assert_eq!(attrs[7].value, [0xff; 4]);
        let bytes = destination("[2001:db8::1]:443".parse().unwrap());
        let attrs: Vec<_> = wire::attrs(&bytes).map(|attr| attr.unwrap()).collect();
        assert_eq!(attrs[0].value[..4], [0x20, 1, 0xd, 0xb8]);
        assert_eq!(attrs[1].value, [1, 187]);
    }
}
