//! The kernels, and how their packages come here.
//!
//! ```text
//! <cache>/kernels/<name>/vmlinuz     the image
//! <cache>/kernels/<name>/modules/    kernel/… as in /lib/modules/<release>
//! <cache>/kernels/<name>/release     its release, written last: what lacks it is not whole
//! ```

use crate::{
    cluster::layout::cache,
    debian::{self, PrivateApt},
    ui,
};
use anyhow::{Context as _, Result, bail, ensure};
use std::{
    cmp::Ordering,
    fs,
    path::{Path, PathBuf},
};

/// A series of kernels that programs are tried on.
pub struct Kernel {
    /// As `--only` and the budget name it.
    pub name: &'static str,
    archive: Archive,
    suite: &'static str,
    /// What comes before the rest of a release's number, and after it; the highest is taken.
    series: (&'static str, &'static str),
    /// Packages with image and modules: what comes before the release.
    packages: &'static [&'static str],
    /// Has tcx links (Linux 6.6).
    pub tcx: bool,
    /// Has all that accelerated TCP takes (Linux 5.15).
    pub acceleration: bool,
    /// One of the few for CI.
    pub short: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Archive {
    Debian,
    DebianSecurity,
    Ubuntu,
}

/// Debian's, of which one package has all.
const fn debian(name: &'static str, suite: &'static str, before: &'static str) -> Kernel {
    Kernel {
        name,
        archive: Archive::Debian,
        suite,
        series: (before, "-cloud-amd64"),
        packages: &["linux-image-"],
        tcx: true,
        acceleration: true,
        short: false,
    }
}

/// Debian's since 7.2, of which the modules are a package of their own.
const fn newer(name: &'static str, suite: &'static str, before: &'static str) -> Kernel {
    Kernel {
        packages: &["linux-binary-", "linux-modules-"],
        ..debian(name, suite, before)
    }
}

/// Ubuntu's, for series of which Debian has none.
const fn ubuntu(name: &'static str, suite: &'static str, before: &'static str) -> Kernel {
    Kernel {
        archive: Archive::Ubuntu,
        series: (before, "-generic"),
        packages: &["linux-image-unsigned-", "linux-modules-"],
        ..debian(name, suite, before)
    }
}

/// Oldest first; one more is a line.
#[rustfmt::skip]
pub const KERNELS: &[Kernel] = &[
    Kernel { archive: Archive::DebianSecurity, tcx: false, acceleration: false, short: true,
             ..debian("5.10", "bullseye-security", "5.10.0-") },
    Kernel { tcx: false, ..ubuntu("5.15", "jammy-updates", "5.15.0-") },
    Kernel { tcx: false, ..debian("6.1", "bookworm", "6.1.0-") },
    ubuntu("6.8", "noble-updates", "6.8.0-"),
    Kernel { short: true, ..debian("6.12", "trixie", "6.12.") },
    debian("6.18", "trixie-backports", "6.18."),
    ubuntu("7.0", "resolute", "7.0.0-"),
    newer("7.2", "trixie-backports", "7.2."),
    Kernel { short: true, ..newer("7.3", "trixie-backports", "7.3.") },
];

/// Names of series that people run and no archive has, as far as is known.
pub const MISSING: &[&str] = &["6.6"];

/// A kernel that is here.
#[derive(Clone, Debug)]
pub struct Image {
    pub release: String,
    pub vmlinuz: PathBuf,
    /// With `kernel/` in it.
    pub modules: PathBuf,
}

