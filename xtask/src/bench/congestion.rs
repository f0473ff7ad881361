//! `--congestion`.

use anyhow::Result;
use sinabro_lab::congestion::{self, DEFAULT};
use std::fmt;

#[derive(Clone, Debug, clap::Args)]
pub struct Congestion {
    /// What TCP everywhere finds out by what a path takes: Linux's default, or what your nodes have, such as bbr
    #[arg(long, value_name = "NAME", default_value = DEFAULT)]
    congestion: String,
}

impl Congestion {
    /// Before anything is made.
    pub fn choose(&self) -> Result<()> {
        congestion::choose(&self.congestion)
    }

    /// The same for the same program under sudo. One argument, whatever it begins with.
    pub fn argument(&self) -> String {
        format!("--congestion={}", self.congestion)
    }
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "congestion control by {}", self.congestion)
    }
}
