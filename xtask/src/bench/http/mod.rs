//! HTTP between two pods: nginx with one worker, and wrk with one thread.

pub mod nginx;
mod wrk;

pub use nginx::Nginx;
pub use wrk::wrk;
