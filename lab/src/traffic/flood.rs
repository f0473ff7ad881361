//! What begins connections and never goes on with them: as many as a program of little effort sends.

use super::{
    packet::{self, Interface},
    segment::{SYN, Segment},
};
use crate::place::Place;
use anyhow::{Context as _, Result, anyhow};
use nix::errno::Errno;
use std::{
    net::SocketAddr,
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

/// Goes on until it is finished.
pub struct Flood {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Flood {
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
