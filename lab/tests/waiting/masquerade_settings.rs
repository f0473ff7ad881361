//! What is masqueraded: by settings, and by a file that changes while the agent runs.

use sinabro_common::api::{MasqueradeReport, StatusReport};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place,
    checks::Scene,
    traffic::{PATIENCE, path::Path, readable, stream::Stream, udp},
    wait::{eventually, eventually_some},
};
use sinabro_netlink::route::Route;
use std::{
    fs,
    net::{IpAddr, UdpSocket},
    os::unix::fs::symlink,
    path::PathBuf,
    time::Instant,
};

const DIRECTORY: &str = "/run/lab/config";
const FLAG: &str = "--masquerade-file=/run/lab/config/ip-masq-agent";

/// A mounted ConfigMap, changed as the kubelet does it: `..data` is swung to another directory.
struct ConfigMap {
    directory: PathBuf,
    version: u32,
}

impl ConfigMap {
    fn new(node: &Node) -> Self {
        let directory = node.namespace().path(DIRECTORY);
        fs::create_dir_all(&directory).unwrap();
        Self {
            directory,
            version: 0,
        }
    }

    fn set(&mut self, text: &str) {
        let of = |version: u32| format!("..{version}");
        let before = self.directory.join(of(self.version));
        self.version += 1;
        let now = self.directory.join(of(self.version));
        fs::create_dir(&now).unwrap();
        fs::write(now.join("ip-masq-agent"), text).unwrap();
        let swung = self.directory.join("..data_tmp");
        symlink(of(self.version), &swung).unwrap();
        fs::rename(swung, self.directory.join("..data")).unwrap();
        match self.version {
            1 => symlink("..data/ip-masq-agent", self.file()).unwrap(),
            _ => fs::remove_dir_all(before).unwrap(),
        }
    }

    fn file(&self) -> PathBuf {
        self.directory.join("ip-masq-agent")
    }
}

fn scene(nodes: usize, flags: &[&str]) -> Scene {
    let lab = Lab::new(Binaries::find().unwrap(), nodes, Lifetime::Process).unwrap();
    for node in lab.nodes() {
        node.start_agent_with(flags).unwrap();
        node.wait_ready().unwrap();
    }
    Scene::new(lab).unwrap()
}

fn status(node: &Node) -> StatusReport {
    node.status().unwrap()
}

fn masquerade(node: &Node) -> MasqueradeReport {
    status(node).masquerade.unwrap()
}

/// As whom a new connection's client is seen.
fn seen(way: &Path) -> IpAddr {
    peer(&Stream::open(way).unwrap())
}

fn peer(stream: &Stream) -> IpAddr {
    stream.server().peer_addr().unwrap().ip()
}

/// As whom one is seen who asks by a datagram, and whether he hears the answer.
fn asked_by(from: &Place, to: &Place, address: IpAddr) -> IpAddr {
    let server = to.run(|| Ok(UdpSocket::bind((address, 0))?)).unwrap();
    let target = server.local_addr().unwrap();
    let client = from.run(|| Ok(UdpSocket::bind("0.0.0.0:0")?)).unwrap();
    let deadline = Instant::now() + PATIENCE;
    client.send_to(b"question", target).unwrap();
    assert!(readable(&server, deadline).unwrap(), "nothing arrived");
    server.recv_from(&mut [0; 16]).unwrap().1.ip()
}

#[test]
fn a_change_of_the_file_is_for_new_connections_and_breaks_none() {
    change_live(0);
}

#[test]
fn the_same_of_ipv6() {
    change_live(1);
}

