//! One pass: read the kernel, or recall what it was told before, compare with the plan, change what
//! differs.
//!
//! The device is raised once the data path checks what comes out of it. From then on the order keeps traffic of unaffected peers flowing and never points at what is not there:
//! device and addresses, then forwarding entries, neighbours and routes are set, each in place;
//! after that what is no longer wanted goes, in reverse. A peer that changes its address has
//! its new forwarding entry before its neighbour turns to it, and the old one goes last; one
//! that takes over another's range takes over the neighbour entry in one step.

use super::{
    OverlayConfig,
    addresses::Addresses,
    fdb::Forwarding,
    links,
    neighbours::Neighbours,
    next_hops,
    pods::{self, PodRoute, Which},
    reconcile::{Steps, Table, steps, steps_from},
    routes::Routes,
    ways::{Ways, Why},
};
use crate::{
    chain::Chain,
    datapath::{Datapath, DatapathError, Tunnels},
    plan::{Facts, OverlayPlan, OverlaySettings, Reached},
};
use ipnet::IpNet;
use sinabro_common::api::Mac;
use sinabro_netlink::{Conn, Error, NetNs, Request};
use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

/// What a failed step was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The node's own part.
    Own,
    Route(IpNet),
    Neighbour(IpAddr),
    Forwarding(Mac),
}

/// A step that failed.
#[derive(Clone, Debug)]
pub struct Fault {
    pub subject: Subject,
    pub text: String,
}

impl Fault {
    pub fn own(error: impl fmt::Display) -> Self {
        Self {
            subject: Subject::Own,
            text: error.to_string(),
        }
    }

    /// Tunnel address of the peer it concerns, if it concerns one: by way of its forwarding entry.
    pub fn tunnel(&self, plan: &OverlayPlan) -> Option<IpAddr> {
        let mac = match self.subject {
            Subject::Own => return None,
            Subject::Route(to) => *plan.neighbours.get(&plan.routes.get(&to)?.gateway)?,
            Subject::Neighbour(address) => *plan.neighbours.get(&address)?,
            Subject::Forwarding(mac) => mac,
        };
        plan.fdb.get(&mac).copied()
    }
}

/// What to look at.
#[derive(Clone, Debug)]
pub struct Work {
    pub overlay: Look,
    /// Whether packets are taken without a tunnel, also if they are not to be any more.
    pub takes_native: bool,
    /// To whom packets get without a tunnel.
    pub reached: Reached,
    /// Indexes of all uplinks.
    pub uplinks: Vec<u32>,
    pub pods: Which,
}

/// How to look at the overlay.
#[derive(Clone, Debug)]
pub enum Look {
    Away,
    /// At what is new since this plan, which the kernel holds on this device as far as it has said.
    Since {
        plan: Arc<OverlayPlan>,
        device: u32,
    },
    /// At all of the kernel's tables.
    Whole,
}

/// What a pass did.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Absent if there is none, or the overlay was not looked at.
    pub plan: Option<Arc<OverlayPlan>>,
    /// The VXLAN device, once it is known.
    pub device: Option<u32>,
    /// Whether that takes UDP over IPv6 without a checksum.
    pub takes_zero_checksum: bool,
    pub changed: usize,
    /// By which way peers are reached; none if that was not looked at.
    pub ways: Option<Ways>,
    /// What failed of the overlay.
    pub faults: Vec<Fault>,
    /// What failed of the pods' host routes.
    pub pod_faults: Vec<Fault>,
}

