//! A load balancer, of the kind that routes its addresses to nodes as they are: what a cloud's
//! controller and its network do for Services of type LoadBalancer.
//!
//! Each such Service gets an address of each of its families. The control plane's machine, where
//! the tests' clients are, has a route to it by the nodes that answer health checks: at the Service's
//! own port if its policy is Local, else where kube-proxy has it. One flow goes to one node; with
//! session affinity all go to the same, since each node knows its own clients only.

use super::{
    Cluster,
    control::{self, BRIDGE},
    layout::{self, Families},
    machine::Machine,
};
use crate::workspace::output;
use anyhow::{Context as _, Result, anyhow, bail};
use serde_json::{Value, json};
use sinabro_lab::Place;
use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// What a Service's load balancer has to be gone before: k8s.io/cloud-provider/service/helpers.
const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";
/// Where nodes answer for Services whose policy is Cluster.
const HEALTH: u16 = 10256;
const EVERY: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_secs(1);

/// Of clients: not of the nodes' network, so that it can be told who saw whom (RFC 5737, RFC 3849).
const CLIENT: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0, 0, 1)),
];

/// Number of a node that there is never, where an address leads that has no nodes: what is sent to it is lost.
const NOBODY: u8 = 244;
const NOWHERE: &str = "02:00:00:00:00:01";

fn client(ipv6: bool) -> IpAddr {
    CLIENT[usize::from(ipv6)]
}

/// The load balancer's address with this number.
fn address(ipv6: bool, number: u8) -> IpAddr {
    match ipv6 {
        false => Ipv4Addr::new(203, 0, 113, number).into(),
        true => Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, number.into()).into(),
    }
}

/// Runs until [`Balancer::stop`].
pub struct Balancer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Balancer {
    pub fn start(cluster: &Cluster) -> Result<Self> {
        let control = control::machine();
        for setting in ["ipv4", "ipv6"] {
            // By ports, too.
            let policy = format!("net.{setting}.fib_multipath_hash_policy=1");
            output(control.command("sysctl")?.args(["-qw", &policy]))?;
        }
        let families = cluster.variant().families;
        for nobody in families.node(NOBODY) {
            let client = client(nobody.is_ipv6());
            let all = match nobody.is_ipv6() {
                false => format!("{}/24", address(false, 0)),
                true => format!("{}/64", address(true, 0)),
            };
            // `replace`: there from an earlier run.
            control.ip(&format!("addr replace {client} dev lo"))?;
            control.ip(&format!(
                "neigh replace {nobody} lladdr {NOWHERE} nud permanent dev {BRIDGE}"
            ))?;
            control.ip(&format!(
                "route replace {all} via {nobody} dev {BRIDGE} src {client}"
            ))?;
        }
        let mut balancing = Balancing {
            place: control.place()?,
            control,
            families,
            nodes: cluster.nodes(),
            given: BTreeMap::new(),
            last: 0,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let ending = stop.clone();
        let thread = thread::spawn(move || {
            let mut outcome = Ok(());
            while !ending.load(Ordering::Relaxed) {
                outcome = balancing.pass();
                thread::sleep(EVERY);
            }
            // One that failed is done again by the next: what counts is the last.
            outcome
        });
        Ok(Self { stop, thread })
    }

    /// Ends it; an error if it did not get along with the cluster at last.
    pub fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let outcome = self.thread.join().map_err(|_| anyhow!("it panicked"));
        outcome.flatten().context("the load balancer")
    }
}

/// What a Service has got.
struct Given {
    addresses: Vec<IpAddr>,
    /// Numbers of the nodes that each address is routed to, as far as it is.
    ways: Vec<Vec<u8>>,
}

struct Balancing {
    control: Machine,
    place: Place,
    families: Families,
    nodes: Vec<String>,
    /// By the Service's UID.
    given: BTreeMap<String, Given>,
    last: u8,
}

impl Balancing {
    fn pass(&mut self) -> Result<()> {
        let text = output(control::kubectl()?.args(["get", "services", "-A", "-o", "json"]))?;
        let list: Value = serde_json::from_str(&text).context("kubectl printed no JSON")?;
        let services = list["items"].as_array().context("no list of Services")?;
        let mut first = Ok(());
        for service in services {
            let done = self.service(service);
            if let Err(error) = done {
                let name = &service["metadata"]["name"];
                first = first.and(Err(error.context(format!("Service {name}"))));
            }
        }
        first
    }

