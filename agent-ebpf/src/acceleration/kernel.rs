//! What the kernel's own structures say of two sockets.
//!
//! Offsets are those of the running kernel: the agent takes them from its type information and
//! writes them here before the programs are loaded. Every read is one that may fail, and what is
//! read of the other end may be of a socket that is gone: it decides only whether to try; the
//! redirection itself finds the socket again by its cookie.

use aya_ebpf::helpers::bpf_probe_read_kernel;
use sinabro_common::{abi::acceleration::KernelOffsets, algo::acceleration::Ends};

#[unsafe(no_mangle)]
static KERNEL_OFFSETS: KernelOffsets = KernelOffsets {
    flags: 0,
    zerocopy_bit: 0,
    rmem_alloc: 0,
    rcvbuf: 0,
    userlocks: 0,
    userlocks_shift: 0,
    shutdown: 0,
    shutdown_shift: 0,
    ulp_ops: 0,
    repair: 0,
    repair_bit: 0,
    copied_seq: 0,
    write_seq: 0,
};

/// One of the offsets, which the verifier knows as a constant.
macro_rules! offset {
    ($field:ident) => {
        // SAFETY: a static, read as what it is; volatile because it is written before loading.
        unsafe { core::ptr::read_volatile(&raw const KERNEL_OFFSETS.$field) }
    };
}

#[inline(always)]
fn read<T>(sk: u64, offset: u32) -> Option<T> {
    // SAFETY: the helper checks the address.
    unsafe { bpf_probe_read_kernel((sk + u64::from(offset)) as *const T) }.ok()
}

/// Whether a socket's data must pass TCP: TLS in the kernel works on TCP's queues, MSG_ZEROCOPY
/// is told when TCP has sent, and TCP_REPAIR reads and writes TCP's queues.
#[inline(always)]
pub fn is_unfit(sk: u64) -> Option<bool> {
    let ulp_ops: u64 = read(sk, offset!(ulp_ops))?;
    let flags: u64 = read(sk, offset!(flags))?;
    let repair: u8 = read(sk, offset!(repair))?;
    Some(
        ulp_ops != 0
            || flags >> (offset!(zerocopy_bit) & 63) & 1 != 0
            || repair >> (offset!(repair_bit) & 7) & 1 != 0,
    )
}

/// The two ends of a connection; none if something cannot be read.
#[inline(always)]
pub fn ends(own: u64, peer: u64) -> Option<Ends> {
    let shutdown: u8 = read(own, offset!(shutdown))?;
    let userlocks: u8 = read(peer, offset!(userlocks))?;
    Some(Ends {
        write_seq: read(own, offset!(write_seq))?,
        shutdown: shutdown >> (offset!(shutdown_shift) & 7),
        unfit: is_unfit(own)? || is_unfit(peer)?,
        copied_seq: read(peer, offset!(copied_seq))?,
        queued: read(peer, offset!(rmem_alloc))?,
        rcvbuf: read(peer, offset!(rcvbuf))?,
        userlocks: userlocks >> (offset!(userlocks_shift) & 7),
    })
}
