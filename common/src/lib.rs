//! What every part of Sinabro agrees on.
//!
//! - [`abi`]: the layouts of the BPF maps, shared by the kernel programs and the agent;
//! - [`algo`]: pure algorithms called by the kernel programs and tested on the host;
//! - [`api`]: messages on the agent's Unix socket (feature `std`);
//! - [`atomic_file`]: how files are replaced (feature `std`);
//! - [`names`]: paths, link names, pin names, ports.
//!
//! The crate depends on no other crate of the workspace. Without the feature `std` it is
//! `no_std` and builds for the BPF target.
#![cfg_attr(not(feature = "std"), no_std)]

pub mod abi;
pub mod algo;
#[cfg(feature = "std")]
pub mod api;
#[cfg(feature = "std")]
pub mod atomic_file;
#[cfg(feature = "std")]
pub mod fail_point;
pub mod names;
