//! Connections between two pods of this node that the host's stack translates, and so keep to it.
//!
//! A packet that reaches a pod of this node through the stack, not by redirection, was translated there
//! (kube-proxy turned a Service's address into the pod's). Its answers must pass the same translation backwards. Such
//! a connection has a record; others between pods of the node have none.

use crate::{
    connection::{self, Noted},
    maps::ENDPOINTS,
    parse::{Fragment, Ip, proto},
    scratch::Scratch,
};
use sinabro_common::{
    abi::connection::{Connection, FLAG_STACK},
    algo::ct_state,
};

/// Index of the link of the pod of this node that sent a packet which the stack delivers to another, if one did and
/// the packet says which connection it is of: of protocols without ports nothing is ever translated there. Of a packet in
/// parts, the first names the connection.
#[inline(always)]
pub fn sender(ip: &Ip) -> Option<u32> {
    if ip.fragment == Fragment::Later || !matches!(ip.proto, proto::TCP | proto::UDP | proto::SCTP)
    {
        return None;
    }
    // SAFETY: a value that the map just gave.
    ENDPOINTS
        .get_ptr(&ip.src)
        .map(|endpoint| unsafe { (*endpoint).ifindex })
}

/// Notes a packet that the stack delivers between two pods of this node. Zero if there is no room to: its answers
/// would not find back.
#[inline(never)]
pub fn delivered(scratch: &mut Scratch, sender: u32) -> u32 {
    scratch.identify();
    if let Some(found) = connection::find(&scratch.key) {
        // SAFETY: a value that the map just gave.
        match unsafe { note(found, scratch) } {
            Noted::Over => connection::remove(&scratch.key),
            Noted::Changed => {
                connection::changed(scratch);
                return 1;
            }
            Noted::Same => return 1,
        }
    }
    begin(scratch, sender)
}

/// # Safety
/// `found` is a value that the map gave in this run of the program.
#[inline(always)]
unsafe fn note(found: *mut Connection, scratch: &Scratch) -> Noted {
    let (proto, flags) = (scratch.key.proto, scratch.l4.tcp_flags);
    // SAFETY: the caller's promise.
    unsafe { connection::note(found, proto, scratch.from_high, flags) }
}

#[inline(never)]
fn begin(scratch: &mut Scratch, payer: u32) -> u32 {
    u32::from(connection::begin_untranslated(scratch, FLAG_STACK, payer))
}

/// Whether a packet that a pod sends to another of this node belongs to a connection that keeps to the stack. One that
/// is over does not: what comes next decides again, and the stack, which forgets its own as late, would take it
/// for a part of what was.
#[inline(never)]
pub fn keeps_to_stack(scratch: &mut Scratch) -> u32 {
    scratch.identify();
    let Some(found) = connection::find(&scratch.key) else {
        return 0;
    };
    // SAFETY: a value that the map just gave.
    let noted = unsafe {
        if !(*found).has(FLAG_STACK) {
            return 0;
        }
        let begins =
            scratch.key.proto == proto::TCP && ct_state::begins(proto::TCP, scratch.l4.tcp_flags);
        match begins && connection::stage(found, proto::TCP).is_closed() {
            true => Noted::Over,
            false => note(found, scratch),
        }
    };
    match noted {
        Noted::Same => 1,
        Noted::Changed => {
            connection::changed(scratch);
            1
        }
        Noted::Over => {
            connection::remove(&scratch.key);
            0
        }
    }
}
