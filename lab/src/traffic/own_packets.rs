//! Packets as network cards give them, in memory that nobody else has.
//!
//! By a veth pair the receiver gets the sender's own packet, and of TCP's a clone: the sender keeps the other one to send it again. Who takes headers off a
//! clone has the kernel copy all of them first (`skb_unclone`, `bpf_skb_net_shrink` in net/core/filter.c), which it never has to do for what a card gives.

use super::machine_code::{Code, Op, see};
use crate::place::Place;
use anyhow::Result;
use std::os::fd::OwnedFd;

const SKB_CHANGE_HEAD: u32 = 43;

/// Has all packets that come in by an interface be nobody else's from there on, for as long as what this gives lives. Linux 6.6.
pub fn from(place: &Place, interface: &str) -> Result<OwnedFd> {
    let mut code = Code::default();
    // No more room in front; to make any, a packet must be nobody else's.
    code.op(Op::Set, 2, 0, 0, 0);
    code.op(Op::Set, 3, 0, 0, 0);
    code.call(SKB_CHANGE_HEAD);
    // TCX_NEXT: on as before.
    code.op(Op::Set, 0, 0, 0, -1i32 as u32);
    code.op(Op::Exit, 0, 0, 0, 0);
    see(place, interface, &code.linked())
}
