//! What is done in a machine, one file per step.

mod datapath;
mod lab;
mod node;
mod verify;

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
        // What comes after it may still be worth knowing.
        let (name, result) = match step {
            Step::Verify => ("verify", verify::run(&mut report)),
            Step::Node => ("node", node::run(&mut report, &job.environment)),
            Step::Lab => ("lab", lab::run(&mut report)),
            Step::Datapath { thorough } => ("datapath", datapath::run(&mut report, *thorough)),
        };
        if let Err(error) = result {
            report.check(name, Err(error))?;
        }
    }
    report.say(&Message::Done)
}
