//! Packets that were dropped: the last of them, with the names of pods.
//!
//! The programs tell of a few a second of each reason ([`sinabro_common::abi::drop`]). They are read as they come,
//! whether or not anybody follows: what was dropped a minute ago is what people ask for. [`KEPT`] of them take
//! half a megabyte.

mod packet;

use crate::{
    datapath::{DropEvents, monotonic_ns},
    endpoint::{EndpointRecord, PodNames},
};
use anyhow::Context as _;
use packet::Clock;
use sinabro_common::{
    abi::drop::{DropEvent, DropReason},
    api::{DROPS_OF_A_PAGE, DropEventsReport, DroppedPacket, MAX_DROP_WAIT_MS},
};
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, watch},
    time::{sleep, timeout},
};

/// Packets remembered.
const KEPT: usize = 1000;
/// Packets taken out of a ring buffer at once: as many as there can be in it.
const BATCH: usize = 256;
/// From one time to the next. What a ring buffer has no room for meanwhile is counted by the programs.
const PAUSE: Duration = Duration::from_millis(50);

/// The packets that were dropped last.
pub struct RecentDrops {
    agent: u64,
    kept: Mutex<VecDeque<DroppedPacket>>,
    /// Number of the last one.
    last: watch::Sender<u64>,
    stopping: watch::Receiver<bool>,
    out_of_ports: Notify,
}

impl RecentDrops {
    /// Nobody waits any more once `stopping` becomes true.
    pub fn new(stopping: watch::Receiver<bool>) -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            agent: since_epoch.unwrap_or_default().as_nanos() as u64,
            kept: Mutex::default(),
            last: watch::Sender::new(0),
            stopping,
            out_of_ports: Notify::new(),
        }
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<DroppedPacket>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push_events(&self, events: &[DropEvent], pods: &[EndpointRecord]) {
        const OUT_OF_PORTS: u32 = DropReason::NatPortsExhausted as u32;
        if events.iter().any(|event| event.reason == OUT_OF_PORTS) {
            self.out_of_ports.notify_one();
        }
        let (pods, clock) = (PodNames::of(pods), Clock::new(monotonic_ns()));
        let shown = |event| packet::shown(event, &pods, &clock);
        self.push(events.iter().map(shown));
    }

    fn push(&self, packets: impl Iterator<Item = DroppedPacket>) {
        let mut kept = self.kept();
        // Under the lock: numbers are in the order of the list.
        let mut last = *self.last.borrow();
        for mut packet in packets {
            last += 1;
            packet.number = last;
            if kept.len() == KEPT {
                kept.pop_front();
            }
            kept.push_back(packet);
        }
        self.last.send_replace(last);
    }

    /// Waits until a packet is dropped because no port was found for its connection, or was since the last time.
    pub async fn out_of_ports(&self) {
        self.out_of_ports.notified().await;
    }

    /// What was dropped after the packet of a number.
    pub fn after(&self, number: u64) -> DropEventsReport {
        let kept = self.kept();
        let begin = kept.partition_point(|packet| packet.number <= number);
        let packets: Vec<_> = kept.range(begin..).take(DROPS_OF_A_PAGE).cloned().collect();
        let first = packets.first().map_or(0, |packet| packet.number);
        DropEventsReport {
            agent: self.agent,
            lost: first.saturating_sub(number + 1),
            packets,
        }
    }

    /// The same, and if there is nothing it is waited for.
    pub async fn wait(&self, number: u64, milliseconds: u64) -> DropEventsReport {
        let (mut last, mut stopping) = (self.last.subscribe(), self.stopping.clone());
        let news = async {
            tokio::select! {
                _ = last.wait_for(|last| *last > number) => {}
                _ = stopping.wait_for(|stop| *stop) => {}
            }
        };
        let most = Duration::from_millis(milliseconds.min(MAX_DROP_WAIT_MS));
        // Whatever came first.
        let _ = timeout(most, news).await;
        self.after(number)
    }
}

/// Reads what one object's programs tell, for ever.
///
/// # Errors
/// If the kernel does not say when there is something to read.
pub async fn read(
    ring: DropEvents,
    recent: Arc<RecentDrops>,
    pods: impl Fn() -> Vec<EndpointRecord>,
) -> anyhow::Result<()> {
    const WHAT: &str = "cannot read what the programs tell of drops";
    // SAFETY: the descriptor is the map's, which lives as long as the ring and is never another one.
    let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
    let mut ring = ring.map_err(io::Error::from).context(WHAT)?;
    loop {
        let mut ready = ring.readable_mut().await.context(WHAT)?;
        let mut events: Vec<DropEvent> = Vec::new();
        while events.len() < BATCH {
            match ready.get_inner_mut().next_event() {
                Some(event) => events.push(event),
                None => {
                    ready.clear_ready();
                    break;
                }
            }
        }
        if !events.is_empty() {
            recent.push_events(&events, &pods());
            // Whatever pods send on however many CPUs: no more of this than so often.
            sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_common::abi::drop::EVENT_HEAD;

    fn packets(count: usize) -> impl Iterator<Item = DroppedPacket> {
        let event = DropEvent {
            time_ns: 0,
            reason: 2,
            ifindex: 7,
            len: 0,
            head_len: 0,
            left_out: 0,
            kind: [0; 2],
            hook: 1,
            pad: 0,
            head: [0; EVENT_HEAD],
        };
        let packet = packet::shown(&event, &PodNames::default(), &Clock::new(0));
        std::iter::repeat_n(packet, count)
    }

    fn recent() -> (watch::Sender<bool>, RecentDrops) {
        let (stop, stopping) = watch::channel(false);
        (stop, RecentDrops::new(stopping))
    }

    #[test]
    fn pages_follow_each_other_and_say_what_is_lost() {
        let (_stop, recent) = recent();
        assert_eq!(recent.after(0).packets, []);
        recent.push(packets(KEPT + 10));
        let first = recent.after(0);
        assert_eq!(
            (first.lost, first.packets.len(), first.packets[0].number),
            (10, DROPS_OF_A_PAGE, 11)
        );
        let last = first.packets[DROPS_OF_A_PAGE - 1].number;
        let second = recent.after(last);
        assert_eq!((second.lost, second.packets[0].number), (0, last + 1));
        let end = recent.after((KEPT + 10) as u64);
        assert_eq!((end.lost, end.packets.len()), (0, 0));
        // Of an agent of before, or of nobody.
        assert_eq!(recent.after(u64::MAX - 1).packets, []);
    }

    #[tokio::test]
    async fn who_waits_hears_of_the_next_one_and_of_the_end() {
        let (stop, recent) = recent();
        let long = MAX_DROP_WAIT_MS;
        let (report, ()) = tokio::join!(recent.wait(0, long), async {
            recent.push(packets(1));
        });
        assert_eq!(report.packets.len(), 1);
        let (report, ()) = tokio::join!(recent.wait(1, long), async {
            stop.send_replace(true);
        });
        assert_eq!(report.packets.len(), 0);
        // There is nothing to wait for then.
        assert_eq!(recent.wait(1, long).await.packets.len(), 0);
    }
}
