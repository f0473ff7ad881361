//! Services pass from kube-proxy to this agent, and back, without a connection noticing.
//!
//! - [`Turn`]: who translates, by the setting and by what is seen of kube-proxy;
//! - [`theirs`]: whether its rules are there, and whether it is;
//! - [`seen`]: whether it was there before;
//! - [`flows`]: which connections it has.
//!
//! Every hook that picks an endpoint comes before netfilter, so it is always safe to begin beside kube-proxy. What it has
//! translated until then stays with it (`datapath::handover`) until netfilter has forgotten it, or its rules are gone.
//! What we have translated goes on when it begins again, until it ends.

pub mod flows;
pub mod seen;
#[cfg(test)]
mod tests;
pub mod theirs;

use crate::{
    apply::beside_proxy,
    config::Settings,
    datapath::{Datapath, DatapathError, Translation},
    troubles::fences,
};
use anyhow::Context as _;
use flows::Flows;
use seen::Seen;
use sinabro_netlink::nft::Nft;
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
    Off,
    On,
    /// This agent, where no kube-proxy does; and from then on.
    #[default]
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
/// How long a kube-proxy that was seen is waited for: after a boot, and while it is being replaced. An image has to be pulled first.
pub const ABSENT: Duration = Duration::from_secs(300);

/// Whose turn it is. Nothing of it lasts longer than the process but what the programs were told.
pub struct Turn {
    settings: Arc<Settings>,
    datapath: Arc<Datapath>,
    seen: Seen,
    /// Since when a kube-proxy that was seen is not there.
    absent_since: Option<Instant>,
    /// Services were translated here, and there were no rules of a kube-proxy.
    had_no_rules: bool,
    /// What was seen of a kube-proxy that serves, and when.
    serving: Option<(Instant, Theirs)>,
}

/// What a step found.
pub struct Outcome {
    /// For people: `on`, `off`, and why.
    pub text: String,
    /// When to look again; none: never.
    pub again: Option<Duration>,
    /// A kube-proxy came although Services are translated here: what to do about that.
    pub trouble: Option<String>,
}

impl Outcome {
    pub fn new(text: impl Into<String>, again: Option<Duration>) -> Self {
        Self {
            text: text.into(),
            again,
            trouble: None,
        }
    }
}

/// What is to be done where nothing is translated yet.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Begin,
    /// The reason.
    Wait(String),
}

impl Turn {
    pub fn new(settings: Arc<Settings>, datapath: Arc<Datapath>, seen: Seen) -> Self {
        Self {
            settings,
            datapath,
            seen,
            absent_since: None,
            had_no_rules: false,
            serving: None,
        }
    }

    /// Looks, and does what is due. Published has to be what Services lead to, if they are to be translated.
    ///
    /// # Errors
    /// If the maps cannot be read or written.
    pub fn step(&mut self, now: Instant) -> anyhow::Result<Outcome> {
        let state = self.datapath.translation();
        let state = state.context("cannot read whether Services are translated")?;
        match (self.wish(), state) {
            (ServiceProxy::Off, Translation::Off) => Ok(Outcome::new("off", None)),
            (ServiceProxy::Off, _) => self.drain(),
            (_, Translation::Handover) => self.hand_over(&look()?),
            (_, Translation::On) => Ok(self.goes_on(&look()?)),
            (wish, Translation::Off | Translation::Draining) => {
                let theirs = self.look_beside(now)?;
                if theirs.rules.is_some() || theirs.listens {
                    self.seen.set(true);
                }
                let was_seen = self.seen.is();
                match decide(wish, &theirs, was_seen, &mut self.absent_since, now) {
                    Decision::Begin => match self.fences()? {
                        Some(why) => self.wait(state, &why),
                        None => self.begin(&theirs),
                    },
                    Decision::Wait(why) => self.wait(state, &why),
                }
            }
        }
    }

    fn wait(&self, state: Translation, why: &str) -> anyhow::Result<Outcome> {
        if state == Translation::Draining {
            self.drain()?;
        }
        Ok(Outcome::new(format!("off, {why}"), Some(LOOK)))
    }

    /// With `auto`: rules that would not be met any more.
    fn fences(&self) -> anyhow::Result<Option<String>> {
        let is_asked = self.wish() == ServiceProxy::Auto;
        let Some((first, last)) = self.settings.node_ports.filter(|_| is_asked) else {
            return Ok(None);
        };
        let find = || {
            let mut nft = Nft::new()?;
            let chains = nft.chains()?;
            fences::find(&mut nft, &chains, &(first..=last))
        };
        let found = theirs::unless_unknown(find()).context(
            "cannot see whether rules for node ports would be bypassed: nothing is changed until that is seen",
        )?;
        Ok(found
            .flatten()
            .map(|_| "rules for node ports would be bypassed, see NodePortRulesBypassed".into()))
    }

