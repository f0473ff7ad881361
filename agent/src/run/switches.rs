//! The task that keeps the kernel's switches for forwarding on, as soon as somebody turns one off.

use crate::{
    apply::kernel_events::{Fd, changed, follow},
    node::NodeStatus,
    troubles::{Standing, forwarding},
};
use anyhow::Context as _;
use sinabro_netlink::changes::Changes;
use std::time::Duration;
use tokio::{
    io::unix::AsyncFd,
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

/// How often they are looked at although nothing was heard.
const REFRESH: Duration = Duration::from_secs(30);
/// The kernel tells of each link when they change, and of each link that comes.
const SETTLE: Duration = Duration::from_millis(200);

pub(super) async fn follow_switches(
    mut node: watch::Receiver<NodeStatus>,
    standing: Standing,
) -> anyhow::Result<()> {
    let mut changes = open();
    loop {
        let state = node.borrow_and_update().state.clone();
        if let Some(state) = state {
            let looked = spawn_blocking(move || forwarding::keep(&state)).await;
            let found = looked.context("looking whether the node forwards failed")?;
            forwarding::say(&standing, found);
        }
        let settled = Instant::now() + SETTLE;
        tokio::select! {
            () = sleep(REFRESH) => {}
            changed = node.changed() => changed.context("what follows the node ended")?,
            () = changed(&mut changes, open, sleep_until(settled)) => {}
        }
    }
}

/// Without it, what changes is noticed by the next look.
fn open() -> Option<AsyncFd<Fd<Changes>>> {
    follow(Changes::of_settings(), "changes of settings")
}
