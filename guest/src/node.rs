//! The machine as a node, where everything is where a user has it.
//!
//! ```text
//!   pods ── snb… │ this machine │ uplink ── outside
//!                                192.0.2.0/24, 2001:db8:2::/64
//! ```

use crate::uplink;
use anyhow::{Context as _, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::{Value, json};
use sinabro_common::{
    api::{StatusReport, Trouble},
    fail_point, names,
};
use sinabro_guest::{BIN_DIR, Environment, REFUSING_AGENT, SELF_TEST};
use sinabro_lab::{
    Place,
    residue::Snapshot,
    traffic::{PATIENCE, icmp, sctp, tcp, udp},
    wait::wait_for,
};
use sinabro_netlink::{
    Conn, Family, NetNs,
    route::{Route, RouteFilter},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Output, Stdio},
};

const NODES_FILE: &str = "/run/nodes.json";
const LOG_FILE: &str = "/run/agent.log";
const PLUGIN: &str = "/opt/cni/bin/sinabro";

pub struct Node {
    this: Place,
    outside: Place,
    outside_addresses: Vec<IpAddr>,
    families: usize,
    /// Links and routes of the machine before it was a node.
    before: BTreeSet<String>,
}

/// A pod and its addresses.
pub struct Pod {
    id: &'static str,
    place: Place,
    addresses: Vec<IpAddr>,
    result: Value,
}

/// How an agent is started.
#[derive(Default)]
pub struct Way<'a> {
    /// Whose programs the kernel is to refuse ([`fail_point::REFUSED`]).
    pub refused: Option<&'a str>,
    pub flags: &'a [&'a str],
}

/// What the agent chose by itself.
pub fn modes(status: StatusReport) -> BTreeMap<String, String> {
    let mut modes = status.modes;
    if let Some(found) = status.tcp_self_test {
        let verdict = format!("{:?}: {}", found.verdict, found.reason);
        modes.insert(SELF_TEST.into(), verdict);
    }
    modes
}

impl Node {
    pub fn new(environment: &Environment) -> Result<Self> {
        let families = if environment.without_ipv6 { 1 } else { 2 };
        let nets = |all: [&str; 2]| -> Result<Vec<IpNet>> {
            let nets = all.iter().take(families);
            nets.map(|net| Ok(net.parse()?)).collect()
        };
        let this = Place::new("this machine", NetNs::current()?);
        let outside = Place::fresh("outside")?;
        let name = uplink::lay(environment.uplink, &this, &outside)?;
        this.set_up("lo", &[])?;
        outside.set_up("lo", &[])?;
        let own = nets(["192.0.2.1/24", "2001:db8:2::1/64"])?;
        let far = nets(["192.0.2.9/24", "2001:db8:2::9/64"])?;
        let uplink = this.set_up(name, &own)?;
        outside.set_up(name, &far)?;
        let mut conn = Conn::new()?;
        for net in &far {
            let family = match net.addr() {
                IpAddr::V4(_) => Family::V4,
                IpAddr::V6(_) => Family::V6,
            };
            let route = Route::default_of(family).via(net.addr()).dev(uplink);
            conn.execute(route.add())?;
        }
        let addresses: Vec<_> = own.iter().map(IpNet::addr).collect();
        let ranges = nets(["10.244.1.0/24", "fd00:10:244:1::/64"])?;
        let nodes = json!([{"name": "n1", "addresses": addresses, "podCIDRs": ranges}]);
        fs::write(NODES_FILE, nodes.to_string())?;
        // As a kubelet's runtime makes them.
        for dir in ["/opt/cni/bin", "/etc/cni/net.d", "/run/netns"] {
            fs::create_dir_all(dir)?;
        }
        Ok(Self {
            before: links_and_routes(&this)?,
            this,
            outside,
            outside_addresses: far.iter().map(IpNet::addr).collect(),
            families,
        })
    }

    pub fn ctl(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(Path::new(BIN_DIR).join("sinabroctl"));
        command
            .args(arguments)
            .output()
            .context("cannot run sinabroctl")
    }

