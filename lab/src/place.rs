//! A network namespace where sockets are made, and the cables between such places.

use crate::{cgroup::Cgroup, congestion};
use anyhow::{Context as _, Result, bail, ensure};
use ipnet::IpNet;
use nix::sched::{CloneFlags, setns};
use sinabro_netlink::{Conn, NetNs, addr::Addr, link, sysctl, veth::Veth};
use std::{os::unix::process::CommandExt as _, process::Command, sync::Arc, thread};

/// A pod's network, a node's, the outside host's.
#[derive(Clone, Debug)]
pub struct Place {
    name: Arc<str>,
    net: NetNs,
    cgroup: Option<Cgroup>,
}

/// One end of a cable: the link's name and hardware address.
pub type End<'a> = (&'a str, [u8; 6]);

impl Place {
    pub fn new(name: &str, net: NetNs) -> Self {
        Self {
            name: name.into(),
            net,
            cgroup: None,
        }
    }

    /// A new network with loopback up and nothing else. It lives as long as something refers to it.
    pub fn fresh(name: &str) -> Result<Self> {
        let net = NetNs::create().with_context(|| {
            format!("cannot make the network of {name} (needs root: run `cargo xtask test`)")
        })?;
        Self::begin(name, net)
    }

    /// A network that has just been made, with loopback up from now on.
    pub fn begin(name: &str, net: NetNs) -> Result<Self> {
        let place = Self::new(name, net);
        congestion::set(&place)?;
        place.set_up("lo", &[])?;
        Ok(place)
    }

    /// The same, with what runs there in a cgroup.
    pub(crate) fn within(self, cgroup: Option<Cgroup>) -> Self {
        Self { cgroup, ..self }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn net(&self) -> &NetNs {
        &self.net
    }

    /// Runs `f` on a thread inside this network namespace, and in the place's cgroup. Sockets made
    /// there stay there and may be used from any thread afterwards.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_thread(&self.name, || {
            setns(&self.net, CloneFlags::CLONE_NEWNET)
                .with_context(|| format!("cannot enter the network namespace of {}", self.name))?;
            if let Some(cgroup) = &self.cgroup {
                let joined = cgroup.join();
                joined.with_context(|| format!("cannot join the cgroup of {}", self.name))?;
            }
            f()
        })
    }

    /// Has a program start inside this network namespace and cgroup, whoever starts it.
    pub fn put(&self, command: &mut Command) {
        let (net, cgroup) = (self.net.clone(), self.cgroup.clone());
        let enter = move || {
            setns(&net, CloneFlags::CLONE_NEWNET)?;
            cgroup.as_ref().map_or(Ok(()), Cgroup::join)
        };
        // SAFETY: only system calls, on descriptors that were opened before the fork.
        unsafe { command.pre_exec(enter) };
    }

    /// Runs a program to its end inside this network namespace; an error if it fails.
    pub fn command(&self, command: &[&str]) -> Result<()> {
        let [program, arguments @ ..] = command else {
            bail!("no command");
        };
        self.run(|| {
            let output = Command::new(program).args(arguments).output()?;
            ensure!(output.status.success(), "{command:?}: {output:?}");
            Ok(())
        })
    }

    /// Has this network hand on packets that are not for it, of both families.
    pub fn forward(&self) -> Result<()> {
        self.run(|| {
            sysctl::write(&["net", "ipv4", "ip_forward"], "1")?;
            Ok(sysctl::write(
                &["net", "ipv6", "conf", "all", "forwarding"],
                "1",
            )?)
        })
    }

    /// A netlink connection to this network.
    pub fn conn(&self) -> Result<Conn> {
        Ok(Conn::in_netns(&self.net)?)
    }

    /// A link's index.
    pub fn index(&self, link: &str) -> Result<u32> {
        Ok(self.conn()?.link_by_name(link)?.index)
    }

    /// Raises a link and gives it addresses, which are usable at once: nobody else can have them,
    /// so duplicates are not looked for (RFC 4862 §5.4).
    pub fn set_up(&self, link: &str, nets: &[IpNet]) -> Result<u32> {
        let index = self.index(link)?;
        let addresses = nets.iter().map(|net| Addr::new(index, *net).nodad().add());
        let requests = [link::set_up(index)].into_iter().chain(addresses);
        self.conn()?.execute_all(requests)?;
        Ok(index)
    }

    /// Lays a veth pair to another place; this end is up, the other is raised by
    /// [`Place::set_up`]. The index of this end.
    pub fn cable(&self, (name, mac): End<'_>, mtu: u32, to: &Self, far: End<'_>) -> Result<u32> {
        let veth = Veth {
            name,
            mac,
            mtu,
            peer_name: far.0,
            peer_mac: far.1,
            peer_netns: Some(&to.net),
        };
        Ok(self.conn()?.create_veth(&veth)?.index)
    }

    pub fn set_mtu(&self, link: &str, mtu: u32) -> Result<()> {
        Ok(self
            .conn()?
            .execute(link::set_mtu(self.index(link)?, mtu))?)
    }

    /// Puts a link under a bridge of this place.
    pub fn plug(&self, link: &str, bridge: &str) -> Result<()> {
        let (link, bridge) = (self.index(link)?, self.index(bridge)?);
        Ok(self.conn()?.execute(link::set_master(link, Some(bridge)))?)
    }
}

/// Runs `f` on a thread of its own, so that what it does to its namespaces ends with it.
pub(crate) fn on_thread<T: Send>(name: &str, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name(name.to_string())
            .spawn_scoped(scope, f)
            .context("cannot start a thread")?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
