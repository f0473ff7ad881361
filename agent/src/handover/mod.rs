//! Services pass from kube-proxy to this agent, and back, without a connection noticing.
//!
//! - [`Turn`]: who translates, by the setting and by what is seen of kube-proxy;
//! - [`theirs`]: whether its rules are there, and whether it is;
//! - [`flows`]: which connections it has.
//!
//! Every hook that picks an endpoint comes before netfilter, so it is always safe to begin beside kube-proxy. What it has
//! translated until then stays with it (`datapath::handover`) until netfilter has forgotten it, or its rules are gone.
//! What we have translated goes on when it begins again, until it ends.

pub mod flows;
#[cfg(test)]
mod tests;
pub mod theirs;

use crate::datapath::{Datapath, DatapathError, Translation};
use anyhow::Context as _;
use flows::Flows;
use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};
use theirs::Theirs;

/// Who translates what is sent to Services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceProxy {
    /// Somebody else.
    #[default]
    Off,
    On,
    /// This agent, as soon as kube-proxy does not; and from then on.
    Auto,
}

impl ServiceProxy {
    pub const EVERY: [Self; 3] = [Self::Off, Self::On, Self::Auto];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
        }
    }

    /// Whether it may be this agent.
    pub fn may_be_on(self) -> bool {
        self != Self::Off
    }
}

impl fmt::Display for ServiceProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How often it is looked at while something is to change. A look goes through all of netfilter's connections.
const LOOK: Duration = Duration::from_secs(5);
/// How often rules that nobody needs are looked for.
const LOOK_AT_RULES: Duration = Duration::from_secs(30);
/// How long rules are taken for those of a kube-proxy that is only being replaced.
pub const RULES_ALONE: Duration = Duration::from_secs(60);

/// Whose turn it is. Nothing of it lasts longer than the process but what the programs were told.
pub struct Turn {
    wish: ServiceProxy,
    datapath: Arc<Datapath>,
    /// Since when there are rules and no kube-proxy.
    alone_since: Option<Instant>,
}

/// What a step found.
pub struct Outcome {
    /// For people: `on`, `off`, and why.
    pub text: String,
    /// When to look again; none: never.
    pub again: Option<Duration>,
}

/// What is to be done where nothing is translated yet.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Begin,
    /// The reason.
    Wait(String),
}

impl Turn {
    pub fn new(wish: ServiceProxy, datapath: Arc<Datapath>) -> Self {
        Self {
            wish,
            datapath,
            alone_since: None,
        }
    }

    /// Looks, and does what is due. Published has to be what Services lead to, if they are to be translated.
    ///
    /// # Errors
    /// If the maps cannot be read or written.
    pub fn step(&mut self, now: Instant) -> anyhow::Result<Outcome> {
        let state = self.datapath.translation();
        let state = state.context("cannot read whether Services are translated")?;
        match (self.wish, state) {
            (ServiceProxy::Off, Translation::Off) => Ok(Outcome {
                text: "off".into(),
                again: None,
            }),
            (ServiceProxy::Off, _) => self.drain(),
            (_, Translation::Handover) => self.hand_over(&look()?),
            (_, Translation::On) => Ok(Self::on(&look()?)),
            (wish, Translation::Off | Translation::Draining) => {
                let theirs = look()?;
                match decide(wish, &theirs, &mut self.alone_since, now) {
                    Decision::Begin => self.begin(&theirs),
                    Decision::Wait(why) => self.wait(state, &why),
                }
            }
        }
    }

    fn wait(&self, state: Translation, why: &str) -> anyhow::Result<Outcome> {
        if state == Translation::Draining {
            self.drain()?;
        }
        Ok(Outcome {
            text: format!("off, {why}"),
            again: Some(LOOK),
        })
    }

    fn begin(&self, theirs: &Theirs) -> anyhow::Result<Outcome> {
        let Some(rules) = theirs.rules else {
            self.set(Translation::On)?;
            tracing::info!("services are translated");
            return Ok(Self::on(theirs));
        };
        // What begins between the first look and the switch is seen by the second, unless it has sent again by then.
        let flows = self.leave_flows();
        self.set(Translation::Handover)?;
        let flows = flows.and_then(|_| self.leave_flows());
        match flows {
            Ok(flows) => tracing::info!(
                connections = flows.remaining,
                "services are translated, but for connections that kube-proxy has ({rules})"
            ),
            Err(error) => tracing::warn!(
                "services are translated; datagrams that kube-proxy has translated may get another endpoint: {error:#}"
            ),
        }
        self.hand_over(theirs)
    }

