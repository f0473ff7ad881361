//! Who translates, on which nodes: one for each subject and each number of Services, so that all of them are
//! measured in turns. A pod of the first node is the server of another node for all.

use super::{
    kube_proxy::{self, Mode},
    objects::{Services, TARGET},
};
use crate::{
    bench::{Programs, cgroup::Cgroups, figures::OURS, published},
    ui::Step,
};
use anyhow::{Context as _, Result, bail, ensure};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Pod,
    node::SERVICES_FILE,
    traffic::{self, PATIENCE, seat::Ends},
};
use socket2::{Domain, Socket, Type};
use std::{
    net::{IpAddr, SocketAddr, TcpStream},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

/// How long kube-proxy may take for ten thousand Services on a busy machine.
const SYNC: Duration = Duration::from_secs(900);
const LOOK: Duration = Duration::from_millis(200);
/// Ports of attempts, of which the kernel gives none to a client (net.ipv4.ip_local_port_range), one for each: netfilter
/// remembers for two minutes that one of before the rules was left as it was, and leaves the next by that port as it is, too.
const FIRST_PORT: u16 = 10_000;

/// What translates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Translator {
    Ours,
    /// Ours of an earlier commit.
    Earlier(String),
    KubeProxy(Mode),
}

impl Translator {
    /// Beside an earlier commit nothing else is measured.
    fn all(programs: &Programs) -> Vec<Self> {
        match programs.earlier() {
            Some((commit, _)) => vec![Self::Ours, Self::Earlier(commit.into())],
            None => vec![
                Self::Ours,
                Self::KubeProxy(Mode::Nftables),
                Self::KubeProxy(Mode::Iptables),
            ],
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Ours => OURS,
            Self::Earlier(commit) => commit,
            Self::KubeProxy(mode) => mode.name(),
        }
    }
}

/// Who asks, and where the server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A pod, one of its own node,
    Near,
    /// or of another.
    Far,
    /// Somebody outside of the cluster by a port of a node, a pod of that node,
    IntoNear,
    /// or of another.
    IntoFar,
}

pub const WAYS: [Way; 4] = [Way::Near, Way::Far, Way::IntoNear, Way::IntoFar];

impl Way {
    pub fn is_from_outside(self) -> bool {
        matches!(self, Self::IntoNear | Self::IntoFar)
    }

    /// The server's place among the pods that Services lead to.
    fn pod(self) -> usize {
        match self {
            Self::Near | Self::IntoNear => 0,
            Self::Far | Self::IntoFar => 1,
        }
    }
}

pub struct Site {
    translator: Translator,
    node: usize,
    /// Of the node.
    address: IpAddr,
    client: Pod,
    near: Pod,
    services: Services,
}

impl Site {
    pub fn name(&self) -> &str {
        self.translator.name()
    }

    pub fn number(&self) -> u32 {
        self.services.number()
    }

    pub fn targets(&self, way: Way) -> Vec<SocketAddr> {
        match way.is_from_outside() {
            false => self.services.targets(way.pod()),
            true => vec![SocketAddr::new(
                self.address,
                self.services.node_port(way.pod()),
            )],
        }
    }
}

pub struct Scene {
    sites: Vec<Site>,
    far: Pod,
    lab: Lab,
    cgroups: Cgroups,
    cpus: [usize; 2],
    next_port: AtomicU16,
}

impl Scene {
    pub fn make(
        cpus: [usize; 2],
        programs: &Programs,
        cgroups: Cgroups,
        numbers: &[u32],
        step: &mut Step,
    ) -> Result<Self> {
        let translators = Translator::all(programs);
        let nodes = 1 + translators.len() * numbers.len();
        let lab = Lab::new(Binaries::at(programs.present())?, nodes, Lifetime::Process)?;
        let sites = translators
            .iter()
            .flat_map(|translator| numbers.iter().map(|number| (translator.clone(), *number)));
        let sites: Vec<_> = (2..).zip(sites).collect();
        start(lab.node(1), &cgroups, false)?;
        for (node, (translator, _)) in &sites {
            let node = lab.node(*node);
            if let (Translator::Earlier(_), Some((_, dir))) = (translator, programs.earlier()) {
                node.set_binaries(Binaries::at(dir)?);
            }
            let is_proxy = !matches!(translator, Translator::KubeProxy(_));
            start(node, &cgroups, is_proxy)?;
        }
        for node in lab.nodes() {
            node.wait_ready()?;
        }
        let far = lab.node(1).add_pod("far")?;
        let site = |(node, (translator, number))| -> Result<Site> {
            let [client, near] = ["client", "near"].map(|id| lab.node(node).add_pod(id));
            let (client, near) = (client?, near?);
            let services = Services::new(number, vec![near.v4(), far.v4()]);
            Ok(Site {
                translator,
                node,
                address: lab.node(node).addresses()[0],
                client,
                near,
                services,
            })
        };
        let sites = sites.into_iter().map(site).collect::<Result<Vec<_>>>()?;
        let scene = Self {
            sites,
            far,
            lab,
            cgroups,
            cpus,
            next_port: AtomicU16::new(FIRST_PORT),
        };
        scene.publish(step)?;
        scene.verify()?;
        Ok(scene)
    }

