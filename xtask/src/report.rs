//! Reports as files.

use crate::root;
use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

/// Writes a report; it belongs to the user who asked for it, also under sudo.
pub fn write(path: &Path, report: &impl Serialize) -> Result<()> {
    let mut json = serde_json::to_string_pretty(report)?;
    json.push('\n');
    write_text(path, &json)
}

/// The same of a report that is text already.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    save(path, text)?;
    println!("  written to {}", path.display());
    Ok(())
}

/// The same without a word.
pub fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    root::give_back(path);
    Ok(())
}

/// What the figures were measured on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    pub kernel: String,
    pub cpu: String,
    pub cpus: usize,
    pub memory_bytes: u64,
}

impl Machine {
    pub fn look() -> Result<Self> {
        let field = |file: &str, name: &str| -> Option<String> {
            let text = fs::read_to_string(file).ok()?;
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_string())
        };
        let memory = field("/proc/meminfo", "MemTotal").unwrap_or_default();
        let kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        Ok(Self {
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?
                .trim()
                .into(),
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into()),
            cpus: std::thread::available_parallelism()?.get(),
            memory_bytes: kib * 1024,
        })
    }
}
