//! What this kernel has. Tried, never concluded from its version.

use super::sys;
use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use std::{io, os::fd::BorrowedFd, path::Path};

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

/// Whether programs on sockets' addresses may say what the system call returns (Linux 5.18).
pub fn has_set_retval() -> bool {
    let hook = ProgramType::CgroupSockAddr;
    is_helper_supported(hook, BpfHelper::BPF_FUNC_set_retval).unwrap_or(false)
}

/// Whether the kernel describes its own types.
pub fn has_btf() -> bool {
    Path::new("/sys/kernel/btf/vmlinux").exists()
}
