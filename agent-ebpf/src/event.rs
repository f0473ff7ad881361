//! Tells the agent of packets that are dropped: of some of them, and what they were.
//!
//! A flood costs little more than its counting: each reason has a number of events a second on each CPU, and
//! a full ring buffer is no reason to wait. Nobody parses here. An event has the packet's first bytes, which
//! the agent reads as the programs do.
//!
//! The maps are not pinned: they go with the programs that use them. Included by the objects that drop, so that
//! the others have no such maps.

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_ktime_get_ns, bpf_skb_load_bytes},
    macros::map,
    maps::{PerCpuArray, RingBuf},
};
use sinabro_common::abi::drop::{
    DropEvent, DropReason, EVENT_BYTES, EVENT_HEAD, EVENTS_PER_SECOND, Hook, MAX_DROP_REASONS,
};
use sinabro_ebpf::{DROP, nat::DROPPED, stage::report};

#[map]
static DROP_EVENTS: RingBuf = RingBuf::with_byte_size(EVENT_BYTES, 0);

/// By reason.
#[map]
static DROP_EVENT_BUDGETS: PerCpuArray<Budget> = PerCpuArray::with_max_entries(MAX_DROP_REASONS, 0);

/// Why a program drops the packet that it looks at; zero if it does not.
#[map]
static DROPPING: PerCpuArray<u32> = PerCpuArray::with_max_entries(1, 0);

/// What a reason may still say in a second.
#[repr(C)]
struct Budget {
    since_ns: u64,
    events: u32,
    left_out: u32,
}

const SECOND_NS: u64 = 1_000_000_000;

/// Counts a drop and gives the action that makes it one, which goes to [`told`].
#[inline(always)]
pub fn dropped(reason: DropReason) -> i32 {
    dropped_for(reason as u32)
}

/// As [`dropped`], by a reason's number.
#[inline(always)]
pub fn dropped_for(reason: u32) -> i32 {
    if let Some(dropping) = DROPPING.get_ptr_mut(0) {
        // SAFETY: this CPU's own copy, and the program is not preempted by itself.
        unsafe { *dropping = reason };
    }
    report::dropped(reason);
    DROP
}

/// Makes an action of what a stage returned that says by a number why it drops ([`sinabro_ebpf::nat::drop`]).
#[inline(always)]
pub fn of_stage(action: i32) -> i32 {
    match action < DROPPED {
        true => action,
        false => dropped_for((action - DROPPED) as u32),
    }
}

/// Tells of a packet if `action` drops it, and gives the action. The last that a program does: what it needs of
/// the stack is that of another function, after all others.
#[inline(always)]
pub fn told(skb: *mut __sk_buff, hook: Hook, action: i32) -> i32 {
    match action {
        DROP => tell(skb, hook as u32),
        other => other,
    }
}

#[inline(never)]
fn tell(skb: *mut __sk_buff, hook: u32) -> i32 {
    let Some(dropping) = DROPPING.get_ptr_mut(0) else {
        return DROP;
    };
    // SAFETY: as in `dropped`.
    let reason = unsafe { core::mem::replace(&mut *dropping, 0) };
    if reason == 0 {
        return DROP;
    }
    let Some(budget) = DROP_EVENT_BUDGETS.get_ptr_mut(reason) else {
        return DROP;
    };
    // SAFETY: as in `dropped`; the clock has no arguments.
    let (budget, now) = unsafe { (&mut *budget, bpf_ktime_get_ns()) };
    if now.wrapping_sub(budget.since_ns) >= SECOND_NS {
        budget.since_ns = now;
        budget.events = 0;
    }
    if budget.events < EVENTS_PER_SECOND
        && let Some(mut entry) = DROP_EVENTS.reserve::<DropEvent>(0)
    {
        budget.events += 1;
        let left_out = core::mem::replace(&mut budget.left_out, 0);
        let event = entry.as_mut_ptr();
        // SAFETY: the entry is as long as an event, and every field is written before it is submitted; the
        // context is valid for as long as the program runs, and no more is loaded than there is room for.
        unsafe {
            let len = (*skb).len;
            (*event).time_ns = now;
            (*event).reason = reason;
            (*event).ifindex = (*skb).ifindex;
            (*event).len = len;
            (*event).head_len = 0;
            (*event).left_out = left_out;
            (*event).kind = ((*skb).protocol as u16).to_ne_bytes();
            (*event).hook = hook as u8;
            (*event).pad = 0;
            (*event).head = [0; EVENT_HEAD];
            let head = (&raw mut (*event).head).cast();
            const ROOM: u32 = EVENT_HEAD as u32;
            let load = |bytes| {
                if bpf_skb_load_bytes(skb.cast(), 0, head, bytes) == 0 {
                    (*event).head_len = bytes;
                }
            };
            if len >= ROOM {
                load(ROOM);
            } else if len > 0 {
                // A length that the verifier sees the bounds of.
                load((len - 1) % ROOM + 1);
            }
        }
        entry.submit(0);
    } else {
        budget.left_out = budget.left_out.wrapping_add(1);
    }
    DROP
}
