//! The report in the state directory, where `sinabroctl prepare` or an agent leaves it for the next.
//!
//! It counts for the boot, the kernel and the programs that it was made with.

use crate::{
    datapath,
    state_file::{self, FileError},
};
use serde::{Deserialize, Serialize};
use sinabro_common::{api::SelfTestReport, names};
use std::{fs, io, path::Path};

/// Versions before wrote some 20 KB.
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
    state_file::sweep(&path);
    state_file::replace(&path, &text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acceleration::self_test;
    use proptest::prelude::*;

    fn kept() -> SelfTestReport {
        self_test::refused("of a test".into())
    }

    #[test]
    fn a_report_is_found_again_where_it_was_kept() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("state");
        assert_eq!(load(&state_dir), None);
        save(&state_dir, &kept()).unwrap();
        assert_eq!(load(&state_dir), Some(kept()));
    }

    #[test]
    fn a_report_about_something_else_is_not_used() {
        let here = For {
            kernel: "6.1.0".into(),
            boot_id: "b".into(),
            fingerprint: "f".into(),
        };
        let text = |valid_for: &For| {
            let (valid_for, report) = (valid_for.clone(), kept());
            serde_json::to_vec(&Kept { valid_for, report }).unwrap()
        };
        assert_eq!(parse(&text(&here), &here), Ok(kept()));
        let change: [fn(&mut For); 3] = [
            |other| other.kernel = "6.1.1".into(),
            |other| other.boot_id = "c".into(),
            |other| other.fingerprint = "g".into(),
        ];
        for change in change {
            let mut other = here.clone();
            change(&mut other);
            assert!(parse(&text(&other), &here).is_err(), "{other:?}");
        }
    }

    #[test]
    fn a_part_of_a_report_and_too_much_of_it_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &kept()).unwrap();
        let path = dir.path().join(names::SELF_TEST_FILE);
        let whole = fs::read(&path).unwrap();
        for len in 0..whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(load(dir.path()), None, "{len} bytes");
        }
        // JSON may end in blanks.
        let mut long = whole;
        long.resize(MAX_LEN as usize, b' ');
        fs::write(&path, &long).unwrap();
        assert_eq!(load(dir.path()), Some(kept()));
        long.push(b' ');
        fs::write(&path, &long).unwrap();
        assert_eq!(load(dir.path()), None);
    }

    proptest! {
        #[test]
        fn garbage_is_not_used(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(parse(&bytes, &now()).is_err());
        }
    }
}
