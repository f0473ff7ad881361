//! Kubelets' reports while nothing happens: each node's status every five minutes
//! (nodeStatusReportFrequency), spread evenly. Their Leases, renewed every ten seconds, are left out:
//! nothing of ours watches them.

use super::object;
use crate::bench::api_server::Client;
use anyhow::{Result, bail};
use serde_json::json;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

const PERIOD: Duration = Duration::from_secs(300);

/// Goes on until it is dropped.
pub struct Heartbeats {
    sent: Arc<AtomicU64>,
    failed: Receiver<anyhow::Error>,
    /// Gone, it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Heartbeats {
    /// Of the nodes with numbers below `nodes`.
    pub fn start(client: &Client, nodes: usize) -> Self {
        let sent = Arc::new(AtomicU64::new(0));
        let (failures, failed) = channel();
        let (stop, stopped) = channel::<()>();
        let thread = {
            let (client, sent) = (client.clone(), sent.clone());
            thread::spawn(move || {
                let every = PERIOD / nodes.max(1) as u32;
                let mut due = Instant::now();
                for number in 0.. {
                    let now = Instant::now();
                    let left = due.saturating_duration_since(now);
                    // What a slow server kept back is not made up for.
                    due = due.max(now) + every;
                    if stopped.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                    let node = object::name(number as usize % nodes);
                    let beat = json!({"status": {"conditions": object::conditions(number)}});
                    if let Err(error) = client.patch_status(&node, &beat) {
                        let _ = failures.send(error);
                        return;
                    }
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        Self {
            sent,
            failed,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// How many there were until now.
    ///
    /// # Errors
    /// If one failed: there are no more.
    pub fn sent(&self) -> Result<u64> {
        if let Ok(error) = self.failed.try_recv() {
            bail!(error.context("a heartbeat failed"));
        }
        Ok(self.sent.load(Ordering::Relaxed))
    }
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
