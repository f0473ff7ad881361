//! The architectures that there are images for.

use anyhow::{Result, bail};
use std::{env::consts, fmt};

/// By the names that images use (OCI image-spec, config.md: GOARCH).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    /// This machine's.
    pub fn host() -> Result<Self> {
        match consts::ARCH {
            "x86_64" => Ok(Self::Amd64),
            "aarch64" => Ok(Self::Arm64),
            other => bail!("there are no images for {other} machines, only for amd64 and arm64"),
        }
    }

    pub fn is_host(self) -> bool {
        Self::host().is_ok_and(|host| host == self)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    pub fn rust_target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// The C compiler that links for it from elsewhere, by the name that Debian gives it.
    pub fn cross_compiler(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu-gcc",
            Self::Arm64 => "aarch64-linux-gnu-gcc",
        }
    }

    /// `e_machine` of its ELF files (elf.h).
    pub fn elf_machine(self) -> u16 {
        match self {
            Self::Amd64 => 62,
            Self::Arm64 => 183,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
