//! Work that is done again and again.

use anyhow::Context as _;
use std::{future::pending, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{Instant, MissedTickBehavior, interval, sleep},
};

/// Between two times, however much it is wanted.
const LEAST_PAUSE: Duration = Duration::from_secs(1);

/// Does the work once in each period, for ever; the first time after one.
///
/// # Errors
/// If the work panics.
pub async fn every(
    period: Duration,
    work: impl Fn() + Clone + Send + 'static,
) -> anyhow::Result<()> {
    every_or(period, pending, work).await
}

/// The same, and also whenever `wanted` says so; then it takes no more than a fifth of a processor.
///
/// # Errors
/// If the work panics.
pub async fn every_or<W: Future<Output = ()>>(
    period: Duration,
    wanted: impl Fn() -> W,
    work: impl Fn() + Clone + Send + 'static,
) -> anyhow::Result<()> {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once, and was done before serving.
    ticks.tick().await;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = wanted() => {}
        }
        let began = Instant::now();
        spawn_blocking(work.clone())
            .await
            .context("periodic work failed")?;
        sleep(LEAST_PAUSE.max(4 * began.elapsed())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokio::{
        sync::{Notify, mpsc},
        time::timeout,
    };

    const FAR: Duration = Duration::from_secs(24 * 3600);
    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn work_that_is_wanted_does_not_wait_for_its_time() {
        let wanted = Arc::new(Notify::new());
        let (done, mut seen) = mpsc::unbounded_channel();
        let work = tokio::spawn({
            let wanted = wanted.clone();
            async move {
                let work = move || done.send(()).unwrap_or_default();
                every_or(FAR, || wanted.notified(), work).await
            }
        });
        for _ in 0..2 {
            // Also by several at once, and before anybody waits.
            wanted.notify_one();
            wanted.notify_one();
            assert_eq!(timeout(PATIENCE, seen.recv()).await, Ok(Some(())));
        }
        work.abort();
    }
}
