//! TCP between two pods of this node, from socket to socket.
//!
//! Enrolled are connections whose two addresses are both pods' of this node
//! (`sinabro_common::abi::socket`): loopback and node addresses never are.
//!
//! Order is what must not break: data handed to the receiving socket would overtake data still
//! on its way through TCP. So each direction chooses once, at its first message, and keeps to
//! it ([`NEW`] → [`DIRECT`] or [`STACK`]); a socket that has already sent is not enrolled.
//!
//! Its maps are here, so that only the object `sock` needs a kernel that has them.
//!
//! Limits, for which it is off unless configured on:
//! - the kernel's receive path of such sockets (net/ipv4/tcp_bpf.c) differs from TCP's: a reader
//!   that does not read does not stop the sender, `splice` finds nothing, and a blocking read
//!   that is woken for another reason than data returns EAGAIN;
//! - a pod allowed to configure its network could give itself another pod's address on its
//!   loopback interface and connect to itself with that pod's ports.

use crate::rare;
use aya_ebpf::{
    bindings::{
        BPF_F_INGRESS, BPF_F_NO_PREALLOC, BPF_NOEXIST, BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB,
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
        BPF_TCP_CLOSE, bpf_sock_ops, sk_action::SK_PASS, sk_msg_md,
    },
    macros::map,
    maps::{HashMap, SockHash},
    programs::{SkMsgContext, SockOpsContext},
};
use aya_log_ebpf::warn;
use sinabro_common::abi::{
    Addr,
    config::FLAG_TCP_FAST_PATH,
    socket::{MAX_SOCKETS, SocketKey},
};
use sinabro_ebpf::maps::{CONFIG, ENDPOINTS};

#[map]
pub static SOCKETS: SockHash<SocketKey> = SockHash::pinned(MAX_SOCKETS, 0);

/// What a socket's sender does: [`NEW`], [`DIRECT`] or [`STACK`].
#[map]
pub static SOCKET_PATHS: HashMap<SocketKey, u8> = HashMap::pinned(MAX_SOCKETS, BPF_F_NO_PREALLOC);

/// Enrolled, nothing sent yet.
pub const NEW: u8 = 1;
/// Sends to the receiving socket.
pub const DIRECT: u8 = 2;
/// Sends through TCP.
pub const STACK: u8 = 3;

/// What a table without room answers.
const E2BIG: i32 = -7;

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;

/// Reads a word of a context. The verifier wants its offset in the instruction itself; left to
/// itself, the compiler shares one load between several fields and computes the address.
macro_rules! field {
    ($ctx:expr, $type:ty, $field:ident $(, $index:literal)?) => {{
        let value: u64;
        // SAFETY: the context is valid for as long as the program runs.
        unsafe {
            core::arch::asm!(
                "{value} = *(u32 *)({ctx} + {offset})",
                value = out(reg) value,
                ctx = in(reg) $ctx,
                offset = const { core::mem::offset_of!($type, $field) $(+ 4 * $index)? },
                options(pure, readonly, nostack),
            );
        }
        value as u32
    }};
}

/// The key of the socket behind a context.
macro_rules! key_of {
    ($ctx:expr, $type:ty) => {{
        let ctx = $ctx;
        let ends = match field!(ctx, $type, family) {
            AF_INET => Some((
                Addr::v4(field!(ctx, $type, local_ip4).to_ne_bytes()),
                Addr::v4(field!(ctx, $type, remote_ip4).to_ne_bytes()),
            )),
            // An IPv4 connection of an IPv6 socket has mapped addresses: the same key.
            AF_INET6 => Some((
                words([
                    field!(ctx, $type, local_ip6, 0),
                    field!(ctx, $type, local_ip6, 1),
                    field!(ctx, $type, local_ip6, 2),
                    field!(ctx, $type, local_ip6, 3),
                ]),
                words([
                    field!(ctx, $type, remote_ip6, 0),
                    field!(ctx, $type, remote_ip6, 1),
                    field!(ctx, $type, remote_ip6, 2),
                    field!(ctx, $type, remote_ip6, 3),
                ]),
            )),
            _ => None,
        };
        ends.map(|(local, remote)| SocketKey {
            local,
            remote,
            local_port: field!(ctx, $type, local_port) as u16,
            // Network order in the upper half of the word.
            remote_port: u32::from_be(field!(ctx, $type, remote_port)) as u16,
        })
    }};
}

