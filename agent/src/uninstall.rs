//! Takes everything of Sinabro off a node: `sinabroctl uninstall`.
//!
//! Not while an agent runs, whose locks are held meanwhile so that none starts. First what would
//! bring new pods (the configuration), last the state directory with the lock. Each step takes
//! away what it finds and is content to find nothing, so an uninstallation that was interrupted
//! is completed by another; one that fails does not keep the others from being done.
//!
//! Only what bears Sinabro's names, protocol number or text goes. The node's sysctls stay: others
//! may have come to need them.

use crate::{
    announce::node::TAINT,
    apply::routes,
    chain::Chain,
    config::Places,
    datapath,
    endpoint::delete_links,
    install::{file, local_mtu_off, others, plugin},
    own_node,
    state_file::FileError,
    state_lock::{LockError, lock_existing, lock_pins},
};
use sinabro_common::names;
use sinabro_netlink::{Conn, Link, ResultExt, link};
use std::{fs, io, os::unix::fs::FileTypeExt as _, path::Path};

/// What is gone, and what is not, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Uninstalled {
    pub removed: Vec<String>,
    /// What was left because it is somebody else's, or cannot be distinguished from it.
    pub left: Vec<String>,
    /// What could not be taken away.
    pub problems: Vec<String>,
}

/// Takes everything away, in the network namespace of the calling thread.
///
/// # Errors
/// If an agent runs; then nothing was done.
pub fn uninstall(places: &Places) -> Result<Uninstalled, LockError> {
    let _lock = match places.state_dir.is_dir() {
        true => Some(lock_existing(&places.state_dir)?),
        false => None,
    };
    // Of one with another state directory, or none any more.
    let _pins = match places.bpf_dir.is_dir() {
        true => Some(lock_pins(&places.bpf_dir)?),
        false => None,
    };
    let mut done = Uninstalled::default();
    done.configuration(&places.cni_conf_dir);
    done.plugin(&places.cni_bin_dir);
    for step in [Uninstalled::pods, Uninstalled::overlay, Uninstalled::routes] {
        if let Err(error) = step(&mut done) {
            done.problem(&error);
        }
    }
    let datapath = datapath::remove(&places.bpf_dir);
    done.removed.extend(datapath.done);
    for error in &datapath.problems {
        done.problem(error);
    }
    done.programs(&places.programs_dir);
    done.state(&places.state_dir, &places.socket);
    // Last: with the taint no pod comes to a node that has no network.
    done.node(places);
    Ok(done)
}

impl Uninstalled {
    fn problem(&mut self, error: &dyn std::error::Error) {
        self.problems.push(Chain(error).to_string());
    }

    /// Notes what became of a file or directory.
    fn note(&mut self, path: &Path, outcome: io::Result<()>) {
        match outcome {
            Ok(()) => self.removed.push(path.display().to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.problem(&FileError::new("delete", path)(error)),
        }
    }

    fn configuration(&mut self, dir: &Path) {
        for path in [dir.join(names::CNI_CONFLIST), local_mtu_off::path(dir)] {
            self.note(&path, fs::remove_file(&path));
            self.cleared(&path);
        }
        // Installed by hand, under whatever name: without the plugin it is of no use.
        for path in others::naming_us(dir) {
            self.left.push(format!(
                "{} names the plugin {}: delete it if it is not wanted",
                path.display(),
                names::CNI_PLUGIN
            ));
        }
    }

    fn plugin(&mut self, dir: &Path) {
        let path = dir.join(names::CNI_PLUGIN);
        match fs::read(&path) {
            Ok(bytes) if plugin::is_ours(&bytes) => self.note(&path, fs::remove_file(&path)),
            Ok(_) => self
                .left
                .push(format!("{} is another program", path.display())),
            Err(error) => self.note(&path, Err(error)),
        }
        self.cleared(&path);
    }

    fn node(&mut self, places: &Places) {
        match own_node::clear(places) {
            Ok(removed) => self.removed.extend(removed),
            // Whoever reads it can do it from anywhere.
            Err(error) => self.left.push(format!(
                "the node's taint, if it has it: kubectl taint node {} {TAINT}- ({})",
                places.node_name.as_deref().unwrap_or("NODE"),
                Chain(&error)
            )),
        }
    }

    fn cleared(&mut self, path: &Path) {
        if let Err(error) = file::clear(path) {
            self.problem(&FileError::new("delete the temporary file of", path)(error));
        }
    }

    fn pods(&mut self) -> Result<(), sinabro_netlink::Error> {
        let mut names = links("veth")?;
        names.retain(|link| names::is_pod_link(&link.name));
        let names: Vec<_> = names.into_iter().map(|link| link.name).collect();
        delete_links(&names)?;
        let gone = names.iter().map(|name| format!("pod link {name}"));
        self.removed.extend(gone);
        Ok(())
    }

    fn overlay(&mut self) -> Result<(), sinabro_netlink::Error> {
        for device in links("vxlan")? {
            if device.name == names::VXLAN_LINK {
                Conn::new()?
                    .execute(link::delete(device.index))
                    .ignore_not_found()?;
                self.removed.push(format!("VXLAN device {}", device.name));
            }
        }
        Ok(())
    }

    /// Those of pod links and the VXLAN device went with them.
    fn routes(&mut self) -> Result<(), sinabro_netlink::Error> {
        let mut conn = Conn::new()?;
        for route in routes::ours(&mut conn)? {
            conn.execute(route.delete()).ignore_not_found()?;
            self.removed.push(format!("route {}", route.dst));
        }
        Ok(())
    }

    /// What is kept over reboots.
    fn programs(&mut self, dir: &Path) {
        for name in [names::PROGRAMS_FILE, names::KUBE_PROXY_SEEN_FILE] {
            let file = dir.join(name);
            self.cleared(&file);
            self.note(&file, fs::remove_file(&file));
        }
        match fs::remove_dir(dir) {
            // Somebody gave it a file system of its own.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                let text = format!("{}: empty, and a mount point", dir.display());
                self.left.push(text);
            }
            outcome => self.note(dir, outcome),
        }
    }

    fn state(&mut self, dir: &Path, socket: &Path) {
        let is_socket = fs::symlink_metadata(socket).is_ok_and(|meta| meta.file_type().is_socket());
        if is_socket {
            self.note(socket, fs::remove_file(socket));
        }
        let directories = [
            names::LEASES_DIR,
            names::RELEASED_DIR,
            names::ENDPOINTS_DIR,
            names::DELETES_DIR,
        ];
        for name in directories {
            let path = dir.join(name);
            self.note(&path, fs::remove_dir_all(&path));
        }
        let mut files = vec![
            dir.join(names::LOCK_FILE),
            dir.join(names::LAST_POSSIBLE_FILE),
        ];
        for name in [
            names::API_SERVERS_FILE,
            names::KUBELETS_SERVER_FILE,
            names::NODES_FILE,
            names::SELF_TEST_FILE,
            names::KEPT_MASQUERADE_FILE,
        ] {
            let path = dir.join(name);
            self.cleared(&path);
            files.push(path);
        }
        for path in files {
            match fs::remove_file(&path) {
                // Not worth a line each: the directory says it.
                Ok(()) => {}
                Err(error) => self.note(&path, Err(error)),
            }
        }
        self.note(dir, fs::remove_dir(dir));
    }
}

fn links(kind: &str) -> Result<Vec<Link>, sinabro_netlink::Error> {
    let mut links = Conn::new()?.links()?;
    links.retain(|link| link.kind.as_deref() == Some(kind));
    Ok(links)
}
