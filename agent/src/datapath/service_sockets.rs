//! Services at sockets: the programs on a cgroup, and in which network namespaces they do anything.
//!
//! A namespace is known by its cookie, which the kernel gives no other. Processes are told it by Linux 5.14; on earlier
//! ones the node's alone is found out. Sockets of a namespace that is not known are left alone; what they send
//! is the programs' on links.

use super::{
    DatapathError, ProgramReport,
    attach::{on_cgroup::Cgroup, service_sock, tell_netns},
    lock, maps,
    object::Tried,
};
use crate::chain::Chain;
use sinabro_common::abi::{
    Addr,
    endpoint::PodLink,
    service::{NETNS_OF_NODE, NetNs},
};
use sinabro_netlink::Conn;
use std::{collections::BTreeMap, path::Path, sync::Mutex};

pub enum ServiceSockets {
    Off,
    On(Box<On>),
    Failed(DatapathError),
}

pub struct On {
    netns: maps::NetNs,
    frontends: maps::SocketFrontends,
    attached: service_sock::Attached,
    /// The calling thread's when it was loaded, or why it is not known.
    node: Result<u64, String>,
    /// Of pods attached by this process, by the name of the link.
    pods: Mutex<BTreeMap<String, u64>>,
}

impl ServiceSockets {
    /// Attaches what was loaded, and makes the node's own namespace known. What fails is said, and taken off: pods'
    /// packets are translated without.
    ///
    /// # Errors
    /// If what an earlier agent attached cannot be taken off.
    pub fn start(
        loaded: Result<Tried, DatapathError>,
        links: &Path,
        cgroup: Option<&Path>,
    ) -> Result<Self, DatapathError> {
        match loaded.and_then(|tried| On::start(tried, links, cgroup)) {
            Ok(on) => Ok(Self::On(Box::new(on))),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "services are not translated at sockets");
                service_sock::detach(links)?;
                Ok(Self::Failed(error))
            }
        }
    }

    /// Takes off what an earlier agent attached.
    ///
    /// # Errors
    /// If that cannot be done.
    pub fn stop(links: &Path) -> Result<Self, DatapathError> {
        service_sock::detach(links)?;
        Ok(Self::Off)
    }

    fn on(&self) -> Option<&On> {
        match self {
            Self::On(on) => Some(on),
            Self::Off | Self::Failed(_) => None,
        }
    }

    /// Translates the sockets of a pod, if its namespace is known; else leaves them alone from now on.
    pub fn attach_pod(
        &self,
        link: &str,
        pod: &PodLink,
        netns: Option<u64>,
    ) -> Result<(), DatapathError> {
        let Some(on) = self.on() else {
            return Ok(());
        };
        let Some(cookie) = netns.filter(|cookie| *cookie != 0) else {
            return self.detach_pod(link);
        };
        // A pod of the node's own network is none of ours, and what a plugin says of one would make it one.
        if on.node.as_ref() == Ok(&cookie) {
            return Ok(());
        }
        let owner = NetNs {
            v4: pod.v4,
            v6: pod.v6,
            flags: 0,
        };
        let before = lock(&on.pods).insert(link.to_owned(), cookie);
        if let Some(before) = before.filter(|before| *before != cookie) {
            on.netns.remove(before)?;
        }
        on.netns.put(cookie, owner)
    }

    /// Translates them no more; those that are connected stay so. Idempotent.
    pub fn detach_pod(&self, link: &str) -> Result<(), DatapathError> {
        let Some(on) = self.on() else {
            return Ok(());
        };
        let Some(cookie) = lock(&on.pods).remove(link) else {
            return Ok(());
        };
        on.netns.remove(cookie)
    }

    /// Forgets the namespaces of pods that this process has not attached.
    pub fn retain_pods(&self) -> Result<(), DatapathError> {
        let Some(on) = self.on() else {
            return Ok(());
        };
        for cookie in on.netns.cookies()? {
            let is_pods = || lock(&on.pods).values().any(|of| *of == cookie);
            if on.node.as_ref() != Ok(&cookie) && !is_pods() {
                on.netns.remove(cookie)?;
            }
        }
        Ok(())
    }

    /// Which endpoints the node's datagram sockets have, if these are translated.
    pub fn frontends(&self) -> Option<&maps::SocketFrontends> {
        self.on().map(|on| &on.frontends)
    }

    /// For people: `on, cgroup /sys/fs/cgroup`, and what is missing.
    pub fn mode(&self) -> String {
        let on = match self {
            Self::Off => return "off".into(),
            Self::Failed(error) => return format!("off: {}", Chain(error)),
            Self::On(on) => on,
        };
        let mut mode = format!("on, cgroup {}", on.attached.cgroup.path.display());
        if let Err(why) = &on.node {
            mode += &format!(", not for the node's own sockets: {why}");
        }
        for (program, error) in &on.attached.missing {
            mode += &format!(", without {program}: {}", Chain(error));
        }
        mode
    }

    /// Where the programs are, if they are.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.on().map(|on| &on.attached.cgroup)
    }

    /// The programs, as the kernel has them.
    pub fn programs(&self) -> impl Iterator<Item = &ProgramReport> {
        self.on().into_iter().flat_map(|on| &on.attached.programs)
    }
}

impl On {
    fn start(mut tried: Tried, links: &Path, cgroup: Option<&Path>) -> Result<Self, DatapathError> {
        let netns = maps::NetNs::new(maps::take(&mut tried.ebpf, "NETNS")?)?;
        let frontends =
            maps::SocketFrontends::new(maps::take(&mut tried.ebpf, "SOCKET_FRONTENDS")?)?;
        let node = own_cookie(&mut tried, cgroup);
        if let Ok(cookie) = &node {
            let owner = NetNs {
                v4: Addr::UNSPECIFIED,
                v6: Addr::UNSPECIFIED,
                flags: NETNS_OF_NODE,
            };
            netns.put(*cookie, owner)?;
        }
        Ok(Self {
            netns,
            frontends,
            attached: service_sock::attach(tried, Some(links), cgroup)?,
            node,
            pods: Mutex::default(),
        })
    }
}

/// The cookie of the calling thread's network namespace, or why it is not known.
fn own_cookie(tried: &mut Tried, cgroup: Option<&Path>) -> Result<u64, String> {
    match Conn::new().and_then(|conn| conn.netns_cookie()) {
        Ok(Some(cookie)) => Ok(cookie),
        Ok(None) => tell_netns::ask(tried, cgroup).map_err(|error| Chain(&error).to_string()),
        Err(error) => Err(Chain(&error).to_string()),
    }
}