impl Kernel {
    pub fn by_name(name: &str) -> Result<&'static Self> {
        let found = KERNELS.iter().find(|kernel| kernel.name == name);
        found.with_context(|| {
            let names: Vec<_> = KERNELS.iter().map(|kernel| kernel.name).collect();
            format!("there is no kernel {name}, there are {}", names.join(", "))
        })
    }

    fn dir(&self) -> Result<PathBuf> {
        Ok(cache()?.join("kernels").join(self.name))
    }

    /// What is in the cache.
    pub fn cached(&self) -> Result<Option<Image>> {
        let dir = self.dir()?;
        let Ok(release) = fs::read_to_string(dir.join("release")) else {
            return Ok(None);
        };
        Ok(Some(Image {
            release: release.trim().to_owned(),
            vmlinuz: dir.join("vmlinuz"),
            modules: dir.join("modules"),
        }))
    }

    /// From the cache, else from its archive.
    pub fn image(&self) -> Result<Image> {
        if let Some(image) = self.cached()? {
            return Ok(image);
        }
        let step = ui::step(format!("fetching Linux {}", self.name));
        self.fetch()
            .with_context(|| format!("cannot fetch Linux {}", self.name))?;
        step.done_in_time();
        self.cached()?.context("the cache is gone")
    }

    /// Takes what the archive has now in the place of what is in the cache.
    pub fn fetch(&self) -> Result<()> {
        let dir = self.dir()?;
        let beside = |name: &str| dir.with_file_name(format!("{}{name}", self.name));
        let apt = PrivateApt::new(&beside(".apt"), Some(&self.source()?))?;
        apt.update()?;
        let (first, (before, after)) = (self.packages[0], self.series);
        let names = apt.names(&format!("{first}{before}"))?;
        let releases = names.iter().filter_map(|name| name.strip_prefix(first));
        let release = newest(releases, self.series)
            .with_context(|| format!("suite {} has no {first}{before}…{after}", self.suite))?;
        let new = beside(".new");
        remove(&new)?;
        let unpacked = new.join("unpacked");
        for before in self.packages {
            apt.unpack(&format!("{before}{release}"), &unpacked)?;
        }
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|path| unpacked.join(path).join(release))
            .into_iter()
            .find(|path| path.join("kernel").is_dir());
        let modules =
            modules.with_context(|| format!("the packages have no modules of {release}"))?;
        // Newer packages have it beside the modules.
        let vmlinuz = [
            unpacked.join(format!("boot/vmlinuz-{release}")),
            modules.join("vmlinuz"),
        ];
        let vmlinuz = vmlinuz.iter().find(|path| path.is_file());
        let vmlinuz =
            vmlinuz.with_context(|| format!("the packages have no image of {release}"))?;
        fs::rename(vmlinuz, new.join("vmlinuz"))?;
        fs::rename(&modules, new.join("modules"))?;
        remove(&unpacked)?;
        fs::write(new.join("release"), release)?;
        remove(&dir)?;
        fs::rename(&new, &dir).with_context(|| format!("cannot make {}", dir.display()))
    }

    /// A line of sources.list(5).
    fn source(&self) -> Result<String> {
        let (uri, keyring) = match self.archive {
            Archive::Ubuntu => ("http://archive.ubuntu.com/ubuntu".into(), ubuntu_keyring()?),
            Archive::Debian => (mirror(), debian::KEYRING.into()),
            Archive::DebianSecurity => {
                let mirror = mirror();
                let mirror = mirror.trim_end_matches('/');
                (format!("{mirror}-security"), debian::KEYRING.into())
            }
        };
        ensure!(
            keyring.is_file(),
            "{} is missing, which the archive's signatures are checked with (Debian: \
             debian-archive-keyring)",
            keyring.display()
        );
        let keyring = keyring.display();
        Ok(format!(
            "deb [arch=amd64 signed-by={keyring}] {uri} {} main\n",
            self.suite
        ))
    }
}

/// The one that the machine uses, if it is a Debian.
fn mirror() -> String {
    debian::mirror().unwrap_or_else(|_| "http://deb.debian.org/debian".into())
}

