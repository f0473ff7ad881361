//! Other connections in the tables, which have no packets.
//!
//! Ours are written into the maps, netfilter's through ctnetlink by `conntrack --load-file`: established
//! TCP connections of the pod's own address to as many remote addresses, of the range that is there for
//! benchmarks (RFC 2544 §C.2.2, RFC 5180 §8).

use crate::bench::feed::feed;
use anyhow::{Context as _, Result, ensure};
use sinabro_common::abi::{Addr, connection::Tuple};
use sinabro_lab::{Node, datapath::Planted};
use sinabro_netlink::sysctl;
use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Mutex, PoisonError},
};

/// Whose table it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    Ours,
    Netfilter,
}

/// The limit of netfilter's table, as it was. It is one for the whole machine (a network other than the
/// first cannot change it), so it is put back.
static BEFORE: Mutex<Option<String>> = Mutex::new(None);
const MAX: [&str; 3] = ["net", "netfilter", "nf_conntrack_max"];

/// A limit that is high enough, as long as this lives.
pub struct Limit(());

impl Limit {
    /// Has room for so many, and for what is measured.
    pub fn raise(flows: u32) -> Result<Self> {
        const MEASURED: u32 = 200_000;
        let before = sysctl::read(&MAX)?;
        let wanted = flows + MEASURED;
        if before.parse::<u32>().is_ok_and(|before| before < wanted) {
            sysctl::write(&MAX, &wanted.to_string())?;
            *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        }
        Ok(Self(()))
    }

    pub fn put_back() {
        let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(before) = before {
            let _ = sysctl::write(&MAX, &before);
        }
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        Self::put_back();
    }
}

/// A node's table with others in it.
pub struct Filled<'a> {
    node: &'a Node,
    flows: u32,
    /// None: they are in netfilter's.
    planted: Option<Planted>,
}

impl<'a> Filled<'a> {
    /// Puts connections from a pod to the outside into a table; netfilter's is emptied first.
    pub fn new(
        table: Table,
        node: &'a Node,
        pod: IpAddr,
        seen: IpAddr,
        flows: u32,
    ) -> Result<Self> {
        let planted = match table {
            Table::Ours => {
                let tuples = (0..flows).map(|number| tuple(pod, number));
                Some(Planted::new(node, Addr::from(seen), tuples)?)
            }
            Table::Netfilter => {
                flush(node)?;
                if flows > 0 {
                    feed(
                        node,
                        "conntrack",
                        &["--load-file", "-"],
                        &lines(pod, seen, flows),
                    )?;
                }
                None
            }
        };
        Ok(Self {
            node,
            flows,
            planted,
        })
    }

    /// Takes them out again; an error if they were not there all the time.
    pub fn empty(self) -> Result<()> {
        let left = match &self.planted {
            Some(planted) => planted.left() as u64,
            None => entries(self.node)?,
        };
        ensure!(
            left >= u64::from(self.flows),
            "{left} of {} were left",
            self.flows
        );
        match self.planted {
            Some(planted) => drop(planted),
            None => flush(self.node)?,
        }
        Ok(())
    }
}

/// Entries of a node in netfilter's table.
pub fn entries(node: &Node) -> Result<u64> {
    let read = || Ok(sysctl::read(&["net", "netfilter", "nf_conntrack_count"])?);
    let text = node.place().run(read)?;
    text.parse()
        .with_context(|| format!("nf_conntrack_count is `{text}`"))
}

/// Takes all of them out.
pub fn flush(node: &Node) -> Result<()> {
    node.command(&["conntrack", "-F"])
}

const PORT: u16 = 80;
/// Of the client, from which on each has as many connections as there are remote addresses.
const FIRST_PORT: u16 = 20_000;
const REMOTES: u32 = 100_000;

/// The number's remote address and the port of the pod.
fn ends(pod: IpAddr, number: u32) -> (IpAddr, u16) {
    let host = number % REMOTES + 1;
    let remote = match pod {
        // 198.18.0.0/15
        IpAddr::V4(_) => Ipv4Addr::from_bits(0xc612_0000 + host).into(),
        // 2001:2::/48
        IpAddr::V6(_) => Ipv6Addr::from_bits((0x2001_0002 << 96) + u128::from(host)).into(),
    };
    (remote, FIRST_PORT + (number / REMOTES) as u16)
}

fn tuple(pod: IpAddr, number: u32) -> Tuple {
    let (remote, port) = ends(pod, number);
    Tuple {
        src: Addr::from(pod),
        dst: Addr::from(remote),
        src_port: port.to_be_bytes(),
        dst_port: PORT.to_be_bytes(),
        proto: 6,
        pad: [0; 3],
    }
}

/// What `conntrack --load-file` reads.
fn lines(pod: IpAddr, seen: IpAddr, flows: u32) -> String {
    let mut text = String::with_capacity(flows as usize * 200);
    for number in 0..flows {
        let (remote, port) = ends(pod, number);
        // Writing into a string does not fail.
        let _ = writeln!(
            text,
            "-I -p tcp -s {pod} -d {remote} --sport {port} --dport {PORT} \
             -r {remote} -q {seen} --reply-port-src {PORT} --reply-port-dst {port} \
             -t 86400 --state ESTABLISHED -u ASSURED,SEEN_REPLY"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_connections_are_the_same() {
        for pod in ["10.244.1.3", "fd00:10:244:1::3"] {
            let pod: IpAddr = pod.parse().unwrap();
            let keys: HashSet<_> = (0..500_000)
                .map(|number| tuple(pod, number).key())
                .collect();
            assert_eq!(keys.len(), 500_000);
            let (first, last) = (ends(pod, 0).0, ends(pod, REMOTES - 1).0);
            let range: ipnet::IpNet = match pod {
                IpAddr::V4(_) => "198.18.0.0/15".parse().unwrap(),
                IpAddr::V6(_) => "2001:2::/48".parse().unwrap(),
            };
            assert!(
                range.contains(&first) && range.contains(&last),
                "{first} {last}"
            );
        }
    }
}
