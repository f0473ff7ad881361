//! Where figures go besides the terminal: a JSON file and a page.

use super::{
    page::page,
    row::{Curve, Row},
};
use crate::{
    report::{self, Machine},
    workspace,
};
use anyhow::{Context as _, Result};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Files to write.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Output {
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Draw the figures on a page that needs nothing else
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// A bench's JSON file, as far as all have the same in it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub machine: Machine,
    pub rows: Vec<Row>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<Curve>,
}

impl Report {
    pub fn of(rows: Vec<Row>) -> Result<Self> {
        Ok(Self {
            machine: Machine::look()?,
            rows,
            curves: Vec::new(),
        })
    }
}

/// A bench that ran, or did not come to its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ran {
    pub bench: String,
    pub command: String,
    pub seconds: u64,
    /// Why there are no figures.
    pub failure: Option<String>,
}

/// What belongs to one bench.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Of<T> {
    pub bench: String,
    #[serde(flatten)]
    pub item: T,
}

/// The figures of several benches.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Whole {
    /// When it was made, by the clock of UTC.
    pub made: String,
    /// What was measured, as git calls it.
    pub version: Option<String>,
    pub machine: Machine,
    pub benches: Vec<Ran>,
    pub rows: Vec<Of<Row>>,
    pub curves: Vec<Of<Curve>>,
}

impl Whole {
    pub fn now() -> Result<Self> {
        let describe = ["describe", "--always", "--dirty", "--abbrev=12"];
        let mut git = Command::new("git");
        git.arg("-C").arg(workspace::root()).args(describe);
        Ok(Self {
            made: Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string(),
            version: workspace::output(&mut git)
                .ok()
                .map(|name| name.trim().to_owned()),
            machine: Machine::look()?,
            benches: Vec::new(),
            rows: Vec::new(),
            curves: Vec::new(),
        })
    }

    pub fn add(&mut self, ran: Ran, rows: &[Row], curves: &[Curve]) {
        fn of<'a, T: Clone>(bench: &'a str, items: &'a [T]) -> impl Iterator<Item = Of<T>> {
            items.iter().map(|item| Of {
                bench: bench.to_owned(),
                item: item.clone(),
            })
        }
        self.rows.extend(of(&ran.bench, rows));
        self.curves.extend(of(&ran.bench, curves));
        self.benches.push(ran);
    }

    pub fn read(path: &Path) -> Result<Self> {
        let read = || -> Result<Self> { Ok(serde_json::from_slice(&fs::read(path)?)?) };
        read().with_context(|| format!("{} is no report", path.display()))
    }
}

impl Output {
    /// The figures alone, if they are wanted.
    pub fn json(path: &Option<PathBuf>) -> Self {
        Self {
            json: path.clone(),
            ..Self::default()
        }
    }

    /// The same options for the same program under sudo.
    pub fn arguments(&self) -> Result<Vec<String>> {
        let mut arguments = Vec::new();
        for (flag, path) in [("--json", &self.json), ("--html", &self.html)] {
            if let Some(path) = path {
                let path = std::path::absolute(path)?.display().to_string();
                arguments.extend([flag.into(), path]);
            }
        }
        Ok(arguments)
    }

    /// Writes what one bench found.
    pub fn report(&self, bench: &str, report: &Report) -> Result<()> {
        self.write(bench, report, &report.rows, &report.curves)
    }

    /// The same for a bench that has more to say in its JSON file.
    pub fn write(
        &self,
        bench: &str,
        json: &impl Serialize,
        rows: &[Row],
        curves: &[Curve],
    ) -> Result<()> {
        if let Some(path) = &self.json {
            report::write(path, json)?;
        }
        if let Some(path) = &self.html {
            let mut whole = Whole::now()?;
            let ran = Ran {
                bench: bench.into(),
                command: format!("cargo xtask bench {bench}"),
                seconds: 0,
                failure: None,
            };
            whole.add(ran, rows, curves);
            report::write_text(path, &page(&whole))?;
        }
        Ok(())
    }

    /// Writes what several benches found, of which more may come.
    pub fn whole(&self, whole: &Whole) -> Result<()> {
        if let Some(path) = &self.json {
            report::save(path, &serde_json::to_string_pretty(whole)?)?;
        }
        if let Some(path) = &self.html {
            report::save(path, &page(whole))?;
        }
        Ok(())
    }

    /// Says where it all is.
    pub fn announce(&self) {
        for path in [&self.json, &self.html].into_iter().flatten() {
            println!("  written to {}", path.display());
        }
    }
}
