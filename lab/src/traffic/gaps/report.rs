//! What a meter saw, and whether it may be so.

use super::{
    ALLOWED, TICK,
    flow::Flow,
    series::{Gap, Series, Stalls, Stamp},
};
use anyhow::{Context as _, Result, ensure};
use std::{ops::Range, time::Duration};

/// Waits of the control path above this, and absences of the meter's threads, are the machine's
/// standing still.
pub const STALL: Duration = Duration::from_millis(1);

pub struct Watched {
    flows: Vec<Seen>,
    events: Vec<(Stamp, String)>,
    /// Parts of the time with events in which the meter looked every millisecond.
    coverage: f64,
}

/// One flow.
struct Seen {
    name: String,
    sent: usize,
    lost: usize,
    again: u64,
    failures: Vec<String>,
    /// The longest before the first event and from then on, without what was the machine's.
    before: Option<Longest>,
    after: Option<Longest>,
}

#[derive(Clone, Copy)]
struct Longest {
    at: Stamp,
    /// Without the time in which the machine stood still.
    own: Duration,
    whole: Duration,
}

impl Watched {
    pub(super) fn new(
        flows: &[Flow],
        events: Vec<(Stamp, String)>,
        absences: Vec<Gap>,
        watch: Range<Stamp>,
        heard: Stamp,
    ) -> Self {
        let first = events.first().map_or(watch.end, |(at, _)| *at);
        let (mut waits, mut coverage) = (absences, 1.0);
        for flow in flows.iter().filter(|flow| flow.is_control) {
            let series = &flow.state().series;
            waits.extend(series.waits(watch.start..heard, heard));
            // Only datagrams are sent at every tick.
            if flow.name.starts_with("UDP") {
                let sent = series.waits(first..watch.end, heard).len();
                let ticks = (watch.end - first) as f64 / TICK.as_nanos() as f64;
                coverage = (sent as f64 / ticks).min(1.0);
            }
        }
        let stalls = Stalls::new(waits, STALL);
        let subjects = flows.iter().filter(|flow| !flow.is_control);
        let seen = subjects.map(|flow| {
            let state = flow.state();
            let series = &state.series;
            Seen {
                name: flow.name.clone(),
                sent: series.sent(),
                lost: series.sent() - series.arrived(),
                again: series.again(),
                failures: state.failures.clone(),
                before: longest(series, watch.start..first, heard, &stalls),
                after: longest(series, first..watch.end, heard, &stalls),
            }
        });
        Self {
            flows: seen.collect(),
            events,
            coverage,
        }
    }

    /// Nothing was lost or doubled, and no path's longest gap since the first event is more than
    /// [`ALLOWED`] longer than its longest one before. Says what the longest was.
    pub fn must_hold(&self) -> Result<String> {
        ensure!(!self.events.is_empty(), "nothing was done to the traffic");
        let (mut sent, mut worst): (usize, Option<(&Seen, Longest, Longest)>) = (0, None);
        for seen in &self.flows {
            let name = &seen.name;
            ensure!(seen.failures.is_empty(), "{name}: {}", seen.failures[0]);
            let what = || format!("{name}: nothing was sent");
            let (before, after) = seen.before.zip(seen.after).with_context(what)?;
            ensure!(
                seen.lost == 0 && seen.again == 0,
                "{name}: of {} messages {} were lost, {} came twice; longest gap {}",
                seen.sent,
                seen.lost,
                seen.again,
                self.told(after)
            );
            ensure!(
                after.own <= before.own + ALLOWED,
                "{name}: longest gap {}, {} before",
                self.told(after),
                ms(before.own)
            );
            sent += seen.sent;
            if worst.is_none_or(|(_, _, longest)| after.own > longest.own) {
                worst = Some((seen, before, after));
            }
        }
        let (seen, before, after) = worst.context("no path was watched")?;
        Ok(format!(
            "0 of {sent} messages lost on {} flows; longest gap {} ({}), {} before; {:.1} % watched",
            self.flows.len(),
            self.told(after),
            seen.name,
            ms(before.own),
            self.coverage * 100.0
        ))
    }

    /// The longest gap of a flow since the first event.
    pub fn gap(&self, flow: &str) -> Duration {
        let seen = self.flows.iter().find(|seen| seen.name == flow);
        let longest = seen.and_then(|seen| seen.after);
        longest.map_or(Duration::ZERO, |longest| longest.own)
    }

    /// How many messages of a flow were lost.
    pub fn lost(&self, flow: &str) -> usize {
        let seen = self.flows.iter().find(|seen| seen.name == flow);
        seen.map_or(0, |seen| seen.lost)
    }

    /// One line per flow: for people.
    pub fn table(&self) -> Vec<String> {
        let line = |seen: &Seen| {
            let before = seen.before.map_or("–".into(), |longest| ms(longest.own));
            let after = seen.after.map_or("–".into(), |longest| self.told(longest));
            format!(
                "{}: {} sent, {} lost; longest gap {before} before, then {after}",
                seen.name, seen.sent, seen.lost
            )
        };
        self.flows.iter().map(line).collect()
    }

    /// How long, and after what.
    fn told(&self, longest: Longest) -> String {
        let past = self.events.iter().rev().find(|(at, _)| *at <= longest.at);
        let cause = past.map_or(String::new(), |(at, what)| {
            let later = Duration::from_nanos((longest.at - at) as u64);
            format!(", {:.0} ms after {what}", later.as_secs_f64() * 1e3)
        });
        let machine = longest.whole - longest.own;
        match machine > STALL {
            true => format!(
                "{} (and {} in which the machine stood still){cause}",
                ms(longest.own),
                ms(machine)
            ),
            false => format!("{}{cause}", ms(longest.own)),
        }
    }
}

fn longest(series: &Series, window: Range<Stamp>, end: Stamp, stalls: &Stalls) -> Option<Longest> {
    let mut longest: Option<Longest> = None;
    for Gap { at, length } in series.waits(window, end) {
        // What is not longer as a whole is not longer without a part of it.
        if longest.is_some_and(|longest| length <= longest.own) {
            continue;
        }
        let own = stalls.without(Gap { at, length });
        if longest.is_none_or(|longest| own > longest.own) {
            longest = Some(Longest {
                at,
                own,
                whole: length,
            });
        }
    }
    longest
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
