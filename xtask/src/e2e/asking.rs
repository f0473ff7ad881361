//! Requests to a Service whose servers are pods of a Deployment: each is a connection or a flow of its own, from
//! everywhere where Services are translated in a way of their own.
//!
//! - a pod's program: its socket is connected to an endpoint;
//! - a node's program: the same, and for datagrams, too;
//! - this process, in another pod's network: it is in no cgroup of the node, so its packets are translated.

use super::{
    pods::{IMAGE, KubePod},
    world::{NAMESPACE, World},
};
use crate::cluster::{Family, Proxy};
use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::{Value, json};
use sinabro_lab::Place;
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    ops::Range,
    path::PathBuf,
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// Of the Service: HTTP by TCP, and the same question by UDP.
const TCP_PORT: u16 = 80;
const UDP_PORT: u16 = 81;
/// How long an endpoint serves after it was told to end.
const ENDING: u32 = 5;
pub const REPLICAS: usize = 3;
const ANSWER: Duration = Duration::from_secs(5);
/// The machine runs a cluster besides.
const PAUSE: Duration = Duration::from_millis(20);
/// What this process asks from, by UDP: each is used again after some ten seconds.
const PORTS: Range<u16> = 20_000..20_256;
/// Of each asker; below it nothing was tested.
const LEAST: usize = 50;
/// Ends the programs once it is there: in a pod, and on a node.
const STOP: &str = "/tmp/stop";
const STOP_NODE: &str = "/run/sinabro-e2e-asked-enough";
/// What the pod's program has said.
const LOG: &str = "/tmp/asked";

/// Makes a Deployment and its Service; the Service's addresses, one of each family.
pub fn deploy(world: &World, name: &str) -> Result<Vec<IpAddr>> {
    let ending = format!("--delay-shutdown={ENDING}");
    world.apply_all(vec![
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "replicas": REPLICAS,
                "selector": {"matchLabels": {"app": name}},
                // As few at a time as there can be, and never fewer than there should be.
                "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": {
                    "metadata": {"labels": {"app": name}},
                    "spec": {
                        "terminationGracePeriodSeconds": ENDING * 4,
                        "automountServiceAccountToken": false,
                        "containers": [{
                            "name": "main",
                            "image": IMAGE,
                            "imagePullPolicy": "IfNotPresent",
                            "args": ["netexec", "--http-port=8080", "--udp-port=8081", ending],
                            "readinessProbe": {
                                "httpGet": {"path": "/hostname", "port": 8080},
                                "periodSeconds": 1,
                            },
                        }],
                    },
                },
            },
        }),
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "selector": {"app": name},
                "ports": [
                    {"name": "http", "port": TCP_PORT, "targetPort": 8080},
                    {"name": "udp", "port": UDP_PORT, "targetPort": 8081, "protocol": "UDP"},
                ],
                "ipFamilyPolicy": "PreferDualStack",
            },
        }),
    ])?;
    rolled(world, name)?;
    addresses(world, name)
}

/// A Service's addresses, in the order of the cluster's families.
pub fn addresses(world: &World, name: &str) -> Result<Vec<IpAddr>> {
    let service = world.get(&["-n", NAMESPACE, "service", name])?;
    let all = service["spec"]["clusterIPs"].as_array();
    let all = all.context("a Service without addresses")?;
    let all = all
        .iter()
        .map(|text| Ok(text.as_str().unwrap_or_default().parse()?))
        .collect::<Result<Vec<IpAddr>>>()?;
    let has = |family: &Family| all.iter().any(|address| family.has(*address));
    ensure!(
        world.families().iter().all(has),
        "the addresses of Service {name} are {all:?}"
    );
    Ok(all)
}

