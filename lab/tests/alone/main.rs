//! Tests that measure for how long traffic stands still: nothing else runs meanwhile.
#![allow(clippy::unwrap_used)]

mod handover;
mod refused;
mod restart;
mod upgrade_since_release;
