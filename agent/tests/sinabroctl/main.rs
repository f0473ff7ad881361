//! The real `sinabroctl` against a socket of the test's own: output, exit codes, bad answers.
#![allow(clippy::unwrap_used)]

mod bad_answers;
mod commands;
mod connections;
mod drops;
mod kit;
mod status;
mod tables;
