//! What the kernel counts of a place's devices, as it says in `/proc/net/dev`.

use crate::Place;
use anyhow::{Context as _, Result};
use std::fs;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub received: Carried,
    pub sent: Carried,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    pub bytes: u64,
    pub packets: u64,
}

/// Of one device, since it was made.
pub fn counts(place: &Place, device: &str) -> Result<Counts> {
    let text = place.run(|| Ok(fs::read_to_string("/proc/thread-self/net/dev")?))?;
    of(&text, device).with_context(|| format!("{} has no {device}", place.name()))
}

fn of(text: &str, device: &str) -> Option<Counts> {
    let columns = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'))?;
    // Eight columns of what was received, beginning with bytes and packets, then those of what was sent.
    let mut columns = columns.split_ascii_whitespace();
    let mut carried = |skipped| -> Option<Carried> {
        Some(Carried {
            bytes: columns.nth(skipped)?.parse().ok()?,
            packets: columns.next()?.parse().ok()?,
        })
    };
    Some(Counts {
        received: carried(0)?,
        sent: carried(6)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str, device: &str) -> Option<u64> {
        of(text, device).map(|counts| counts.received.bytes + counts.sent.bytes)
    }

    #[test]
    fn both_directions_of_a_device_are_counted() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n\
            \x20   lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n\
            \x20 eth0: 1000 9 0 0 0 0 0 0 230 4 0 0 0 0 0 0\n";
        assert_eq!(bytes(text, "eth0"), Some(1230));
        assert_eq!(bytes(text, "lo"), Some(10));
        let eth0 = of(text, "eth0").unwrap();
        assert_eq!((eth0.received.packets, eth0.sent.packets), (9, 4));
        assert_eq!(bytes(text, "eth"), None);
        let end = text.find("230").unwrap();
        assert_eq!(bytes(&text[..end], "eth0"), None);
    }
}
