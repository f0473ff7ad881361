//! What a machine said, and whether it is as it should be there.

use super::{
    environments::Special,
    kernels::Kernel,
    machine::Ended,
    times::{Clock, Took},
};
use crate::ui;
use serde::Serialize;
use sinabro_common::api::VerifiedProgram;
use sinabro_guest::{Check, Message};
use std::collections::BTreeMap;

const KERNEL_LOG: &str = "kernel_log";

#[derive(Debug, Default, Serialize)]
pub struct Outcome {
    /// The series, as `cargo xtask vm list` names it; of an own kernel its release.
    pub name: String,
    pub release: String,
    /// What is special about the machine; empty if nothing.
    pub environment: String,
    pub programs: Vec<VerifiedProgram>,
    /// What the agent chose by itself.
    pub modes: BTreeMap<String, String>,
    pub checks: Vec<Check>,
    /// What was not done there, and why.
    pub left_out: Vec<String>,
    pub seconds: f64,
    /// What it had of the processors: comparable, also if others used them meanwhile.
    pub processor_seconds: f64,
    /// Where the time went.
    pub steps: Vec<Took>,
    #[serde(skip)]
    pub clock: Clock,
    /// Of the kernel that was booted.
    #[serde(skip)]
    pub booted: String,
}

/// What is known of a machine before it runs.
pub struct Expected {
    /// None of somebody's own: whatever the agent chooses there is right.
    pub kernel: Option<&'static Kernel>,
    pub special: Option<&'static Special>,
    /// Whether programs are verified there.
    pub is_verified: bool,
    /// Whether an agent runs there.
    pub has_agent: bool,
}

impl Expected {
    /// Modes by their key, and how their values begin.
    fn modes(&self) -> BTreeMap<&'static str, &'static str> {
        let mut modes = BTreeMap::new();
        if let Some(kernel) = self.kernel {
            modes.insert("attachUplinks", if kernel.tcx { "tcx" } else { "clsact" });
            modes.insert(
                "tcpAcceleration",
                if kernel.acceleration { "on, " } else { "off" },
            );
            modes.insert("btf", "yes");
        }
        modes.extend(
            self.special
                .iter()
                .flat_map(|special| special.modes.iter().copied()),
        );
        modes
    }

    /// Whether the programs that a node can do without have to be taken.
    fn all_programs(&self) -> bool {
        self.modes().get("tcpAcceleration") == Some(&"on, ")
    }
}

impl Outcome {
    pub fn new(name: &str, release: &str, environment: &str) -> Self {
        Self {
            name: name.into(),
            release: release.into(),
            environment: environment.into(),
            ..Self::default()
        }
    }

    pub fn title(&self) -> String {
        match self.environment.as_str() {
            "" => self.name.clone(),
            environment => format!("{}, {environment}", self.name),
        }
    }

    pub fn take(&mut self, message: Message) {
        match message {
            Message::Started { release } => {
                let expected = self.booted.clone();
                if release != expected {
                    self.note("release", Err(format!("{release} runs, not {expected}")));
                }
            }
            Message::Programs(report) => self.programs = report.programs,
            Message::Modes(modes) => self.modes = modes,
            Message::Check(check) => self.checks.push(check),
            Message::Step(name) => self.clock.next(&mut self.steps, &name),
            Message::LeftOut(what) => self.left_out.push(what),
            Message::Doing(_) | Message::Survives(_) | Message::Done => {}
        }
    }

    fn note(&mut self, name: &str, outcome: Result<String, String>) {
        self.checks.push(Check {
            name: name.into(),
            ok: outcome.is_ok(),
            detail: outcome.unwrap_or_else(|why| why),
        });
    }

    /// A kernel is started, of that release.
    pub fn boots(&mut self, release: &str) {
        release.clone_into(&mut self.booted);
        self.clock.next(&mut self.steps, "boot");
    }

    /// How it ended; whether all is well.
    pub fn end(&mut self, ended: Ended, kernel_trouble: Option<String>) -> bool {
        self.clock.stop(&mut self.steps);
        self.seconds = self.steps.iter().map(|took| took.seconds).sum();
        self.processor_seconds += ended.processor.as_secs_f64();
        if let Err(error) = ended.result {
            self.note("machine", Err(format!("{error:#}")));
        }
        // Once, of all its boots.
        self.checks
            .retain(|check| check.name != KERNEL_LOG || !check.ok);
        self.note(
            KERNEL_LOG,
            match kernel_trouble {
                None => Ok("the kernel complains of nothing".into()),
                Some(trouble) => Err(trouble),
            },
        );
        self.failures().next().is_none()
    }

    /// Whether programs and modes are what they should be.
    pub fn judge(&mut self, expected: &Expected) {
        if expected.is_verified {
            self.judge_programs(expected);
        }
        if !expected.has_agent {
            return;
        }
        for (key, begins) in expected.modes() {
            let found = self.modes.get(key).map_or("", String::as_str);
            let outcome = match found.starts_with(begins) {
                true => Ok(found.to_owned()),
                false => Err(format!("{found:?}, not {begins:?}…")),
            };
            self.note(&format!("mode_{key}"), outcome);
        }
    }

