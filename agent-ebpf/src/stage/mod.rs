//! The stages in packet order. Each lets a packet go on, settles what becomes of it, or names
//! the reason to drop it.

pub mod deliver;
pub mod identity;
pub mod mss;
pub mod mtu;
pub mod neighbour;
pub mod origin;
pub mod report;
pub mod track;
pub mod tunnel;

use sinabro_common::abi::drop::DropReason;

/// What becomes of a packet: an action for the kernel, or a reason to drop it.
pub type Action = Result<i32, DropReason>;