fn change_live(family: usize) {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    lab.route_pods_from_outside().unwrap();
    let address = lab.outside_addresses().unwrap()[family];
    let named = ipnet::IpNet::from(address);
    let node = lab.node(1);
    let setting = format!("--non-masquerade-cidrs={named}");
    let flags = [FLAG, &setting];
    let mut config = ConfigMap::new(node);
    node.start_agent_with(&flags).unwrap();
    node.wait_ready().unwrap();
    let scene = Scene::new(lab).unwrap();
    let (node, pod, outside) = (
        scene.node(1),
        scene.pod(1, 1),
        scene.lab().outside().place(),
    );
    let (as_pod, as_node) = (pod.addresses()[family], node.addresses()[family]);
    let way = Path::new("pod → outside", pod.place(), outside, address);
    let goes_on = |streams: &[&Stream]| {
        for stream in streams {
            stream.carry(64 << 10, 4 << 10).unwrap();
        }
    };

    // No file: the setting.
    assert_eq!(seen(&way), as_pod);
    let own = Stream::open(&way).unwrap();
    assert_eq!(masquerade(node).file, None);

    // The file's word takes the place of the setting's.
    config.set("nonMasqueradeCIDRs: []\nresyncInterval: 1s\n");
    eventually("the outside to see the node", || seen(&way) == as_node);
    let masqueraded = Stream::open(&way).unwrap();
    assert_eq!(peer(&masqueraded), as_node);
    goes_on(&[&masqueraded, &own]);
    let report = masquerade(node);
    assert!(report.non_masquerade_cidrs.is_empty() && report.link_local);
    assert_eq!(report.file.as_deref(), FLAG.split('=').nth(1));

    config.set(&format!(
        "nonMasqueradeCIDRs:\n- {named}\nmasqLinkLocal: false\n"
    ));
    eventually("the outside to see the pod", || seen(&way) == as_pod);
    goes_on(&[&masqueraded, &own]);
    assert!(!masquerade(node).link_local);

    // A bad one changes nothing, and is told with its line.
    config.set("masqLinkLocal: true\nnonMasqueradeCIDRs: [192.0.2.1/24]\n");
    let told = |node: &Node| {
        let mut troubles = status(node).troubles.into_iter();
        troubles.find(|trouble| trouble.reason == "MasqueradeFileInvalid")
    };
    let trouble = eventually_some("the trouble", || told(node));
    for part in [
        "/run/lab/config/ip-masq-agent: line 2: nonMasqueradeCIDRs: `192.0.2.1/24`",
        "192.0.2.0/24",
    ] {
        assert!(trouble.text.contains(part), "{}", trouble.text);
    }
    assert_eq!(seen(&way), as_pod);
    // Not for the next agent either.
    node.kill_agent().unwrap();
    node.start_agent_with(&[FLAG]).unwrap();
    node.wait_ready().unwrap();
    assert_eq!(seen(&way), as_pod);
    assert!(!masquerade(node).link_local);
    assert!(
        eventually_some("the trouble again", || told(node))
            .text
            .contains("line 2")
    );
    goes_on(&[&masqueraded, &own]);

    // Without it, settings: now there are none.
    fs::remove_file(config.file()).unwrap();
    eventually("the outside to see the node again", || {
        seen(&way) == as_node
    });
    eventually("the trouble to be over", || told(node).is_none());
    goes_on(&[&masqueraded, &own]);
    assert_eq!([&masqueraded, &own].map(peer), [as_node, as_pod]);
}

/// As clouds have their resolvers (RFC 3927).
#[test]
fn a_resolver_at_a_link_local_address_answers_pods() {
    let resolver: IpAddr = "169.254.169.254".parse().unwrap();
    let scene = scene(1, &[FLAG]);
    let lab = scene.lab();
    let (router, outside) = (lab.router().place(), lab.outside().place());
    let address = ipnet::IpNet::from(resolver);
    outside.set_up("eth0", &[address]).unwrap();
    let route = Route::to(address).via(lab.outside_addresses().unwrap()[0]);
    let route = route.dev(router.index("out0").unwrap());
    router.conn().unwrap().execute(route.add()).unwrap();

    let (node, pod) = (scene.node(1), scene.pod(1, 1));
    let answered = udp::echo(pod.place(), outside, resolver, 100, false).unwrap();
    assert_eq!(answered, node.addresses()[0]);
    let mut config = ConfigMap::new(node);
    config.set("masqLinkLocal: false\n");
    eventually("link-local addresses not to be masqueraded", || {
        asked_by(pod.place(), outside, resolver) == pod.v4()
    });
    config.set("masqLinkLocal: true\n");
    eventually("link-local addresses to be masqueraded", || {
        asked_by(pod.place(), outside, resolver) == node.addresses()[0]
    });
}

/// Whether pods' unique local addresses are translated is a setting.
#[test]
fn ipv6_is_masqueraded_unless_it_is_off() {
    for (flags, is_on) in [(&[][..], true), (&["--masquerade-ipv6=off"], false)] {
        let scene = scene(1, flags);
        scene.lab().route_pods_from_outside().unwrap();
        let (node, pod) = (scene.node(1), scene.pod(1, 1));
        let address = scene.lab().outside_addresses().unwrap()[1];
        let outside = scene.lab().outside().place();
        let way = Path::new("pod → outside", pod.place(), outside, address);
        let expected = if is_on { node.addresses()[1] } else { pod.v6() };
        assert_eq!(seen(&way), expected, "{flags:?}");
        assert_eq!(masquerade(node).ipv6, is_on);
    }
}

#[test]
fn nodes_see_pods_only_where_that_is_chosen() {
    for (flags, chosen) in [(&[][..], false), (&["--masquerade-nodes=false"], true)] {
        let scene = scene(2, flags);
        let (from, to) = (scene.node(1), scene.node(2));
        let pod = scene.pod(1, 1);
        let as_pod = pod.addresses();
        for family in [0, 1] {
            let address = to.addresses()[family];
            let way = Path::new("pod → node", pod.place(), to.place(), address);
            let stream = Stream::open(&way).unwrap();
            let as_node = from.addresses()[family];
            let expected = if chosen { as_pod[family] } else { as_node };
            assert_eq!(peer(&stream), expected, "{flags:?}");
            stream.carry(1 << 20, 16 << 10).unwrap();
        }
        assert_eq!(masquerade(from).nodes, !chosen);
    }
}
