//! Property tests of everything that takes the kernel's answers apart.

use super::*;
use crate::addr::Addr;
use crate::conn::tests::answers;
use crate::fdb::Fdb;
use crate::neigh::Neigh;
use crate::route::Route;
use crate::rule::Rule;
use crate::{Error, Family, Link, Request, bridge, link};
use proptest::prelude::*;

/// A message as the kernel would frame it.
pub(crate) fn frame(kind: i32, flags: i32, seq: u32, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    out.extend_from_slice(&(kind as u16).to_ne_bytes());
    out.extend_from_slice(&(flags as u16).to_ne_bytes());
    out.extend_from_slice(&seq.to_ne_bytes());
    out.extend_from_slice(&0u32.to_ne_bytes());
    out.extend_from_slice(body);
    out.resize(align(out.len()), 0);
    out
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(value);
    out.resize(align(out.len()), 0);
    out
}

/// Body of an NLMSG_ERROR: the code, the request's header, what else was echoed, attributes.
pub(crate) fn refusal(errno: i32, echoed: &[u8], attributes: &[u8]) -> Vec<u8> {
    let mut out = (-errno).to_ne_bytes().to_vec();
    out.extend(frame(0, 0, 0, echoed));
    out.extend_from_slice(attributes);
    out
}

fn parse_everything(body: &[u8]) {
    let _ = Link::parse(body);
    let _ = Addr::parse(body);
    let _ = Route::parse(body);
    let _ = Rule::parse(body);
    let _ = Neigh::parse(body);
    let _ = Fdb::parse(body);
}

fn parses_as_something(body: &[u8]) -> usize {
    usize::from(Link::parse(body).is_ok())
        + usize::from(matches!(Addr::parse(body), Ok(Some(_))))
        + usize::from(matches!(Route::parse(body), Ok(Some(_))))
        + usize::from(matches!(Rule::parse(body), Ok(Some(_))))
        + usize::from(matches!(Neigh::parse(body), Ok(Some(_))))
        + usize::from(matches!(Fdb::parse(body), Ok(Some(_))))
}

/// Bodies that the crate itself sends: the kernel's have the same form.
fn real_bodies() -> Vec<Vec<u8>> {
    let v4 = "10.1.2.3/24".parse().expect("an address");
    let v6 = "fd00::3/64".parse().expect("an address");
    let vxlan = crate::vxlan::Vxlan {
        name: "vx",
        mac: [2; 6],
        mtu: 1400,
        settings: crate::vxlan::VxlanSettings {
            zero_checksum6: true,
            ..crate::vxlan::VxlanSettings::new(1, 8472, [192, 0, 2, 1].into())
        },
    };
    let requests: Vec<Request> = vec![
        bridge::create("br0"),
        link::set_name(3, "eth0"),
        vxlan.create(),
        Addr::new(3, v4).add(),
        Addr::new(3, v6).nodad().add(),
        Route::to(v4)
            .via([10, 0, 0, 1].into())
            .dev(3)
            .mtu(1400)
            .add(),
        Route::to(v4)
            .via("fe80::1".parse().expect("an address"))
            .dev(3)
            .add(),
        Route::to(v6).dev(3).table(1000).add(),
        Rule {
            src: Some(v4),
            ..Rule::new(Family::V4, 5, 100)
        }
        .add(),
        Neigh::new(3, v6.addr(), [2; 6]).add(),
        Fdb {
            link: 3,
            mac: [2; 6],
            dst: v4.addr(),
        }
        .add(),
    ];
    requests
        .iter()
        .map(|request| request.body_for_test().to_vec())
        .collect()
}

#[test]
fn every_real_body_is_understood_and_none_of_its_truncations_is_a_panic() {
    for body in real_bodies() {
        assert!(parses_as_something(&body) > 0, "{body:?}");
        for length in 0..body.len() {
            parse_everything(&body[..length]);
        }
    }
}

#[test]
fn objects_read_back_from_the_form_they_are_sent_in() {
    let v6: ipnet::IpNet = "fd00::3/64".parse().unwrap();
    let addr = Addr::new(3, v6).nodad();
    assert_eq!(Addr::parse(addr.add().body_for_test()), Ok(Some(addr)));
    let route = Route::to(v6)
        .via("fd00::1".parse().unwrap())
        .dev(3)
        .metric(9)
        .mtu(1300);
    assert_eq!(Route::parse(route.add().body_for_test()), Ok(Some(route)));
}

#[test]
fn wrong_sizes_are_told_and_unknown_attributes_passed_over() {
    let mut body = vec![0; 16];
    body.extend(attribute(libc::IFLA_IFNAME, b"eth0\0"));
    body.extend(attribute(0x3fff, b"from the future"));
    let link = Link::parse(&body).unwrap();
    assert_eq!((link.name.as_str(), link.mtu), ("eth0", 0));
    body.extend(attribute(libc::IFLA_MTU, &[1, 2, 3]));
    assert!(Link::parse(&body).is_err());
    assert!(Link::parse(&[0; 16]).is_err(), "a link has a name");
}

