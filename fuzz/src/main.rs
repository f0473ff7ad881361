//! libFuzzer over the target that the environment names; started by `cargo xtask fuzz`.
#![no_main]

use libfuzzer_sys::fuzzer_mutate;
use sinabro_fuzz::{Target, json};
use std::sync::OnceLock;

/// How much longer than before the engine may make a text.
const LONGER: usize = 64;

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

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    // Bytes as bytes every fourth time: syntax has faults, too.
    if !seed.is_multiple_of(4)
        && let Some(changed) = json::mutate(&data[..size], seed, text)
        && changed.len() <= max_size
    {
        data[..changed.len()].copy_from_slice(&changed);
        return changed.len();
    }
    fuzzer_mutate(data, size, max_size)
});

/// A text as the engine changes it, with all that it has seen inputs compared with.
fn text(text: &str) -> String {
    let (size, mut bytes) = (text.len(), text.as_bytes().to_vec());
    bytes.resize(size + LONGER, 0);
    let most = bytes.len();
    let size = fuzzer_mutate(&mut bytes, size, most);
    String::from_utf8_lossy(&bytes[..size]).into_owned()
}
