//! WireGuard devices: keys and peers, by generic netlink (linux/wireguard.h, linux/genetlink.h).

use crate::{
    Conn, NetNs, Request, Result,
    conn::{CREATE, malformed},
    generic::{self, HEADER, attr, header, nested},
    link::{self, check_name},
    wire::{self, Garbage, Message, Raw},
};
use ipnet::IpNet;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo};
use std::net::{IpAddr, SocketAddrV4};

/// Of Curve25519; a public and a private one are as long.
pub type Key = [u8; 32];

const GET_DEVICE: u8 = 0;
const SET_DEVICE: u8 = 1;
/// Somebody at the other end of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub key: Key,
    /// Where its packets are sent to.
    pub at: SocketAddrV4,
    /// Which addresses are its own; those of no peer are nobody's.
    pub addresses: Vec<IpNet>,
}

/// Creates a device, down, that knows nobody.
pub fn create(name: &str) -> Request {
    let what = format!("create WireGuard device {name}");
    if let Err(error) = check_name(name) {
        return Request::wrong(what, error);
    }
    let message = link::new_down(vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Wireguard)]),
    ]);
    Request::new(what, libc::RTM_NEWLINK, CREATE, &message)
}

/// The devices of a network namespace.
#[derive(Debug)]
pub struct Wireguard {
    conn: Conn,
    family: u16,
}

impl Wireguard {
    /// # Errors
    /// If the kernel has no such devices.
    pub fn in_netns(netns: &NetNs) -> Result<Self> {
        let (conn, family) = generic::open(netns, "wireguard")?;
        Ok(Self { conn, family })
    }

    /// Gives a device its private key, and the port where it listens.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn set_key(&mut self, device: u32, key: Key, port: u16) -> Result<()> {
        let attrs = [attr(3, &key), attr(6, &port.to_ne_bytes())].concat();
        self.set(format!("set the key of link #{device}"), device, &attrs)
    }

    /// The public key that belongs to a device's private one.
    ///
    /// # Errors
    /// If there is no such device, or it has no key.
    pub fn public_key(&mut self, device: u32) -> Result<Key> {
        let what = format!("read the key of link #{device}");
        let body = [header(GET_DEVICE), attr(1, &device.to_ne_bytes())].concat();
        let family = self.family;
        let parse = |message: &Message<'_>| match message.kind == family {
            true => public_key(message.body),
            false => Ok(None),
        };
        let found = self.conn.dump(&what, family, &Raw(&body), parse)?;
        let missing = || malformed(what, Garbage("no public key".into()));
        found.into_iter().next().ok_or_else(missing)
    }

    /// Adds a peer to a device.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn add_peer(&mut self, device: u32, peer: &Peer) -> Result<()> {
        let peers = nested(8, &nested(0, &peer.attrs()));
        self.set(format!("add a peer to link #{device}"), device, &peers)
    }

    fn set(&mut self, what: String, device: u32, attrs: &[u8]) -> Result<()> {
        let device = attr(1, &device.to_ne_bytes());
        let body = [&header(SET_DEVICE)[..], &device, attrs].concat();
        let request = Request::new(what, self.family, 0, &Raw(&body));
        self.conn.execute(request)
    }
}

impl Peer {
    fn attrs(&self) -> Vec<u8> {
        // `struct sockaddr_in`.
        let family = (libc::AF_INET as u16).to_ne_bytes();
        let port = self.at.port().to_be_bytes();
        let end = [&family[..], &port, &self.at.ip().octets(), &[0; 8]].concat();
        let addresses: Vec<u8> = self.addresses.iter().flat_map(allowed).collect();
        [attr(1, &self.key), attr(4, &end), nested(9, &addresses)].concat()
    }
}

fn allowed(net: &IpNet) -> Vec<u8> {
    let (family, address) = match net.network() {
        IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
    };
    let family = attr(1, &(family as u16).to_ne_bytes());
    let prefix = attr(3, &[net.prefix_len()]);
    nested(0, &[family, attr(2, &address), prefix].concat())
}

type Parsed<T> = std::result::Result<T, Garbage>;

/// None in what a long answer goes on with.
fn public_key(body: &[u8]) -> Parsed<Option<Key>> {
    for attr in wire::attrs_after(body, HEADER)? {
        let attr = attr?;
        if attr.kind == 4 {
            return attr.array().map(Some);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_peer_is_written_as_the_kernel_reads_it() {
        let peer = Peer {
            key: [7; 32],
            at: "192.0.2.1:51820".parse().unwrap(),
            addresses: vec!["10.0.0.0/8".parse().unwrap()],
        };
        let bytes = peer.attrs();
        let attrs: Vec<_> = wire::attrs(&bytes).map(|attr| attr.unwrap()).collect();
        let kinds: Vec<_> = attrs.iter().map(|attr| attr.kind).collect();
        assert_eq!(kinds, [1, 4, 9]);
        assert_eq!(attrs[0].value, [7; 32]);
        assert_eq!(attrs[1].value[2..8], [0xca, 0x6c, 192, 0, 2, 1]);
        let first = wire::attrs(attrs[2].value).next().unwrap().unwrap();
        let parts: Vec<_> = wire::attrs(first.value).map(|attr| attr.unwrap()).collect();
        assert_eq!(parts[1].value, [10, 0, 0, 0]);
        assert_eq!(parts[2].value, [8]);
    }

    #[test]
    fn what_the_kernel_says_is_found() {
        let key = [vec![0; HEADER], attr(4, &[9; 32])].concat();
        assert_eq!(public_key(&key).ok(), Some(Some([9; 32])));
        assert_eq!(public_key(&key[..HEADER]).ok(), Some(None));
        assert!(public_key(&[vec![0; HEADER], attr(4, &[9; 31])].concat()).is_err());
    }

    proptest! {
        #[test]
        fn garbage_never_panics(body in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = public_key(&body);
        }
    }
}
