//! The few bpf(2) commands that aya does not offer in the form needed here: links of any type
//! that are pinned, looked at and updated through their file. Maps whose types nobody here knows:
//! [`super::raw_map`].
//!
//! Structures are those of linux/bpf.h, cut where the rest would be zero: the kernel takes
//! shorter ones.

use std::{
    ffi::{CStr, CString},
    io, mem,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

const MAP_GET_NEXT_KEY: libc::c_int = 4;
const PROG_LOAD: libc::c_int = 5;
const OBJ_PIN: libc::c_int = 6;
const OBJ_GET: libc::c_int = 7;
const PROG_ATTACH: libc::c_int = 8;
const PROG_TEST_RUN: libc::c_int = 10;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BTF_LOAD: libc::c_int = 18;
const LINK_CREATE: libc::c_int = 28;
const LINK_UPDATE: libc::c_int = 29;
const LINK_DETACH: libc::c_int = 34;

/// `enum bpf_attach_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AttachType {
    CgroupSockOps = 3,
    SkMsgVerdict = 7,
    Inet4Connect = 10,
    Inet6Connect = 11,
    Udp4Sendmsg = 14,
    Udp6Sendmsg = 15,
    Udp4Recvmsg = 19,
    Udp6Recvmsg = 20,
    Inet4Getpeername = 29,
    Inet6Getpeername = 30,
    InetSockRelease = 34,
    TcxIngress = 46,
    TcxEgress = 47,
}

/// Runs a command whose structure is `attr`.
///
/// # Safety
///
/// `attr` is the structure of `cmd`, and every pointer in it is valid for what `cmd` does.
pub(super) unsafe fn bpf<T>(cmd: libc::c_int, attr: &mut T) -> io::Result<RawFd> {
    // SAFETY: the caller's promise; the size is that of the structure.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            cmd,
            std::ptr::from_mut(attr),
            mem::size_of::<T>(),
        )
    };
    if ret < 0 {
        Err(io::Error::last_os_error())
    } else {
        // A descriptor, or zero.
        Ok(ret as RawFd)
    }
}

/// How often a program is loaded again that was not verified to its end; libbpf does so five times.
pub const ATTEMPTS: usize = 100;

/// Whether a program was not verified to its end, because a signal came for this thread (`do_check`,
/// kernel/bpf/verifier.c: `-EAGAIN`): it was not refused. Signals need not be for us: who stops the process or looks at it
/// with a debugger sends them, too.
pub fn is_interrupted(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAGAIN)
}

/// # Safety
///
/// `fd` was just given by the kernel and belongs to nobody else.
pub(super) unsafe fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the caller's promise.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[repr(C)]
#[derive(Default)]
struct ObjAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// Opens a pinned object of any kind.
pub fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = ObjAttr {
        path: path.as_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the path lives until the call returns, and the descriptor is new.
    unsafe { bpf(OBJ_GET, &mut attr).map(|fd| own(fd)) }
}

pub fn obj_pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = ObjAttr {
        path: path.as_ptr() as u64,
        fd: fd.as_raw_fd() as u32,
        flags: 0,
    };
    // SAFETY: the path lives until the call returns.
    unsafe { bpf(OBJ_PIN, &mut attr) }.map(drop)
}

#[repr(C)]
#[derive(Default)]
struct TestRunAttr {
    program: u32,
    return_value: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
}

/// Runs a program on a frame that nobody sends: what it returns.
pub fn test_run(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<u32> {
    let mut attr = TestRunAttr {
        program: program.as_raw_fd() as u32,
        data_size_in: frame.len() as u32,
        data_in: frame.as_ptr() as u64,
        ..Default::default()
    };
    // SAFETY: the frame lives until the call returns, and nothing is asked back of what becomes of it.
    unsafe { bpf(PROG_TEST_RUN, &mut attr)? };
    Ok(attr.return_value)
}

/// What a descriptor refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Map,
    Program,
    Link,
    Other,
}

