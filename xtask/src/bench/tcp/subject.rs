//! What is compared: two plain pods (or two of a node with an earlier commit's programs), two
//! accelerated ones, and one pod with itself.
//!
//! Acceleration that does not happen is slow to notice and embarrassing to report. What is
//! accelerated does not cross the pods' links; so a few thousand requests are sent first and last,
//! and the bytes that crossed the server's link are held against those of the plain pair.

use super::{
    Options,
    case::{Bench, REQUEST},
};
use crate::{bench::http::Nginx, workspace::which};
use anyhow::{Context as _, Result, bail, ensure};
use sinabro_common::api::TcpAcceleration;
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    traffic::{
        device,
        seat::{Ends, Seat},
    },
};
use sinabro_netlink::sysctl;
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

/// Clients' ports; servers have those below.
const CLIENT_PORTS: &str = "16384 65535";
/// The interface of a pod.
const LINK: &str = "eth0";

pub struct Subject {
    pub name: String,
    /// The number of its node, from 1.
    node: usize,
    client: Place,
    server: Place,
    address: IpAddr,
    cpus: [usize; 2],
    /// None if the bytes of this subject cross no link anyway.
    link: Option<&'static str>,
    _nginx: Nginx,
}

impl Subject {
    pub fn ends(&self) -> Ends<'_> {
        Ends::on(self.cpus, [&self.client, &self.server], self.address)
    }

    /// Bytes that crossed the server's link so far, both ways.
    pub fn crossed(&self) -> Result<Option<u64>> {
        let Some(link) = self.link else {
            return Ok(None);
        };
        let counts = device::counts(&self.server, link)?;
        Ok(Some(counts.received.bytes + counts.sent.bytes))
    }
}

pub struct Scene {
    // Dropped before the lab that they are in.
    subjects: [Subject; 3],
    lab: Lab,
    wrk: PathBuf,
    cpus: [usize; 2],
    control: bool,
    /// Whether the first subject is an earlier commit's.
    against: bool,
}

impl Scene {
    pub fn make(cpus: [usize; 2], options: &Options) -> Result<Self> {
        let control = options.control;
        let earlier = options.programs.earlier();
        let wrk = which("wrk").context("wrk is missing: run `cargo xtask setup`")?;
        let present = Binaries::at(options.programs.present())?;
        let nodes = 1 + usize::from(earlier.is_some());
        let lab = Lab::new(present, nodes, Lifetime::Process)?;
        if let Some((_, dir)) = earlier {
            lab.node(2).set_binaries(Binaries::at(dir)?);
        }
        for node in lab.nodes() {
            match control {
                true => node.start_agent()?,
                false => node.start_agent_with(&["--tcp-acceleration=opt-in"])?,
            }
            node.wait_ready()?;
        }
        let node = lab.node(1);
        let wish = match control {
            true => TcpAcceleration::Disabled,
            false => TcpAcceleration::Enabled,
        };
        let (other, plain_wish) = match earlier {
            Some(_) => (lab.node(2), wish),
            None => (node, TcpAcceleration::Disabled),
        };
        let plain = pair(other, "plain", plain_wish)?;
        let accelerated = pair(node, "fast", wish)?;
        let local = [&plain[1], &plain[1]];
        let address = |pod: &Pod| match options.ipv6 {
            true => pod.v6(),
            false => pod.v4(),
        };
        let (loopback, loopback_name) = match options.ipv6 {
            true => (Ipv6Addr::LOCALHOST.into(), "::1"),
            false => (Ipv4Addr::LOCALHOST.into(), "127.0.0.1"),
        };
        let make = |name: &str, node: usize, [client, server]: [&Pod; 2], address, link| {
            let (client, server) = (client.place().clone(), server.place().clone());
            let seat = Seat {
                place: &server,
                cpu: cpus[1],
            };
            anyhow::Ok(Subject {
                name: name.into(),
                node,
                _nginx: Nginx::start(lab.node(node), seat, address)?,
                client,
                server,
                address,
                cpus,
                link,
            })
        };
        let [first, second] = match (earlier, control) {
            (None, true) => ["plain", "plain as well"],
            (None, false) => ["plain", "accelerated"],
            (Some((commit, _)), true) => [commit, "plain"],
            (Some((commit, _)), false) => [commit, "accelerated"],
        };
        let link = Some(LINK);
        let subjects = [
            make(first, nodes, plain.each_ref(), address(&plain[1]), link)?,
            make(
                second,
                1,
                accelerated.each_ref(),
                address(&accelerated[1]),
                link,
            )?,
            make(loopback_name, nodes, local, loopback, None)?,
        ];
        Ok(Self {
            subjects,
            lab,
            wrk,
            cpus,
            control,
            against: earlier.is_some(),
        })
    }

    pub fn node(&self, subject: &Subject) -> &Node {
        self.lab.node(subject.node)
    }

    pub fn wrk(&self) -> &PathBuf {
        &self.wrk
    }

    pub fn cpus(&self) -> [usize; 2] {
        self.cpus
    }

    /// Plain, accelerated, local.
    pub fn subjects(&self) -> &[Subject; 3] {
        &self.subjects
    }

    pub fn names(&self) -> [&str; 3] {
        self.subjects.each_ref().map(|subject| &*subject.name)
    }

    /// An error unless what should be accelerated is, and nothing else.
    pub fn verify(&self, bench: &Bench<'_>) -> Result<()> {
        let [first, second, _] = &self.subjects;
        for (subject, accelerated) in [
            (first, self.against && !self.control),
            (second, !self.control),
        ] {
            let crossed = bench.crossing_per_request(subject)?;
            let text = format!(
                "per request {crossed:.0} bytes crossed the link of the pods `{}`",
                subject.name
            );
            if !accelerated {
                // A request and its answer cross it, and what TCP says about them.
                ensure!(
                    crossed > 2.0 * REQUEST as f64,
                    "something is accelerated: {text}"
                );
            } else if crossed > REQUEST as f64 / 2.0 {
                let said = self.node(subject).ctl(&["status"]);
                let said = said.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
                bail!(
                    "nothing to report, because what is to be accelerated is not: {text}; \
                     `sinabroctl status` says:\n{}",
                    said.unwrap_or_default().trim_end()
                );
            }
        }
        Ok(())
    }
}

/// Two pods that ask for acceleration or for none.
fn pair(node: &Node, name: &str, wish: TcpAcceleration) -> Result<[Pod; 2]> {
    let pod = |role: &str| -> Result<Pod> {
        let id = format!("{name}-{role}");
        let pod = node.add_pod_wishing(&id, wish)?;
        pod.place().run(|| {
            Ok(sysctl::write(
                &["net", "ipv4", "ip_local_port_range"],
                CLIENT_PORTS,
            )?)
        })?;
        Ok(pod)
    };
    Ok([pod("client")?, pod("server")?])
}
