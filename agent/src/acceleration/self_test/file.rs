//! The report in the state directory, where `sinabroctl prepare` leaves it for the agent.
//!
//! It counts for the boot, the kernel and the programs that it was made with.

use crate::{
    datapath,
    state_file::{self, FileError},
};
use serde::{Deserialize, Serialize};
use sinabro_common::{api::SelfTestReport, names};
use std::{fs, io, path::Path};

/// Some 20 KB are usual.
const MAX_LEN: u64 = 1 << 20;

/// What a report counts for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct For {
    kernel: String,
    boot_id: String,
    fingerprint: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    #[serde(flatten)]
    valid_for: For,
    report: SelfTestReport,
}

/// The kernel's release.
pub(super) fn kernel() -> String {
    proc("osrelease")
}

fn proc(name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/sys/kernel/{name}"));
    text.unwrap_or_default().trim_end().to_owned()
}

fn now() -> For {
    For {
        kernel: kernel(),
        boot_id: proc("random/boot_id"),
        fingerprint: format!("{:016x}", datapath::fingerprint()),
    }
}

/// The report that counts for now, if there is one. What cannot be used is said and left.
pub fn load(state_dir: &Path) -> Option<SelfTestReport> {
    let path = state_dir.join(names::SELF_TEST_FILE);
    let bytes = match state_file::read_up_to(&path, MAX_LEN) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!("cannot read {}, it is ignored: {error}", path.display());
            return None;
        }
    };
    match parse(&bytes, &now()) {
        Ok(report) => Some(report),
        Err(why) => {
            tracing::warn!("{} is ignored: {why}", path.display());
            None
        }
    }
}

fn parse(bytes: &[u8], now: &For) -> Result<SelfTestReport, String> {
    let kept: Kept =
        serde_json::from_slice(bytes).map_err(|error| format!("it is not a report: {error}"))?;
    let For {
        kernel,
        boot_id,
        fingerprint,
    } = &kept.valid_for;
    let other = [
        ("kernel", kernel, &now.kernel),
        ("boot", boot_id, &now.boot_id),
        ("build of the programs", fingerprint, &now.fingerprint),
    ]
    .into_iter()
    .find(|(_, then, now)| then != now);
    match other {
        Some((what, then, now)) => Err(format!("it is about the {what} {then:?}, this is {now:?}")),
        None => Ok(kept.report),
    }
}

/// Keeps a report; the directory is made if it is missing.
///
/// # Errors
/// If it cannot be written.
pub fn save(state_dir: &Path, report: &SelfTestReport) -> Result<(), FileError> {
    let path = state_dir.join(names::SELF_TEST_FILE);
    let kept = Kept {
        valid_for: now(),
        report: report.clone(),
    };
    let text = serde_json::to_vec_pretty(&kept)
        .map_err(|error| FileError::new("write", &path)(error.into()))?;
    crate::state_lock::make(state_dir)?;
    state_file::replace(&path, &text)
}