/// Asks what a BPF descriptor is, by the name that the kernel gives its anonymous inode.
pub fn kind(fd: BorrowedFd<'_>) -> io::Result<Kind> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    Ok(match name.as_os_str().as_bytes() {
        b"anon_inode:bpf-map" => Kind::Map,
        b"anon_inode:bpf-prog" => Kind::Program,
        // With or without underscore, by version.
        b"anon_inode:bpf_link" | b"anon_inode:bpf-link" => Kind::Link,
        _ => Kind::Other,
    })
}

/// The beginning of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MapInfo {
    pub map_type: u32,
    pub id: u32,
    pub key_size: u32,
    pub value_size: u32,
    pub max_entries: u32,
    pub map_flags: u32,
}

/// The beginning of `struct bpf_link_info`; `target` is the first field of its union.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct LinkInfoRaw {
    link_type: u32,
    id: u32,
    prog_id: u32,
    pad: u32,
    target: [u32; 2],
    rest: [u32; 2],
}

#[derive(Clone, Copy, Debug)]
pub struct LinkInfo {
    pub prog_id: u32,
    target: [u32; 2],
}

impl LinkInfo {
    /// Of a tcx link: the interface, zero once it is gone.
    pub fn ifindex(&self) -> u32 {
        self.target[0]
    }

    /// Of a cgroup link: the directory's inode number.
    pub fn cgroup_id(&self) -> u64 {
        u64::from(self.target[0]) | u64::from(self.target[1]) << 32
    }
}

fn info<T: Default>(fd: BorrowedFd<'_>) -> io::Result<T> {
    #[repr(C)]
    struct Attr {
        fd: u32,
        len: u32,
        info: u64,
    }
    let mut info = T::default();
    let mut attr = Attr {
        fd: fd.as_raw_fd() as u32,
        len: mem::size_of::<T>() as u32,
        info: std::ptr::from_mut(&mut info) as u64,
    };
    // SAFETY: `info` is as long as it says; both instances of T are integers only.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info)
}

pub fn map_info(fd: BorrowedFd<'_>) -> io::Result<MapInfo> {
    info(fd)
}

pub fn link_info(fd: BorrowedFd<'_>) -> io::Result<LinkInfo> {
    let raw: LinkInfoRaw = info(fd)?;
    Ok(LinkInfo {
        prog_id: raw.prog_id,
        target: raw.target,
    })
}

#[repr(C)]
struct FourAttr([u32; 4]);

/// Attaches a program to an interface (by index) or a cgroup (by descriptor).
pub fn link_create(prog: BorrowedFd<'_>, target: u32, attach: AttachType) -> io::Result<OwnedFd> {
    let mut attr = FourAttr([prog.as_raw_fd() as u32, target, attach as u32, 0]);
    // SAFETY: no pointers; the descriptor is new.
    unsafe { bpf(LINK_CREATE, &mut attr).map(|fd| own(fd)) }
}

/// Puts another program in a link's place; no packet sees neither.
pub fn link_update(link: BorrowedFd<'_>, prog: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = FourAttr([link.as_raw_fd() as u32, prog.as_raw_fd() as u32, 0, 0]);
    // SAFETY: no pointers.
    unsafe { bpf(LINK_UPDATE, &mut attr) }.map(drop)
}

/// Takes a link's program off, whoever else holds the link.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = FourAttr([link.as_raw_fd() as u32, 0, 0, 0]);
    // SAFETY: no pointers.
    unsafe { bpf(LINK_DETACH, &mut attr) }.map(drop)
}

/// Attaches a program to a map of sockets, in the place of the one before.
pub fn prog_attach(
    prog: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    attach: AttachType,
) -> io::Result<()> {
    let target = target.as_raw_fd() as u32;
    let mut attr = FourAttr([target, prog.as_raw_fd() as u32, attach as u32, 0]);
    // SAFETY: no pointers.
    unsafe { bpf(PROG_ATTACH, &mut attr) }.map(drop)
}