    fn service(&mut self, service: &Value) -> Result<()> {
        let meta = &service["metadata"];
        let uid = meta["uid"].as_str().context("no UID")?;
        let wants =
            service["spec"]["type"] == "LoadBalancer" && meta["deletionTimestamp"].is_null();
        let finalizers = meta["finalizers"].as_array().map_or(&[][..], Vec::as_slice);
        if !wants {
            if finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
                self.take(service, uid, finalizers)?;
            }
            return Ok(());
        }
        if !self.given.contains_key(uid) {
            let numbers = self.last.checked_add(1);
            self.last = numbers.context("no addresses are left: start it again")?;
            let families = service["spec"]["ipFamilies"].as_array();
            let families = families.context("a Service without families")?;
            let addresses = families.iter().map(|f| address(f == "IPv6", self.last));
            let addresses: Vec<IpAddr> = addresses.collect();
            let ways = vec![Vec::new(); addresses.len()];
            self.given.insert(uid.to_owned(), Given { addresses, ways });
        }
        if !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
            let mut all = finalizers.to_vec();
            all.push(FINALIZER.into());
            finalize(service, &all)?;
        }
        self.route(service, uid)?;
        let ingress = &service["status"]["loadBalancer"]["ingress"];
        if ingress.as_array().is_none_or(Vec::is_empty) {
            let addresses = self.given.get(uid).map(|given| &given.addresses);
            let ingress: Vec<Value> = (addresses.into_iter().flatten())
                .map(|address| json!({"ip": address, "ipMode": "VIP"}))
                .collect();
            tell(service, json!(ingress))?;
        }
        Ok(())
    }

    /// Leads its addresses to the nodes that want them.
    fn route(&mut self, service: &Value, uid: &str) -> Result<()> {
        let spec = &service["spec"];
        let port = match spec["externalTrafficPolicy"] == "Local" {
            true => u16::try_from(spec["healthCheckNodePort"].as_u64().unwrap_or(0))?,
            false => HEALTH,
        };
        let given = self.given.get(uid).context("it has no address")?;
        let mut ways = Vec::new();
        for (address, before) in given.addresses.iter().zip(&given.ways) {
            let mut healthy = Vec::new();
            for node in &self.nodes {
                let number = layout::node_number(node).context("not a node")?;
                if self.is_healthy(way(self.families, number, *address)?, port) {
                    healthy.push(number);
                }
            }
            if spec["sessionAffinity"] == "ClientIP" {
                let same = healthy.iter().find(|number| before.contains(number));
                let one = same.or(healthy.first()).copied();
                healthy = one.into_iter().collect();
            }
            if healthy != *before {
                self.lead(*address, &healthy)?;
            }
            ways.push(healthy);
        }
        if let Some(given) = self.given.get_mut(uid) {
            given.ways = ways;
        }
        Ok(())
    }

    fn lead(&self, address: IpAddr, nodes: &[u8]) -> Result<()> {
        if nodes.is_empty() {
            let _ = self.control.ip(&format!("route del {address}"));
            return Ok(());
        }
        let client = client(address.is_ipv6());
        let mut route = format!("route replace {address} src {client}");
        for number in nodes {
            route += &format!(" nexthop via {}", way(self.families, *number, address)?);
        }
        self.control.ip(&route)
    }

    /// Takes away what a Service has got that is none of a load balancer's any more.
    fn take(&mut self, service: &Value, uid: &str, finalizers: &[Value]) -> Result<()> {
        for address in self.given.remove(uid).into_iter().flat_map(|g| g.addresses) {
            self.lead(address, &[])?;
        }
        tell(service, Value::Null)?;
        let others = finalizers
            .iter()
            .filter(|finalizer| *finalizer != FINALIZER);
        finalize(service, &others.cloned().collect::<Vec<_>>())
    }

    fn is_healthy(&self, node: IpAddr, port: u16) -> bool {
        let ask = || -> Result<()> {
            let mut stream = TcpStream::connect_timeout(&SocketAddr::new(node, port), ANSWER)?;
            stream.set_read_timeout(Some(ANSWER))?;
            stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n")?;
            let mut answer = [0; 12];
            stream.read_exact(&mut answer)?;
            match answer.ends_with(b" 200") {
                true => Ok(()),
                false => bail!("not healthy"),
            }
        };
        self.place.run(ask).is_ok()
    }
}

/// The node's address of the other's family.
fn way(families: Families, number: u8, address: IpAddr) -> Result<IpAddr> {
    let addresses = families.node(number).into_iter();
    let mut same = addresses.filter(|own| own.is_ipv6() == address.is_ipv6());
    same.next().context("nodes have no address of that family")
}

fn patch(service: &Value, more: &[&str], patch: &Value) -> Result<()> {
    let of = |key| {
        service["metadata"][key]
            .as_str()
            .context("a Service without a name")
    };
    let (namespace, name, patch) = (of("namespace")?, of("name")?, patch.to_string());
    let what = [
        "-n",
        namespace,
        "patch",
        "service",
        name,
        "--type=merge",
        "-p",
        &patch,
    ];
    output(control::kubectl()?.args(what).args(more)).map(drop)
}

fn tell(service: &Value, ingress: Value) -> Result<()> {
    let status = json!({"status": {"loadBalancer": {"ingress": ingress}}});
    patch(service, &["--subresource=status"], &status)
}

fn finalize(service: &Value, finalizers: &[Value]) -> Result<()> {
    // Somebody else's are not taken away: the version says that none came in between.
    let version = &service["metadata"]["resourceVersion"];
    let meta = json!({"metadata": {"finalizers": finalizers, "resourceVersion": version}});
    patch(service, &[], &meta)
}
