//! What this kernel has. Tried, never concluded from its version.

use super::sys;
use crate::chain::Chain;
use aya::{
    Ebpf,
    programs::{ProgramError, ProgramType, SchedClassifier},
    sys::{BpfHelper, is_helper_supported},
};
use sinabro_common::fail_point;
use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
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

/// Of the overlay's object.
const WRAPS: &str = "overlay_wraps";

/// An IPv4 packet of UDP without data, behind an Ethernet header.
#[rustfmt::skip]
const FRAME: [u8; 42] = [
    2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0,
    0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2,
    0, 9, 0, 9, 0, 8, 0, 0,
];

/// Whether programs put packets into tunnels (Linux 5.13). It may be so where that cannot be tried, as with the programs of an
/// earlier version.
pub fn wraps(overlay: &mut Ebpf) -> bool {
    if fail_point::refused("tunnels") {
        return false;
    }
    let Some(Ok(program)) = overlay
        .program_mut(WRAPS)
        .map(<&mut SchedClassifier>::try_from)
    else {
        return true;
    };
    let mut tried = || -> Result<u32, ProgramError> {
        let returned = sys::test_run(program.fd()?.as_fd(), &FRAME)?;
        program.unload()?;
        Ok(returned)
    };
    match tried() {
        Ok(returned) => returned == 0,
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "whether packets are put into tunnels past the stack is not known");
            true
        }
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