/// Writes the key after `key`, or the first, to `next`; false if there is none. Both have the
/// length of the map's keys, else nothing is asked.
pub fn next_key(map: BorrowedFd<'_>, key: Option<&[u8]>, next: &mut [u8]) -> io::Result<bool> {
    #[repr(C)]
    struct Attr {
        map: u32,
        pad: u32,
        key: u64,
        next: u64,
    }
    let size = map_info(map)?.key_size as usize;
    if next.len() != size || key.is_some_and(|key| key.len() != size) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut attr = Attr {
        map: map.as_raw_fd() as u32,
        pad: 0,
        key: key.map_or(0, |key| key.as_ptr() as u64),
        next: next.as_mut_ptr() as u64,
    };
    // SAFETY: both buffers have the map's key size, as just checked, and outlive the call.
    match unsafe { bpf(MAP_GET_NEXT_KEY, &mut attr) } {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Loads type information.
pub fn load_types(btf: &[u8]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        btf: u64,
        log: u64,
        len: u32,
        log_size: u32,
        log_level: u32,
        unused: u32,
    }
    let mut attr = Attr {
        btf: btf.as_ptr() as u64,
        log: 0,
        len: btf.len() as u32,
        log_size: 0,
        log_level: 0,
        unused: 0,
    };
    // SAFETY: the bytes outlive the call, and the descriptor is new.
    unsafe { bpf(BTF_LOAD, &mut attr).map(|fd| own(fd)) }
}

/// What is known of the functions of a program.
pub struct Functions<'a> {
    /// As [`load_types`] gave them.
    pub types: BorrowedFd<'a>,
    /// `struct bpf_func_info`, one after the other.
    pub records: &'a [u8],
    pub record_len: usize,
}

/// Loads a program for what the verifier says of it, and lets go of it. The program has been accepted
/// before, for this hook if it is of a type that is loaded for one.
pub fn verifier_statistics<I>(
    kind: u32,
    hook: u32,
    program: &[I],
    functions: &Functions<'_>,
    license: &CStr,
) -> io::Result<String> {
    #[repr(C)]
    struct Attr {
        kind: u32,
        count: u32,
        program: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        // Kernel version, flags, name and interface.
        unused: [u32; 7],
        hook: u32,
        types: RawFd,
        function_len: u32,
        functions: u64,
        function_count: u32,
        // The length of what is known of lines.
        line_len: u32,
    }
    /// `BPF_LOG_STATS`.
    const STATISTICS: u32 = 4;
    /// `struct bpf_insn`.
    const INSTRUCTION: usize = 8;
    if mem::size_of::<I>() != INSTRUCTION {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // Some lines.
    let mut log = vec![0u8; 1 << 16];
    let mut attr = Attr {
        kind,
        count: program.len() as u32,
        program: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: STATISTICS,
        log_size: log.len() as u32,
        log: log.as_mut_ptr() as u64,
        unused: [0; 7],
        hook,
        types: functions.types.as_raw_fd(),
        function_len: functions.record_len as u32,
        functions: functions.records.as_ptr() as u64,
        function_count: functions.records.chunks(functions.record_len.max(1)).len() as u32,
        line_len: 0,
    };
    let mut load = || {
        // SAFETY: the program has `count` instructions of the size that the kernel's have, as just
        // checked, there are as many records as are counted, the license is terminated, the log as long as it says;
        // all outlive the call, and the descriptor is new.
        unsafe { bpf(PROG_LOAD, &mut attr).map(|fd| own(fd)) }
    };
    let mut loaded = load();
    for _ in 0..ATTEMPTS {
        if !loaded.as_ref().is_err_and(is_interrupted) {
            break;
        }
        loaded = load();
    }
    let end = log.iter().position(|&byte| byte == 0);
    log.truncate(end.unwrap_or(log.len()));
    let log = String::from_utf8_lossy(&log).into_owned();
    match loaded {
        Ok(_) => Ok(log),
        Err(error) => Err(io::Error::new(error.kind(), format!("{error}: {log}"))),
    }
}
