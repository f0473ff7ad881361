//! Moments at which a test has a process killed: between two steps that belong together.
//!
//! A debug build ends by SIGKILL at the point that SINABRO_FAIL_POINT names, and waits at those that SINABRO_HOLD_POINTS
//! names. Builds without
//! debug assertions, as all that are shipped, contain none of this: neither the question nor its
//! name. `agent/tests/waiting/fail_points.rs` goes through all of them.

/// All points, in the order of a pod's life.
pub const ALL: &[&str] = &[
    "temporary-net.d",
    "temporary-leases",
    "lease-written",
    "leased",
    "temporary-endpoints",
    "record-written",
    "attached",
    "activated",
    "temporary-deletes",
    "delete-written",
    "disconnected",
    "links-deleted",
    "record-removed",
    "leases-released",
    "collected",
];

/// More of them, which only an agent comes by that takes over maps of another layout.
pub const CARRYING: &[&str] = &[
    "carried",
    "swapped",
    "swapped-noted",
    "loaded",
    "pods-swapped",
    "carried-all",
];

/// The environment variable that names a point.
pub const VARIABLE: &str = "SINABRO_FAIL_POINT";

/// The environment variable that names points, with commas between, at which a process stops by SIGSTOP until it is told to go on.
pub const HOLDS: &str = "SINABRO_HOLD_POINTS";

/// The environment variable that names what the verifier is to refuse, with commas between: `current`
/// or `last-good` programs, of the current ones those of the `acceleration`, or those that `redirect`. The kernel is taken for
/// one that has programs make no `tunnels`.
pub const REFUSED: &str = "SINABRO_REFUSED_PROGRAMS";

/// Whether a test wants these programs made such that no verifier accepts them.
#[inline(always)]
pub fn refused(programs: &str) -> bool {
    #[cfg(debug_assertions)]
    {
        let wanted = std::env::var(REFUSED).unwrap_or_default();
        wanted.split(',').any(|name| name == programs)
    }
    #[cfg(not(debug_assertions))]
    {
        let _ = programs;
        false
    }
}

/// A point is reached.
#[inline(always)]
pub fn fail_point(name: &str) {
    #[cfg(debug_assertions)]
    {
        let mut known = ALL.iter().chain(CARRYING);
        debug_assert!(
            known.any(|known| *known == name),
            "{name} is in no list of fail points"
        );
        if std::env::var_os(VARIABLE).is_some_and(|wanted| wanted == *name) {
            die();
        }
        let holds = std::env::var(HOLDS).unwrap_or_default();
        if holds.split(',').any(|wanted| wanted == name) {
            // SAFETY: signals this process only.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        }
    }
    #[cfg(not(debug_assertions))]
    let _ = name;
}

/// The point at which a file of a directory is written and has no name yet.
#[inline(always)]
pub fn temporary_file(path: &std::path::Path) {
    #[cfg(debug_assertions)]
    {
        let directory = path.parent().and_then(std::path::Path::file_name);
        let name = format!("temporary-{}", directory.unwrap_or_default().display());
        if ALL.contains(&&*name) {
            fail_point(&name);
        }
    }
    #[cfg(not(debug_assertions))]
    let _ = path;
}

/// No destructor runs, nothing is flushed.
#[cfg(debug_assertions)]
fn die() -> ! {
    // SAFETY: signals this process only.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        std::thread::park();
    }
}