/// Waits until a Deployment is what it should be, and pods of before are gone; the names of its pods.
pub fn rolled(world: &World, name: &str) -> Result<BTreeSet<String>> {
    let deployment = format!("deployment/{name}");
    let status = ["rollout", "status", &deployment, "--timeout=180s"];
    world.kubectl(&[&["-n", NAMESPACE], &status[..]].concat())?;
    let label = format!("app={name}");
    world.wait("the pods of before to be gone", || {
        let pods = world.get(&["-n", NAMESPACE, "pods", "-l", &label])?;
        let pods = pods["items"].as_array().context("no list of pods")?;
        let name = |pod: &Value| pod["metadata"]["name"].as_str().map(str::to_owned);
        Ok((pods.len() == REPLICAS).then(|| pods.iter().filter_map(name).collect()))
    })
}

/// Askers, until [`Asking::finish`].
pub struct Asking<'a> {
    world: &'a World,
    pod: String,
    /// The node's program: where it is told to stop, and what it has said.
    node: (PathBuf, Child, tempfile::NamedTempFile),
    stop: Arc<AtomicBool>,
    packets: Option<JoinHandle<Result<String>>>,
}

impl<'a> Asking<'a> {
    /// A pod, the node named, and this process in the other pod's network ask at each of a Service's
    /// addresses. In one pod, connections of both kinds would meet on the same ports.
    pub fn start(
        world: &'a World,
        [pod, other]: [&KubePod; 2],
        node: &str,
        service: &[IpAddr],
    ) -> Result<Self> {
        let asked_from = [&pod.place, &other.place, &world.cluster.place(node)?];
        wait_for_proxy(world, &asked_from, service)?;
        // Detached: what kubectl starts ends with the API server.
        let in_pod = script(service, STOP);
        let detached = format!("setsid bash -c '{in_pod}' > {LOG} 2>&1 < /dev/null &");
        let exec = ["-n", NAMESPACE, "exec", &pod.name, "--", "bash", "-c"];
        world.kubectl(&[&exec[..], &[&detached]].concat())?;

        let said = tempfile::NamedTempFile::new()?;
        let output: File = said.reopen()?;
        let stop_node = world.path(node, STOP_NODE)?;
        let _ = fs::remove_file(&stop_node);
        let program = world
            .cluster
            .in_node(node, "bash")?
            .args(["-c", &script(service, STOP_NODE)])
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(output)
            .spawn()
            .context("cannot start it")?;

        let stop = Arc::new(AtomicBool::new(false));
        let (place, service) = (other.place.clone(), service.to_vec());
        let packets = {
            let stop = stop.clone();
            thread::spawn(move || place.run(|| Ok(ask_by_packets(&service, &stop))))
        };
        Ok(Self {
            world,
            pod: pod.name.clone(),
            node: (stop_node, program, said),
            stop,
            packets: Some(packets),
        })
    }