    /// Has every node know its Services.
    fn publish(&self, step: &mut Step) -> Result<()> {
        for site in &self.sites {
            let (node, begun) = (self.lab.node(site.node), Instant::now());
            step.now(format!("{} Services by {}", site.number(), site.name()));
            let Translator::KubeProxy(mode) = site.translator else {
                node.write_services(&site.services.file())?;
                let all = f64::from(site.number());
                self.wait(site, || Ok(published::ask(node)?.services == all))?;
                told(site, begun);
                continue;
            };
            // Ended once its rules are there, so that it takes no time of those that are measured.
            let _proxy = kube_proxy::start(node, mode, &site.services)?;
            let last = site.targets(Way::Far);
            let last = last.last().context("no Service leads anywhere")?;
            self.wait(site, || Ok(self.leads(site, Way::Far, *last).is_ok()))
                .with_context(|| {
                    format!("kube-proxy's log ends with:\n{}", kube_proxy::log(node))
                })?;
            told(site, begun);
        }
        Ok(())
    }

    fn wait(&self, site: &Site, done: impl Fn() -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        while !done()? {
            if begun.elapsed() > SYNC {
                let node = self.lab.node(site.node).name();
                bail!("{node} does not translate its Services by {}", site.name());
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Whether a client gets to the server by a Service.
    fn leads(&self, site: &Site, way: Way, target: SocketAddr) -> Result<()> {
        let ends = self.ends(site, way);
        let listener = ends.listen(TARGET)?;
        let client = ends.client.place.run(|| self.attempt(target))?;
        let (_, peer) = traffic::accept(&listener, Instant::now() + PATIENCE)?;
        // Not its port: two Services may lead the same one to a pod, and netfilter gives out another then.
        let (peer, own) = (peer.ip(), client.local_addr()?.ip());
        // Whom it sees of clients outside differs.
        ensure!(
            way.is_from_outside() || peer == own,
            "the server sees {peer} instead of {own}"
        );
        Ok(())
    }

    fn attempt(&self, target: SocketAddr) -> Result<TcpStream> {
        let port = self.next_port.fetch_add(1, Ordering::Relaxed);
        let socket = Socket::new(Domain::for_address(target), Type::STREAM, None)?;
        socket.bind(&SocketAddr::new(traffic::any(target.ip()), port).into())?;
        socket.connect_timeout(&target.into(), LOOK)?;
        Ok(socket.into())
    }

    /// An error unless each Service that leads to a pod does so, and pods have their nodes' cgroups.
    pub fn verify(&self) -> Result<()> {
        let sites = self.sites.iter();
        let pods = sites.flat_map(|site| [&site.client, &site.near]);
        let places = pods.chain([&self.far]).map(Pod::place);
        for place in places.chain([self.lab.outside().place()]) {
            self.cgroups.verify(&self.lab, place)?;
        }
        for site in &self.sites {
            for way in WAYS {
                for target in site.targets(way) {
                    self.leads(site, way, target).with_context(|| {
                        let node = self.lab.node(site.node).name();
                        format!("{target} by {} on {node}", site.name())
                    })?;
                }
            }
        }
        Ok(())
    }

    /// The sites of one number of Services.
    pub fn sites(&self, number: u32) -> Vec<&Site> {
        self.sites
            .iter()
            .filter(|site| site.number() == number)
            .collect()
    }

    pub fn ends<'a>(&'a self, site: &'a Site, way: Way) -> Ends<'a> {
        let from = match way.is_from_outside() {
            false => site.client.place(),
            true => self.lab.outside().place(),
        };
        let server = [&site.near, &self.far][way.pod()];
        Ends::on(self.cpus, [from, server.place()], server.v4())
    }
}

fn told(site: &Site, begun: Instant) {
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "\r  {:>6} Services by {:<9} {seconds:.1} s",
        site.number(),
        site.name()
    );
}

fn start(node: &Node, cgroups: &Cgroups, is_proxy: bool) -> Result<()> {
    cgroups.give(node)?;
    let mut flags = vec!["--tcp-acceleration=off"];
    let file = format!("--services-file={SERVICES_FILE}");
    if is_proxy {
        node.write_services("{kind: List, items: []}\n")?;
        flags.extend(["--service-proxy=on", &file]);
    }
    node.start_agent_with(&flags)
}
