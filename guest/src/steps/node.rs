//! The machine as a node: where everything is where a user has it, from `prepare` to `uninstall`.
//!
//! ```text
//!   pods ── snb… │ this machine │ eth0 ── outside
//!                                192.0.2.0/24, 2001:db8:2::/64
//! ```

use crate::report::Report;
use anyhow::{Context as _, Result, bail, ensure};
use ipnet::IpNet;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use sinabro_common::api::StatusReport;
use sinabro_guest::{BIN_DIR, Environment, Message, SELF_TEST};
use sinabro_lab::{
    Place,
    traffic::{PATIENCE, icmp, sctp, tcp, udp},
    wait::wait_for,
};
use sinabro_netlink::{Conn, Family, NetNs, route::Route};
use std::{
    fs,
    io::Write as _,
    net::IpAddr,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

const NODES_FILE: &str = "/run/nodes.json";
const LOG_FILE: &str = "/run/agent.log";
const PLUGIN: &str = "/opt/cni/bin/sinabro";

pub fn run(report: &mut Report, environment: &Environment) -> Result<()> {
    report.doing("as a node")?;
    let node = Node::new(environment).context("cannot make the machine a node")?;
    report.check("prepare", node.prepare())?;
    let mut agent = node.start_agent()?;
    let status = node.wait_ready(&mut agent)?;
    let mut modes = status.modes;
    if let Some(found) = status.tcp_self_test {
        let verdict = format!("{:?}: {}", found.verdict, found.reason);
        modes.insert(SELF_TEST.into(), verdict);
    }
    report.say(&Message::Modes(modes))?;

    report.check(
        "cni_status",
        node.cni("STATUS", None, json!({}))
            .map(|_| "possible".into()),
    )?;
    let pods = ["one", "two"].map(|id| node.add(id));
    let [one, two] = pods;
    let (one, two) = (one.context("ADD")?, two.context("ADD")?);
    report.check("cni_add", node.reach(&one, &two))?;
    report.check("cni_check", node.check(&one))?;
    if environment.sctp {
        report.check("sctp", node.sctp(&one, &two))?;
    }

    report.doing("as a node whose agent is killed")?;
    kill(Pid::from_raw(agent.id() as i32), Signal::SIGKILL)?;
    agent.wait()?;
    let without = node.reach(&one, &two).context("without an agent");
    let mut agent = node.start_agent()?;
    node.wait_ready(&mut agent)?;
    let with = node.reach(&one, &two).context("with a new agent");
    report.check("cni_agent_kill", without.and(with))?;

    report.doing("as a node that pods leave")?;
    report.check("cni_gc", node.collect(&one, &two))?;
    report.check("cni_del", node.delete(&one))?;

    report.doing("as a node that is given up")?;
    let ctl = ["uninstall"];
    let refused = node.ctl(&ctl)?;
    kill(Pid::from_raw(agent.id() as i32), Signal::SIGTERM)?;
    let ended = agent.wait()?;
    let uninstalled = || {
        ensure!(
            !refused.status.success(),
            "uninstalled below a running agent"
        );
        ensure!(ended.success(), "the agent ended with {ended}");
        node.said(&node.ctl(&ctl)?)?;
        node.nothing_left()
    };
    report.check("uninstall", uninstalled())
}

struct Node {
    this: Place,
    outside: Place,
    outside_addresses: Vec<IpAddr>,
    families: usize,
}

/// A pod and its addresses.
struct Pod {
    id: &'static str,
    place: Place,
    addresses: Vec<IpAddr>,
    result: Value,
}

impl Node {
    fn new(environment: &Environment) -> Result<Self> {
        let families = if environment.without_ipv6 { 1 } else { 2 };
        let nets = |all: [&str; 2]| -> Result<Vec<IpNet>> {
            let nets = all.iter().take(families);
            nets.map(|net| Ok(net.parse()?)).collect()
        };
        let this = Place::new("this machine", NetNs::current()?);
        let outside = Place::fresh("outside")?;
        let ends = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 9]];
        this.cable(("eth0", ends[0]), 1500, &outside, ("eth0", ends[1]))?;
        this.set_up("lo", &[])?;
        outside.set_up("lo", &[])?;
        let own = nets(["192.0.2.1/24", "2001:db8:2::1/64"])?;
        let far = nets(["192.0.2.9/24", "2001:db8:2::9/64"])?;
        let eth0 = this.set_up("eth0", &own)?;
        outside.set_up("eth0", &far)?;
        let mut conn = Conn::new()?;
        for net in &far {
            let family = match net.addr() {
                IpAddr::V4(_) => Family::V4,
                IpAddr::V6(_) => Family::V6,
            };
            let route = Route::default_of(family).via(net.addr()).dev(eth0);
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
            this,
            outside,
            outside_addresses: far.iter().map(IpNet::addr).collect(),
            families,
        })
    }

    fn ctl(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(Path::new(BIN_DIR).join("sinabroctl"));
        command
            .args(arguments)
            .output()
            .context("cannot run sinabroctl")
    }

    /// What a program said that must have succeeded.
    fn said(&self, output: &Output) -> Result<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "{}: {out} {err}", output.status);
        Ok(out.replace('\n', "; "))
    }

    fn prepare(&self) -> Result<String> {
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

    fn start_agent(&self) -> Result<Child> {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(LOG_FILE)?;
        Command::new(Path::new(BIN_DIR).join("sinabro-agent"))
            .args(["--node-name", "n1", "--nodes", NODES_FILE])
            .arg(format!("--cni-source={BIN_DIR}/sinabro"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start the agent")
    }

    fn wait_ready(&self, agent: &mut Child) -> Result<StatusReport> {
        let ready = wait_for("the agent to be ready", || {
            if let Some(status) = agent.try_wait()? {
                return Ok(Some(Err(anyhow::anyhow!("it ended: {status}"))));
            }
            let output = self.ctl(&["status", "-o", "json"])?;
            let status: StatusReport = serde_json::from_slice(&output.stdout)
                .with_context(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())?;
            let missing = status.conditions.iter().find(|condition| !condition.ok);
            if let Some(missing) = missing {
                bail!("{}: {}", missing.name, missing.detail);
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

    /// A call of the plugin by its configuration as the agent installed it.
    fn cni(&self, verb: &str, id: Option<&str>, more: Value) -> Result<Value> {
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
        let output = child.wait_with_output()?;
        let said = self.said(&output).with_context(|| format!("CNI {verb}"))?;
        match said.is_empty() {
            true => Ok(Value::Null),
            false => Ok(serde_json::from_slice(&output.stdout)?),
        }
    }

    fn add(&self, id: &'static str) -> Result<Pod> {
        let place = Place::new(id, NetNs::create_at(netns(id))?);
        place.set_up("lo", &[])?;
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

    /// Between pods, between pod and node, and out, masqueraded.
    fn reach(&self, one: &Pod, two: &Pod) -> Result<String> {
        for &address in &two.addresses {
            icmp::ping(&one.place, address, PATIENCE)?;
            udp::echo(&one.place, &two.place, address, 1000, false)?;
            tcp::transfer(&one.place, &two.place, address, 1_000_000)?;
            tcp::transfer(&self.this, &two.place, address, 10_000)?;
        }
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
        let families: Vec<_> = two.addresses.iter().map(IpAddr::to_string).collect();
        Ok(format!("pod to {}, and outside", families.join(", ")))
    }

    fn sctp(&self, one: &Pod, two: &Pod) -> Result<String> {
        for &address in &two.addresses {
            sctp::exchange(&one.place, &two.place, address)?;
        }
        Ok("an association between pods by each family".into())
    }

    fn check(&self, pod: &Pod) -> Result<String> {
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
    fn collect(&self, keep: &Pod, gone: &Pod) -> Result<String> {
        let valid =
            json!({"cni.dev/valid-attachments": [{"containerID": keep.id, "ifname": "eth0"}]});
        self.cni("GC", None, valid)?;
        let left = self.links()?;
        let link = sinabro_common::names::pod_link(keep.id, "eth0");
        ensure!(left == [link], "links of pods: {left:?}");
        NetNs::remove_at(netns(gone.id))?;
        Ok("takes what no pod has any more, and nothing else".into())
    }

    fn delete(&self, pod: &Pod) -> Result<String> {
        for _ in 0..2 {
            self.cni("DEL", Some(pod.id), json!({"prevResult": pod.result}))?;
        }
        let left = self.links()?;
        ensure!(left.is_empty(), "links of pods: {left:?}");
        NetNs::remove_at(netns(pod.id))?;
        Ok("and again".into())
    }

    fn links(&self) -> Result<Vec<String>> {
        let links = self.this.conn()?.links()?;
        let names = links.into_iter().map(|link| link.name);
        Ok(names
            .filter(|name| sinabro_common::names::is_pod_link(name))
            .collect())
    }

    fn nothing_left(&self) -> Result<String> {
        let left = |path: &str| -> Result<Vec<String>> {
            let Ok(entries) = fs::read_dir(path) else {
                return Ok(Vec::new());
            };
            let name = |entry: std::io::Result<fs::DirEntry>| {
                Ok(format!("{path}/{}", entry?.file_name().to_string_lossy()))
            };
            entries.map(name).collect()
        };
        let mut all = Vec::new();
        for path in [
            "/sys/fs/bpf",
            "/opt/cni/bin",
            "/etc/cni/net.d",
            "/run/sinabro",
        ] {
            all.extend(left(path)?);
        }
        let links = self.this.conn()?.links()?;
        let others = ["lo", "eth0"];
        let links = links.into_iter().map(|link| link.name);
        all.extend(
            links.filter(|name| name.contains("sinabro") && !others.contains(&name.as_str())),
        );
        ensure!(all.is_empty(), "left behind: {}", all.join(", "));
        Ok("refused below a running agent, then nothing left".into())
    }
}

fn netns(id: &str) -> String {
    format!("/run/netns/{id}")
}
