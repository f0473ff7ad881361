//! How many instructions the verifier of each kernel may walk through in each program: what was
//! written down once, and a tenth more.
//!
//! The kernel's limit is a million, and what comes near it on one kernel is over it on another. A
//! program that grows is to be seen when it grows.

use anyhow::{Context as _, Result};
use sinabro_common::api::VerifiedProgram;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// By kernel and program.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Budget(BTreeMap<String, BTreeMap<String, u32>>);

impl Budget {
    pub fn path() -> PathBuf {
        crate::workspace::root().join("xtask/src/vm/budget.json")
    }

    pub fn read(path: &Path) -> Result<Self> {
        let read = || -> Result<Self> { Ok(Self(serde_json::from_slice(&fs::read(path)?)?)) };
        read().with_context(|| format!("cannot read {}", path.display()))
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let mut json = serde_json::to_vec_pretty(&self.0)?;
        json.push(b'\n');
        fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes down what was seen on a kernel, in the place of what was written of it.
    pub fn note(&mut self, kernel: &str, programs: &[VerifiedProgram]) {
        let seen = programs.iter().filter(|row| row.ok).filter_map(|row| {
            let count = row.instructions?;
            Some((row.name.clone(), count))
        });
        self.0.insert(kernel.to_owned(), seen.collect());
    }

    /// What is over its budget, or has none, in words.
    pub fn exceeded(&self, kernel: &str, programs: &[VerifiedProgram]) -> Vec<String> {
        let Some(budget) = self.0.get(kernel) else {
            return vec![format!("nothing is written down for Linux {kernel}")];
        };
        let mut found = Vec::new();
        for row in programs.iter().filter(|row| row.ok) {
            let name = &row.name;
            let problem = match (row.instructions, budget.get(name)) {
                (None, _) => Some(format!("{name}: the kernel does not say how many")),
                (Some(count), None) => {
                    Some(format!("{name}: {count}, and nothing is written down"))
                }
                (Some(count), Some(&limit)) if u64::from(count) * 10 > u64::from(limit) * 11 => {
                    let percent = (f64::from(count) / f64::from(limit) - 1.0) * 100.0;
                    Some(format!(
                        "{name}: {count} instead of {limit}, {percent:.0} % more"
                    ))
                }
                _ => None,
            };
            found.extend(problem);
        }
        found.dedup();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, instructions: u32) -> VerifiedProgram {
        VerifiedProgram {
            name: name.into(),
            instructions: Some(instructions),
            ok: true,
            ..VerifiedProgram::default()
        }
    }

    #[test]
    fn a_tenth_more_is_within_and_what_is_over_is_named() {
        let mut budget = Budget::default();
        budget.note("6.12", &[row("pod_out", 1000), row("pod_in", 500)]);
        let exceeded = |rows: &[VerifiedProgram]| budget.exceeded("6.12", rows);
        assert_eq!(exceeded(&[row("pod_out", 1100), row("pod_in", 1)]), [""; 0]);
        let found = exceeded(&[row("pod_out", 1101), row("pod_out", 1101), row("new", 7)]);
        assert_eq!(
            found,
            [
                "pod_out: 1101 instead of 1000, 10 % more",
                "new: 7, and nothing is written down"
            ]
        );
        assert_eq!(budget.exceeded("5.10", &[]).len(), 1);
        // One that was refused is somebody else's to tell.
        let refused = VerifiedProgram {
            ok: false,
            ..row("pod_out", 9000)
        };
        assert_eq!(exceeded(&[refused]), [""; 0]);
    }

    #[test]
    fn it_is_read_as_it_was_written_and_garbage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget.json");
        let mut budget = Budget::default();
        budget.note("6.12", &[row("pod_out", 1000)]);
        budget.write(&path).unwrap();
        assert_eq!(Budget::read(&path).unwrap(), budget);
        fs::write(&path, "{\"6.12\": [").unwrap();
        assert!(Budget::read(&path).is_err());
    }

    #[test]
    fn the_page_on_kernels_has_what_is_written_down() {
        let page = fs::read_to_string(crate::workspace::root().join("docs/kernels.md")).unwrap();
        let rows = page.lines().map(|line| -> Vec<&str> {
            let cells = line.trim_matches('|').split('|').map(str::trim);
            cells.collect()
        });
        let mut rows = rows.skip_while(|row| !row.contains(&"`pod_out`"));
        let programs = rows.next().unwrap();
        let budget = Budget::read(&Budget::path()).unwrap();
        let mut seen = Vec::new();
        for row in rows.skip(1).take_while(|row| row.len() == programs.len()) {
            let kernel = &budget.0[row[0]];
            for (program, cell) in programs.iter().zip(&row).skip(2) {
                let program = program.trim_matches('`');
                let written = kernel.get(program).map(u32::to_string);
                let shown = (*cell != "refused").then(|| cell.replace(' ', ""));
                assert_eq!(shown, written, "{program} on Linux {}", row[0]);
            }
            seen.push(row[0]);
        }
        assert_eq!(seen.len(), budget.0.len());
    }
}
