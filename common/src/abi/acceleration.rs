//! TCP connections between pods of this node that go from socket to socket.
//!
//! - map `ACCELERATED_PODS`, hash: pod address ([`Addr`]) → [`AcceleratedPod`]: whose connections
//!   may be enrolled;
//! - map `LOOPBACK_PODS`, hash: network namespace cookie (u64) → [`AcceleratedPod`]: whose
//!   loopback connections may be;
//! - map `SOCKETS`, sock hash: socket cookie (u64) → socket. Cookies are given once, so what is
//!   found under one is that very socket;
//! - map `SOCKET_STATES`, socket storage: [`SocketState`] of each enrolled socket; ends with it;
//! - map `ENROLLED`, hash: [`ConnectionKey`] → [`Enrolled`]: where the other end finds it;
//! - map `SERVER_TRAFFIC`, LRU hash: [`ServerKey`] → [`Traffic`]: what its connections were like;
//! - map `ACCELERATION_COUNTERS`, per-CPU hash: interface index (u32) → [`AccelerationCounters`];
//! - map `QUEUE_CHARGES`, hash: [`ChargeKey`] → [`Charge`]: what each enrolled socket may cost the
//!   kernel, and who pays;
//! - map `QUEUE_ACCOUNTS`, hash: interface index (u32) or [`NODE_ACCOUNT`] → [`Account`]: what is
//!   charged; written by programs only;
//! - map `QUEUE_BUDGETS`, hash: the same key → [`Budget`]: what may be; written by the agent only;
//! - map `ACCELERATION_EPOCH`, array of one: 0 → u32, raised whenever who may be accelerated
//!   changes, so that enrolled sockets ask again.

use super::{Addr, map_type};

pub const MAX_SOCKETS: u32 = 65_536;
pub const MAX_SERVERS: u32 = 8192;
pub const MAX_CHARGES: u32 = 2 * MAX_SOCKETS;

/// Key of the whole node's account: no interface has the number 0.
pub const NODE_ACCOUNT: u32 = 0;

/// A pod whose connections may be enrolled.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratedPod {
    /// Cookie of the network namespace that its sockets are in.
    pub netns: u64,
    /// Host-side interface, key of its counters.
    pub ifindex: u32,
    /// A connection enrolled under another generation goes back to TCP.
    pub generation: u32,
}
map_type!(AcceleratedPod, 16, 1, [netns, ifindex, generation]);

/// One end of a connection as that end sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    /// Zero between pod addresses, which are unique on a node; on loopback the cookie of the
    /// network namespace that both ends are in.
    pub netns: u64,
    pub local: Addr,
    pub remote: Addr,
    /// Host order.
    pub local_port: u16,
    /// Host order.
    pub remote_port: u16,
    pub pad: u32,
}
map_type!(
    ConnectionKey,
    48,
    1,
    [netns, local, remote, local_port, remote_port, pad]
);

impl ConnectionKey {
    /// The other end's key.
    #[inline(always)]
    pub const fn peer(&self) -> Self {
        Self {
            netns: self.netns,
            local: self.remote,
            remote: self.local,
            local_port: self.remote_port,
            remote_port: self.local_port,
            pad: 0,
        }
    }

    /// The end that was connected to, if this one is it (`passive`) or the other.
    #[inline(always)]
    pub const fn server(&self, passive: bool) -> ServerKey {
        let (addr, port) = if passive {
            (self.local, self.local_port)
        } else {
            (self.remote, self.remote_port)
        };
        ServerKey {
            netns: self.netns,
            addr,
            port,
            pad: [0; 3],
        }
    }
}

/// How the other end reaches an enrolled socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enrolled {
    pub cookie: u64,
    /// Kernel address of its `struct sock`, for reading only. It may be stale.
    pub sk: u64,
}
map_type!(Enrolled, 16, 1, [cookie, sk]);

/// What a sender knows of the messages that it handed over and that are not read yet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Bytes handed over, modulo 2^32.
    pub bytes: u32,
    /// Some earlier value of `bytes`.
    pub mark: u32,
    /// Messages of which some may be unread, handed over before the mark.
    pub before: u32,
    /// Messages handed over since the mark.
    pub after: u32,
}
map_type!(Backlog, 16, 1, [bytes, mark, before, after]);

