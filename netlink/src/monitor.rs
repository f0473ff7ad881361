//! What the kernel says has changed.
//!
//! An event only says that a look at the tables may be worth it, and shows what was set or removed,
//! so that who did it need not look. A message that makes no sense counts as lost events.

use crate::addr::Addr;
use crate::conn::receive;
use crate::fdb::Fdb;
use crate::link::Link;
use crate::neigh::Neigh;
use crate::route::Route;
use crate::wire::{self, Garbage, Message};
use crate::{Error, NetNs, Result};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::LinkHeader;
use netlink_packet_route::neighbour::NeighbourHeader;
use netlink_sys::Socket;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// NETCONFA_IFINDEX (linux/netconf.h), behind struct netconfmsg: a family, padded.
const NETCONF_IFINDEX: u16 = 1;
const NETCONF_HEADER: usize = 4;

const GROUPS: [u32; 9] = [
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_NEIGH,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV6_IFADDR,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV4_RULE,
    libc::RTNLGRP_IPV6_RULE,
    libc::RTNLGRP_IPV4_NETCONF,
];

/// Room for events between two reads: a burst of a thousand pods.
const BUFFER: usize = 4 << 20;

/// Datagrams per [`Monitor::read`], so that a flood can not hold the caller in it.
const READS: usize = 512;

/// A change: enough to decide whether to look.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    Link {
        index: u32,
        name: String,
        up: bool,
        removed: bool,
    },
    Addr {
        link: u32,
        address: IpAddr,
        removed: bool,
    },
    Route {
        route: Route,
        removed: bool,
    },
    Neigh {
        neigh: Neigh,
        removed: bool,
    },
    Fdb {
        link: u32,
        /// None if it names no tunnel endpoint.
        entry: Option<Fdb>,
        removed: bool,
    },
    /// A setting of a link's for IPv4 was changed, such as whether it forwards.
    Settings {
        link: u32,
    },
    /// A rule by which a routing table is chosen was added or removed.
    Rule,
    /// Events were lost: everything has to be looked at again.
    Overrun,
}

/// A socket subscribed to links, addresses, routes and their rules, neighbours and forwarding entries.
///
/// It never blocks by itself, so that it can be registered with an event loop ([`AsFd`]). One
/// that reports edges must call [`Monitor::read`] until it gives nothing.
#[derive(Debug)]
pub struct Monitor {
    socket: Socket,
    datagram: Vec<u8>,
}

impl Monitor {
    /// Watches the calling thread's network namespace.
    pub fn new() -> Result<Monitor> {
        Monitor::with_buffer(BUFFER)
    }

    /// Watches another network namespace.
    pub fn in_netns(netns: &NetNs) -> Result<Monitor> {
        netns.run(Monitor::new)?
    }

    fn with_buffer(bytes: usize) -> Result<Monitor> {
        let open = || -> io::Result<Monitor> {
            let mut socket = Socket::new(netlink_sys::protocols::NETLINK_ROUTE)?;
            // Beyond net.core.rmem_max with CAP_NET_ADMIN only; less is an earlier overrun.
            if setsockopt(&socket, sockopt::RcvBufForce, &bytes).is_err() {
                let _ = setsockopt(&socket, sockopt::RcvBuf, &bytes);
            }
            socket.bind_auto()?;
            for group in GROUPS {
                socket.add_membership(group)?;
            }
            Ok(Monitor {
                socket,
                datagram: Vec::new(),
            })
        };
        open().map_err(|error| Error::system("watch the network configuration", &error))
    }