    /// Ends it: an error if a single request had no answer. How many there were, and the names of the
    /// pods that answered every asker.
    pub fn finish(mut self) -> Result<(usize, BTreeSet<String>)> {
        let exec = ["-n", NAMESPACE, "exec", &self.pod, "--", "bash", "-c"];
        let end = format!("touch {STOP}; sleep 1; cat {LOG}");
        let in_pod = self.world.kubectl(&[&exec[..], &[&end]].concat())?;
        self.end();
        let on_node = fs::read_to_string(self.node.2.path())?;
        let packets = self.packets.take().context("it was ended before")?;
        let packets = packets.join().map_err(|_| anyhow!("an asker panicked"))??;
        let (mut count, mut names) = (0, None::<BTreeSet<String>>);
        for (who, said) in [("pod", in_pod), ("node", on_node), ("packets", packets)] {
            let lines: Vec<&str> = said.lines().collect();
            let answered: Vec<&str> = lines.iter().filter_map(|l| l.strip_prefix("ok ")).collect();
            let failed: Vec<&&str> = lines.iter().filter(|l| !l.starts_with("ok ")).collect();
            ensure!(
                failed.is_empty(),
                "{who}: {} of {} requests failed: {}",
                failed.len(),
                lines.len(),
                failed[0]
            );
            ensure!(
                answered.len() >= LEAST,
                "{who}: only {} requests",
                answered.len()
            );
            count += answered.len();
            let of_this: BTreeSet<String> = answered.into_iter().map(str::to_owned).collect();
            names = Some(match names {
                Some(names) => names.intersection(&of_this).cloned().collect(),
                None => of_this,
            });
        }
        Ok((count, names.unwrap_or_default()))
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = File::create(&self.node.0);
        let _ = self.node.1.wait();
        let _ = fs::remove_file(&self.node.0);
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits for kube-proxy, which may not have heard of the Service: after the API server was away it asks again as late as half
/// a minute later. Who asks before has the whole connection go where no rule led its first packet. Sinabro's own Services are
/// there at once, or it is a failure.
fn wait_for_proxy(world: &World, from: &[&Place], service: &[IpAddr]) -> Result<()> {
    if world.cluster.variant().proxy == Proxy::None {
        return Ok(());
    }
    for place in from {
        for address in service {
            let target = SocketAddr::new(*address, TCP_PORT);
            let what = format!("{} to reach Service {target}", place.name());
            world.wait(&what, || {
                Ok(place.run(|| ask_tcp(target)).is_ok().then_some(()))
            })?;
        }
    }
    Ok(())
}

/// Asks in turns, by TCP and UDP, and writes a line for each: `ok` and the name of who answered, or why
/// not. No apostrophe may be in it.
fn script(service: &[IpAddr], stop: &str) -> String {
    let mut asks = String::new();
    for address in service {
        let (tcp, udp) = (
            SocketAddr::new(*address, TCP_PORT),
            SocketAddr::new(*address, UDP_PORT),
        );
        asks += &format!(
            "said=$(curl -gsS --noproxy \"*\" --max-time 5 http://{tcp}/hostname 2>&1) && \
               echo \"ok $said\" || echo \"TCP {tcp}: $said\"; \
             said=$(exec 3<>/dev/udp/{address}/{UDP_PORT}; echo -n hostname >&3; \
               timeout 5 dd bs=512 count=1 <&3 2>/dev/null) && \
               echo \"ok $said\" || echo \"UDP {udp}: no answer\"; "
        );
    }
    format!("rm -f {stop}; while [ ! -e {stop} ]; do {asks} sleep 0.02; done")
}

/// The same of this thread.
fn ask_by_packets(service: &[IpAddr], stop: &AtomicBool) -> String {
    let mut said = String::new();
    let mut asks = service.iter().cycle().zip(PORTS.cycle());
    while !stop.load(Ordering::Relaxed) {
        for (address, port) in asks.by_ref().take(service.len()) {
            let (tcp, udp) = (
                SocketAddr::new(*address, TCP_PORT),
                SocketAddr::new(*address, UDP_PORT),
            );
            for (what, at, answer) in [("TCP", tcp, ask_tcp(tcp)), ("UDP", udp, ask_udp(port, udp))]
            {
                said += &match answer {
                    Ok(name) => format!("ok {name}\n"),
                    Err(error) => format!("{what} {at}: {error:#}\n"),
                };
            }
        }
        thread::sleep(PAUSE);
    }
    said
}

fn ask_tcp(target: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&target, ANSWER).context("connecting")?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("no answer")?;
    let (head, name) = answer.split_once("\r\n\r\n").context("no end of headers")?;
    ensure!(head.contains(" 200 "), "answered by {head}");
    Ok(name.to_owned())
}

/// From a port that an earlier question came from, as happens to who asks a lot: its record leads to an endpoint that may
/// be about to end.
fn ask_udp(port: u16, target: SocketAddr) -> Result<String> {
    let socket = UdpSocket::bind((sinabro_lab::traffic::any(target.ip()), port))?;
    socket.set_read_timeout(Some(ANSWER))?;
    socket.connect(target)?;
    socket.send(b"hostname")?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer).context("no answer")?;
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
}
