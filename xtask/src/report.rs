//! Reports as JSON files.

use crate::root;
use anyhow::{Context as _, Result};
use serde::Serialize;
use std::{fs, path::Path};

/// Writes a report; it belongs to the user who asked for it, also under sudo.
pub fn write(path: &Path, report: &impl Serialize) -> Result<()> {
    let mut json = serde_json::to_vec_pretty(report)?;
    json.push(b'\n');
    fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    root::give_back(path);
    println!("  written to {}", path.display());
    Ok(())
}

/// What the figures were measured on.
#[derive(Serialize)]
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
