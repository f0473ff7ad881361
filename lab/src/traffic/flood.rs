//! What begins connections and never goes on with them: as many as a program of little effort sends.

use super::{
    packet::{self, Interface},
    segment::{SYN, Segment},
};
use crate::{place::Place, pod::Pod};
use anyhow::{Context as _, Result, anyhow};
use nix::errno::Errno;
use sinabro_common::names;
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// Packets at a time, and the pause between two times: the machine has others to serve, too.
const BURST: u64 = 16;
const PAUSE: Duration = Duration::from_millis(1);

/// Where floods come from, or go to, by family.
pub const NOWHERE: [&str; 2] = ["203.0.113.0/24", "2001:db8:bad::/48"];

/// Addresses that no machine has (RFC 5737, RFC 3849), and no packet reaches.
pub fn nowhere(family: usize, number: u64) -> SocketAddr {
    let port = 1024 + (number % 50_000) as u16;
    let host = (number / 50_000 % 254 + 1) as u16;
    let address: IpAddr = match family {
        0 => Ipv4Addr::new(203, 0, 113, host as u8).into(),
        _ => Ipv6Addr::new(0x2001, 0xdb8, 0xbad, 0, 0, 0, 0, host).into(),
    };
    SocketAddr::new(address, port)
}

/// Has a router drop what is sent there.
pub fn lose_what_goes_nowhere(router: &Place) -> Result<()> {
    for range in NOWHERE {
        let family = if range.contains(':') { "-6" } else { "-4" };
        router.command(&["ip", family, "route", "add", "blackhole", range])?;
    }
    Ok(())
}

/// Goes on until it is finished.
pub struct Flood {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Flood {
    /// A pod begins connections to everywhere, and after so many the same ones again.
    pub fn from_pod(pod: &Pod, family: usize, connections: u64) -> Result<Self> {
        let own = pod.addresses()[family];
        let ends = move |number| {
            let number = number % connections;
            let from = SocketAddr::new(own, 1024 + (number / 12_700_000) as u16);
            (from, nowhere(family, number))
        };
        let interface = packet::interface(pod.place(), "eth0")?;
        Self::start(pod.place(), interface, names::HOST_MAC, ends)
    }

    /// SYNs by an interface to a router; from whom and to whom the n-th is, the caller says.
    pub fn start(
        place: &Place,
        interface: Interface,
        router: [u8; 6],
        ends: impl Fn(u64) -> (SocketAddr, SocketAddr) + Send + 'static,
    ) -> Result<Self> {
        let socket = packet::socket(place, interface, 0)?;
        let (stop, sent) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let thread = {
            let (stop, sent) = (stop.clone(), sent.clone());
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..BURST {
                        let (src, dst) = ends(sent.load(Ordering::Relaxed));
                        let segment = Segment {
                            src_mac: interface.mac,
                            dst_mac: router,
                            src,
                            dst,
                            sequence: 1,
                            flags: SYN,
                            options: &[],
                            words: None,
                        };
                        match socket.send(&segment.frame()?) {
                            Ok(_) => sent.fetch_add(1, Ordering::Relaxed),
                            // What finds no room is sent later.
                            Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => 0,
                            Err(error) => return Err(error).context("cannot flood"),
                        };
                    }
                    thread::sleep(PAUSE);
                }
                Ok(())
            })
        };
        Ok(Self {
            stop,
            sent,
            thread: Some(thread),
        })
    }

    /// How many it sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Ends it; how many it sent.
    pub fn finish(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow!("a flood panicked"))??;
        }
        Ok(self.sent())
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
