//! Tests that wait for what never comes, most of their time: many of them run at once, beside other programs.
#![allow(clippy::unwrap_used)]

mod flaws;
