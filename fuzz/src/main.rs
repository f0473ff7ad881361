//! libFuzzer over the target that the environment names; started by `cargo xtask fuzz`.
#![no_main]

use sinabro_fuzz::Target;
use std::sync::OnceLock;

static TARGET: OnceLock<Target> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: {
        let target = Target::from_environment().unwrap_or_else(|error| {
            eprintln!("error: {error}");
            std::process::exit(1)
        });
        let _ = TARGET.set(target);
    },
    |input: &[u8]| {
        if let Some(target) = TARGET.get() {
            target.run(input);
        }
    }
);