    fn judge_programs(&mut self, expected: &Expected) {
        if self.programs.is_empty() {
            self.note("programs", Err("none was verified".into()));
            return;
        }
        let is_wrong =
            |row: &&VerifiedProgram| !row.ok && (row.required || expected.all_programs());
        let wrong = self.programs.iter().filter(is_wrong);
        let wrong = wrong.map(|row| format!("{} ({}): {}", row.name, row.mode, row.detail));
        let wrong: Vec<String> = wrong.collect();
        let outcome = match wrong.is_empty() {
            true => Ok("all that it has to take are taken".into()),
            false => Err(wrong.join("\n")),
        };
        self.note("programs", outcome);
    }

    pub fn judge_budget(&mut self, exceeded: &[String]) {
        let outcome = match exceeded {
            [] => Ok("no program takes a tenth more than is written down".into()),
            _ => Err(format!(
                "{}; if that is as it should be, write it down: cargo xtask vm --only {} \
                 --step verify --write-budget",
                exceeded.join("; "),
                self.name
            )),
        };
        self.note("budget", outcome);
    }

    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| !check.ok)
    }

    /// When it has ended.
    pub fn line(&self) -> String {
        let failed = self.failures().count();
        format!(
            "  {}  {}{}",
            ui::verdict(failed == 0),
            self.title(),
            ui::dim(&format!(
                "  {}, {} programs, {} checks, {failed} failed, {:.0} s",
                self.release,
                self.programs.len(),
                self.checks.len(),
                self.seconds
            ))
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::{environments::SPECIAL, kernels::Kernel};
    use std::time::Duration;

    fn row(name: &str, required: bool, ok: bool) -> VerifiedProgram {
        VerifiedProgram {
            name: name.into(),
            required,
            ok,
            ..VerifiedProgram::default()
        }
    }

    fn failing(outcome: &Outcome) -> Vec<&str> {
        outcome
            .failures()
            .map(|check| check.name.as_str())
            .collect()
    }

    fn judged(
        kernel: &str,
        special: Option<&str>,
        rows: &[VerifiedProgram],
        modes: &[(&str, &str)],
    ) -> Outcome {
        let mut outcome = Outcome::new(kernel, "x", "");
        outcome.programs = rows.to_vec();
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        outcome.modes = modes.iter().map(owned).collect();
        outcome.judge(&Expected {
            kernel: Some(Kernel::by_name(kernel).unwrap()),
            special: special.and_then(|name| SPECIAL.iter().find(|special| special.name == name)),
            is_verified: true,
            has_agent: true,
        });
        outcome
    }

    const NEW: [(&str, &str); 3] = [
        ("attachUplinks", "tcx"),
        ("tcpAcceleration", "on, cgroup /"),
        ("btf", "yes"),
    ];

    #[test]
    fn a_kernel_has_to_take_what_it_can_and_the_agent_to_see_it() {
        let taken = [row("pod_out", true, true), row("pod_sockets", false, true)];
        assert_eq!(failing(&judged("6.12", None, &taken, &NEW)), [""; 0]);
        // A program less than it could have.
        let refused = [row("pod_out", true, true), row("pod_sockets", false, false)];
        assert_eq!(failing(&judged("6.12", None, &refused, &NEW)), ["programs"]);
        let old = [
            ("attachUplinks", "clsact"),
            ("tcpAcceleration", "off: no"),
            ("btf", "yes"),
        ];
        assert_eq!(failing(&judged("5.10", None, &refused, &old)), [""; 0]);
        let dark = [row("pod_out", true, false)];
        assert_eq!(failing(&judged("5.10", None, &dark, &old)), ["programs"]);
        // A mode that is not what the kernel has.
        assert_eq!(
            failing(&judged("6.12", None, &taken, &old)),
            ["mode_attachUplinks", "mode_tcpAcceleration"]
        );
        assert_eq!(failing(&judged("6.12", None, &[], &NEW)), ["programs"]);
    }

    #[test]
    fn a_special_machine_expects_its_own_modes() {
        let refused = [row("pod_sockets", false, false)];
        let off = [
            ("attachUplinks", "tcx"),
            ("tcpAcceleration", "off: there"),
            ("btf", "yes"),
        ];
        let outcome = judged("6.12", Some("cgroup v1 only"), &refused, &off);
        assert_eq!(failing(&outcome), [""; 0]);
        let on = judged("6.12", Some("cgroup v1 only"), &refused, &NEW);
        assert_eq!(failing(&on), ["mode_tcpAcceleration"]);
    }

    #[test]
    fn another_kernel_than_was_booted_and_an_early_end_are_failures() {
        let mut outcome = Outcome::new("6.12", "6.12.1", "");
        outcome.boots("6.12.1");
        outcome.take(Message::Started {
            release: "6.18.1".into(),
        });
        let ended = |result| Ended {
            result,
            processor: Duration::from_secs(2),
        };
        let hung = Err(anyhow::anyhow!("it hung"));
        assert!(!outcome.end(ended(hung), Some("WARNING: x".into())));
        assert_eq!(failing(&outcome), ["release", "machine", "kernel_log"]);

        // Of several boots each has its own release, and what one did is added up.
        let mut outcome = Outcome::new("6.12", "6.12.1", "");
        for release in ["6.18.1", "6.12.1"] {
            outcome.boots(release);
            let release = release.into();
            outcome.take(Message::Started { release });
            assert!(outcome.end(ended(Ok(())), None));
        }
        assert_eq!(outcome.processor_seconds, 4.0);
        let steps: Vec<_> = outcome.steps.iter().map(|took| &took.name).collect();
        assert_eq!(steps, ["boot"]);
        assert_eq!(outcome.checks.len(), 1, "{:?}", outcome.checks);
    }
}
