//! What is done in a machine, one file per step.

mod datapath;
mod ipvs;
mod lab;
mod node;
mod refused;
mod uplinks;
mod verify;
mod ways;

use crate::{job, report::Report};
use anyhow::Result;
use sinabro_guest::{Message, Step};

pub fn run() -> Result<()> {
    let job = job()?;
    let mut report = Report::open()?;
    let release = nix::sys::utsname::uname()?;
    report.say(&Message::Started {
        release: release.release().to_string_lossy().into_owned(),
    })?;
    for step in &job.steps {
        let name = match step {
            Step::Verify => "verify",
            Step::Node => "node",
            Step::Lab => "lab",
            Step::Uplinks => "uplinks",
            Step::Ipvs => "ipvs",
            Step::Datapath { .. } => "datapath",
            Step::PowerOff => "power_off",
            Step::Refused | Step::AllRefused => "refused",
        };
        report.say(&Message::Step(name.into()))?;
        let result = match step {
            Step::Verify => verify::run(&mut report),
            Step::Node => node::run(&mut report, &job.environment),
            Step::Lab => lab::run(&mut report, &job.environment),
            Step::Uplinks => uplinks::run(&mut report),
            Step::Ipvs => ipvs::run(&mut report),
            Step::Datapath { thorough } => datapath::run(&mut report, *thorough),
            Step::PowerOff => refused::power_off(&mut report, &job.environment),
            Step::Refused => refused::last_good(&mut report, &job.environment),
            Step::AllRefused => refused::all(&mut report, &job.environment),
        };
        // What comes after it may still be worth knowing.
        if let Err(error) = result {
            report.check(name, Err(error))?;
        }
    }
    report.say(&Message::Done)
}
