//! From a change of a Node until the kernel has it: the request's first byte, the API server, the
//! watch, the plan, netlink.

use super::object;
use crate::bench::api_server::Client;
use anyhow::{Context as _, Result};
use ipnet::IpNet;
use serde_json::json;
use sinabro_common::names::ROUTE_PROTOCOL;
use sinabro_lab::Node;
use sinabro_netlink::{Event, Monitor};
use std::{
    net::IpAddr,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(60);
/// Each change meets an agent that has nothing else to do.
const PAUSE: Duration = Duration::from_millis(400);

/// Milliseconds of each change.
#[derive(Default)]
pub struct Changes {
    pub came: Vec<f64>,
    pub moved: Vec<f64>,
    pub went: Vec<f64>,
}

/// Has a peer come, move to another machine and go again, `times` times.
pub fn measure(client: &Client, node: &Node, number: usize, times: usize) -> Result<Changes> {
    let mut monitor = Monitor::in_netns(node.place().net())?;
    let over = AtomicBool::new(false);
    let (sender, events) = channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let sender = sender;
            while !over.load(Ordering::Relaxed) {
                let Ok(events) = monitor.wait(Duration::from_millis(100)) else {
                    return;
                };
                let now = Instant::now();
                for event in events {
                    let _ = sender.send((now, event));
                }
            }
        });
        let measured = in_turn(client, &events, number, times);
        over.store(true, Ordering::Relaxed);
        measured
    })
}

type Events = Receiver<(Instant, Event)>;

fn in_turn(client: &Client, events: &Events, first: usize, times: usize) -> Result<Changes> {
    let mut changes = Changes::default();
    for number in first..first + times {
        let (entry, name) = (object::entry(number), object::name(number));
        let gateways: Vec<IpAddr> = entry.pod_cidrs.iter().map(gateway).collect();
        let route = |event: &Event, gone: bool| match event {
            Event::Route { route, removed }
                if route.protocol == ROUTE_PROTOCOL && *removed == gone =>
            {
                entry.pod_cidrs.iter().position(|cidr| *cidr == route.dst)
            }
            _ => None,
        };

        let node = object::node(&entry);
        let came = timed(events, || client.create_node(&node), |e| route(e, false));
        changes.came.push(came.context("a new node")?);

        let moved = object::shown(&name, &object::moved(number));
        let moved = json!({"status": {"addresses": moved}});
        let moved = timed(
            events,
            || client.replace_in_status(&name, &moved),
            |event| match event {
                Event::Neigh {
                    neigh,
                    removed: false,
                } => gateways
                    .iter()
                    .position(|gateway| *gateway == neigh.address),
                _ => None,
            },
        );
        changes.moved.push(moved.context("a node that moved")?);

        let went = timed(events, || client.delete_node(&name), |e| route(e, true));
        changes.went.push(went.context("a node that went")?);
    }
    Ok(changes)
}

/// A peer's own address in a pod range of its.
fn gateway(cidr: &IpNet) -> IpAddr {
    match cidr.network() {
        IpAddr::V4(network) => IpAddr::V4((network.to_bits() + 1).into()),
        IpAddr::V6(network) => IpAddr::V6((network.to_bits() + 1).into()),
    }
}

/// Makes a change; the time until both families' events are there.
fn timed(
    events: &Events,
    change: impl FnOnce() -> Result<()>,
    which: impl Fn(&Event) -> Option<usize>,
) -> Result<f64> {
    thread::sleep(PAUSE);
    while events.try_recv().is_ok() {}
    let start = Instant::now();
    change()?;
    let mut seen = [false; 2];
    loop {
        let left = PATIENCE.saturating_sub(start.elapsed());
        let next = events.recv_timeout(left);
        let (when, event) = next.context("the kernel has not heard of it in a minute")?;
        if let Some(which) = which(&event) {
            seen[which] = true;
        }
        if seen == [true; 2] {
            return Ok((when - start).as_secs_f64() * 1e3);
        }
    }
}
