//! A world of its own for each test: the thread is inside a node of the lab, and pods and an
//! outside host are networks beside it. All of it goes with the test.

use ipnet::IpNet;
use nix::{
    mount::{MsFlags, mount},
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::Pid,
};
use sinabro_agent::datapath::{
    AttachMode, Datapath, DatapathConfig, DatapathError, Mtus, PodAcceleration,
};
use sinabro_common::{
    abi::{
        Addr,
        config::{
            FLAG_MASQUERADE, FLAG_MASQUERADE_PORTLESS, FLAG_REDIRECT_PEER, FLAG_STAMPED,
            FLAG_TUNNELS, NodeConfig,
        },
        connection::MAX_CONNECTIONS,
        drop::DropReason,
        endpoint::{Endpoint, NO_HOST_PORTS, PodLink},
        uplink::Uplink,
    },
    names,
};
use sinabro_lab::{Lifetime, Namespace, Place};
pub use sinabro_lab::{kernel::unaccelerated, wait::eventually};
use sinabro_netlink::{Conn, Family, NetNs, neigh::Neigh, route::Route, sysctl};
use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream},
    process::Command,
    sync::LazyLock,
};

pub const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub const NODE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// Addresses of the node that its pods can reach.
const LOCAL_V4: &str = "10.1.0.1";
const LOCAL_V6: &str = "fd00:1::1";
/// Translated ports.
pub const PORT_MIN: u16 = 61000;
pub const PORT_MAX: u16 = 65535;

/// Runs a test in its own world.
pub fn fresh<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let node = Namespace::new("node", Lifetime::Process)
        .expect("namespaces need root: run `cargo xtask test`");
    let local = [LOCAL_V4, LOCAL_V6].map(|address| IpNet::from(address.parse::<IpAddr>().unwrap()));
    node.place().set_up("lo", &local).unwrap();
    let in_world = || {
        if std::env::var_os(WITHOUT_ACCELERATION).is_some() {
            let (tmpfs, none) = (Some("tmpfs"), None::<&str>);
            mount(tmpfs, "/sys/kernel/btf", tmpfs, MsFlags::empty(), none)?;
        }
        sysctl::write(&["net", "ipv4", "ip_forward"], "1")?;
        sysctl::write(&["net", "ipv6", "conf", "all", "forwarding"], "1")?;
        Ok(test())
    };
    node.run(in_world).unwrap()
}

/// Has the thread stay where it is meanwhile: each processor remembers flows for itself.
pub fn on_one_processor(test: impl FnOnce()) {
    let (thread, before) = (
        Pid::from_raw(0),
        sched_getaffinity(Pid::from_raw(0)).unwrap(),
    );
    let mut one = CpuSet::new();
    one.set(sched_getcpu().unwrap()).unwrap();
    sched_setaffinity(thread, &one).unwrap();
    test();
    sched_setaffinity(thread, &before).unwrap();
}

/// With a smaller table of connections than usual: each test makes one, walks it and has it taken apart.
pub fn config() -> DatapathConfig {
    DatapathConfig {
        connections: Some(MAX_CONNECTIONS / 8),
        ..DatapathConfig::default()
    }
}

pub fn load() -> Datapath {
    load_with(&config())
}

pub fn load_with(config: &DatapathConfig) -> Datapath {
    let datapath = Datapath::load(config).unwrap();
    datapath.set_node_config(node_config()).unwrap();
    datapath
}

/// Every way of attaching that this kernel has. It is asked once: that takes loading all programs.
pub fn modes() -> &'static [AttachMode] {
    static MODES: LazyLock<Vec<AttachMode>> = LazyLock::new(|| {
        let has = |&attach: &AttachMode| {
            fresh(|| {
                !matches!(
                    Datapath::load(&DatapathConfig { attach, ..config() }),
                    Err(DatapathError::Unsupported(_))
                )
            })
        };
        let all = [AttachMode::Tcx, AttachMode::Clsact];
        all.into_iter().filter(has).collect()
    });
    &MODES
}

pub fn node_config() -> NodeConfig {
    NodeConfig {
        masquerade_v4: Addr::v4(NODE.octets()),
        masquerade_v6: Addr::v6(NODE6.octets()),
        nat_port_min: PORT_MIN,
        nat_port_max: PORT_MAX,
        flags: FLAG_MASQUERADE
            | FLAG_MASQUERADE_PORTLESS
            | FLAG_REDIRECT_PEER
            | FLAG_TUNNELS
            | FLAG_STAMPED,
    }
}