/// What is kept with an enrolled socket. Written by programs that hold the socket's lock.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketState {
    pub key: ConnectionKey,
    /// Kernel address of its own `struct sock`.
    pub sk: u64,
    /// The other end, once found.
    pub peer: Enrolled,
    /// Bytes sent since the counters were brought up to date.
    pub bytes: u64,
    /// Messages sent since then.
    pub messages: u32,
    /// Messages sent in all, as far as it counts.
    pub all_messages: u32,
    /// Its pod's interface.
    pub ifindex: u32,
    /// `ACCELERATION_EPOCH` when last asked whether it may go on.
    pub epoch: u32,
    /// Its pod's generation at enrolment, and that of the other end's.
    pub generations: [u32; 2],
    pub backlog: Backlog,
    /// A [`Path`].
    pub path: u8,
    /// A [`Reason`], where the path is [`Path::Stack`].
    pub reason: u8,
    /// One if the connection was accepted, zero if it was made.
    pub passive: u8,
    /// One once it is counted among its server's connections.
    pub counted: u8,
    /// Level ([`crate::algo::queue`]) to which the other end's queue is charged.
    pub level: u8,
    pub pad: [u8; 3],
}
map_type!(
    SocketState,
    128,
    1,
    [
        key,
        sk,
        peer,
        bytes,
        messages,
        all_messages,
        ifindex,
        epoch,
        generations,
        backlog,
        path,
        reason,
        passive,
        counted,
        level,
        pad
    ]
);

/// How what a socket sends travels. Only ever goes down this list: data handed to the other
/// socket must not overtake data on its way through TCP, nor meet a reader that waits for TCP's.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Nothing was sent yet.
    New = 0,
    /// To the other end's socket.
    Direct = 1,
    /// Through TCP, for good.
    Stack = 2,
}

/// Why messages of an enrolled connection go through TCP.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The other end was not enrolled when the first message was sent.
    NotPaired = 0,
    /// Data had gone through TCP before.
    AlreadySent = 1,
    /// The other end did not read, or too slowly.
    QueueFull = 2,
    /// The socket became one whose data must pass TCP (TLS, zerocopy, repair).
    Unfit = 3,
    /// One end was closed, at least for this direction.
    Closing = 4,
    /// Its pod may not be accelerated any more.
    Evicted = 5,
    /// The other end's queue would take more than the connecting pod may have.
    PodLimit = 6,
    /// It would take more than all pods of the node together may have.
    NodeLimit = 7,
}

impl Reason {
    pub const ALL: [Self; 8] = [
        Self::NotPaired,
        Self::AlreadySent,
        Self::QueueFull,
        Self::Unfit,
        Self::Closing,
        Self::Evicted,
        Self::PodLimit,
        Self::NodeLimit,
    ];

    /// As metrics name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotPaired => "not_paired",
            Self::AlreadySent => "already_sent",
            Self::QueueFull => "queue_full",
            Self::Unfit => "unfit",
            Self::Closing => "closing",
            Self::Evicted => "evicted",
            Self::PodLimit => "pod_limit",
            Self::NodeLimit => "node_limit",
        }
    }
}

/// Why a connection between accelerated pods was not enrolled.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// Its server's connections stream.
    Stream = 0,
    /// Its server's connections are short.
    Short = 1,
    /// The socket had sent already, its data must pass TCP, or its client's socket is not enrolled.
    Unfit = 2,
    /// The kernel refused (MPTCP, for example), or a table is full.
    Refused = 3,
    /// The connecting pod has as many sockets enrolled, or messages waiting, as it may.
    PodLimit = 4,
    /// All pods of the node together have.
    NodeLimit = 5,
}

impl Skip {
    pub const ALL: [Self; 6] = [
        Self::Stream,
        Self::Short,
        Self::Unfit,
        Self::Refused,
        Self::PodLimit,
        Self::NodeLimit,
    ];

    /// As metrics name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Short => "short",
            Self::Unfit => "unfit",
            Self::Refused => "refused",
            Self::PodLimit => "pod_limit",
            Self::NodeLimit => "node_limit",
        }
    }
}

/// What one pod's sockets did.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccelerationCounters {
    /// Sockets enrolled.
    pub enrolled: u64,
    pub redirected_messages: u64,
    pub redirected_bytes: u64,
    /// By [`Reason`].
    pub passed_messages: [u64; Reason::ALL.len()],
    /// By [`Reason`].
    pub passed_bytes: [u64; Reason::ALL.len()],
    /// Sockets not enrolled, by [`Skip`].
    pub skipped: [u64; Skip::ALL.len()],
}
map_type!(
    AccelerationCounters,
    200,
    1,
    [
        enrolled,
        redirected_messages,
        redirected_bytes,
        passed_messages,
        passed_bytes,
        skipped
    ]
);