/// Makes one pass. Blocks.
pub fn run(
    netns: Option<&NetNs>,
    datapath: Option<&Datapath>,
    config: &OverlayConfig,
    work: &Work,
    facts: Option<&Facts>,
    pods: &[PodRoute],
) -> Outcome {
    let mut outcome = Outcome::default();
    let conn = match netns {
        Some(netns) => Conn::in_netns(netns),
        None => Conn::new(),
    };
    let mut conn = match conn {
        Ok(conn) => conn,
        Err(error) => {
            outcome.faults.push(Fault::own(error));
            return outcome;
        }
    };
    let (looks, before) = match &work.overlay {
        Look::Away => (false, None),
        Look::Since { plan, device } => (true, Some((&**plan, *device))),
        Look::Whole => (true, None),
    };
    if let Some(facts) = facts.filter(|_| looks) {
        match plan(&mut conn, config, &work.reached, facts) {
            Ok(plan) => {
                apply(&mut conn, datapath, before, &plan, &mut outcome);
                if let (Some(datapath), Some(device)) = (datapath, outcome.device) {
                    let takes_native = plan.takes_native || work.takes_native;
                    let native = takes_native.then_some((device, plan.device.mac));
                    let fault = |error: DatapathError| Fault::own(Chain(&error));
                    let set = datapath.set_native(native);
                    outcome.faults.extend(set.err().map(fault));
                    let ways = match config.direct {
                        true => {
                            let before = before.map(|(plan, _)| plan);
                            next_hops::follow(
                                &mut conn,
                                datapath,
                                &config.cni_conf_dir,
                                before,
                                &plan,
                            )
                        }
                        false => Ok(Ways::none(Why::Setting)),
                    };
                    match ways {
                        Ok(ways) => outcome.ways = Some(ways),
                        Err(error) => outcome.faults.push(fault(error)),
                    }
                }
                outcome.plan = Some(Arc::new(plan));
            }
            Err(fault) => outcome.faults.push(fault),
        }
    }
    if matches!(work.overlay, Look::Whole) {
        for &index in &work.uplinks {
            match links::keep_forwarding(&mut conn, index) {
                Ok(changed) => outcome.changed += usize::from(changed),
                Err(error) => outcome.faults.push(Fault::own(error)),
            }
        }
    }
    let (restored, errors) = pods::restore(&mut conn, pods, &work.pods);
    outcome.changed += restored;
    outcome.pod_faults = errors.iter().map(Fault::own).collect();
    outcome
}

fn plan(
    conn: &mut Conn,
    config: &OverlayConfig,
    reached: &Reached,
    facts: &Facts,
) -> Result<OverlayPlan, Fault> {
    let uplink_mtu = match config.mtu {
        Some(_) => 0,
        None => {
            let uplink = conn.link_by_name(&config.uplink);
            let fault = |error| Fault::own(format!("uplink {}: {error}", config.uplink));
            uplink.map_err(fault)?.mtu
        }
    };
    let settings = OverlaySettings {
        node: config.node.clone(),
        device: config.device.clone(),
        vni: config.vni,
        port: config.port,
        uplink_mtu,
        mtu: config.mtu,
        routing: config.routing,
        reached: reached.clone(),
    };
    OverlayPlan::new(facts, &settings).map_err(Fault::own)
}

