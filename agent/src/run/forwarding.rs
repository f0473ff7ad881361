//! The task that says by which way packets leave the cluster, and get to other nodes, as rules of others come and go.

use crate::{
    apply::{
        OverlayStatus,
        beside_proxy::BesideProxy,
        forwarding,
        kernel_events::{Fd, changed, follow},
    },
    config::Settings,
    datapath::Datapath,
    node::NodeStatus,
    plan::Forwarding,
};
use anyhow::Context as _;
use sinabro_netlink::changes::Changes;
use std::{sync::Arc, time::Duration};
use tokio::{io::unix::AsyncFd, sync::watch, task::spawn_blocking, time::sleep};

/// How often the kernel is looked at although nothing was heard: of iptables-legacy and of IPsec nothing ever is.
const REFRESH: Duration = Duration::from_secs(30);
/// Rules come in groups, and kube-proxy's all the time.
const SETTLE: Duration = Duration::from_millis(500);

pub(super) struct ForwardingTask {
    pub(super) settings: Arc<Settings>,
    pub(super) datapath: Arc<Datapath>,
    pub(super) node: watch::Receiver<NodeStatus>,
    pub(super) overlay: watch::Receiver<OverlayStatus>,
    /// What came of it,
    pub(super) forwarding: watch::Sender<Option<Forwarding>>,
    /// and of packets between nodes.
    pub(super) beside_proxy: watch::Sender<Option<Forwarding>>,
}

pub(super) async fn follow_forwarding(mut task: ForwardingTask) -> anyhow::Result<()> {
    let mut changes = open();
    let mut beside_proxy = BesideProxy::default();
    loop {
        let (settings, datapath) = (task.settings.clone(), task.datapath.clone());
        let looked = spawn_blocking(move || forwarding::follow(&settings, &datapath));
        let way = looked.await.context("looking for the way out failed")?;
        let way = way.context("cannot say by which way packets leave the cluster")?;
        if is_new(&task.forwarding, &way) {
            tracing::info!(%way, "packets out of the cluster");
        }
        let (settings, datapath) = (task.settings.clone(), task.datapath.clone());
        let ways = task.overlay.borrow().ways.clone();
        let looked = spawn_blocking(move || {
            let way = beside_proxy.follow(&settings, &datapath, &ways);
            (beside_proxy, way)
        });
        let way;
        (beside_proxy, way) = looked
            .await
            .context("looking for the way to nodes failed")?;
        let way = way.unwrap_or_else(|error| Forwarding::Kernel(format!("{error:#}")));
        if is_new(&task.beside_proxy, &way) {
            tracing::info!(%way, "packets between nodes");
        }
        tokio::select! {
            () = sleep(REFRESH) => {}
            changed = task.node.changed() => changed.context("what follows the node ended")?,
            () = changed(&mut changes, open, sleep(SETTLE)) => {}
        }
    }
}

/// Tells others of a way that was chosen, if it is another than before.
fn is_new(known: &watch::Sender<Option<Forwarding>>, way: &Forwarding) -> bool {
    known.send_if_modified(|known| {
        let is_new = known.as_ref() != Some(way);
        if is_new {
            *known = Some(way.clone());
        }
        is_new
    })
}

/// Without it, what changes is noticed by the next look.
fn open() -> Option<AsyncFd<Fd<Changes>>> {
    follow(Changes::of_rules(), "changes of rules")
}
