//! Connections are looked over now and then, and sooner where somebody waits for what that finds.

use crate::{
    chain::Chain,
    datapath::{self, Datapath},
    telemetry::drops::RecentDrops,
};
use std::{sync::Arc, time::Duration};
use tokio::time::sleep;

/// How often connections are looked over, and what the programs logged is passed on. Sooner if [`wants_sweep`] says so.
pub(super) const SWEEP: Duration = Duration::from_secs(10);

/// Between two looks at what connections take.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

pub(super) fn sweep(datapath: &Datapath) {
    if let Err(error) = datapath.sweep(datapath::monotonic_ns()) {
        tracing::warn!("cannot sweep connections: {}", Chain(&error));
    }
    if let Err(error) = datapath.sweep_accelerated() {
        tracing::warn!("cannot sweep accelerated connections: {}", Chain(&error));
    }
}

/// Waits until a sweep does not wait for its time. A connection found no port: the sweep notes which ones are free, and the
/// connection's next packet finds one. Or there is little room for new ones, and it ends those that are closed.
pub(super) async fn wants_sweep(datapath: Arc<Datapath>, drops: Arc<RecentDrops>) {
    let room_is_scarce = async {
        loop {
            match datapath.is_sweep_due() {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!("cannot read what connections take: {}", Chain(&error))
                }
            }
            sleep(LOOK_AGAIN).await;
        }
    };
    tokio::select! {
        () = drops.out_of_ports() => {}
        () = room_is_scarce => {}
    }
}