impl core::ops::AddAssign for AccelerationCounters {
    fn add_assign(&mut self, other: Self) {
        let add = |sums: &mut [u64], others: &[u64]| {
            for (sum, other) in sums.iter_mut().zip(others) {
                *sum += other;
            }
        };
        self.enrolled += other.enrolled;
        self.redirected_messages += other.redirected_messages;
        self.redirected_bytes += other.redirected_bytes;
        add(&mut self.passed_messages, &other.passed_messages);
        add(&mut self.passed_bytes, &other.passed_bytes);
        add(&mut self.skipped, &other.skipped);
    }
}

/// A step of what an enrolled socket may cost. An entry never changes, and whoever removes it gives
/// the account back what it says: exactly one can.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChargeKey {
    /// The socket's cookie.
    pub cookie: u64,
    /// Zero for the socket itself and its first messages.
    pub level: u32,
    pub pad: u32,
}
map_type!(ChargeKey, 16, 1, [cookie, level, pad]);

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Interface of the pod that connected: it pays for both ends, so that nobody can spend
    /// another pod's budget but on connections which that pod makes itself.
    pub payer: u32,
    pub bytes: u32,
}
map_type!(Charge, 8, 1, [payer, bytes]);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Bytes.
    pub charged: u64,
}
map_type!(Account, 8, 1, [charged]);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Bytes.
    pub limit: u64,
    /// What the agent gave back, of sockets whose end no program saw. Only grows: the account
    /// itself is the programs' alone, so neither side needs a lock.
    pub returned: u64,
}
map_type!(Budget, 16, 1, [limit, returned]);

/// What is connected to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServerKey {
    /// As in [`ConnectionKey`].
    pub netns: u64,
    pub addr: Addr,
    /// Host order.
    pub port: u16,
    pub pad: [u16; 3],
}
map_type!(ServerKey, 32, 1, [netns, addr, port, pad]);

/// What the connections to a server were like, recent ones weighing more. Updated without locks:
/// a lost update changes no verdict.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections that ended, or lasted.
    pub connections: u64,
    /// Questions and answers on them, of each connection a few.
    pub exchanges: u64,
    /// Messages (of accelerated connections) or segments (of others) that servers received and
    /// sent, in this order.
    pub messages: [u64; 2],
    pub bytes: [u64; 2],
    /// Time of the last update (CLOCK_MONOTONIC).
    pub updated_ns: u64,
}
map_type!(
    Traffic,
    56,
    1,
    [connections, exchanges, messages, bytes, updated_ns]
);

/// Where this kernel keeps what the programs look at, by its own BTF. Byte offsets into
/// `struct sock`, of which `struct tcp_sock` is an extension.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelOffsets {
    /// `__sk_common.skc_flags`, unsigned long.
    pub flags: u32,
    /// The bit number of `SOCK_ZEROCOPY` in it.
    pub zerocopy_bit: u32,
    /// `sk_backlog.rmem_alloc`, s32.
    pub rmem_alloc: u32,
    /// `sk_rcvbuf`, s32.
    pub rcvbuf: u32,
    /// `sk_userlocks`, u8, or the byte that it is part of.
    pub userlocks: u32,
    /// The bits of `sk_userlocks` in that byte start here.
    pub userlocks_shift: u32,
    /// `sk_shutdown`, u8, or the byte that it is part of.
    pub shutdown: u32,
    /// The bits of `sk_shutdown` in that byte start here.
    pub shutdown_shift: u32,
    /// `inet_conn.icsk_ulp_ops`, pointer.
    pub ulp_ops: u32,
    /// The byte with `repair`.
    pub repair: u32,
    /// The bit number of `repair` in it.
    pub repair_bit: u32,
    /// `copied_seq`, u32.
    pub copied_seq: u32,
    /// `write_seq`, u32.
    pub write_seq: u32,
    /// `sk_user_data`, pointer.
    pub user_data: u32,
    /// `sk_wq`, pointer.
    pub wq: u32,
    /// `wait.head` in `struct socket_wq`.
    pub wq_head: u32,
    /// `entry` in `struct wait_queue_entry`.
    pub wait_entry: u32,
    /// `private` in `struct wait_queue_entry`, pointer.
    pub wait_private: u32,
}
map_type!(
    KernelOffsets,
    72,
    1,
    [
        flags,
        zerocopy_bit,
        rmem_alloc,
        rcvbuf,
        userlocks,
        userlocks_shift,
        shutdown,
        shutdown_shift,
        ulp_ops,
        repair,
        repair_bit,
        copied_seq,
        write_seq,
        user_data,
        wq,
        wq_head,
        wait_entry,
        wait_private
    ]
);

/// `SOCK_RCVBUF_LOCK` of `sk_userlocks`: the application has set SO_RCVBUF.
pub const RCVBUF_LOCK: u8 = 2;
/// `SEND_SHUTDOWN` of `sk_shutdown`.
pub const SEND_SHUTDOWN: u8 = 2;
