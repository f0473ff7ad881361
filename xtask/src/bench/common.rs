//! Options of benches that have many cases.

use super::{Output, Programs, congestion::Congestion};
use anyhow::Result;
use std::fmt::Display;

#[derive(Clone, clap::Args)]
pub struct Common {
    #[command(flatten)]
    pub programs: Programs,

    /// Rounds, each of all subjects; at least 5
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..))]
    pub rounds: u32,

    /// Shorter measurements and fewer cases: less than half as long
    #[arg(long)]
    pub short: bool,

    /// Only cases whose name has this in it
    #[arg(long, value_name = "TEXT")]
    pub case: Option<String>,

    #[command(flatten)]
    pub congestion: Congestion,

    #[command(flatten)]
    pub output: Output,
}

impl Common {
    pub fn is_wanted(&self, case: &impl Display) -> bool {
        let text = self.case.as_ref();
        text.is_none_or(|text| case.to_string().contains(text))
    }

    /// The same options for the same program under sudo.
    pub fn arguments(&self, bench: &str) -> Result<Vec<String>> {
        let mut arguments = vec!["bench".into(), bench.into()];
        arguments.extend(self.programs.arguments()?);
        arguments.extend(["--rounds".into(), self.rounds.to_string()]);
        arguments.extend(self.short.then(|| "--short".into()));
        // One argument, whatever it begins with.
        let case = self.case.iter();
        arguments.extend(case.map(|text| format!("--case={text}")));
        arguments.push(self.congestion.argument());
        arguments.extend(self.output.arguments()?);
        Ok(arguments)
    }
}
