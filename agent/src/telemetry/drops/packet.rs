//! A dropped packet in people's words. It is read by what the programs read it with.

use crate::endpoint::PodNames;
use sinabro_common::{
    abi::{
        Addr,
        drop::{DropEvent, DropReason, Hook},
    },
    api::{DroppedPacket, Mac, PacketEnd, protocol_name},
};
use sinabro_ebpf::parse::{
    Fragment, Ip, arp,
    bytes::Frame,
    eth,
    icmp::is_echo,
    l4::{self, L4},
    proto,
};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Turns the kernel's time into that of people.
pub struct Clock {
    monotonic_ns: u64,
    now: SystemTime,
}

impl Clock {
    pub fn new(monotonic_ns: u64) -> Self {
        Self {
            monotonic_ns,
            now: SystemTime::now(),
        }
    }

    fn unix_milliseconds(&self, monotonic_ns: u64) -> u64 {
        let ago = Duration::from_nanos(self.monotonic_ns.saturating_sub(monotonic_ns));
        let then = self.now.checked_sub(ago).unwrap_or(UNIX_EPOCH);
        let since_epoch = then.duration_since(UNIX_EPOCH).unwrap_or_default();
        since_epoch.as_millis() as u64
    }
}

/// What an event says; its number is for others to give.
pub fn shown(event: &DropEvent, pods: &PodNames, clock: &Clock) -> DroppedPacket {
    let head = &event.head[..event.head.len().min(event.head_len as usize)];
    let ethernet = !is_layer_3(head, event.kind);
    let mut framed = vec![0; 12];
    let frame = if ethernet {
        Frame {
            head,
            len: event.len,
        }
    } else {
        // As it would be behind an Ethernet header.
        framed.extend(event.kind);
        framed.extend(head);
        Frame {
            head: &framed,
            len: event.len.saturating_add(eth::LEN),
        }
    };
    let told = read(&frame);
    let end = |(address, port): (Addr, Option<u16>)| PacketEnd {
        address: address.into(),
        port,
        pod: pods.at(address).map(Into::into),
    };
    let number = |what: &str, number: u32| format!("{what}_{number}");
    DroppedPacket {
        number: 0,
        unix_milliseconds: clock.unix_milliseconds(event.time_ns),
        // A program of another version may run for a moment.
        reason: DropReason::of(event.reason).map_or_else(
            || number("reason", event.reason),
            |reason| reason.label().into(),
        ),
        program: Hook::of(event.hook).map_or_else(
            || number("program", event.hook.into()),
            |hook| hook.label().into(),
        ),
        ifindex: event.ifindex,
        pod: pods.behind(event.ifindex).map(Into::into),
        protocol: told.protocol,
        source: told.ends.map(|(source, _)| end(source)),
        destination: told.ends.map(|(_, destination)| end(destination)),
        detail: told.detail,
        source_mac: (ethernet && head.len() >= 12).then(|| {
            let mut mac = [0; 6];
            mac.copy_from_slice(&head[6..12]);
            Mac(mac)
        }),
        bytes: event.len,
        left_out: event.left_out,
    }
}

/// Whether a packet begins with its IP header. The kernel knows its EtherType; a frame says it, too.
fn is_layer_3(head: &[u8], kind: [u8; 2]) -> bool {
    let version = match kind {
        eth::IP4 => 4,
        eth::IP6 => 6,
        _ => return false,
    };
    let says = head.get(12..14) == Some(&kind[..]);
    !says && head.first().is_some_and(|first| first >> 4 == version)
}

type End = (Addr, Option<u16>);

struct Told {
    protocol: String,
    ends: Option<(End, End)>,
    detail: Option<String>,
}

fn read(frame: &Frame<'_>) -> Told {
    let of = |protocol: &str| Told {
        protocol: protocol.into(),
        ends: None,
        detail: None,
    };
    let Some(header) = eth::read(frame) else {
        return of("malformed");
    };
    if header.kind == eth::ARP {
        let Some(arp) = arp::read(frame) else {
            return of("malformed");
        };
        return Told {
            detail: Some(format!("of {}", std::net::Ipv4Addr::from(arp.sender))),
            ..of("arp")
        };
    }
    match Ip::read(frame, header.kind) {
        None => of(&format!("{:#06x}", u16::from_be_bytes(header.kind))),
        Some(None) => of("malformed"),
        Some(Some(ip)) => match l4::read(frame, &ip) {
            Some(l4) => Told {
                protocol: protocol_name(ip.proto).into_owned(),
                ends: Some(ends(&ip, &l4)),
                detail: detail(&ip, &l4),
            },
            // The addresses say whose it is nevertheless.
            None => Told {
                ends: Some(((ip.src, None), (ip.dst, None))),
                detail: Some("malformed".into()),
                ..of(&protocol_name(ip.proto))
            },
        },
    }
}

