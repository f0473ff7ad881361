//! What the kernel's own structures say of two sockets.
//!
//! Offsets are those of the running kernel: the agent takes them from its type information and
//! writes them here before the programs are loaded, so the verifier knows them as constants.
//!
//! The sender's socket is at hand, with its type, and read as memory is. Of the other end there
//! is an address, noted when it was enrolled: every read of it is one that may fail, and may be of
//! a socket that is gone. It decides only whether to try; the redirection itself finds the socket
//! again by its cookie. Such reads are calls and dear, so there are as few as can be.

use aya_ebpf::helpers::{bpf_probe_read_kernel, bpf_skc_to_tcp_sock};
use core::{ffi::c_void, ptr::NonNull};
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
    user_data: 0,
    wq: 0,
    wq_head: 0,
    wait_entry: 0,
    wait_private: 0,
};

macro_rules! offset {
    ($field:ident) => {
        // SAFETY: a static, read as what it is; volatile because it is written before loading.
        unsafe { core::ptr::read_volatile(&raw const KERNEL_OFFSETS.$field) }
    };
}

/// The socket that a program runs for.
#[derive(Clone, Copy)]
pub struct Own(NonNull<u8>);

impl Own {
    /// A TCP socket as what it is.
    #[inline(always)]
    pub fn new(socket: NonNull<c_void>) -> Option<Self> {
        // SAFETY: a socket from a context.
        let tcp = unsafe { bpf_skc_to_tcp_sock(socket.as_ptr()) };
        NonNull::new(tcp.cast()).map(Self)
    }

    #[inline(always)]
    fn read<T: Copy>(self, offset: u32) -> T {
        // SAFETY: a field of the structure, by the kernel's own description, which the verifier
        // compares again.
        unsafe {
            self.0
                .as_ptr()
                .add(offset as usize)
                .cast::<T>()
                .read_volatile()
        }
    }

    /// Whether its data must pass TCP: TLS in the kernel works on TCP's queues, MSG_ZEROCOPY is
    /// told when TCP has sent, and TCP_REPAIR reads and writes TCP's queues.
    #[inline(always)]
    pub fn is_unfit(self) -> bool {
        let ulp_ops: u64 = self.read(offset!(ulp_ops));
        let flags: u64 = self.read(offset!(flags));
        let repair: u8 = self.read(offset!(repair));
        ulp_ops != 0 || bit(flags, offset!(zerocopy_bit)) || bit(repair.into(), offset!(repair_bit))
    }

    /// The next sequence number that it gives to TCP.
    #[inline(always)]
    pub fn write_seq(self) -> u32 {
        self.read(offset!(write_seq))
    }

    /// Whether it still has the queue that messages are handed to (`struct sk_psock`). It goes
    /// when the application closes the socket, which may be before or after TCP is done with it.
    #[inline(always)]
    pub fn has_queue(self) -> bool {
        let user_data: u64 = self.read(offset!(user_data));
        user_data != 0
    }

    /// `sk_shutdown`.
    #[inline(always)]
    pub fn shutdown(self) -> u8 {
        let byte: u8 = self.read(offset!(shutdown));
        byte >> (offset!(shutdown_shift) & 7)
    }
}

#[inline(always)]
fn bit(word: u64, number: u32) -> bool {
    word >> (number & 63) & 1 != 0
}

/// The other end, by the address of its `struct sock`.
#[derive(Clone, Copy)]
pub struct Peer(pub u64);

impl Peer {
    #[inline(always)]
    fn read<T>(self, offset: u32) -> Option<T> {
        // SAFETY: the helper checks the address.
        unsafe { bpf_probe_read_kernel((self.0 + u64::from(offset)) as *const T) }.ok()
    }

    /// Whether what it reads must come through TCP.
    #[inline(always)]
    pub fn is_unfit(self) -> Option<bool> {
        let ulp_ops: u64 = self.read(offset!(ulp_ops))?;
        let repair: u8 = self.read(offset!(repair))?;
        Some(ulp_ops != 0 || bit(repair.into(), offset!(repair_bit)))
    }

    /// The next sequence number of TCP that its application reads.
    #[inline(always)]
    pub fn copied_seq(self) -> Option<u32> {
        self.read(offset!(copied_seq))
    }

    /// Bytes in its queues.
    #[inline(always)]
    pub fn queued(self) -> Option<u32> {
        self.read(offset!(rmem_alloc))
    }

    /// SO_RCVBUF as the kernel counts it, and whether the application has set it.
    #[inline(always)]
    pub fn receive_buffer(self) -> Option<(u32, u8)> {
        let userlocks: u8 = self.read(offset!(userlocks))?;
        Some((
            self.read(offset!(rcvbuf))?,
            userlocks >> (offset!(userlocks_shift) & 7),
        ))
    }
}

/// Waiters looked at; a socket with more is as one with many.
const MAX_WAITERS: u32 = 8;

/// Whether more than one thread waits for a socket, by the address of its `struct sock`.
///
/// While a connection is made, the thread in connect(2) is one. Another can only be reading: it
/// sleeps inside TCP's own function since before the enrolment, and would not see what comes
/// from socket to socket. Entries of an epoll instance name no thread.
#[inline(always)]
pub fn has_early_reader(sk: u64) -> Option<bool> {
    let at = |address: u64| -> Option<u64> { Peer(address).read(0) };
    let head = at(sk + u64::from(offset!(wq)))? + u64::from(offset!(wq_head));
    let mut entry = at(head)?;
    let mut threads = 0;
    for _ in 0..MAX_WAITERS {
        if entry == head {
            return Some(threads > 1);
        }
        let waiter = entry - u64::from(offset!(wait_entry));
        if at(waiter + u64::from(offset!(wait_private)))? != 0 {
            threads += 1;
        }
        entry = at(entry)?;
    }
    Some(true)
}

/// Whether no application has a socket yet, by the address of its `struct sock`: a listener's, before accept(2).
#[inline(always)]
pub fn is_of_nobody(sk: u64) -> Option<bool> {
    let wq: u64 = Peer(sk).read(offset!(wq))?;
    Some(wq == 0)
}

/// Both ends of a connection, from the sender's side.
pub struct Connection {
    pub own: Own,
    pub peer: Peer,
}

impl Ends for Connection {
    #[inline(always)]
    fn shutdown(&self) -> u8 {
        self.own.shutdown()
    }

    #[inline(always)]
    fn unfit(&self) -> Option<bool> {
        Some(self.own.is_unfit() || self.peer.is_unfit()?)
    }

    #[inline(always)]
    fn write_seq(&self) -> u32 {
        self.own.write_seq()
    }

    #[inline(always)]
    fn copied_seq(&self) -> Option<u32> {
        self.peer.copied_seq()
    }

    #[inline(always)]
    fn queued(&self) -> Option<u32> {
        self.peer.queued()
    }

    #[inline(always)]
    fn receive_buffer(&self) -> Option<(u32, u8)> {
        self.peer.receive_buffer()
    }
}