/// Ubuntu's keys, by Debian's package of them, which not every suite has.
fn ubuntu_keyring() -> Result<PathBuf> {
    const FILE: &str = "usr/share/keyrings/ubuntu-archive-keyring.gpg";
    const SUITE: &str = "trixie";
    let dir = cache()?.join("kernels/ubuntu-keyring");
    for place in [Path::new("/"), &dir] {
        if place.join(FILE).is_file() {
            return Ok(place.join(FILE));
        }
    }
    let source = format!(
        "deb [signed-by={}] {} {SUITE} main\n",
        debian::KEYRING,
        mirror()
    );
    let apt = PrivateApt::new(&cache()?.join("kernels/keys.apt"), Some(&source))?;
    apt.update()?;
    apt.unpack("ubuntu-keyring", &dir)?;
    Ok(dir.join(FILE))
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// An image of one's own, with its modules: a directory as /lib/modules/RELEASE.
pub fn own(vmlinuz: &Path, modules: &Path) -> Result<Image> {
    ensure!(vmlinuz.is_file(), "there is no {}", vmlinuz.display());
    if !modules.join("kernel").is_dir() {
        bail!(
            "{} has no directory `kernel`: name the directory as /lib/modules/RELEASE is",
            modules.display()
        );
    }
    let modules = modules.canonicalize()?;
    let release = modules.file_name().unwrap_or_default();
    Ok(Image {
        release: release.to_string_lossy().into_owned(),
        vmlinuz: vmlinuz.to_owned(),
        modules,
    })
}

/// The highest of those releases that are of the series; what is not a release (`dbg`, a package that
/// only depends on the newest) is none.
fn newest<'a>(
    releases: impl Iterator<Item = &'a str>,
    (before, after): (&str, &str),
) -> Option<&'a str> {
    let is_of = |release: &&str| {
        let rest = release.strip_prefix(before);
        let rest = rest.and_then(|rest| rest.strip_suffix(after));
        rest.is_some_and(|rest| {
            rest.starts_with(|first: char| first.is_ascii_digit()) && !rest.contains("-rt")
        })
    };
    releases.filter(is_of).max_by(|a, b| compare(a, b))
}

/// Numbers by their value, everything else by its letters.
fn compare(a: &str, b: &str) -> Ordering {
    let parts = |text: &str| -> Vec<(u64, String)> {
        text.split(|c: char| !c.is_ascii_alphanumeric())
            .map(|part| match part.parse() {
                Ok(number) => (number, String::new()),
                Err(_) => (0, part.to_owned()),
            })
            .collect()
    };
    parts(a).cmp(&parts(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_release_is_taken_and_no_other_package() {
        let listed = [
            "6.12.94+deb13-cloud-amd64",
            "6.12.107+deb13-cloud-amd64",
            "6.12.107+deb13-cloud-amd64-dbg",
            "6.12.200+deb13-cloud-amd64-unsigned",
            "6.12.300+deb13-amd64",
            "6.12-cloud-amd64",
        ];
        let kernel = Kernel::by_name("6.12").unwrap();
        let found = |listed: &[&'static str]| newest(listed.iter().copied(), kernel.series);
        assert_eq!(found(&listed), Some("6.12.107+deb13-cloud-amd64"));
        assert_eq!(found(&["6.12.x-cloud-amd64"]), None);
        assert_eq!(found(&[]), None);
    }

    #[test]
    fn releases_are_compared_by_their_numbers() {
        for (low, high) in [
            ("46", "100"),
            ("12.94+deb13", "12.107+deb13"),
            ("5.9", "5.9.1"),
        ] {
            assert_eq!(compare(low, high), Ordering::Less, "{low} {high}");
        }
        assert_eq!(compare("7.2", "7.2"), Ordering::Equal);
    }

    #[test]
    fn every_kernel_has_a_name_of_its_own() {
        for kernel in KERNELS {
            let same = KERNELS.iter().filter(|other| other.name == kernel.name);
            assert_eq!(same.count(), 1, "{}", kernel.name);
        }
        assert!(Kernel::by_name("2.4").is_err());
        assert!(KERNELS.iter().filter(|kernel| kernel.short).count() >= 3);
    }
}
