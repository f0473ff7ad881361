//! What an earlier agent left is brought back: data path, leases, endpoint records.

use super::{service_room::service_room, sweeps::sweep};
use crate::{
    acceleration::{
        choice::{Mode, Policy},
        self_test::SelfTest,
    },
    apply::beside_proxy,
    chain::Chain,
    config::{self, Settings},
    connections::Room,
    datapath::{self, Datapath, DatapathConfig, QueueLimits, Translation},
    endpoint::{Endpoints, Programs, record::Records},
    ipam::Allocator,
    memory,
    plan::OverlayMode,
};
use anyhow::Context as _;
use sinabro_common::{
    api::{SelfTestReport, Verdict},
    names,
};
use std::sync::Arc;

pub(super) struct Restored {
    pub(super) datapath: Arc<Datapath>,
    pub(super) endpoints: Arc<Endpoints>,
    pub(super) room: Room,
    pub(super) self_test: Arc<SelfTest>,
}

/// Brings back what an earlier agent left, and clears away what is no pod's any more.
pub(super) fn restore(settings: &Settings) -> anyhow::Result<Restored> {
    let self_test = Arc::new(self_test(settings)?);
    let before = Datapath::translated_before(&settings.bpf_dir);
    let wish = settings.service_proxy;
    // What is translated goes on, whoever has what begins from now on.
    let has_services = wish.may_be_on() || before != Translation::Off;
    let room = Room::new(settings.connections, has_services);
    tracing::info!(?room, "the table of connections");
    let datapath = Datapath::load(&DatapathConfig {
        bpf_dir: settings.bpf_dir.clone(),
        cgroup: settings.cgroup_dir.clone(),
        acceleration: settings.tcp_acceleration != Mode::Off
            && (self_test.found()).is_none_or(|found| found.verdict == Verdict::Accelerate),
        service_sockets: has_services || Datapath::has_service_sockets(&settings.bpf_dir),
        attach: match settings.attach {
            config::AttachMode::Auto => datapath::AttachMode::Auto,
            config::AttachMode::Tcx => datapath::AttachMode::Tcx,
            config::AttachMode::Clsact => datapath::AttachMode::Clsact,
        },
        connections: Some(room.connections),
        connection_limits: settings.connection_limits.clone(),
        services: match has_services {
            true => service_room(settings.service_endpoints, &settings.bpf_dir),
            false => datapath::ServiceRoom::NONE,
        },
        queue_limits: Some(queue_limits(settings)),
        last_good: Some(settings.programs_dir.join(names::PROGRAMS_FILE)),
    })
    .context("cannot load the data path")?;
    if !wish.may_be_on() && before != Translation::Off {
        if before == Translation::On
            && settings.overlay != OverlayMode::Kernel
            && let Err(error) = beside_proxy::ensure(&datapath)
        {
            tracing::warn!("connections between nodes go by the stack: {error:#}");
        }
        let draining = datapath.set_services(Translation::Draining);
        draining.context("cannot leave Services to others")?;
    }
    let datapath = Arc::new(datapath);
    let ipam = Allocator::open(&settings.state_dir).context("cannot read the leases")?;
    let programs = Arc::new(Programs {
        datapath: datapath.clone(),
        acceleration: Policy {
            mode: settings.tcp_acceleration,
            self_test: self_test.clone(),
            loopback: settings.tcp_acceleration_loopback,
        },
    });
    let endpoints = Endpoints::open(&settings.state_dir, ipam, programs)
        .context("cannot open the endpoint records")?;
    let restored = endpoints
        .restore()
        .context("cannot restore the endpoints")?;
    tracing::info!(?restored, "endpoints restored");
    let endpoints = Arc::new(endpoints);
    log_collected(&endpoints);
    // They run on every pod now.
    let kept = settings.programs_dir.join(names::PROGRAMS_FILE);
    if let Err(error) = datapath.keep_programs(&kept) {
        tracing::warn!(
            "the programs are not kept for a kernel that refuses others: {}",
            Chain(&error)
        );
    }
    // An address must not be given again with the flows of its last pod.
    sweep(&datapath);
    // An archive of all programs was made.
    memory::release();
    datapath::release_objects();
    Ok(Restored {
        datapath,
        endpoints,
        room,
        self_test,
    })
}

/// What accelerated connections may cost the kernel.
fn queue_limits(settings: &Settings) -> QueueLimits {
    let node = settings.tcp_acceleration_node_memory;
    let limits = node.map_or_else(QueueLimits::default, QueueLimits::of_node);
    QueueLimits {
        pod: settings.tcp_acceleration_pod_memory.unwrap_or(limits.pod),
        ..limits
    }
}

/// Whether this kernel can accelerate TCP, as far as it is known. Pods of before that ask for it have
/// the test run now: no program gets their connections that was not tried.
fn self_test(settings: &Settings) -> anyhow::Result<SelfTest> {
    let mode = settings.tcp_acceleration;
    if mode == Mode::Off {
        return Ok(SelfTest::known(SelfTestReport::default()));
    }
    let cgroup = settings.cgroup_dir.as_deref();
    let self_test = SelfTest::of_node(&settings.state_dir, &settings.bpf_dir, cgroup);
    let records = Records::open(&settings.state_dir).and_then(|records| records.load());
    let (records, _) = records.context("cannot read the endpoint records")?;
    if records.iter().any(|record| mode.asks(record.acceleration)) {
        self_test.verdict();
    }
    Ok(self_test)
}

pub(super) fn log_collected(endpoints: &Endpoints) {
    let collected = endpoints.collect();
    for owner in &collected.deletes {
        tracing::info!("carried out the queued delete of {owner}");
    }
    for owner in &collected.endpoints {
        tracing::info!("freed {owner}, its link is gone");
    }
    for owner in &collected.leases {
        tracing::info!("freed the addresses of {owner}, whose ADD was not finished");
    }
    for link in &collected.links {
        tracing::info!("deleted {link}, which belongs to no pod");
    }
}
