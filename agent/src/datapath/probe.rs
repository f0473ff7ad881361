//! What this kernel has. Tried, never concluded from its version.

use super::sys;
use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use std::{
    fs, io,
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
};

/// An interface index that no kernel gives: they count up from one.
const NO_INTERFACE: u32 = i32::MAX as u32;

/// Whether a classifier can be attached by a tcx link.
///
/// A kernel that knows tcx looks for the interface; one that does not, or was built without,
/// finds the command itself invalid.
pub fn has_tcx(classifier: BorrowedFd<'_>) -> io::Result<bool> {
    match sys::link_create(classifier, NO_INTERFACE, sys::AttachType::TcxIngress) {
        Ok(_) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENODEV) => Ok(true),
            Some(libc::EINVAL | libc::EOPNOTSUPP | libc::E2BIG) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Whether classifiers may call `bpf_redirect_peer`. No answer counts as no.
pub fn has_redirect_peer() -> bool {
    is_helper_supported(
        ProgramType::SchedClassifier,
        BpfHelper::BPF_FUNC_redirect_peer,
    )
    .unwrap_or(false)
}

/// Whether the kernel describes its own types.
pub fn has_btf() -> bool {
    Path::new("/sys/kernel/btf/vmlinux").exists()
}

/// Where the cgroup v2 hierarchy is mounted, if it is.
pub fn cgroup2_mount() -> io::Result<Option<PathBuf>> {
    Ok(find_cgroup2(&fs::read("/proc/self/mountinfo")?))
}

/// Finds the cgroup v2 mount in mountinfo (proc_pid_mountinfo(5)), one that shows the whole
/// hierarchy before one that shows a part.
fn find_cgroup2(mountinfo: &[u8]) -> Option<PathBuf> {
    let mut part = None;
    for line in mountinfo.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b' ');
        let (Some(root), Some(mount_point)) = (fields.nth(3), fields.next()) else {
            continue;
        };
        // Optional fields end with a lone hyphen, before the file system's type.
        if !fields.any(|field| field == b"-") || fields.next() != Some(b"cgroup2") {
            continue;
        }
        let path = unescape(mount_point);
        if root == b"/" {
            return Some(path);
        }
        part.get_or_insert(path);
    }
    part
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;

    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        if byte == b'\\'
            && let Some((digits, after)) = tail.split_at_checked(3)
            && digits.iter().all(|digit| matches!(digit, b'0'..=b'7'))
        {
            let value = digits
                .iter()
                .fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
            // Three digits reach 511; the kernel writes none above 255.
            bytes.push(value as u8);
            rest = after;
        } else {
            bytes.push(byte);
            rest = tail;
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn finds_the_unified_and_the_hybrid_mount() {
        let unified = b"25 30 0:23 / /sys rw shared:7 - sysfs sysfs rw\n\
            29 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(find_cgroup2(unified), Some("/sys/fs/cgroup".into()));
        let hybrid = b"30 25 0:27 / /sys/fs/cgroup rw - tmpfs cgroup2 rw\n\
            31 30 0:28 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n";
        assert_eq!(find_cgroup2(hybrid), Some("/sys/fs/cgroup/unified".into()));
    }

    #[test]
    fn prefers_the_whole_hierarchy() {
        let text = b"1 0 0:1 /kubepods/x /a rw - cgroup2 c rw\n2 0 0:1 / /b\\040c rw a:1 b:2 - cgroup2 c rw\n";
        assert_eq!(find_cgroup2(text), Some("/b c".into()));
        assert_eq!(find_cgroup2(&text[..37]), Some("/a".into()));
    }

    #[test]
    fn finds_nothing_where_there_is_nothing() {
        for text in [
            &b""[..],
            b"\n\n",
            b"- cgroup2",
            b"1 2 3 / /x rw - ext4 x rw\n",
        ] {
            assert_eq!(find_cgroup2(text), None);
        }
    }

    proptest! {
        #[test]
        fn never_panics(text: Vec<u8>) {
            find_cgroup2(&text);
            unescape(&text);
        }
    }
}
