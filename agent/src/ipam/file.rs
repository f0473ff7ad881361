//! Leases as files: one per address, the file system refuses a duplicate.
//!
//! - `leases/<address>` is made by [`AtomicFile::create`]: it appears whole, or the address is
//!   taken, whoever took it.
//! - Releasing renames it to `released/<address>` and sets its modification time: the order of
//!   these times is the order of release. The last owner stays readable there, until a thousand
//!   others were released after it.
//!
//! A file that cannot be read as a lease costs its address: it is reported by name, the address
//! is given to nobody, and nothing but a person removes the file. There is no fsync: leases do
//! not outlive the boot, so they need to survive the agent, not the machine.

use crate::state_file::{self, FileError, read_small};
use serde::{Deserialize, Serialize};
use sinabro_common::{
    api::{Mac, Owner, PodRef},
    atomic_file::{AtomicFile, is_temporary},
    fail_point::fail_point,
    names,
};
use std::{
    fs::{self, DirBuilder, File, FileTimes},
    io,
    net::IpAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// One address and who has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    /// Repeats the file's name.
    pub address: IpAddr,
    pub owner: Owner,
    /// Name of the network configuration.
    pub network: String,
    /// Path of the pod's network namespace.
    pub netns: String,
    #[serde(default)]
    pub pod: PodRef,
    /// MAC address asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Seconds since the Unix epoch.
    pub leased_at: u64,
}

impl Lease {
    /// The content of the file of an address.
    ///
    /// # Errors
    /// Why it is not a lease of this address.
    pub fn parse(text: &[u8], address: IpAddr) -> Result<Self, String> {
        let lease: Self =
            serde_json::from_slice(text).map_err(|error| format!("is not a lease: {error}"))?;
        match lease.address == address {
            true => Ok(lease),
            false => Err(format!("is a lease of {}", lease.address)),
        }
    }
}

/// What one name in the leases directory turned out to be.
#[derive(Debug)]
pub enum Found {
    Lease(Lease),
    /// An address whose file is not a lease, and why.
    Unreadable(IpAddr, String),
    /// A file that does not belong there, and why.
    Stray(String),
}

/// Outcome of [`Store::claim`].
#[derive(Debug, PartialEq, Eq)]
pub enum Claim {
    Made,
    Taken,
}

/// The two directories.
#[derive(Debug)]
pub struct Store {
    leases: PathBuf,
    released: PathBuf,
}

impl Store {
    /// Makes the directories where they are missing.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn open(state_dir: &Path) -> Result<Self, FileError> {
        let store = Self {
            leases: state_dir.join(names::LEASES_DIR),
            released: state_dir.join(names::RELEASED_DIR),
        };
        for dir in [&store.leases, &store.released] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .map_err(FileError::new("make directory", dir))?;
        }
        Ok(store)
    }

    /// Reads every lease, and removes temporary files that a killed agent left.
    ///
    /// # Errors
    /// If the directory cannot be listed. A file that cannot be read is an entry, not an error.
    pub fn leases(&self) -> Result<Vec<Found>, FileError> {
        let mut found = Vec::new();
        for name in list(&self.leases)? {
            if is_temporary(name.as_ref()) {
                state_file::remove(&self.leases.join(name))?;
                continue;
            }
            found.push(match canonical(&name) {
                Some(address) => self.found(address),
                None => Found::Stray(format!(
                    "{} is not the name of an address, remove it",
                    self.leases.join(name).display()
                )),
            });
        }
        Ok(found)
    }

    fn found(&self, address: IpAddr) -> Found {
        let reason = match self.read(address) {
            Ok(Some(lease)) => return Found::Lease(lease),
            Ok(None) => "it vanished while it was read".to_owned(),
            Err(reason) => reason,
        };
        Found::Unreadable(address, reason)
    }

    /// The released addresses, the longest released first, with the time of their release.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub fn released(&self) -> Result<Vec<(SystemTime, IpAddr)>, FileError> {
        let mut released = Vec::new();
        for name in list(&self.released)? {
            let Some(address) = canonical(&name) else {
                continue;
            };
            let path = self.released.join(name);
            let time = fs::symlink_metadata(&path).and_then(|m| m.modified());
            // Unreadable times only lose their place in the queue.
            released.push((time.unwrap_or(SystemTime::UNIX_EPOCH), address));
        }
        released.sort_unstable();
        Ok(released)
    }

    /// Reads a lease. `Ok(None)` if there is none; the error says why the file is not a lease.
    ///
    /// # Errors
    /// If the file is there but cannot be read, or is not a lease of this address.
    pub fn read(&self, address: IpAddr) -> Result<Option<Lease>, String> {
        let path = self.path(address);
        let bad = |reason: String| format!("lease file {} {reason}", path.display());
        let text = match read_small(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(bad(format!("cannot be read: {error}"))),
        };
        Lease::parse(&text, address).map(Some).map_err(bad)
    }

    /// Takes an address, unless it is taken.
    ///
    /// # Errors
    /// If the file cannot be written; then the address is not taken.
    pub fn claim(&self, lease: &Lease) -> Result<Claim, FileError> {
        let text = serde_json::to_vec(lease).map_err(io::Error::from);
        let path = self.path(lease.address);
        let text = text.map_err(FileError::new("write", &path))?;
        match AtomicFile::new(&path).create(&text) {
            Ok(()) => {
                fail_point("lease-written");
                Ok(Claim::Made)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Claim::Taken),
            Err(error) => Err(FileError::new("make lease", &path)(error)),
        }
    }

    /// Moves a lease to the end of the released ones, under the time given.
    ///
    /// # Errors
    /// If the file cannot be moved; then the address stays taken. A missing file is no error.
    pub fn release(&self, address: IpAddr, time: SystemTime) -> Result<(), FileError> {
        let path = self.path(address);
        // Time first: were the agent killed in between, the address would still be leased.
        let moved = File::open(&path)
            .and_then(|file| file.set_times(FileTimes::new().set_modified(time)))
            .and_then(|()| fs::rename(&path, self.released.join(address.to_string())));
        match moved {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(FileError::new("release", &path)),
        }
    }

    /// Takes back a claim as if it had never been made.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn unclaim(&self, address: IpAddr) -> Result<(), FileError> {
        state_file::remove(&self.path(address))
    }

    /// Forgets that an address was released; it is leased again.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn forget_released(&self, address: IpAddr) -> Result<(), FileError> {
        state_file::remove(&self.released.join(address.to_string()))
    }

    fn path(&self, address: IpAddr) -> PathBuf {
        self.leases.join(address.to_string())
    }
}

