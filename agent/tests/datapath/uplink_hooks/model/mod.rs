//! Random packets, through the real programs and through a translator in plain Rust that knows nothing of theirs:
//! byte for byte the same comes out.
//!
//! The model leaves open what the programs may choose, a new connection's port, and asks of the choice what must
//! hold of it. It has no clock: the tests' packets come within the times that matter, and sweeps say what time it is.
//!
//! [`ops`]: what happens, by chance; [`packets`]: of which protocols; [`flow`]: what is remembered;
//! [`translator`]: what comes out; [`host`]: of the node's own flows; [`parts`]: of packets in parts.

mod flow;
mod host;
mod ops;
mod packets;
mod parts;
mod translator;

use self::{
    flow::{Flow, Key, Record},
    ops::{End, Op, Order, Who, ops},
    packets::{ESP, GRE, IP6_IN_IP, IPIP, Making, PARTS, has_ports, has_sockets},
    translator::{Model, Seen},
};
use super::*;
use crate::packet::{ICMPV6, IcmpError, UDPLITE, icmp_error, see_error};
use proptest::{prelude::*, test_runner::TestRunner};
use sinabro_common::abi::{
    config::FLAG_ENDPOINT_INDEPENDENT,
    connection::{Fragment, FragmentKey},
    fragment::{EarlyFragment, EarlyKey},
};
use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

/// So few that they run out.
const PORTS: RangeInclusive<u16> = 61000..=61005;
/// Longer than all but connections that both ends keep open may be idle.
const AWAY: u64 = 130;
/// More sweeps than an alias without a record is left for.
const SWEEPS: usize = 17;

fn set_config(w: &World, maps: bool) {
    let mut config = kit::node_config();
    (config.nat_port_min, config.nat_port_max) = (*PORTS.start(), *PORTS.end());
    if maps {
        config.flags |= FLAG_ENDPOINT_INDEPENDENT;
    }
    w.datapath.set_node_config(config).unwrap();
}

#[test]
fn random_packets_are_translated_as_a_plain_translator_would() {
    random_packets(false);
}

/// While the setting is turned on and off, too.
#[test]
fn random_packets_have_the_mappings_of_a_plain_translator() {
    random_packets(true);
}

/// Removes all entries of a map.
fn empty<K: aya::Pod, V: aya::Pod>(name: &str) {
    let mut map = open::<K, V>(name);
    let keys: Vec<_> = map.keys().collect::<Result<_, _>>().unwrap();
    keys.iter().for_each(|key| map.remove(key).unwrap());
}

/// As it was before the first packet, whatever the case before has left, if it failed.
fn begin_anew(w: &World, maps: bool) {
    while !table().is_empty() || !aliases().is_empty() {
        w.sweep_at(1 << 20);
    }
    empty::<FragmentKey, Fragment>("FRAGMENTS");
    empty::<EarlyKey, EarlyFragment>("EARLY_FRAGMENTS");
    set_config(w, maps);
}

/// Milliseconds.
const SHRINK_FOR: u32 = 60_000;

/// So many cases, unless PROPTEST_CASES says otherwise.
const CASES: u32 = 96;

fn random_packets(maps: bool) {
    let cases = match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default().cases,
        None => CASES,
    };
    world(|w| {
        host::prepare();
        let (most, refusals, unlucky) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let all = RefCell::new(Seen::default());
        let mut runner = TestRunner::new(ProptestConfig {
            failure_persistence: None,
            // Most of what happened before has nothing to do with a failure.
            max_shrink_iters: 100_000,
            max_shrink_time: SHRINK_FOR,
            ..ProptestConfig::with_cases(cases)
        });
        let result = runner.run(&ops(maps), |ops| {
            begin_anew(&w, maps);
            let mut model = Model::new(&w, maps);
            for op in ops {
                let dropped = kit::dropped(&w.datapath, DropReason::NatPortsExhausted);
                let what = format!("{op:?}");
                model.step(op).map_err(|error| match error {
                    TestCaseError::Fail(why) => TestCaseError::fail(format!("{what}: {why}")),
                    reject => reject,
                })?;
                let after = kit::dropped(&w.datapath, DropReason::NatPortsExhausted);
                refusals.set(refusals.get() + after - dropped);
                most.set(most.get().max(model.flows.len()));
            }
            if !model.left.is_empty() {
                for _ in 0..SWEEPS {
                    w.sweep_at(0);
                }
            }
            check_table();
            all.borrow_mut().add(&model.seen);
            unlucky.set(unlucky.get() + model.unlucky);
            Ok(())
        });
        result.unwrap();
        let all = all.into_inner();
        println!(
            "{} connections at once, {} refused, {} unlucky, {all:?}",
            most.get(),
            refusals.get(),
            unlucky.get(),
        );
        assert!(most.get() > 30 && refusals.get() > 0);
        assert_eq!(all.apart > 0, maps);
        assert!(all.portless_refused > 0 && all.host_moved > 0);
        assert!(all.kept_off > 0 && all.waited > 0);
        assert!(
            unlucky.get() <= cases.div_ceil(CASES) as usize,
            "{}",
            unlucky.get()
        );
    });
}
