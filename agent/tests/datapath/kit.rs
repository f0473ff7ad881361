//! A world of its own for each test: the thread's network namespace is a node, with a bpffs of
//! its own, and pods and an outside host are namespaces beside it. All of it goes with the thread.

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use sinabro_agent::datapath::{
    AttachMode, Datapath, DatapathConfig, DatapathError, PodAcceleration,
};
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_MASQUERADE, FLAG_REDIRECT_PEER, FLAG_TUNNELS, NodeConfig},
        drop::DropReason,
        endpoint::{Endpoint, PodLink},
    },
    names,
};
pub use sinabro_lab::wait::eventually;
use sinabro_netlink::{
    Conn, Family, NetNs, addr::Addr as Address, link, neigh::Neigh, netns, route::Route, sysctl,
    veth::Veth,
};
use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, TcpStream},
    path::Path,
};

pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// Addresses of the node that its pods can reach.
const LOCAL_V4: &str = "10.1.0.1";
const LOCAL_V6: &str = "fd00:1::1";
/// Translated ports.
pub const PORT_MIN: u16 = 61000;
pub const PORT_MAX: u16 = 65535;

/// Runs a test in its own world.
pub fn fresh<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    netns::in_fresh(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        // A mount of its own over the directory that every machine has for it.
        let bpffs = Some("bpf");
        mount(bpffs, "/sys/fs/bpf", bpffs, MsFlags::empty(), none).unwrap();
        if std::env::var_os(WITHOUT_ACCELERATION).is_some() {
            let tmpfs = Some("tmpfs");
            mount(tmpfs, "/sys/kernel/btf", tmpfs, MsFlags::empty(), none).unwrap();
        }
        for family in ["ipv4", "ipv6"] {
            let (name, value) = match family {
                "ipv4" => (["net", "ipv4", "ip_forward"].to_vec(), "1"),
                _ => (["net", "ipv6", "conf", "all", "forwarding"].to_vec(), "1"),
            };
            sysctl::write(&name, value).unwrap();
        }
        let mut conn = Conn::new().unwrap();
        let lo = conn.link_by_name("lo").unwrap().index;
        for address in [LOCAL_V4, LOCAL_V6] {
            let address: IpAddr = address.parse().unwrap();
            conn.execute(Address::new(lo, address.into()).nodad().add())
                .unwrap();
        }
        test()
    })
}

pub fn config() -> DatapathConfig {
    DatapathConfig::default()
}

pub fn load() -> Datapath {
    load_with(&config())
}

pub fn load_with(config: &DatapathConfig) -> Datapath {
    let datapath = Datapath::load(config).unwrap();
    datapath.set_node_config(node_config()).unwrap();
    datapath
}

/// Every way of attaching that this kernel has.
pub fn modes() -> Vec<AttachMode> {
    let has = |&attach: &AttachMode| {
        fresh(|| {
            !matches!(
                Datapath::load(&DatapathConfig { attach, ..config() }),
                Err(DatapathError::Unsupported(_))
            )
        })
    };
    [AttachMode::Tcx, AttachMode::Clsact]
        .into_iter()
        .filter(has)
        .collect()
}

pub fn node_config() -> NodeConfig {
    NodeConfig {
        masquerade_v4: Addr::v4(NODE.octets()),
        masquerade_v6: Addr::UNSPECIFIED,
        nat_port_min: PORT_MIN,
        nat_port_max: PORT_MAX,
        flags: FLAG_MASQUERADE | FLAG_REDIRECT_PEER | FLAG_TUNNELS,
    }
}

pub fn dropped(datapath: &Datapath, reason: DropReason) -> u64 {
    let drops = datapath.drops().unwrap();
    drops.iter().find(|(r, _)| *r == reason).unwrap().1
}

/// Waits until packets get through to a host and back. A link that was just raised drops them
/// until the kernel has got round to it.
fn wait_for(address: IpAddr) {
    let error = TcpStream::connect((address, 9)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address}");
}

/// Set for a process that is to find a kernel without acceleration, whatever this one has.
pub const WITHOUT_ACCELERATION: &str = "SINABRO_TEST_WITHOUT_ACCELERATION";

/// Why nothing can be accelerated on this kernel, by what it lacks: not by whether it works, so
/// that a test never passes because what it looks at is broken.
pub fn unaccelerated() -> Option<&'static str> {
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Some("the kernel does not describe its types");
    }
    if Conn::new().unwrap().netns_cookie().unwrap().is_none() {
        return Some("the kernel does not number network namespaces");
    }
    None
}

/// Says that the test is not made on this kernel, if it is about acceleration and there can be none.
pub fn skipped() -> bool {
    let lacks = unaccelerated();
    if let Some(lacks) = lacks {
        println!("skipped: no acceleration, {lacks}");
    }
    lacks.is_some()
}

/// A pod of the node.
#[derive(Clone)]
pub struct Pod {
    pub netns: NetNs,
    pub link: String,
    pub ifindex: u32,
    pub mac: [u8; 6],
    pub v4: IpAddr,
    pub v6: IpAddr,
}

impl Pod {
    /// Makes the pod number `n` as the plugin does, without telling the data path.
    pub fn new(n: u8) -> Self {
        let pod = Self::link(n);
        pod.configure();
        pod.run(|| {
            wait_for(LOCAL_V4.parse().unwrap());
            wait_for(LOCAL_V6.parse().unwrap());
        });
        pod
    }

    /// A pod that the data path knows and that sends nothing by itself: its interface is down.
    pub fn silent(datapath: &Datapath, n: u8) -> Self {
        let pod = Self::link(n);
        pod.attach(datapath);
        pod
    }