fn ends(ip: &Ip, l4: &L4) -> (End, End) {
    let has_ports = ip.fragment != Fragment::Later
        && match ip.proto {
            proto::TCP | proto::UDP | proto::SCTP => true,
            proto::ICMP | proto::ICMPV6 => is_echo(ip.v6, l4.icmp),
            _ => false,
        };
    let port = |port| has_ports.then(|| u16::from_be_bytes(port));
    ((ip.src, port(l4.src_port)), (ip.dst, port(l4.dst_port)))
}

fn detail(ip: &Ip, l4: &L4) -> Option<String> {
    let what = match ip.proto {
        _ if ip.fragment == Fragment::Later => None,
        proto::TCP => Some(flags(l4.tcp_flags)),
        proto::ICMP | proto::ICMPV6 => Some(icmp(ip.v6, l4.icmp)),
        _ => None,
    };
    let part = match ip.fragment {
        Fragment::No => None,
        Fragment::First => Some("first fragment".to_owned()),
        Fragment::Later => Some("later fragment".to_owned()),
    };
    let words: Vec<String> = what.into_iter().chain(part).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// `SYN ACK` (RFC 9293 §3.1).
fn flags(flags: u8) -> String {
    const NAMES: [&str; 8] = ["FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"];
    let set = NAMES
        .iter()
        .enumerate()
        .filter(|(bit, _)| flags & (1 << bit) != 0);
    let names: Vec<&str> = set.map(|(_, name)| *name).collect();
    match names.is_empty() {
        true => "no flags".into(),
        false => names.join(" "),
    }
}

/// RFC 792, RFC 4443, RFC 4861.
fn icmp(v6: bool, kind: u8) -> String {
    let name = match (v6, kind) {
        (false, 0) | (true, 129) => "echo reply",
        (false, 8) | (true, 128) => "echo request",
        (false, 3) | (true, 1) => "destination unreachable",
        (true, 2) => "packet too big",
        (false, 11) | (true, 3) => "time exceeded",
        (false, 5) | (true, 137) => "redirect",
        (false, 12) | (true, 4) => "parameter problem",
        (true, 133) => "router solicitation",
        (true, 134) => "router advertisement",
        (true, 135) => "neighbour solicitation",
        (true, 136) => "neighbour advertisement",
        _ => return format!("type {kind}"),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sinabro_common::abi::drop::EVENT_HEAD;

    fn event(kind: [u8; 2], packet: &[u8]) -> DropEvent {
        let mut head = [0; EVENT_HEAD];
        let len = packet.len().min(EVENT_HEAD);
        head[..len].copy_from_slice(&packet[..len]);
        DropEvent {
            time_ns: 5_000_000,
            reason: DropReason::SourceAddr as u32,
            ifindex: 7,
            len: packet.len() as u32,
            head_len: len as u32,
            left_out: 3,
            kind,
            hook: Hook::PodOut as u8,
            pad: 0,
            head,
        }
    }

    fn show(event: &DropEvent) -> DroppedPacket {
        shown(event, &PodNames::default(), &Clock::new(5_000_000))
    }

    /// 10.0.0.1:1000 to 10.0.0.2:80, with these flags and so much behind the header.
    fn tcp(flags: u8, payload: usize) -> Vec<u8> {
        let mut packet = vec![
            0x45, 0, 0, 0, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ];
        packet.extend([0x03, 0xe8, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, flags]);
        packet.extend([0; 6]);
        packet.extend(vec![0; payload]);
        let len = (packet.len() as u16).to_be_bytes();
        packet[2..4].copy_from_slice(&len);
        packet
    }

    fn framed(kind: [u8; 2], packet: &[u8]) -> Vec<u8> {
        let macs = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        [&macs[..], &kind, packet].concat()
    }

    fn ends(packet: &DroppedPacket) -> [String; 2] {
        let text = |end: &Option<PacketEnd>| end.as_ref().map_or(String::new(), |e| e.to_string());
        [text(&packet.source), text(&packet.destination)]
    }

    #[test]
    fn a_packet_is_read_with_and_without_an_ethernet_header_and_longer_than_its_event() {
        for payload in [0, 1000] {
            let bare = tcp(0x12, payload);
            let frame = framed(eth::IP4, &bare);
            for (packet, mac) in [(&frame, true), (&bare, false)] {
                let shown = show(&event(eth::IP4, packet));
                assert_eq!(ends(&shown), ["10.0.0.1:1000", "10.0.0.2:80"]);
                assert_eq!(shown.protocol, "tcp");
                assert_eq!(shown.detail.as_deref(), Some("SYN ACK"));
                assert_eq!(shown.source_mac.is_some(), mac);
                assert_eq!((shown.bytes as usize, shown.left_out), (packet.len(), 3));
                assert_eq!(
                    (shown.reason.as_str(), shown.program.as_str()),
                    ("source_address", "pod_out")
                );
            }
        }
    }

    #[test]
    fn ipv6_is_read_behind_extension_headers() {
        // A UDP datagram behind a header of options for the destination.
        let mut packet = vec![0x60, 0, 0, 0, 0, 16, 60, 64];
        for last in [7, 9] {
            packet.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
        packet.extend([17, 0, 1, 4, 0, 0, 0, 0]);
        packet.extend([0, 53, 0x10, 0, 0, 8, 0, 0]);
        for frame in [framed(eth::IP6, &packet), packet] {
            let shown = show(&event(eth::IP6, &frame));
            assert_eq!(ends(&shown), ["[fd00::7]:53", "[fd00::9]:4096"]);
            assert_eq!((shown.protocol.as_str(), shown.detail), ("udp", None));
        }
    }

    #[test]
    fn pods_are_named_by_address_and_by_link() {
        let pod = sinabro_common::api::PodRef {
            namespace: "shop".into(),
            name: "cart-0".into(),
            uid: String::new(),
        };
        let record = crate::endpoint::pod_names::record(7, pod, &["10.0.0.1"]);
        let pods = PodNames::of([&record]);
        let shown = shown(
            &event(eth::IP4, &framed(eth::IP4, &tcp(2, 0))),
            &pods,
            &Clock::new(0),
        );
        let name = Some("shop/cart-0".to_owned());
        assert_eq!(shown.pod, name);
        assert_eq!(shown.source.unwrap().pod, name);
        assert_eq!(shown.destination.unwrap().pod, None);
    }

    #[test]
    fn what_is_no_ip_packet_says_what_it_is() {
        let protocol = |kind, packet: &[u8]| show(&event(kind, &framed(kind, packet))).protocol;
        assert_eq!(protocol([0x88, 0xcc], &[0; 50]), "0x88cc");
        assert_eq!(protocol(eth::IP4, &[0; 50]), "malformed");
        assert_eq!(protocol(eth::ARP, &[0; 3]), "malformed");
        assert_eq!(show(&event(eth::IP4, &[])).protocol, "malformed");
        let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1];
        arp.extend([2; 6]);
        arp.extend([10, 0, 0, 9]);
        arp.extend([0; 10]);
        let shown = show(&event(eth::ARP, &framed(eth::ARP, &arp)));
        assert_eq!(
            (shown.protocol.as_str(), shown.detail.as_deref()),
            ("arp", Some("of 10.0.0.9"))
        );
        // Whose it is can be said although its transport header is cut off.
        let mut cut = tcp(2, 0);
        cut.truncate(24);
        cut[2..4].copy_from_slice(&24u16.to_be_bytes());
        let shown = show(&event(eth::IP4, &framed(eth::IP4, &cut)));
        assert_eq!(ends(&shown), ["10.0.0.1", "10.0.0.2"]);
        assert_eq!(shown.detail.as_deref(), Some("malformed"));
    }

    #[test]
    fn fragments_say_which_part_they_are() {
        let mut packet = tcp(2, 0);
        packet[6] = 0x20;
        let first = show(&event(eth::IP4, &framed(eth::IP4, &packet)));
        assert_eq!(first.detail.as_deref(), Some("SYN, first fragment"));
        packet[6..8].copy_from_slice(&[0, 185]);
        let later = show(&event(eth::IP4, &framed(eth::IP4, &packet)));
        assert_eq!(later.detail.as_deref(), Some("later fragment"));
        assert_eq!(ends(&later), ["10.0.0.1", "10.0.0.2"]);
    }

    #[test]
    fn time_is_that_of_the_drop() {
        let clock = Clock {
            monotonic_ns: 10_000_000_000,
            now: UNIX_EPOCH + Duration::from_secs(100),
        };
        assert_eq!(clock.unix_milliseconds(9_000_000_000), 99_000);
        // Clocks are read one after the other.
        assert_eq!(clock.unix_milliseconds(11_000_000_000), 100_000);
    }

    proptest! {
        #[test]
        fn any_bytes_are_shown(
            kind: [u8; 2], bytes in proptest::collection::vec(any::<u8>(), 0..200),
            reason: u32, hook: u8, head_len: u32, len: u32,
        ) {
            let event = DropEvent { reason, hook, head_len, len, ..event(kind, &bytes) };
            let shown = show(&event);
            prop_assert!(!shown.protocol.is_empty() && !shown.reason.is_empty());
        }
    }
}