    /// What a program said that must have succeeded.
    pub fn said(&self, output: &Output) -> Result<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "{}: {out} {err}", output.status);
        Ok(out.replace('\n', "; "))
    }

    pub fn prepare(&self) -> Result<String> {
        let source = format!("{BIN_DIR}/sinabro");
        let arguments = [
            "prepare",
            "--cni-source",
            &source,
            "--node-name",
            "n1",
            "--nodes",
        ];
        let output = self.ctl(&[&arguments[..], &[NODES_FILE]].concat())?;
        let said = self.said(&output)?;
        ensure!(
            Path::new(PLUGIN).is_file(),
            "the plugin is not there: {said}"
        );
        Ok(said)
    }

    pub fn start_agent(&self, way: &Way<'_>) -> Result<Child> {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(LOG_FILE)?;
        let program = match way.refused {
            None => "sinabro-agent",
            Some(_) => REFUSING_AGENT,
        };
        Command::new(Path::new(BIN_DIR).join(program))
            .args(["--node-name", "n1", "--nodes", NODES_FILE])
            .arg(format!("--cni-source={BIN_DIR}/sinabro"))
            .args(way.flags)
            .envs(way.refused.map(|programs| (fail_point::REFUSED, programs)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start the agent")
    }

    pub fn status(&self) -> Result<StatusReport> {
        let output = self.ctl(&["status", "-o", "json"])?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }

    /// Until nothing is missing, or nothing but that.
    pub fn wait_ready_but_for(
        &self,
        missing: Option<&str>,
        agent: &mut Child,
    ) -> Result<StatusReport> {
        let ready = wait_for("the agent to be ready", || {
            if let Some(status) = agent.try_wait()? {
                return Ok(Some(Err(anyhow::anyhow!("it ended: {status}"))));
            }
            let status = self.status()?;
            let found = status.conditions.iter().filter(|condition| !condition.ok);
            let found: Vec<_> = found.map(|condition| condition.name.as_str()).collect();
            if found != missing.as_slice() {
                bail!("{:?}", status.conditions);
            }
            Ok(Some(Ok(status)))
        });
        ready.and_then(|ready| ready).with_context(|| {
            let log = fs::read_to_string(LOG_FILE).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(10)..].join("\n");
            format!("the agent's log ends with\n{last}")
        })
    }

    pub fn wait_ready(&self, agent: &mut Child) -> Result<StatusReport> {
        self.wait_ready_but_for(None, agent)
    }

    /// The trouble of that reason, once the agent has seen it.
    pub fn trouble(&self, reason: &str) -> Result<String> {
        let is_it = |trouble: &Trouble| trouble.reason == reason;
        wait_for(&format!("the trouble {reason}"), || {
            let troubles = self.status()?.troubles;
            Ok(troubles.into_iter().find(is_it).map(|found| found.text))
        })
    }

    /// What a scraper gets.
    pub fn metrics(&self) -> Result<String> {
        let get = || -> Result<String> {
            let mut stream = TcpStream::connect(names::METRICS_ADDR)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        get().context("cannot read the metrics")
    }

    /// A call of the plugin by its configuration as the agent installed it.
    fn call(&self, verb: &str, id: Option<&str>, more: Value) -> Result<Output> {
        let mut config = json!({"cniVersion": "1.1.0", "name": "sinabro", "type": "sinabro"});
        for (key, value) in more.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        let mut command = Command::new(PLUGIN);
        command
            .env_clear()
            .env("CNI_COMMAND", verb)
            .env("CNI_PATH", "/opt/cni/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(id) = id {
            command
                .env("CNI_CONTAINERID", id)
                .env("CNI_NETNS", netns(id))
                .env("CNI_IFNAME", "eth0");
        }
        let mut child = command.spawn().context("cannot start the plugin")?;
        let mut stdin = child.stdin.take().context("no standard input")?;
        stdin.write_all(config.to_string().as_bytes())?;
        drop(stdin);
        Ok(child.wait_with_output()?)
    }

    /// One that must succeed.
    pub fn cni(&self, verb: &str, id: Option<&str>, more: Value) -> Result<Value> {
        let output = self.call(verb, id, more)?;
        let said = self.said(&output).with_context(|| format!("CNI {verb}"))?;
        match said.is_empty() {
            true => Ok(Value::Null),
            false => Ok(serde_json::from_slice(&output.stdout)?),
        }
    }

    /// One that must fail: its error (CNI specification, section 5, "Error").
    pub fn cni_refused(&self, verb: &str, id: Option<&str>) -> Result<(u64, String)> {
        let output = self.call(verb, id, json!({}))?;
        ensure!(!output.status.success(), "CNI {verb} succeeded");
        let error: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("CNI {verb} gives no error but {output:?}"))?;
        let code = error["code"].as_u64().context("no `code`")?;
        Ok((code, error.to_string()))
    }

    /// A pod's network namespace, as a runtime makes it.
    pub fn sandbox(&self, id: &str) -> Result<Place> {
        let place = Place::new(id, NetNs::create_at(netns(id))?);
        place.set_up("lo", &[])?;
        Ok(place)
    }

    pub fn add(&self, id: &'static str) -> Result<Pod> {
        let place = self.sandbox(id)?;
        let result = self.cni("ADD", Some(id), json!({}))?;
        let ips = result["ips"].as_array().context("no `ips`")?;
        let addresses = ips.iter().map(|ip| {
            let net: IpNet = ip["address"].as_str().context("no `address`")?.parse()?;
            Ok(net.addr())
        });
        let addresses: Vec<IpAddr> = addresses.collect::<Result<_>>()?;
        ensure!(addresses.len() == self.families, "{addresses:?}");
        Ok(Pod {
            id,
            place,
            addresses,
            result,
        })
    }

    /// Between pods, between pod and node.
    pub fn reach_pods(&self, one: &Pod, two: &Pod) -> Result<String> {
        for &address in &two.addresses {
            icmp::ping(&one.place, address, PATIENCE)?;
            udp::echo(&one.place, &two.place, address, 1000, false)?;
            tcp::transfer(&one.place, &two.place, address, 1_000_000)?;
            tcp::transfer(&self.this, &two.place, address, 10_000)?;
        }
        let families: Vec<_> = two.addresses.iter().map(IpAddr::to_string).collect();
        Ok(format!("pod to {}", families.join(", ")))
    }

    /// The same, and out, masqueraded.
    pub fn reach(&self, one: &Pod, two: &Pod) -> Result<String> {
        let pods = self.reach_pods(one, two)?;
        let [outside, ..] = self.outside_addresses[..] else {
            bail!("no host outside");
        };
        let seen = tcp::transfer(&one.place, &self.outside, outside, 100_000)?.seen;
        ensure!(seen.to_string() == "192.0.2.1", "seen outside as {seen}");
        let echoed = udp::echo(&one.place, &self.outside, outside, 1000, false)?;
        ensure!(
            echoed.to_string() == "192.0.2.1",
            "seen outside as {echoed}"
        );
        Ok(format!("{pods}, and outside"))
    }

    pub fn sctp(&self, one: &Pod, two: &Pod) -> Result<String> {
        for &address in &two.addresses {
            sctp::exchange(&one.place, &two.place, address)?;
        }
        let from = [&one.place, &two.place];
        for &outside in &self.outside_addresses {
            let peers = sctp::exchange_by(&from, 40000, &self.outside, outside)?;
            let kept = peers.iter().filter(|peer| peer.port() == 40000).count();
            let is_of_pod = |peer: &SocketAddr| {
                [one, two]
                    .iter()
                    .any(|pod| pod.addresses.contains(&peer.ip()))
            };
            ensure!(
                kept == 1 && !peers.iter().any(is_of_pod),
                "seen outside as {peers:?}, where one was to keep its port and both the node's address"
            );
        }
        Ok("an association between pods by each family, and two outside by one port".into())
    }

    pub fn check(&self, pod: &Pod) -> Result<String> {
        let previous = json!({"prevResult": pod.result});
        self.cni("CHECK", Some(pod.id), previous.clone())?;
        // It notices what is wrong.
        let index = pod.place.index("eth0")?;
        let mut conn = pod.place.conn()?;
        conn.execute(sinabro_netlink::link::set_down(index))?;
        let wrong = self.cni("CHECK", Some(pod.id), previous.clone());
        ensure!(
            wrong.is_err(),
            "CHECK finds nothing wrong with a link that is down"
        );
        let again = self.add_again(pod)?;
        self.cni("CHECK", Some(pod.id), json!({"prevResult": again}))?;
        Ok("agrees, and notices a link that is down".into())
    }

    /// The link that was set down lost its routes.
    fn add_again(&self, pod: &Pod) -> Result<Value> {
        self.cni("DEL", Some(pod.id), json!({"prevResult": pod.result}))?;
        let result = self.cni("ADD", Some(pod.id), json!({}))?;
        Ok(result)
    }

    /// A pod that the runtime does not name goes.
    pub fn collect(&self, keep: &Pod, gone: &Pod) -> Result<String> {
        let valid =
            json!({"cni.dev/valid-attachments": [{"containerID": keep.id, "ifname": "eth0"}]});
        self.cni("GC", None, valid)?;
        let left = self.links()?;
        let link = sinabro_common::names::pod_link(keep.id, "eth0");
        ensure!(left == [link], "links of pods: {left:?}");
        NetNs::remove_at(netns(gone.id))?;
        Ok("takes what no pod has any more, and nothing else".into())
    }

    pub fn delete(&self, pod: &Pod) -> Result<String> {
        for _ in 0..2 {
            self.cni("DEL", Some(pod.id), json!({"prevResult": pod.result}))?;
        }
        let left = self.links()?;
        ensure!(left.is_empty(), "links of pods: {left:?}");
        NetNs::remove_at(netns(pod.id))?;
        Ok("and again".into())
    }

    pub fn links(&self) -> Result<Vec<String>> {
        let links = self.this.conn()?.links()?;
        let names = links.into_iter().map(|link| link.name);
        Ok(names
            .filter(|name| sinabro_common::names::is_pod_link(name))
            .collect())
    }

    /// Of what an agent makes, and of what the machine has by it.
    pub fn nothing_left(&self) -> Result<String> {
        let mut left: Vec<_> = DIRECTORIES.iter().flat_map(|path| entries(path)).collect();
        left.extend(Snapshot::take()?.ours().iter().map(ToString::to_string));
        let after = links_and_routes(&self.this)?;
        left.extend(after.difference(&self.before).cloned());
        let gone: Vec<_> = self.before.difference(&after).cloned().collect();
        ensure!(left.is_empty(), "left behind: {}", left.join(", "));
        ensure!(gone.is_empty(), "taken, too: {}", gone.join(", "));
        Ok("refused below a running agent, then nothing left".into())
    }
}

/// What is there of its own must not be when the node is given up.
const DIRECTORIES: [&str; 5] = [
    "/sys/fs/bpf",
    names::CNI_BIN_DIR,
    names::CNI_CONF_DIR,
    names::STATE_DIR,
    names::PROGRAMS_DIR,
];

/// The directory itself where that is ours, and else what is in it.
fn entries(path: &str) -> Vec<String> {
    let is_ours = path == names::STATE_DIR || path == names::PROGRAMS_DIR;
    if is_ours && Path::new(path).exists() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path().display().to_string())
        .collect()
}

/// All but the routes that the kernel makes with an address, some of which come when it pleases.
fn links_and_routes(place: &Place) -> Result<BTreeSet<String>> {
    let mut conn = place.conn()?;
    let links = conn.links()?;
    let mut found: BTreeSet<_> = links
        .iter()
        .map(|link| format!("link {}", link.name))
        .collect();
    let routes = conn.routes(&RouteFilter::default())?;
    let routes = routes
        .iter()
        .filter(|route| route.protocol != libc::RTPROT_KERNEL);
    found.extend(routes.map(|route| format!("route {} in table {}", route.dst, route.table)));
    Ok(found)
}

fn netns(id: &str) -> String {
    format!("/run/netns/{id}")
}