#[inline(always)]
fn words(words: [u32; 4]) -> Addr {
    let [a, b, c, d] = words.map(u32::to_ne_bytes);
    Addr([
        a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2],
        d[3],
    ])
}

/// Enrols a connection when it is established, forgets it when it closes.
#[inline(always)]
pub fn follow(ctx: &SockOpsContext) {
    match ctx.op() {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB | BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => enrol(ctx),
        // args[1] is the new state.
        BPF_SOCK_OPS_STATE_CB if ctx.arg(1) == BPF_TCP_CLOSE => {
            if let Some(key) = key_of!(ctx.ops, bpf_sock_ops) {
                let _ = SOCKET_PATHS.remove(&key);
            }
        }
        _ => {}
    }
}

#[inline(always)]
fn enrol(ctx: &SockOpsContext) {
    let wanted = CONFIG
        .get(0)
        .is_some_and(|config| config.flags & FLAG_TCP_FAST_PATH != 0);
    let sent = field!(ctx.ops, bpf_sock_ops, data_segs_out);
    if !wanted || sent != 0 {
        return;
    }
    let Some(key) = key_of!(ctx.ops, bpf_sock_ops) else {
        return;
    };
    if ENDPOINTS.get_ptr(key.local).is_none() || ENDPOINTS.get_ptr(key.remote).is_none() {
        return;
    }
    // The way first: without one a socket does not send directly.
    if let Err(error) = SOCKET_PATHS.insert(&key, NEW, 0) {
        return refused(ctx, error);
    }
    let flags = ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG;
    let enrolled = ctx.set_cb_flags(flags as i32).and_then(|()| {
        // SAFETY: the context is valid for as long as the program runs.
        SOCKETS.update(key, unsafe { &mut *ctx.ops }, BPF_NOEXIST.into())
    });
    if let Err(error) = enrolled {
        let _ = SOCKET_PATHS.remove(&key);
        refused(ctx, error);
    }
}

/// Says why a connection between pods was not enrolled.
#[inline(always)]
fn refused(ctx: &SockOpsContext, error: i32) {
    if !rare::due() {
        return;
    }
    match error {
        E2BIG => warn!(
            ctx,
            target: "sock",
            "tcp fast path: table of sockets is full, connections between pods go through tcp"
        ),
        _ => warn!(
            ctx,
            target: "sock",
            "tcp fast path: connection between pods not enrolled, it goes through tcp: errno {}",
            -error
        ),
    }
}

/// Hands a message to the other end's socket, or lets TCP have it.
#[inline(always)]
pub fn send(ctx: &SkMsgContext) -> u32 {
    let Some(key) = key_of!(ctx.msg, sk_msg_md) else {
        return SK_PASS;
    };
    let Some(path) = SOCKET_PATHS.get_ptr_mut(&key) else {
        return SK_PASS;
    };
    // SAFETY: a value that the map gave, valid until the program ends; the kernel runs this
    // program with the socket locked, so nobody else writes it.
    unsafe {
        if *path == STACK {
            return SK_PASS;
        }
        if SOCKETS.redirect_msg(ctx, key.peer(), BPF_F_INGRESS.into()) == SK_PASS.into() {
            *path = DIRECT;
        } else if *path == NEW {
            *path = STACK;
        }
    }
    // Where the other end closed in the middle, TCP tells the sender so.
    SK_PASS
}