#[test]
fn index_zero_is_no_peer() {
    let mut body = vec![0; 16];
    body.extend(attribute(libc::IFLA_IFNAME, b"a\0"));
    let mut far = body.clone();
    body.extend(attribute(libc::IFLA_LINK, &0u32.to_ne_bytes()));
    far.extend(attribute(libc::IFLA_LINK, &9u32.to_ne_bytes()));
    assert_eq!(Link::parse(&body).unwrap().peer, None);
    assert_eq!(Link::parse(&far).unwrap().peer, Some(9));
}

#[test]
fn an_error_s_text_is_found_behind_whatever_is_echoed() {
    let text = attribute(1, b"because\0");
    let capped = libc::NLM_F_CAPPED | libc::NLM_F_ACK_TLVS;
    for (flags, echoed) in [(capped, &[][..]), (libc::NLM_F_ACK_TLVS, &[9; 37][..])] {
        let datagram = frame(
            libc::NLMSG_ERROR,
            flags,
            5,
            &refusal(libc::EINVAL, echoed, &text),
        );
        let message = messages(&datagram).next().unwrap().unwrap();
        let ack = Ack::of_error(&message).unwrap();
        assert_eq!(
            (ack.errno, ack.message.as_deref()),
            (libc::EINVAL, Some("because"))
        );
    }
}

#[test]
fn a_batch_takes_only_answers_that_are_its_own() {
    let ack = refusal(0, &[], &[]);
    let mut datagrams = Vec::new();
    // Of an earlier batch, of a later one, an object that nobody asked for, a damaged one.
    for (kind, seq, body) in [
        (libc::NLMSG_ERROR, 99, &ack[..]),
        (libc::NLMSG_ERROR, 103, &ack),
        (i32::from(libc::RTM_NEWLINK), 100, &[0; 16]),
        (libc::NLMSG_ERROR, 101, &[1, 2]),
        (libc::NLMSG_ERROR, 100, &refusal(libc::EBUSY, &[], &[])),
        (libc::NLMSG_ERROR, 100, &ack),
    ] {
        datagrams.push(frame(kind, 0, seq, body));
    }
    let requests = vec![link::set_up(1), link::set_up(2), link::set_up(3)];
    let (open, outcomes) = answers(100, requests, &datagrams);
    assert_eq!(open, 1, "one request has no answer");
    assert!(
        matches!(outcomes[0], Some(Err(Error::Busy(_)))),
        "the first answer counts"
    );
    assert!(matches!(outcomes[1], Some(Err(Error::Malformed { .. }))));
    assert!(outcomes[2].is_none());
}

proptest! {
    #[test]
    fn garbage_is_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        parse_everything(&bytes);
        // Each step eats some of it: the end is reached.
        prop_assert!(messages(&bytes).count() <= bytes.len());
        prop_assert!(attrs(&bytes).count() <= bytes.len());
        for message in messages(&bytes).flatten() {
            let _ = Ack::of_error(&message);
            let _ = Ack::of_done(&message);
        }
        let requests = vec![link::set_up(1), link::set_up(2)];
        let (open, _) = answers(1, requests, &[bytes]);
        prop_assert!(open <= 2);
    }

    #[test]
    fn a_damaged_body_is_no_panic(
        which in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        length in any::<prop::sample::Index>(),
    ) {
        let bodies = real_bodies();
        let mut body = which.get(&bodies).clone();
        *at.get_mut(&mut body) = byte;
        parse_everything(&body);
        body.truncate(length.index(body.len() + 1));
        parse_everything(&body);
    }

    #[test]
    fn messages_come_out_as_they_were_framed(
        parts in prop::collection::vec(
            (16i32..100, any::<u16>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..50)),
            0..8,
        ),
    ) {
        let datagram: Vec<u8> = parts
            .iter()
            .flat_map(|(kind, flags, seq, body)| frame(*kind, i32::from(*flags), *seq, body))
            .collect();
        let found: Vec<_> = messages(&datagram).map(|message| message.unwrap()).collect();
        prop_assert_eq!(found.len(), parts.len());
        for (message, (kind, flags, seq, body)) in found.iter().zip(&parts) {
            prop_assert_eq!(i32::from(message.kind), *kind);
            prop_assert_eq!((message.flags, message.seq), (*flags, *seq));
            prop_assert_eq!(message.body, &body[..]);
        }
        // Cut anywhere: whole ones first, then at most one complaint, and the end.
        for length in 0..datagram.len() {
            let cut: Vec<_> = messages(&datagram[..length]).collect();
            let whole = cut.iter().take_while(|message| message.is_ok()).count();
            prop_assert!(cut.len() - whole <= 1);
            prop_assert!(whole <= parts.len());
        }
    }

    #[test]
    fn attributes_come_out_as_they_were_written(
        parts in prop::collection::vec(
            (0u16..0x4000, prop::collection::vec(any::<u8>(), 0..40)),
            0..8,
        ),
    ) {
        let tail: Vec<u8> =
            parts.iter().flat_map(|(kind, value)| attribute(*kind, value)).collect();
        let found: Vec<_> = attrs(&tail).map(|attr| attr.unwrap()).collect();
        prop_assert_eq!(found.len(), parts.len());
        for (attr, (kind, value)) in found.iter().zip(&parts) {
            prop_assert_eq!((attr.kind, attr.value), (*kind, &value[..]));
        }
    }
}
