//! A TCP connection as docs/connections.md tells of it, in a table of states and what each segment makes of them: what
//! [`ct_state`](super::ct_state) and [`lifetime`](super::lifetime) make of bits is the same, whatever comes in whichever
//! order.

use super::{
    ct_state,
    lifetime::{LIFETIMES, Stage, stage},
};
use proptest::prelude::*;
use std::collections::HashSet;

const TCP: u8 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum End {
    Client,
    Server,
}

/// What a segment says of its end. A reset says more than a goodbye, and either more than an acknowledgement; a SYN asks, and
/// whatever else is in it has no meaning (RFC 9293 §3.10.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    Syn,
    Reset,
    Goodbye,
    Acknowledges,
    Nothing,
}

impl Says {
    const ALL: [(u8, Self); 5] = [
        (0x02, Self::Syn),
        (0x04, Self::Reset),
        (0x01, Self::Goodbye),
        (0x10, Self::Acknowledges),
        (0, Self::Nothing),
    ];

    fn of(flags: u8) -> Self {
        let says = Self::ALL.iter().find(|(flag, _)| flags & flag != 0);
        says.map_or(Self::Nothing, |(_, says)| *says)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    /// Nobody has answered the client,
    Asked,
    /// which goes on all the same: it was found in its middle.
    Speaking,
    /// The server has accepted.
    Accepted,
    /// The server has spoken, of whose acceptance nothing is known, and the client has not acknowledged.
    Answered,
    Open,
    ClientLeft,
    ServerLeft,
    BothLeft,
    Reset,
}

impl State {
    const ALL: [Self; 9] = [
        Self::Asked,
        Self::Speaking,
        Self::Accepted,
        Self::Answered,
        Self::Open,
        Self::ClientLeft,
        Self::ServerLeft,
        Self::BothLeft,
        Self::Reset,
    ];

    fn after(self, from: End, says: Says) -> Self {
        use {End::*, Says::*, State::*};
        match (self, from, says) {
            (State::Reset, ..) | (_, _, Says::Reset) => State::Reset,
            (BothLeft, ..) | (ClientLeft, Server, Goodbye) | (ServerLeft, Client, Goodbye) => {
                BothLeft
            }
            (ClientLeft | ServerLeft, ..) => self,
            (_, Client, Goodbye) => ClientLeft,
            (_, Server, Goodbye) => ServerLeft,
            (Asked, Client, Acknowledges) => Speaking,
            (Asked, Server, Syn) => Accepted,
            (Asked, Server, _) => Answered,
            (Speaking, Server, _) => Open,
            (Accepted | Answered, Client, Acknowledges) => Open,
            (Answered, Server, Syn) => Accepted,
            (Asked | Speaking | Accepted | Answered, ..) | (Open, ..) => self,
        }
    }