/// Names of a directory; names that are not UTF-8 come out as what they are not.
fn list(dir: &Path) -> Result<Vec<String>, FileError> {
    let entries = fs::read_dir(dir).map_err(FileError::new("list", dir))?;
    entries
        .map(|entry| {
            let entry = entry.map_err(FileError::new("list", dir))?;
            Ok(entry.file_name().to_string_lossy().into_owned())
        })
        .collect()
}

/// The address that a file is named after, in the one spelling that link(2) would refuse twice.
fn canonical(name: &str) -> Option<IpAddr> {
    let address: IpAddr = name.parse().ok()?;
    (address.to_string() == name).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lease(address: &str, container: &str) -> Lease {
        Lease {
            address: address.parse().unwrap(),
            owner: Owner {
                container_id: container.into(),
                ifname: "eth0".into(),
            },
            network: "pods".into(),
            netns: "/run/netns/x".into(),
            pod: PodRef::default(),
            mac: None,
            leased_at: 1,
        }
    }

    #[test]
    fn an_address_is_claimed_once() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (
            Store::open(dir.path()).unwrap(),
            Store::open(dir.path()).unwrap(),
        );
        let first = lease("10.0.0.2", "a");
        assert_eq!(a.claim(&first).unwrap(), Claim::Made);
        assert_eq!(b.claim(&lease("10.0.0.2", "b")).unwrap(), Claim::Taken);
        assert_eq!(b.read(first.address).unwrap(), Some(first));
    }

    #[test]
    fn temporary_files_of_a_killed_agent_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let temporary = dir.path().join("leases/.tmp-1-1");
        fs::write(&temporary, "{").unwrap();
        assert!(store.leases().unwrap().is_empty());
        assert!(!temporary.exists());
    }

    #[test]
    fn released_addresses_come_in_the_order_of_release() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let at = |s| SystemTime::UNIX_EPOCH + std::time::Duration::from_nanos(s);
        for (address, time) in [("10.0.0.2", 3), ("fd00::2", 1), ("10.0.0.9", 2)] {
            let lease = lease(address, "a");
            store.claim(&lease).unwrap();
            store.release(lease.address, at(time)).unwrap();
        }
        let order: Vec<_> = store.released().unwrap();
        let order: Vec<_> = order.into_iter().map(|(_, a)| a.to_string()).collect();
        assert_eq!(order, ["fd00::2", "10.0.0.9", "10.0.0.2"]);
        assert!(store.leases().unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_no_lease_is_named_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let leases = dir.path().join("leases");
        fs::write(leases.join("10.0.0.2"), "{\"address\":\"10.0").unwrap();
        fs::create_dir(leases.join("10.0.0.3")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", leases.join("10.0.0.4")).unwrap();
        fs::write(
            leases.join("10.0.0.5"),
            serde_json::to_vec(&lease("10.0.0.6", "a")).unwrap(),
        )
        .unwrap();
        fs::write(leases.join("10.0.0.7"), vec![b' '; 100_000]).unwrap();
        nix::unistd::mkfifo(&leases.join("10.0.0.8"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(leases.join("fd00::0:9"), "").unwrap();
        store.claim(&lease("10.0.0.99", "a")).unwrap();
        let mut unreadable = 0;
        for found in store.leases().unwrap() {
            match found {
                Found::Unreadable(address, reason) => {
                    unreadable += 1;
                    assert!(reason.contains(&format!("leases/{address}")), "{reason}");
                    let claim = store.claim(&lease(&address.to_string(), "z"));
                    assert_eq!(claim.unwrap(), Claim::Taken);
                }
                Found::Stray(reason) => assert!(reason.contains("fd00::0:9"), "{reason}"),
                Found::Lease(lease) => assert_eq!(lease.address.to_string(), "10.0.0.99"),
            }
        }
        assert_eq!(unreadable, 6);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn garbage_and_truncation_never_panic(
            garbage in proptest::collection::vec(any::<u8>(), 0..64),
            cut in 0usize..200,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::open(dir.path()).unwrap();
            let address = "10.0.0.2".parse().unwrap();
            let whole = serde_json::to_vec(&lease("10.0.0.2", "a")).unwrap();
            for bytes in [&garbage[..], &whole[..cut.min(whole.len() - 1)]] {
                fs::write(dir.path().join("leases/10.0.0.2"), bytes).unwrap();
                prop_assert!(store.read(address).is_err());
            }
        }
    }
}
