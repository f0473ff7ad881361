//! Has this process keep no more memory than it uses.

/// Before anything else runs. glibc gives every few threads a heap of their own and keeps what they freed: with a pool of
/// short-lived threads that is most of the agent's memory. Two heaps suffice. And it gives the end
/// of a heap back only beyond a limit, which it raises to twice the largest piece ever freed, tens
/// of megabytes after the kernel's type information was read; a limit that was set stays.
pub fn bound() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only sets a parameter of malloc, which locks its heaps for that.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 * 1024);
    }
}

/// Gives back what was freed. To be called after what takes tens of megabytes once, such as parsing the kernel's type
/// information: it looks at every heap, and holds up who wants memory meanwhile.
pub fn release() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}