/// Makes the kernel match the plan, from the one before if the kernel holds that.
fn apply(
    conn: &mut Conn,
    datapath: Option<&Datapath>,
    before: Option<(&OverlayPlan, u32)>,
    plan: &OverlayPlan,
    outcome: &mut Outcome,
) {
    let device = match links::ensure(conn, &plan.device) {
        Ok(device) => device,
        Err(error) => {
            outcome.faults.push(Fault::own(error));
            return;
        }
    };
    let (link, touched) = (device.index, device.changed);
    outcome.changed += usize::from(touched);
    outcome.device = Some(link);
    outcome.takes_zero_checksum = device.takes_zero_checksum;
    // Nothing comes out of a tunnel before it is checked.
    if let Some(datapath) = datapath
        && let Err(error) = check_tunnels(datapath, link, plan)
    {
        outcome.faults.push(Fault::own(Chain(&error)));
        return;
    }
    let raised = match links::raise(conn, link) {
        Ok(changed) => changed,
        Err(error) => {
            outcome.faults.push(Fault::own(error));
            return;
        }
    };
    outcome.changed += usize::from(raised);

    // A device that was made or raised has lost what it had.
    let same = |device: u32| device == link && !touched && !raised;
    let before = before.and_then(|(plan, device)| same(device).then_some(plan));
    let host_prefixes = |plan: &OverlayPlan| -> BTreeMap<IpNet, ()> {
        let addresses = plan.addresses.iter();
        addresses.map(|address| ((*address).into(), ())).collect()
    };
    let addresses = compare(
        &Addresses { link },
        conn,
        before.map(host_prefixes).as_ref(),
        &host_prefixes(plan),
        |_| Subject::Own,
        outcome,
    );
    let fdb = compare(
        &Forwarding { link },
        conn,
        before.map(|plan| &plan.fdb),
        &plan.fdb,
        Subject::Forwarding,
        outcome,
    );
    let neighbours = compare(
        &Neighbours { link },
        conn,
        before.map(|plan| &plan.neighbours),
        &plan.neighbours,
        Subject::Neighbour,
        outcome,
    );
    let routes = compare(
        &Routes { link },
        conn,
        before.map(|plan| &plan.routes),
        &plan.routes,
        Subject::Route,
        outcome,
    );

    let put = [addresses.put, fdb.put, neighbours.put, routes.put];
    let remove = [
        routes.remove,
        neighbours.remove,
        fdb.remove,
        addresses.remove,
    ];
    execute(conn, put.into_iter().flatten(), explain_put, outcome);
    execute(conn, remove.into_iter().flatten(), explain_remove, outcome);
}

/// A new peer's tunnels are taken before a route leads to it, and a former one's no longer.
fn check_tunnels(
    datapath: &Datapath,
    device: u32,
    plan: &OverlayPlan,
) -> Result<(), DatapathError> {
    let gateways: Vec<IpAddr> = plan.addresses.iter().copied().collect();
    datapath.set_tunnels(&Tunnels {
        local: plan.device.local,
        port: plan.device.port,
        vni: plan.device.vni,
        gateways: &gateways,
        nodes: &plan.nodes,
        ranges: &plan.ranges,
    })?;
    datapath.attach_overlay(device)
}

/// Steps of one table, from what it holds if that is known; none, and a fault, if it cannot be
/// listed.
fn compare<T: Table>(
    table: &T,
    conn: &mut Conn,
    before: Option<&BTreeMap<T::Key, T::Want>>,
    want: &BTreeMap<T::Key, T::Want>,
    subject: impl Fn(T::Key) -> Subject,
    outcome: &mut Outcome,
) -> Steps<Subject>
where
    T::Want: PartialEq,
{
    let steps = match before {
        Some(before) => Ok(steps_from(table, before, want)),
        None => steps(table, conn, want),
    };
    let steps = steps.unwrap_or_else(|error| {
        outcome.faults.push(Fault::own(error));
        Steps {
            put: Vec::new(),
            remove: Vec::new(),
        }
    });
    let about = |(key, request)| (subject(key), request);
    Steps {
        put: steps.put.into_iter().map(&about).collect(),
        remove: steps.remove.into_iter().map(&about).collect(),
    }
}

fn execute(
    conn: &mut Conn,
    steps: impl Iterator<Item = (Subject, Request)>,
    explain: fn(Subject, Error) -> Option<String>,
    outcome: &mut Outcome,
) {
    let (subjects, requests): (Vec<_>, Vec<_>) = steps.unzip();
    let results = conn.execute_each(requests);
    for (subject, result) in subjects.into_iter().zip(results) {
        match result.map_err(|error| explain(subject, error)) {
            Ok(()) => outcome.changed += 1,
            Err(None) => {}
            Err(Some(text)) => outcome.faults.push(Fault { subject, text }),
        }
    }
}

fn explain_put(subject: Subject, error: Error) -> Option<String> {
    Some(match subject {
        Subject::Route(to) if error.is_exists() => {
            format!("somebody else's route to {to} is in the way: remove it")
        }
        _ => error.to_string(),
    })
}

fn explain_remove(_: Subject, error: Error) -> Option<String> {
    (!error.is_not_found()).then(|| error.to_string())
}