    /// What has happened since the last call; empty if nothing has. Never blocks.
    pub fn read(&mut self) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        for _ in 0..READS {
            match receive(&self.socket, &mut self.datagram, libc::MSG_DONTWAIT) {
                Ok(()) => {
                    for message in wire::messages(&self.datagram) {
                        match message.and_then(|message| event(&message)) {
                            Ok(event) => events.extend(event),
                            Err(_) => events.push(Event::Overrun),
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    events.push(Event::Overrun);
                }
                Err(error) => {
                    return Err(Error::system("read network configuration events", &error));
                }
            }
        }
        Ok(events)
    }

    /// Waits for at least one event; empty after the timeout.
    pub fn wait(&mut self, timeout: Duration) -> Result<Vec<Event>> {
        let deadline = Instant::now() + timeout;
        loop {
            let events = self.read()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if !events.is_empty() || left.is_zero() {
                return Ok(events);
            }
            // Rounded up: a poll of zero milliseconds would spin.
            let left = left.as_millis().saturating_add(1);
            let left = i32::try_from(left).unwrap_or(i32::MAX);
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match poll(&mut polled, left) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => {
                    let what = "wait for network configuration events";
                    return Err(Error::refused(what, errno, None));
                }
            }
        }
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn event(message: &Message<'_>) -> std::result::Result<Option<Event>, Garbage> {
    let body = message.body;
    Ok(match message.kind {
        libc::RTM_NEWLINK | libc::RTM_DELLINK => {
            let header = LinkHeader::parse(body)?;
            let link = Link::parse(body)?;
            Some(Event::Link {
                index: link.index,
                name: link.name,
                up: link.up,
                // Of the bridge family it says that a port has left its bridge.
                removed: message.kind == libc::RTM_DELLINK
                    && header.interface_family != AddressFamily::Bridge,
            })
        }
        libc::RTM_NEWADDR | libc::RTM_DELADDR => Addr::parse(body)?.map(|addr| Event::Addr {
            link: addr.link,
            address: addr.net.addr(),
            removed: message.kind == libc::RTM_DELADDR,
        }),
        // Those for all links, and of new ones, have a negative index: each link is told of by itself.
        libc::RTM_NEWNETCONF => {
            let mut link = None;
            for attr in wire::attrs_after(body, NETCONF_HEADER)? {
                let attr = attr?;
                if attr.kind == NETCONF_IFINDEX {
                    link = Some(attr.u32()?).filter(|index| index.cast_signed() > 0);
                }
            }
            link.map(|link| Event::Settings { link })
        }
        libc::RTM_NEWRULE | libc::RTM_DELRULE => Some(Event::Rule),
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE => Route::parse(body)?.map(|route| Event::Route {
            route,
            removed: message.kind == libc::RTM_DELROUTE,
        }),
        libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => {
            let header = NeighbourHeader::parse(body)?;
            let removed = message.kind == libc::RTM_DELNEIGH;
            if header.family == AddressFamily::Bridge {
                Some(Event::Fdb {
                    link: header.ifindex,
                    entry: Fdb::parse(body)?,
                    removed,
                })
            } else {
                Neigh::parse(body)?.map(|neigh| Event::Neigh { neigh, removed })
            }
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::in_fresh;
    use crate::{Conn, bridge, link};

    #[test]
    fn a_buffer_that_ran_over_is_told_and_the_monitor_goes_on() {
        in_fresh(|| {
            // The kernel raises this to its least, some 2 KiB: a few events.
            let mut monitor = Monitor::with_buffer(1).unwrap();
            let mut conn = Conn::new().unwrap();
            conn.execute(bridge::create("br0")).unwrap();
            let br0 = conn.link_by_name("br0").unwrap().index;
            let mut flood = || {
                let renames = (0..50).map(|number| link::set_alias(br0, &number.to_string()));
                conn.execute_all(renames).unwrap();
            };
            for _ in 0..2 {
                flood();
                let mut events = monitor.read().unwrap();
                loop {
                    let more = monitor.read().unwrap();
                    if more.is_empty() {
                        break;
                    }
                    events.extend(more);
                }
                assert!(events.contains(&Event::Overrun), "{events:?}");
                assert!(events.len() < 50, "{} events came through", events.len());
            }
            conn.execute(link::set_down(br0)).unwrap();
            let events = monitor.wait(Duration::from_secs(10)).unwrap();
            assert!(
                events.iter().any(
                    |event| matches!(event, Event::Link { index, up: false, .. } if *index == br0)
                ),
                "{events:?}"
            );
        });
    }
}
