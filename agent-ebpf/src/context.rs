//! Fields of contexts whose programs the verifier gives no pointer to.
//!
//! It wants a field's offset and width in the instruction itself, as the kernel rewrites that instruction. Left to itself
//! the compiler shares one load between several fields and computes the address.

/// Reads a word of a context.
#[macro_export]
macro_rules! field {
    ($ctx:expr, $type:ty, $field:ident $(, $index:literal)?) => {{
        let value: u64;
        // SAFETY: the context is valid for as long as the program runs.
        unsafe {
            core::arch::asm!(
                "{value} = *(u32 *)({ctx} + {offset})",
                value = out(reg) value,
                ctx = in(reg) $ctx,
                offset = const { core::mem::offset_of!($type, $field) $(+ 4 * $index)? },
                options(pure, readonly, nostack),
            );
        }
        value as u32
    }};
}

/// As [`field`], eight bytes.
#[macro_export]
macro_rules! long_field {
    ($ctx:expr, $type:ty, $field:ident) => {{
        let value: u64;
        // SAFETY: the context is valid for as long as the program runs.
        unsafe {
            core::arch::asm!(
                "{value} = *(u64 *)({ctx} + {offset})",
                value = out(reg) value,
                ctx = in(reg) $ctx,
                offset = const { core::mem::offset_of!($type, $field) },
                options(pure, readonly, nostack),
            );
        }
        value
    }};
}

/// Writes a word of a context.
#[macro_export]
macro_rules! set_field {
    ($ctx:expr, $type:ty, $field:ident $(, $index:literal)? = $value:expr) => {{
        // SAFETY: the context is valid for as long as the program runs.
        unsafe {
            core::arch::asm!(
                "*(u32 *)({ctx} + {offset}) = {value}",
                ctx = in(reg) $ctx,
                value = in(reg) u64::from($value),
                offset = const { core::mem::offset_of!($type, $field) $(+ 4 * $index)? },
                options(nostack),
            );
        }
    }};
}
