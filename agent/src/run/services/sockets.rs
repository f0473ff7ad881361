//! Disconnects the node's UDP sockets from endpoints that their Services have lost.

use crate::{
    chain::Chain,
    datapath::Datapath,
    troubles::{self, Standing},
};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// A socket that was connecting as the endpoint went is connected by then.
const ONCE_MORE: Duration = Duration::from_secs(1);
/// How soon it is looked again while some are left: their processes may have ended.
const AGAIN: Duration = Duration::from_secs(30);

const KEPT: &str = "SocketsKeepEndpoints";

/// Each time that an endpoint is lost, until nobody can say so any more.
pub async fn follow(mut lost: watch::Receiver<()>, datapath: Arc<Datapath>, standing: Standing) {
    let mut are_kept = false;
    loop {
        let wait = if are_kept { AGAIN } else { Duration::MAX };
        if let Ok(Err(_)) = timeout(wait, lost.changed()).await {
            return;
        }
        for pause in [Duration::ZERO, ONCE_MORE] {
            sleep(pause).await;
            let datapath = datapath.clone();
            let done = spawn_blocking(move || datapath.disconnect_stale_sockets()).await;
            let problem = match done {
                Ok(Ok(0)) => None,
                Ok(Ok(count)) => {
                    tracing::info!(
                        count,
                        "UDP sockets of the node were disconnected: their endpoints are gone"
                    );
                    None
                }
                Ok(Err(error)) => Some(Chain(&error).to_string()),
                Err(error) => Some(Chain(&error).to_string()),
            };
            are_kept = problem.is_some();
            troubles::replace(&standing, KEPT, problem);
        }
    }
}
