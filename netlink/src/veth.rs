//! Pairs of virtual Ethernet links.
//!
//! The kernel refuses to make a pair whose peer is up (ENOTCONN: it opens the peer before it joins
//! the two). So the first end is made up, the peer down. A peer in another namespace is raised
//! there, best by the first request of the batch that gives it its addresses and routes.

use crate::conn::{CREATE, Request, malformed};
use crate::link::{self, check_name};
use crate::{Conn, Link, Mac, NetNs, Result};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo};

/// A pair to be made by one request: the first end up, the peer in its namespace under its final
/// name, still down.
#[derive(Clone, Debug)]
pub struct Veth<'a> {
    pub name: &'a str,
    pub mac: Mac,
    pub mtu: u32,
    pub peer_name: &'a str,
    pub peer_mac: Mac,
    /// The namespace that the peer is put into; the same as the first end's if absent.
    pub peer_netns: Option<&'a NetNs>,
}

impl Veth<'_> {
    pub fn create(&self) -> Request {
        let what = format!("create veth {} with peer {}", self.name, self.peer_name);
        if let Err(error) = check_name(self.name).and_then(|()| check_name(self.peer_name)) {
            return Request::wrong(what, error);
        }
        let mut peer = vec![
            LinkAttribute::IfName(self.peer_name.into()),
            LinkAttribute::Address(self.peer_mac.to_vec()),
            LinkAttribute::Mtu(self.mtu),
        ];
        peer.extend(self.peer_netns.map(link::in_netns));
        let message = link::new_up(vec![
            LinkAttribute::IfName(self.name.into()),
            LinkAttribute::Address(self.mac.to_vec()),
            LinkAttribute::Mtu(self.mtu),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(link::message(0, peer)))),
            ]),
        ]);
        let request = Request::new(what, libc::RTM_NEWLINK, CREATE, &message);
        match self.peer_netns {
            Some(netns) => request.holding(netns.shared_fd()),
            None => request,
        }
    }
}

impl Conn {
    /// Creates the pair and returns the first end, in one system call each way. The peer's index
    /// in its own namespace is the link's `peer`; in the same namespace the peer is raised too.
    pub fn create_veth(&mut self, veth: &Veth<'_>) -> Result<Link> {
        let what = format!("find link {}", veth.name);
        let mut requests = vec![veth.create()];
        if veth.peer_netns.is_none() {
            requests.push(link::set_up_by_name(veth.peer_name));
        }
        requests.push(link::get_by_name(what.clone(), veth.name));
        let outcomes = self.transact(requests);
        let answers = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
        let body = answers.last().map_or(&[][..], Vec::as_slice);
        Link::parse(body).map_err(|garbage| malformed(what, garbage))
    }
}
