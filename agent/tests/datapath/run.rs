//! Runs a program on one packet (BPF_PROG_TEST_RUN).

use sinabro_agent::datapath::Datapath;
use std::{
    collections::HashMap,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

const PROG_TEST_RUN: libc::c_int = 10;
const PROG_GET_FD_BY_ID: libc::c_int = 13;

/// The programs' verdicts.
pub const PASS: i32 = -1;
pub const DROP: i32 = 2;
pub const REDIRECT: i32 = 7;

#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    return_value: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// Size of `struct __sk_buff` and where its fields are.
const SK_BUFF: usize = 192;
const MARK: usize = 8;
const INGRESS_IFINDEX: usize = 36;
const IFINDEX: usize = 40;

fn bpf<T>(cmd: libc::c_int, attr: &mut T) -> io::Result<i32> {
    // SAFETY: the callers below give the structure of the command.
    let ret =
        unsafe { libc::syscall(libc::SYS_bpf, cmd, std::ptr::from_mut(attr), size_of::<T>()) };
    if ret < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(ret as i32)
    }
}

pub struct Programs(HashMap<&'static str, OwnedFd>);

impl Programs {
    pub fn of(datapath: &Datapath) -> Self {
        let open = |id: u32| {
            let mut attr = [id, 0, 0, 0];
            let fd = bpf(PROG_GET_FD_BY_ID, &mut attr).unwrap();
            // SAFETY: a new descriptor.
            unsafe { OwnedFd::from_raw_fd(fd) }
        };
        let programs = datapath.programs();
        Self(
            programs
                .iter()
                .map(|program| (program.name, open(program.id)))
                .collect(),
        )
    }

    /// Whether this kernel runs programs on frames that came in by another interface: Linux 5.15 does not yet.
    pub fn know_where_from(&self) -> bool {
        let attempt = |from| self.attempt("uplink_out", 1, from, 0, &[0; 64]);
        assert_eq!(attempt(0).unwrap().0, PASS);
        attempt(1).is_ok()
    }

    /// Says that the test is not made, or some of it, on a kernel that does not.
    pub fn skipped(&self) -> bool {
        let knows = self.know_where_from();
        if !knows {
            println!(
                "skipped: this kernel runs no program on a packet that came in by an interface"
            );
        }
        !knows
    }

    /// The verdict on a frame that comes by at an interface, and what became of the frame.
    pub fn run(&self, program: &str, ifindex: u32, frame: &[u8]) -> (i32, Vec<u8>) {
        self.try_run(program, ifindex, frame).unwrap()
    }

    /// As `run`. Newer kernels refuse to run a program on a frame that ends within its fixed IP
    /// header; a pod can send one nevertheless.
    pub fn try_run(&self, program: &str, ifindex: u32, frame: &[u8]) -> Option<(i32, Vec<u8>)> {
        self.run_from(program, ifindex, 0, frame)
    }

    /// As `try_run`, of a frame that came in by the interface `from`; 0: of a socket.
    pub fn run_from(
        &self,
        program: &str,
        ifindex: u32,
        from: u32,
        frame: &[u8],
    ) -> Option<(i32, Vec<u8>)> {
        let ran = self.run_marked(program, ifindex, from, 0, frame)?;
        Some((ran.0, ran.1))
    }

    /// As `run_from`, of a frame with a mark; and the mark that it has then.
    pub fn run_marked(
        &self,
        program: &str,
        ifindex: u32,
        from: u32,
        mark: u32,
        frame: &[u8],
    ) -> Option<(i32, Vec<u8>, u32)> {
        let ran = self.attempt(program, ifindex, from, mark, frame);
        if let Err(error) = &ran {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
            let header = match frame[12..14] {
                [0x08, 0x00] => 34,
                _ => 54,
            };
            assert!(frame.len() < header, "{error}");
        }
        ran.ok()
    }

    fn attempt(
        &self,
        program: &str,
        ifindex: u32,
        from: u32,
        mark: u32,
        frame: &[u8],
    ) -> io::Result<(i32, Vec<u8>, u32)> {
        // A tunnel over IPv6 is 70.
        let mut out = vec![0; frame.len() + 128];
        let mut context = [0u8; SK_BUFF];
        let mut context_out = [0u8; SK_BUFF];
        context[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
        context[IFINDEX..IFINDEX + 4].copy_from_slice(&ifindex.to_ne_bytes());
        context[INGRESS_IFINDEX..INGRESS_IFINDEX + 4].copy_from_slice(&from.to_ne_bytes());
        let mut attr = TestRun {
            program: self.0[program].as_raw_fd() as u32,
            data_size_in: frame.len() as u32,
            data_in: frame.as_ptr() as u64,
            data_size_out: out.len() as u32,
            data_out: out.as_mut_ptr() as u64,
            ctx_size_in: SK_BUFF as u32,
            ctx_in: context.as_ptr() as u64,
            ctx_size_out: SK_BUFF as u32,
            ctx_out: context_out.as_mut_ptr() as u64,
            ..Default::default()
        };
        bpf(PROG_TEST_RUN, &mut attr)?;
        out.truncate(attr.data_size_out as usize);
        let mark = u32::from_ne_bytes(context_out[MARK..MARK + 4].try_into().unwrap());
        Ok((attr.return_value as i32, out, mark))
    }
}