    fn link(n: u8) -> Self {
        let v4: IpAddr = Ipv4Addr::new(10, 1, 0, n).into();
        let v6: IpAddr = format!("fd00:1::{n:x}").parse().unwrap();
        let netns = NetNs::create().unwrap();
        let link = names::pod_link(&format!("pod{n}"), "eth0");
        let mac = names::pod_mac(v4);
        let mut conn = Conn::new().unwrap();
        let ifindex = conn
            .create_veth(&Veth {
                name: &link,
                mac: names::HOST_MAC,
                mtu: 1500,
                peer_name: "eth0",
                peer_mac: mac,
                peer_netns: Some(&netns),
            })
            .unwrap()
            .index;
        Self {
            netns,
            link,
            ifindex,
            mac,
            v4,
            v6,
        }
    }

    fn configure(&self) {
        let mut conn = Conn::new().unwrap();
        let mut pod = Conn::in_netns(&self.netns).unwrap();
        for name in ["lo", "eth0"] {
            let index = pod.link_by_name(name).unwrap().index;
            pod.execute(link::set_up(index)).unwrap();
        }
        let eth0 = pod.link_by_name("eth0").unwrap().index;
        for (family, address) in [(Family::V4, self.v4), (Family::V6, self.v6)] {
            let gateway: IpAddr = match family {
                Family::V4 => names::GATEWAY_V4.into(),
                Family::V6 => names::GATEWAY_V6.into(),
            };
            pod.execute_all([
                Address::new(eth0, address.into()).nodad().add(),
                Neigh::new(eth0, gateway, names::HOST_MAC).add(),
                Route::default_of(family)
                    .via(gateway)
                    .dev(eth0)
                    .onlink()
                    .add(),
            ])
            .unwrap();
            conn.execute_all([
                Route::to_host(address).dev(self.ifindex).scope_link().add(),
                Neigh::new(self.ifindex, address, self.mac).add(),
            ])
            .unwrap();
        }
    }

    /// A pod that the data path knows.
    pub fn live(datapath: &Datapath, n: u8) -> Self {
        let pod = Self::new(n);
        pod.attach(datapath);
        pod
    }

    /// Makes it known; its connections with other pods may be accelerated where that is on.
    pub fn attach(&self, datapath: &Datapath) {
        self.attach_with(datapath, Some(self.acceleration()));
    }

    /// Connections with other pods may be accelerated, loopback may not.
    pub fn acceleration(&self) -> PodAcceleration {
        PodAcceleration {
            netns: self
                .run(|| Conn::new().unwrap().netns_cookie().unwrap())
                .unwrap_or(0),
            pods: true,
            loopback: false,
        }
    }

    pub fn attach_with(&self, datapath: &Datapath, acceleration: Option<PodAcceleration>) {
        self.attach_link(datapath, &self.pod_link(), acceleration);
    }

    /// As if another hardware address were its own: what it sends is dropped.
    pub fn attach_as(&self, datapath: &Datapath, mac: [u8; 6]) {
        let link = PodLink {
            mac,
            ..self.pod_link()
        };
        self.attach_link(datapath, &link, Some(self.acceleration()));
    }

    fn attach_link(
        &self,
        datapath: &Datapath,
        link: &PodLink,
        acceleration: Option<PodAcceleration>,
    ) {
        let endpoint = Endpoint {
            ifindex: self.ifindex,
            flags: 0,
            mac: self.mac,
            host_mac: names::HOST_MAC,
        };
        let endpoints = [(self.v4.into(), endpoint), (self.v6.into(), endpoint)];
        datapath
            .attach_pod(self.ifindex, &self.link, link, &endpoints, acceleration)
            .unwrap();
    }

    pub fn pod_link(&self) -> PodLink {
        PodLink {
            v4: self.v4.into(),
            v6: self.v6.into(),
            mac: self.mac,
            pad: [0; 2],
        }
    }

    pub fn addresses(&self) -> [Addr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// Runs a closure inside.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.netns.run(f).unwrap()
    }
}

/// A host beyond the node's uplink, which knows the pods' addresses only through the node's.
pub struct Outside {
    pub netns: NetNs,
    /// Of the node's uplink.
    pub uplink: u32,
}

impl Outside {
    pub fn new(datapath: &Datapath) -> Self {
        let netns = NetNs::create().unwrap();
        let mut conn = Conn::new().unwrap();
        let uplink = conn
            .create_veth(&Veth {
                name: "uplink",
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1500,
                peer_name: "eth0",
                peer_mac: [2, 0, 0, 0, 0, 9],
                peer_netns: Some(&netns),
            })
            .unwrap()
            .index;
        let mut outside = Conn::in_netns(&netns).unwrap();
        for name in ["lo", "eth0"] {
            let index = outside.link_by_name(name).unwrap().index;
            outside.execute(link::set_up(index)).unwrap();
        }
        let eth0 = outside.link_by_name("eth0").unwrap().index;
        let net = |address: Ipv4Addr| format!("{address}/24").parse().unwrap();
        conn.execute(Address::new(uplink, net(NODE)).add()).unwrap();
        outside
            .execute(Address::new(eth0, net(OUTSIDE)).add())
            .unwrap();
        datapath.set_uplinks(&[uplink]).unwrap();
        let outside = Self { netns, uplink };
        outside.run(|| wait_for(NODE.into()));
        outside
    }

    /// Lets the outside host reach pods at their own addresses too.
    pub fn route_to_pods(&self) {
        let mut conn = Conn::in_netns(&self.netns).unwrap();
        let route = Route::to("10.1.0.0/16".parse().unwrap()).via(NODE.into());
        conn.execute(route.add()).unwrap();
    }

    /// Runs a closure there.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.netns.run(f).unwrap()
    }
}
