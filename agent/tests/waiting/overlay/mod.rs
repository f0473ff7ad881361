//! The overlay on the real kernel: machines with networks of their own, real traffic.

mod net;
mod nodes;
mod obstacles;
mod repair;