    fn stage(self) -> Stage {
        match self {
            Self::Asked | Self::Speaking => Stage::SynSent,
            Self::Accepted => Stage::SynReceived,
            Self::Answered | Self::Open => Stage::Established,
            Self::ClientLeft | Self::ServerLeft => Stage::HalfClosed,
            Self::BothLeft => Stage::TimeWait,
            Self::Reset => Stage::Reset,
        }
    }
}

/// Both ends' bits after one more segment.
fn bits_after((client, server): (u8, u8), proto: u8, from: End, flags: u8) -> (u8, u8) {
    match from {
        End::Client => (ct_state::next(client, proto, flags), server),
        End::Server => (client, ct_state::next(server, proto, flags)),
    }
}

fn stage_of((client, server): (u8, u8), proto: u8, lived_ns: u64) -> Stage {
    stage(proto, client, server, lived_ns)
}

/// Not some sequences but all: whatever bits a sequence leads to, each segment there can be comes next.
#[test]
fn any_sequence_of_segments_leads_to_the_automatons_stage() {
    let mut found = HashSet::from([((0, 0), State::Asked)]);
    let mut next: Vec<_> = found.iter().copied().collect();
    while let Some((bits, state)) = next.pop() {
        for from in [End::Client, End::Server] {
            for flags in 0..=u8::MAX {
                let after = bits_after(bits, TCP, from, flags);
                let expected = state.after(from, Says::of(flags));
                assert_eq!(
                    stage_of(after, TCP, 0),
                    expected.stage(),
                    "{state:?}, {bits:?}: {flags:#04x} of the {from:?}"
                );
                if found.insert((after, expected)) {
                    next.push((after, expected));
                }
            }
        }
    }
    let reached: HashSet<_> = found.iter().map(|(_, state)| *state).collect();
    assert_eq!(reached, HashSet::from(State::ALL));
}

#[test]
fn only_who_is_waited_for_is_embryonic_and_only_who_left_is_closed() {
    for state in State::ALL {
        let (waits, left) = match state {
            State::Asked | State::Speaking | State::Accepted => (true, false),
            State::BothLeft | State::Reset => (false, true),
            _ => (false, false),
        };
        let stage = state.stage();
        assert_eq!((stage.is_embryonic(), stage.is_closed()), (waits, left));
    }
}

fn segments() -> impl Strategy<Value = Vec<(bool, u8)>> {
    // Mostly what programs send, else resets are in nearly every sequence.
    let flags = prop_oneof![
        4 => prop::sample::select(&[0x02, 0x12, 0x10, 0x18, 0x11][..]), 1 => any::<u8>(),
    ];
    prop::collection::vec((any::<bool>(), flags), 0..40)
}

proptest! {
    #[test]
    fn a_connection_never_becomes_younger(segments in segments()) {
        let mut bits = (0, 0);
        let mut oldest = 0;
        for (is_client, flags) in segments {
            let from = if is_client { End::Client } else { End::Server };
            bits = bits_after(bits, TCP, from, flags);
            // A server may accept after it has spoken: neither is younger.
            let age = match stage_of(bits, TCP, 0) {
                Stage::SynSent => 0,
                Stage::SynReceived | Stage::Established => 1,
                Stage::HalfClosed => 2,
                Stage::TimeWait => 3,
                Stage::Reset => 4,
                other => panic!("{other:?} is no stage of TCP"),
            };
            prop_assert!(age >= oldest);
            oldest = age;
        }
    }

    #[test]
    fn how_long_tcp_has_lived_says_nothing(segments in segments(), lived_ns: u64) {
        let bits = segments.iter().fold((0, 0), |bits, (is_client, flags)| {
            let from = if *is_client { End::Client } else { End::Server };
            bits_after(bits, TCP, from, *flags)
        });
        prop_assert_eq!(stage_of(bits, TCP, lived_ns), stage_of(bits, TCP, 0));
    }

    #[test]
    fn flags_mean_nothing_to_other_protocols(
        proto in any::<u8>().prop_filter("not TCP", |proto| *proto != TCP),
        segments in segments(),
        lived_ns: u64,
    ) {
        let mut bits = (0, 0);
        let mut plain = (0, 0);
        let mut server_spoke = false;
        for (is_client, flags) in segments {
            let from = if is_client { End::Client } else { End::Server };
            bits = bits_after(bits, proto, from, flags);
            plain = bits_after(plain, proto, from, 0);
            server_spoke |= !is_client;
        }
        prop_assert_eq!(bits, plain);
        let expected = match (proto, server_spoke) {
            (1 | 58, false) => Stage::Echo,
            (1 | 58, true) => Stage::EchoReplied,
            (_, false) => Stage::Unreplied,
            (17 | 136, true) if lived_ns < 2_000_000_000 => Stage::Replied,
            (17 | 136, true) => Stage::Stream,
            (_, true) => Stage::Other,
        };
        prop_assert_eq!(stage_of(bits, proto, lived_ns), expected);
        prop_assert!(LIFETIMES[expected as usize] > 0);
    }
}
