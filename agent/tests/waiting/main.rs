//! Tests that wait for agents and for the kernel most of their time: many of them run at once, beside other programs.
#![allow(clippy::unwrap_used)]

mod fail_points;
mod overlay;
