//! Services: real agents translate what pods, nodes and clients outside send to them.
#![allow(clippy::unwrap_used)]

mod blind;
mod flood;
mod outside;
mod published;
mod ranges;
mod translation;
mod two_nodes;
