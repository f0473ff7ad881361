//! The task that says by which way packets leave the cluster, as rules of others come and go.

use crate::{
    apply::{
        beside_proxy, forwarding,
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
    /// What came of it.
    pub(super) forwarding: watch::Sender<Option<Forwarding>>,
}

pub(super) async fn follow_forwarding(mut task: ForwardingTask) -> anyhow::Result<()> {
    let mut changes = open();
    let mut beside_proxy = Told::default();
    loop {
        let (settings, datapath) = (task.settings.clone(), task.datapath.clone());
        let looked = spawn_blocking(move || forwarding::follow(&settings, &datapath));
        let way = looked.await.context("looking for the way out failed")?;
        let way = way.context("cannot say by which way packets leave the cluster")?;
        let (settings, datapath) = (task.settings.clone(), task.datapath.clone());
        let looked = spawn_blocking(move || beside_proxy::follow(&settings, &datapath));
        let why = looked
            .await
            .context("looking for the way to nodes failed")?;
        beside_proxy.tell(why);
        task.forwarding.send_if_modified(|known| {
            let is_new = known.as_ref() != Some(&way);
            if is_new {
                tracing::info!(way = %way, "packets out of the cluster");
                *known = Some(way);
            }
            is_new
        });
        tokio::select! {
            () = sleep(REFRESH) => {}
            changed = task.node.changed() => changed.context("what follows the node ended")?,
            () = changed(&mut changes, open, sleep(SETTLE)) => {}
        }
    }
}

/// What was logged last of the fast path beside kube-proxy.
#[derive(Default)]
struct Told(Option<String>);

impl Told {
    /// Given is why it is not taken; nothing if it is.
    fn tell(&mut self, why: anyhow::Result<Option<String>>) {
        let text = match &why {
            Ok(None) => "past netfilter".into(),
            Ok(Some(why)) => format!("by the stack: {why}"),
            Err(error) => format!("as before: {error:#}"),
        };
        if self.0.as_ref() == Some(&text) {
            return;
        }
        match why {
            Ok(None) => tracing::info!("packets between nodes beside kube-proxy: {text}"),
            Ok(Some(_)) => tracing::debug!("packets between nodes beside kube-proxy: {text}"),
            Err(_) => tracing::warn!("packets between nodes beside kube-proxy: {text}"),
        }
        self.0 = Some(text);
    }
}

/// Without it, what changes is noticed by the next look.
fn open() -> Option<AsyncFd<Fd<Changes>>> {
    follow(Changes::of_rules(), "changes of rules")
}