    fn leave_flows(&self) -> anyhow::Result<Flows> {
        let flows = Flows::look(&self.datapath)?;
        self.datapath.leave_connections(flows.connections.iter())?;
        self.datapath.leave_sockets(&flows.sockets)?;
        Ok(flows)
    }

    /// Kube-proxy's connections end one after the other.
    fn hand_over(&self, theirs: &Theirs) -> anyhow::Result<Outcome> {
        let Some(rules) = theirs.rules else {
            // Nobody translates them any more, whatever netfilter remembers.
            tracing::info!("kube-proxy's rules are gone: all of its connections are ours");
            return self.finish(theirs);
        };
        let flows = match Flows::look(&self.datapath) {
            Ok(flows) => flows,
            Err(error) => {
                return Ok(Outcome {
                    text: format!("on, cannot see kube-proxy's connections ({rules}): {error:#}"),
                    again: Some(LOOK),
                });
            }
        };
        if flows.remaining == 0 {
            tracing::info!("kube-proxy has no connection any more ({rules})");
            return self.finish(theirs);
        }
        let taken = self.datapath.take_back(&flows.connections, &flows.sockets);
        taken.context("cannot take back what kube-proxy has forgotten")?;
        Ok(Outcome {
            text: format!(
                "on, kube-proxy has {} connections yet ({rules})",
                flows.remaining
            ),
            again: Some(LOOK),
        })
    }

    fn finish(&self, theirs: &Theirs) -> anyhow::Result<Outcome> {
        self.set(Translation::On)?;
        let flows = Flows::default();
        let taken = self.datapath.take_back(&flows.connections, &flows.sockets);
        taken.context("cannot take back what kube-proxy has forgotten")?;
        Ok(Self::on(theirs))
    }

    fn on(theirs: &Theirs) -> Outcome {
        match theirs.rules {
            None => Outcome {
                text: "on".into(),
                again: None,
            },
            Some(rules) => Outcome {
                text: format!("on, nothing needs kube-proxy's rules any more ({rules})"),
                again: Some(LOOK_AT_RULES),
            },
        }
    }

    fn drain(&self) -> anyhow::Result<Outcome> {
        let left = self.datapath.translated();
        let left = left.context("cannot count translated connections")?;
        if left == 0 {
            self.set(Translation::Off)?;
            tracing::info!("no connection is translated any more");
            return Ok(Outcome {
                text: "off".into(),
                again: None,
            });
        }
        Ok(Outcome {
            text: format!("off, {left} connections are translated until they end"),
            again: Some(LOOK),
        })
    }

    fn set(&self, translation: Translation) -> Result<(), DatapathError> {
        self.datapath.set_services(translation)
    }
}

/// What cannot be looked at stays as it is, and is looked at again.
fn look() -> anyhow::Result<Theirs> {
    Theirs::look()
        .context("cannot see whether kube-proxy is there: nothing is changed until that is seen")
}

fn decide(
    wish: ServiceProxy,
    theirs: &Theirs,
    alone_since: &mut Option<Instant>,
    now: Instant,
) -> Decision {
    if wish == ServiceProxy::On {
        return Decision::Begin;
    }
    match (theirs.rules, theirs.listens) {
        (None, false) => Decision::Begin,
        (rules, true) => {
            *alone_since = None;
            let rules = rules.map_or(String::new(), |rules| format!(", {rules}"));
            Decision::Wait(format!(
                "kube-proxy serves (it listens on port {}{rules})",
                theirs::HEALTH_PORT
            ))
        }
        (Some(rules), false) => {
            let alone = now.saturating_duration_since(*alone_since.get_or_insert(now));
            match alone >= RULES_ALONE {
                true => Decision::Begin,
                false => Decision::Wait(format!(
                    "kube-proxy's rules are there without it ({rules}): on in {} s",
                    (RULES_ALONE - alone).as_secs()
                )),
            }
        }
    }
}