/// Every way out of the node carries as much.
pub fn all_carry(datapath: &Datapath, mtu: u32) {
    let mtus = Mtus {
        tunnels: mtu,
        uplinks: mtu,
    };
    datapath.set_mtus(mtus).unwrap();
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

/// Says that the test is not made on this kernel, if it is about acceleration and there can be none.
pub fn skipped() -> bool {
    let lacks = unaccelerated();
    if let Some(lacks) = lacks {
        println!("skipped: no acceleration, {lacks}");
    }
    lacks.is_some()
}

/// The calling thread's network: in [`fresh`], the node's.
pub fn this_place() -> Place {
    Place::new("node", NetNs::current().unwrap())
}

/// Runs `ip` in a place.
pub fn ip(place: &Place, arguments: &str) {
    let mut ip = Command::new("ip");
    place.put(ip.args(arguments.split(' ')));
    assert!(ip.status().unwrap().success(), "ip {arguments}");
}

/// Has the kernel's routes lead to another node as `NEXT_HOPS` is to say, which nothing goes past the stack without.
pub fn lead(link: &str, to: IpAddr, gateway: IpAddr) {
    let here = this_place();
    let route = Route::to_host(to).dev(here.index(link).unwrap());
    let route = match gateway == to {
        true => route.scope_link(),
        false => route.via(gateway).onlink(),
    };
    here.conn().unwrap().execute(route.replace()).unwrap();
}

/// A pod of the node.
#[derive(Clone)]
pub struct Pod {
    pub place: Place,
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
        let name = format!("pod{n}");
        let place = Place::fresh(&name).unwrap();
        let link = names::pod_link(&name, "eth0");
        let mac = names::pod_mac(v4);
        let near = (link.as_str(), names::HOST_MAC);
        let ifindex = this_place().cable(near, 1500, &place, ("eth0", mac));
        Self {
            place,
            ifindex: ifindex.unwrap(),
            link,
            mac,
            v4,
            v6,
        }
    }

    fn configure(&self) {
        let mut conn = Conn::new().unwrap();
        let mut pod = self.place.conn().unwrap();
        let addresses = [self.v4, self.v6].map(IpNet::from);
        let eth0 = self.place.set_up("eth0", &addresses).unwrap();
        for (family, address) in [(Family::V4, self.v4), (Family::V6, self.v6)] {
            let gateway: IpAddr = match family {
                Family::V4 => names::GATEWAY_V4.into(),
                Family::V6 => names::GATEWAY_V6.into(),
            };
            pod.execute_all([
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
        self.attach_link(datapath, &self.pod_link(), NO_HOST_PORTS, acceleration);
    }

    /// As if its link had this MTU.
    pub fn attach_with_mtu(&self, datapath: &Datapath, mtu: u32) {
        let flags = Endpoint::flags_of(mtu, NO_HOST_PORTS);
        self.attach_link(datapath, &self.pod_link(), flags, Some(self.acceleration()));
    }

    /// As if others led ports of the node to it.
    pub fn attach_with_host_ports(&self, datapath: &Datapath) {
        self.attach_link(datapath, &self.pod_link(), 0, Some(self.acceleration()));
    }

    /// As if another hardware address were its own: what it sends is dropped.
    pub fn attach_as(&self, datapath: &Datapath, mac: [u8; 6]) {
        let link = PodLink {
            mac,
            ..self.pod_link()
        };
        self.attach_link(datapath, &link, NO_HOST_PORTS, Some(self.acceleration()));
    }

    fn attach_link(
        &self,
        datapath: &Datapath,
        link: &PodLink,
        flags: u32,
        acceleration: Option<PodAcceleration>,
    ) {
        let endpoint = Endpoint {
            ifindex: self.ifindex,
            flags,
            mac: self.mac,
            host_mac: names::HOST_MAC,
        };
        let endpoints = [(self.v4.into(), endpoint), (self.v6.into(), endpoint)];
        let netns = self.run(|| Conn::new().unwrap().netns_cookie().unwrap());
        datapath
            .attach_pod(
                self.ifindex,
                &self.link,
                link,
                &endpoints,
                acceleration,
                netns,
            )
            .unwrap();
    }

    pub fn pod_link(&self) -> PodLink {
        PodLink {
            v4: self.v4.into(),
            v6: self.v6.into(),
            mac: self.mac,
            pad: PodLink::pad_of(
                Conn::new()
                    .unwrap()
                    .link_by_index(self.ifindex)
                    .unwrap()
                    .peer_netns,
            ),
        }
    }

    pub fn addresses(&self) -> [Addr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// Runs a closure inside.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.place.run(|| Ok(f())).unwrap()
    }
}

/// What the programs are told of an Ethernet uplink with the node's address.
pub fn leads_out(ifindex: u32) -> (u32, Uplink) {
    let uplink = Uplink {
        v4: Addr::v4(NODE.octets()),
        v6: Addr::UNSPECIFIED,
        header_len: 14,
        pad: 0,
    };
    (ifindex, uplink)
}

/// A host beyond the node's uplink, which knows the pods' addresses only through the node's.
pub struct Outside {
    pub place: Place,
    /// Of the node's uplink.
    pub uplink: u32,
}

impl Outside {
    pub fn new(datapath: &Datapath) -> Self {
        let (node, place) = (this_place(), Place::fresh("outside").unwrap());
        let near = ("uplink", [2, 0, 0, 0, 0, 1]);
        let far = ("eth0", [2, 0, 0, 0, 0, 9]);
        node.cable(near, 1500, &place, far).unwrap();
        let net = |address: Ipv4Addr| format!("{address}/24").parse().unwrap();
        place.set_up("eth0", &[net(OUTSIDE)]).unwrap();
        let uplink = node.set_up("uplink", &[net(NODE)]).unwrap();
        datapath.set_uplinks(&[leads_out(uplink)]).unwrap();
        let outside = Self { place, uplink };
        outside.run(|| wait_for(NODE.into()));
        outside
    }

    /// Lets the outside host reach pods at their own addresses too.
    pub fn route_to_pods(&self) {
        let mut conn = self.place.conn().unwrap();
        let route = Route::to("10.1.0.0/16".parse().unwrap()).via(NODE.into());
        conn.execute(route.add()).unwrap();
    }

    /// Runs a closure there.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.place.run(|| Ok(f())).unwrap()
    }
}
