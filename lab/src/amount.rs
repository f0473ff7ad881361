//! How much a test does.

/// How many of something a test does: a few, or with SINABRO_THOROUGH all that are promised.
pub fn amount(few: u32, all: u32) -> u32 {
    match std::env::var_os("SINABRO_THOROUGH") {
        Some(_) => all,
        None => few,
    }
}
