//! A flag that is raised in any case.

use std::sync::atomic::{AtomicBool, Ordering};

/// Raises a flag when it is dropped, whatever becomes of a test: its scope waits for threads that look at the flag.
pub struct Raise<'a>(pub &'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
