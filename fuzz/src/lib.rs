//! Fuzz targets, one per place where bytes come in from outside.
//!
//! A target takes any bytes. It panics if what the code under test makes of them contradicts the
//! target's claims, or if that code panics itself. Two things run the targets:
//! - `cargo xtask fuzz`, with an engine that sees which code an input reaches;
//! - the test of this crate, with the inputs kept in `corpus/TARGET`. Some of these are where the
//!   engine starts from; an input that once broke something is kept there for good.
//!
//! To see that the engine gets far enough, each target also has a planted bug: it says whether an
//! input is one of the few that only an engine led by coverage finds, and with
//! [`PLANTED`] in the environment that is a panic (`cargo xtask fuzz --planted`). Without that a run that
//! finds nothing says little.
//!
//! Where the bytes are JSON, the engine mostly changes one place of the document ([`json`]).

pub mod json;

mod target {
    pub mod cni;
    pub mod conflist;
    pub mod frame;
    pub mod masquerade;
    pub mod nodes;
    pub mod packet;
    pub mod records;
}

use std::{env, hint};

/// Environment variable with the target's name.
pub const TARGET: &str = "SINABRO_FUZZ_TARGET";
/// Environment variable that makes the planted bugs bugs.
pub const PLANTED: &str = "SINABRO_FUZZ_PLANTED";

/// Whether a text is as most planted bugs want it: with more digits than any of the corpus. One or two
/// steps there are taken by chance; all of them only by an engine that keeps what took the first.
#[inline(never)]
fn is_planted(text: &str) -> Planted {
    let digits = text.bytes().filter(u8::is_ascii_digit).count();
    // Each comparison by itself: what is decided by the last alone would be one step.
    let at_least = |least| hint::black_box(digits) >= least;
    at_least(5)
        && at_least(8)
        && at_least(10)
        && at_least(12)
        && at_least(14)
        && at_least(16)
        && at_least(18)
        && at_least(20)
}

/// Whether an input is one that the planted bug is in.
type Planted = bool;

/// A place where bytes come in.
#[derive(Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    parse: fn(&[u8]) -> Planted,
    planted: bool,
}

impl Target {
    const fn new(name: &'static str, parse: fn(&[u8]) -> Planted) -> Self {
        Self {
            name,
            parse,
            planted: false,
        }
    }

    pub const ALL: [Self; 7] = [
        Self::new("cni", target::cni::run),
        Self::new("conflist", target::conflist::run),
        Self::new("frame", target::frame::run),
        Self::new("masquerade", target::masquerade::run),
        Self::new("nodes", target::nodes::run),
        Self::new("packet", target::packet::run),
        Self::new("records", target::records::run),
    ];

    /// # Errors
    /// If none has the name in the environment.
    pub fn from_environment() -> Result<Self, String> {
        let name = env::var(TARGET).map_err(|error| format!("{TARGET}: {error}"))?;
        let mut all = Self::ALL.into_iter();
        let target = all.find(|target| target.name == name);
        let target = target.ok_or_else(|| format!("{TARGET}: there is no target {name}"))?;
        Ok(Self {
            planted: env::var_os(PLANTED).is_some(),
            ..target
        })
    }

    /// Runs one input.
    ///
    /// # Panics
    /// If it breaks something.
    pub fn run(&self, input: &[u8]) {
        let found = (self.parse)(input);
        assert!(!(found && self.planted), "the planted bug");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, fs, path::Path};

    fn corpus() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
    }

    /// What is written for the BPF target brings functions of these names with it that return
    /// nothing: linked here, every program and the engine's C++ would go astray.
    #[test]
    fn copies_are_made_by_the_c_library() {
        unsafe extern "C" {
            fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8;
            fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8;
            fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8;
        }
        let len = std::hint::black_box(4);
        let (from, mut to) = ([1; 4], [0; 4]);
        let place = to.as_mut_ptr();
        // SAFETY: both have four bytes.
        unsafe {
            assert_eq!(memset(place, 7, len), place);
            assert_eq!(memmove(place, from.as_ptr(), len), place);
            assert_eq!(memcpy(place, from.as_ptr(), len), place);
        }
        assert_eq!(to, from);
    }

    #[test]
    fn every_target_has_a_corpus_and_every_corpus_a_target() {
        let directories: BTreeSet<_> = fs::read_dir(corpus())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let targets = Target::ALL.map(|target| target.name.to_owned());
        assert_eq!(directories, targets.into());
    }

    #[test]
    fn no_input_of_the_corpus_breaks_anything() {
        for target in Target::ALL {
            let mut inputs = 0;
            for entry in fs::read_dir(corpus().join(target.name)).unwrap() {
                let path = entry.unwrap().path();
                println!("{}", path.display());
                target.run(&fs::read(path).unwrap());
                inputs += 1;
            }
            assert!(inputs > 0, "{}", target.name);
            target.run(b"");
        }
    }
}
