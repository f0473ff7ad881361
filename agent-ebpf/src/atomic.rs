//! Additions that several processors may make at once. (The target has no `fetch_add`; the instruction, which
//! returns nothing, is older than Linux 5.10.)

/// # Safety
/// `number` is aligned, in a value that a map gave in this run of the program, and changed by such additions only.
#[inline(always)]
pub unsafe fn add_u64(number: *mut u64, more: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        core::arch::asm!(
            "lock *(u64 *)({number} + 0) += {more}",
            number = in(reg) number,
            more = in(reg) more,
            options(nostack),
        );
    }
}

/// # Safety
/// As in [`add_u64`].
#[inline(always)]
pub unsafe fn add_u32(number: *mut u32, more: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        core::arch::asm!(
            "lock *(u32 *)({number} + 0) += {more}",
            number = in(reg) number,
            more = in(reg) u64::from(more),
            options(nostack),
        );
    }
}