    fn begin(&mut self, theirs: &Theirs) -> anyhow::Result<Outcome> {
        let Some(rules) = theirs.rules else {
            self.begin_alone()?;
            self.forget_theirs();
            tracing::info!("services are translated");
            return Ok(self.goes_on(theirs));
        };
        // What begins between the first look and the switch is seen by the second, unless it has sent again by then.
        let flows = self.leave_flows();
        self.set(Translation::Handover)?;
        self.forget_theirs();
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

    /// With `auto` the next boot waits for nobody.
    fn forget_theirs(&mut self) {
        if self.wish() == ServiceProxy::Auto {
            self.seen.set(false);
        }
    }

    fn leave_flows(&self) -> anyhow::Result<Flows> {
        let flows = Flows::look(&self.datapath)?;
        self.datapath.leave_connections(flows.connections.iter())?;
        self.datapath.leave_sockets(&flows.sockets)?;
        Ok(flows)
    }

    /// Kube-proxy's connections end one after the other.
    fn hand_over(&mut self, theirs: &Theirs) -> anyhow::Result<Outcome> {
        let Some(rules) = theirs.rules else {
            // Nobody translates them any more, whatever netfilter remembers.
            tracing::info!("kube-proxy's rules are gone: all of its connections are ours");
            return self.finish(theirs);
        };
        let flows = match Flows::look(&self.datapath) {
            Ok(flows) => flows,
            Err(error) => {
                return Ok(Outcome::new(
                    format!("on, cannot see kube-proxy's connections ({rules}): {error:#}"),
                    Some(LOOK),
                ));
            }
        };
        if flows.remaining == 0 {
            tracing::info!("kube-proxy has no connection any more ({rules})");
            return self.finish(theirs);
        }
        let taken = self.datapath.take_back(&flows.connections, &flows.sockets);
        taken.context("cannot take back what kube-proxy has forgotten")?;
        Ok(Outcome::new(
            format!(
                "on, kube-proxy has {} connections yet ({rules})",
                flows.remaining
            ),
            Some(LOOK),
        ))
    }

    fn finish(&mut self, theirs: &Theirs) -> anyhow::Result<Outcome> {
        self.begin_alone()?;
        let flows = Flows::default();
        let taken = self.datapath.take_back(&flows.connections, &flows.sockets);
        taken.context("cannot take back what kube-proxy has forgotten")?;
        Ok(self.goes_on(theirs))
    }

    /// Rules that came since then are those of a kube-proxy, which is waited for at the next boot.
    fn goes_on(&mut self, theirs: &Theirs) -> Outcome {
        let Some(rules) = theirs.rules else {
            self.had_no_rules = true;
            let looks = self.wish() == ServiceProxy::Auto;
            return Outcome::new("on", looks.then_some(LOOK));
        };
        let text = format!("on, nothing needs kube-proxy's rules any more ({rules})");
        let has_come = self.had_no_rules && self.wish() == ServiceProxy::Auto;
        if has_come {
            self.seen.set(true);
        }
        Outcome {
            trouble: has_come.then(|| {
                format!(
                    "kube-proxy came ({rules}) after Sinabro had begun to translate Services: remove kube-proxy, or set serviceProxy to off"
                )
            }),
            ..Outcome::new(text, Some(LOOK_AT_RULES))
        }
    }

    /// A kube-proxy that serves has many rules. They are not listed each time.
    fn look_beside(&mut self, now: Instant) -> anyhow::Result<Theirs> {
        if let Some((at, theirs)) = &self.serving
            && now.saturating_duration_since(*at) < LOOK_AT_RULES
            && matches!(theirs::listens(), Ok(true))
        {
            return Ok(theirs.clone());
        }
        let theirs = look()?;
        self.serving = theirs.listens.then(|| (now, theirs.clone()));
        Ok(theirs)
    }

    fn drain(&self) -> anyhow::Result<Outcome> {
        let left = self.datapath.translated();
        let left = left.context("cannot count translated connections")?;
        if left == 0 {
            self.set(Translation::Off)?;
            tracing::info!("no connection is translated any more");
            return Ok(Outcome::new("off", None));
        }
        let text = format!("off, {left} connections are translated until they end");
        Ok(Outcome::new(text, Some(LOOK)))
    }

    /// Packets between nodes need no record any more, unless rules of others are to be met.
    fn begin_alone(&self) -> anyhow::Result<()> {
        beside_proxy::before_alone(&self.settings, &self.datapath)
            .context("cannot have packets between nodes meet rules of others")?;
        Ok(self.set(Translation::On)?)
    }

    fn wish(&self) -> ServiceProxy {
        self.settings.service_proxy
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
    was_seen: bool,
    absent_since: &mut Option<Instant>,
    now: Instant,
) -> Decision {
    if wish == ServiceProxy::On {
        return Decision::Begin;
    }
    if theirs.listens {
        *absent_since = None;
        let rules = theirs
            .rules
            .map_or(String::new(), |rules| format!(", {rules}"));
        return Decision::Wait(format!(
            "kube-proxy serves (it listens on port {}{rules})",
            theirs::HEALTH_PORT
        ));
    }
    if !was_seen {
        return Decision::Begin;
    }
    let absent = now.saturating_duration_since(*absent_since.get_or_insert(now));
    if absent >= ABSENT {
        return Decision::Begin;
    }
    let left = (ABSENT - absent).as_secs();
    Decision::Wait(match theirs.rules {
        Some(rules) => {
            format!("kube-proxy's rules are there without it ({rules}): on in {left} s")
        }
        None => format!("kube-proxy was here and is waited for: on in {left} s"),
    })
}
