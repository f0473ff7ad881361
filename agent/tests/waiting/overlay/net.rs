//! Nodes for the tests: networks joined by a bridge, each with the reconciler at work.

use ipnet::IpNet;
use sinabro_agent::{
    apply::{self, Overlay, OverlayConfig, OverlayStatus, PodRoute},
    plan::{Facts, Node, Reached, Routing},
    watch::Snapshot,
};
use sinabro_common::names::{ROUTE_PROTOCOL, VXLAN_LINK, VXLAN_PORT, VXLAN_VNI};
use sinabro_lab::Place;
pub use sinabro_lab::wait::{eventually as until, eventually_some as eventually};
use sinabro_netlink::{
    Conn, Link, ResultExt, bridge,
    fdb::Fdb,
    neigh::Neigh,
    route::{Route, RouteFilter, TABLE_MAIN},
};
use std::{
    net::{IpAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};
use tokio::{runtime::Runtime, sync::watch};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Underlay {
    V4,
    V6,
}

/// A node's network and reconciler. Number `n` has 192.168.7.n and fd07::n on eth0, and one
/// pod address per range on its loopback.
pub struct Machine {
    pub place: Place,
    pub overlay: Overlay,
    pub pods: watch::Sender<Vec<PodRoute>>,
}

/// The machines and what they are told.
pub struct Net {
    switch: Place,
    pub machines: Vec<Machine>,
    facts: watch::Sender<Snapshot>,
    runtime: Runtime,
}

/// The entry of node `n`, with ranges 10.244.r.0/24 and fd00:244:0:r::/64.
pub fn entry(n: u8, range: u8, underlay: Underlay) -> Node {
    let v4: IpAddr = [192, 168, 7, n].into();
    let v6: IpAddr = [0xfd07, 0, 0, 0, 0, 0, 0, u16::from(n)].into();
    let addresses = match underlay {
        Underlay::V4 => vec![v4, v6],
        Underlay::V6 => vec![v6, v4],
    };
    let cidrs = [
        format!("10.244.{range}.0/24"),
        format!("fd00:244:0:{range:x}::/64"),
    ];
    Node {
        name: format!("n{n}"),
        addresses,
        pod_cidrs: cidrs.iter().map(|c| c.parse().unwrap()).collect(),
        ..Node::default()
    }
}

/// The pod addresses of range `r`.
pub fn pod(range: u8) -> [IpAddr; 2] {
    [
        [10, 244, range, 5].into(),
        [0xfd00, 0x244, 0, u16::from(range), 0, 0, 0, 5].into(),
    ]
}

impl Net {
    /// So many machines that know one another.
    pub fn new(count: u8, underlay: Underlay) -> Self {
        let net = Self::without_facts(count);
        net.tell((1..=count).map(|n| entry(n, n, underlay)));
        net
    }

    pub fn without_facts(count: u8) -> Self {
        let switch = Place::fresh("switch").unwrap();
        let mut conn = switch.conn().unwrap();
        conn.execute(bridge::create("br0")).unwrap();
        let runtime = Runtime::new().unwrap();
        let (facts, _) = watch::channel(Snapshot::default());
        let mut net = Self {
            switch,
            machines: Vec::new(),
            facts,
            runtime,
        };
        for n in 1..=count {
            net.boot(n);
        }
        net
    }

    fn boot(&mut self, n: u8) {
        let place = Place::fresh(&format!("n{n}")).unwrap();
        let port = format!("port{n}");
        let near = (port.as_str(), [2, 0, 0, 0, 1, n]);
        let far = ("eth0", [2, 0, 0, 0, 2, n]);
        self.switch.cable(near, 1500, &place, far).unwrap();
        self.switch.plug(&port, "br0").unwrap();
        let addresses = [format!("192.168.7.{n}/24"), format!("fd07::{n:x}/64")];
        let addresses = addresses.map(|address| address.parse().unwrap());
        place.set_up("eth0", &addresses).unwrap();
        place.set_up("lo", &pod(n).map(IpNet::from)).unwrap();
        let config = OverlayConfig {
            direct: true,
            cni_conf_dir: "/nowhere".into(),
            routing: Routing::Tunnel,
            node: format!("n{n}"),
            device: VXLAN_LINK.into(),
            vni: VXLAN_VNI,
            port: VXLAN_PORT,
            uplink: "eth0".into(),
            mtu: None,
            // Nothing here is to be right only because it was looked at again.
            period: Duration::from_secs(24 * 3600),
        };
        let (pods, receiver) = watch::channel(Vec::new());
        let _context = self.runtime.enter();
        let overlay = apply::spawn_in(
            Some(place.net().clone()),
            None,
            config,
            self.facts.subscribe(),
            receiver,
            watch::channel(Reached::default()).1,
            watch::channel(Vec::new()).1,
        );
        self.machines.push(Machine {
            place,
            overlay,
            pods,
        });
    }

    pub fn tell(&self, nodes: impl IntoIterator<Item = Node>) {
        self.facts.send_replace(Snapshot {
            facts: Some(Arc::new(Facts::new(nodes))),
            ..Snapshot::default()
        });
    }

    /// Machine `n`, counted from one.
    pub fn machine(&self, n: u8) -> &Machine {
        &self.machines[usize::from(n) - 1]
    }

    /// Waits until a datagram of each family crosses from one pod to another, and back.
    pub fn crosses(&self, (from, from_range): (u8, u8), (to, to_range): (u8, u8)) {
        for (a, b) in pod(from_range).into_iter().zip(pod(to_range)) {
            let here = self.machine(from).socket(a);
            let there = self.machine(to).socket(b);
            let b = there.local_addr().unwrap();
            eventually(&format!("{a} reaches {b}"), || {
                // A failing send (no route yet) is part of the waiting.
                let _ = here.send_to(b"ping", b);
                let mut buffer = [0; 16];
                let (len, source) = there.recv_from(&mut buffer).ok()?;
                assert_eq!(source, here.local_addr().unwrap(), "the pod's own source");
                let _ = there.send_to(&buffer[..len], source);
                (here.recv(&mut buffer).ok()? == 4).then_some(())
            });
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // The tasks end with the facts' source; a panic elsewhere must not be hidden by waiting.
        for machine in &self.machines {
            machine.overlay.task.abort();
        }
    }
}

impl Machine {
    pub fn conn(&self) -> Conn {
        self.place.conn().unwrap()
    }

    /// A socket of this machine, with a short receive timeout.
    pub fn socket(&self, address: IpAddr) -> UdpSocket {
        let bind = || Ok(UdpSocket::bind((address, 0))?);
        let socket = self.place.run(bind).unwrap();
        let timeout = Some(Duration::from_millis(50));
        socket.set_read_timeout(timeout).unwrap();
        socket
    }

    pub fn device(&self) -> Option<Link> {
        self.conn()
            .link_by_name(VXLAN_LINK)
            .ignore_not_found()
            .unwrap()
    }

    pub fn status(&self) -> OverlayStatus {
        self.overlay.status.borrow().clone()
    }

    /// Gives the machine a pod address of another range.
    pub fn add_pod(&self, range: u8) {
        let addresses = pod(range).map(IpNet::from);
        self.place.set_up("lo", &addresses).unwrap();
    }
}

pub fn index(conn: &mut Conn, name: &str) -> u32 {
    conn.link_by_name(name).unwrap().index
}

/// Sinabro's routes on the device, without the rest.
pub fn routes(machine: &Machine) -> Vec<Route> {
    let Some(device) = machine.device() else {
        return Vec::new();
    };
    let filter = RouteFilter {
        oif: Some(device.index),
        protocol: Some(ROUTE_PROTOCOL),
        table: Some(TABLE_MAIN),
        ..RouteFilter::default()
    };
    machine.conn().routes(&filter).unwrap()
}

pub fn neighbours(machine: &Machine) -> Vec<Neigh> {
    let Some(device) = machine.device() else {
        return Vec::new();
    };
    let all = machine.conn().neighs(device.index).unwrap();
    all.into_iter().filter(Neigh::is_permanent).collect()
}

pub fn fdb(machine: &Machine) -> Vec<Fdb> {
    match machine.device() {
        Some(device) => machine.conn().fdb(device.index).unwrap(),
        None => Vec::new(),
    }
}

pub fn peer_problem(machine: &Machine, peer: &str) -> Option<String> {
    let status = machine.status();
    let node = status.nodes.iter().find(|node| node.name == peer)?.clone();
    node.problem
}
