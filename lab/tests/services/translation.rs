//! A pod with a proxy of a mesh: rules in the pod's own namespace lead its connections to the proxy, which asks for the
//! destination of before and connects there itself. Whether that is the Service's address is what a pod may wish.

use serde_json::json;
use sinabro_common::api::{
    ServiceTranslation::{self, Auto, Packet, Socket},
    TcpAcceleration,
};
use sinabro_lab::{
    Binaries, Lab, Lifetime, Node, Place, Pod,
    cni::config,
    node::SERVICES_FLAGS,
    traffic::{PATIENCE, any, bind, readable},
};
use socket2::{Domain, Protocol, SockRef, Type};
use std::{
    fs,
    io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::{Command, Stdio},
    thread,
    time::Instant,
};

const VIPS: [&str; 2] = ["10.96.0.10", "fd00:10:96::10"];
const PORT: u16 = 80;
const TARGET: u16 = 8080;
const PROXY_PORT: u16 = 15_001;
/// Of what the proxy itself sends, as meshes tell it from the rest.
const PROXY_MARK: u32 = 7;
/// Answers of a byte each.
const ROUNDS: usize = 400;
/// Bytes of the longest answer.
const LONG: usize = 1 << 20;

fn vip(family: usize) -> SocketAddr {
    SocketAddr::new(VIPS[family].parse().unwrap(), PORT)
}

fn start() -> Lab {
    let lab = Lab::new(Binaries::find().unwrap(), 1, Lifetime::Process).unwrap();
    lab.node(1).write_services("").unwrap();
    lab.node(1).start_agent_with(&SERVICES_FLAGS).unwrap();
    lab.node(1).wait_ready().unwrap();
    lab
}

/// Has a Service lead to a pod.
fn publish(node: &Node, server: &Pod) {
    let [v4, v6] = VIPS;
    let ports = |port| {
        format!(
            "[{{name: t, protocol: TCP, port: {port}}}, {{name: u, protocol: UDP, port: {port}}}]"
        )
    };
    let mut text = format!(
        "kind: Service\nmetadata: {{namespace: lab, name: web}}\nspec:\n  clusterIPs: ['{v4}', '{v6}']\n  \
         clusterIP: {v4}\n  ports: {}\n",
        ports(PORT)
    );
    for (kind, own) in ["IPv4", "IPv6"].iter().zip(server.addresses()) {
        text += &format!(
            "---\nkind: EndpointSlice\nmetadata: {{namespace: lab, name: web-{kind}, labels: {{kubernetes.io/service-name: \
             web}}}}\naddressType: {kind}\nendpoints: [{{addresses: ['{own}'], conditions: {{ready: true}}}}]\nports: {}\n",
            ports(TARGET)
        );
    }
    node.write_services(&text).unwrap();
    let last = SocketAddr::new(server.v6(), TARGET).to_string();
    node.wait_for_service("lab/web", |said| said.contains(&last))
        .unwrap();
}

/// Answers a line with a line of as many bytes as it says, and a datagram with itself. For as long as the process lives.
fn serve(place: &Place, own: IpAddr) {
    let at = SocketAddr::new(own, TARGET);
    let (listener, socket) = place.run(|| Ok((bind::tcp(at)?, bind::udp(at)?))).unwrap();
    let answer = |stream: TcpStream| -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?);
        let (mut line, mut stream) = (String::new(), stream);
        loop {
            match lines.read_line(&mut line) {
                Ok(0) => return Ok(()),
                Ok(_) => {
                    let len: usize = line.trim().parse().map_err(std::io::Error::other)?;
                    stream.write_all(&vec![b'x'; len])?;
                    line.clear();
                }
                // A blocking read of a socket that may be accelerated, woken by room for what it has written
                // (docs/tcp-acceleration.md).
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    };
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || answer(stream?));
        }
    });
    thread::spawn(move || {
        let mut heard = [0; 128];
        while let Ok((len, from)) = socket.recv_from(&mut heard) {
            let _ = socket.send_to(&heard[..len], from);
        }
    });
}

/// A pod's proxy: takes what the pod connects to, and passes it on to where it was going.
struct Proxy(TcpListener);

impl Proxy {
    /// With the rules that lead there.
    fn start(place: &Place, family: usize) -> Self {
        let at = SocketAddr::new(any(vip(family).ip()), PROXY_PORT);
        let listen = || {
            let socket = socket2::Socket::new(Domain::for_address(at), Type::STREAM, None)?;
            if at.is_ipv6() {
                socket.set_only_v6(true)?;
            }
            socket.set_reuse_address(true)?;
            socket.bind(&at.into())?;
            socket.listen(8)?;
            Ok(socket.into())
        };
        Self(place.run(|| bind::freed(listen)).unwrap())
    }

    /// Passes one connection on, which is for a line and its answer; says where it was going.
    fn pass(&self, place: &Place) -> SocketAddr {
        assert!(readable(&self.0, Instant::now() + PATIENCE).unwrap());
        let (mut inner, from) = self.0.accept().unwrap();
        let known = SockRef::from(&inner);
        let was = match from {
            SocketAddr::V4(_) => known.original_dst_v4(),
            SocketAddr::V6(_) => known.original_dst_v6(),
        };
        let was = was.unwrap().as_socket().unwrap();
        let connect = || {
            let socket =
                socket2::Socket::new(Domain::for_address(was), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_mark(PROXY_MARK)?;
            socket.connect_timeout(&was.into(), PATIENCE)?;
            Ok(TcpStream::from(socket))
        };
        let mut outer = place.run(connect).unwrap();
        assert_eq!(outer.peer_addr().unwrap(), was);
        let mut line = String::new();
        BufReader::new(inner.try_clone().unwrap())
            .read_line(&mut line)
            .unwrap();
        outer.write_all(line.as_bytes()).unwrap();
        let mut answer = vec![0; line.trim().parse().unwrap()];
        outer.read_exact(&mut answer).unwrap();
        inner.write_all(&answer).unwrap();
        was
    }
}

/// As meshes have it: all TCP but the proxy's own goes to the proxy. Datagrams to the Service are counted.
fn redirect(place: &Place) {
    let rules = format!(
        "table inet mesh {{
            counter datagrams {{ }}
            chain output {{
                type nat hook output priority -100
                meta l4proto tcp meta mark != {PROXY_MARK} redirect to :{PROXY_PORT}
            }}
            chain count {{
                type filter hook output priority 0
                ip daddr {} udp dport {PORT} counter name datagrams
                ip6 daddr {} udp dport {PORT} counter name datagrams
            }}
        }}",
        VIPS[0], VIPS[1]
    );
    let mut nft = Command::new("nft");
    place.put(nft.args(["-f", "-"]).stdin(Stdio::piped()));
    let mut nft = nft.spawn().unwrap();
    nft.stdin
        .take()
        .unwrap()
        .write_all(rules.as_bytes())
        .unwrap();
    assert!(nft.wait().unwrap().success());
}

fn counted_datagrams(place: &Place) -> u32 {
    let mut nft = Command::new("nft");
    place.put(nft.args(["list", "counter", "inet", "mesh", "datagrams"]));
    let said = String::from_utf8(nft.output().unwrap().stdout).unwrap();
    let mut words = said
        .split_whitespace()
        .skip_while(|word| *word != "packets");
    words.nth(1).unwrap().parse().unwrap()
}

/// One connection to the Service through the proxy: to where the proxy sees it go.
fn seen(pod: &Pod, family: usize) -> SocketAddr {
    let place = pod.place();
    let proxy = Proxy::start(place, family);
    let (client_place, to) = (place.clone(), vip(family));
    let client = thread::spawn(move || {
        let opened = client_place.run(|| Ok(TcpStream::connect_timeout(&to, PATIENCE)?));
        let mut stream = opened.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), to);
        stream.write_all(b"7\n").unwrap();
        stream.read_exact(&mut [0; 7]).unwrap();
    });
    let seen = proxy.pass(place);
    client.join().unwrap();
    seen
}

/// One datagram to the Service and back, from a connected socket and from another.
fn exchange_datagrams(pod: &Pod, to: SocketAddr) {
    let bind = || Ok(UdpSocket::bind((any(to.ip()), 0))?);
    for is_connected in [false, true] {
        let socket = pod.place().run(bind).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut heard = [0; 16];
        if is_connected {
            socket.connect(to).unwrap();
            socket.send(b"hello").unwrap();
        } else {
            socket.send_to(b"hello", to).unwrap();
        }
        let (len, from) = socket.recv_from(&mut heard).unwrap();
        assert_eq!((&heard[..len], from), (&b"hello"[..], to), "{}", pod.id());
    }
}

fn translation(node: &Node, pod: &Pod) -> Option<ServiceTranslation> {
    node.endpoint(pod).unwrap().unwrap().service_translation
}

fn add(node: &Node, id: &str, wish: &str) -> Pod {
    let args = [("SINABRO_SERVICE_TRANSLATION", wish)];
    node.add_pod_with(id, &args).unwrap()
}

#[test]
fn a_proxy_in_a_pod_sees_the_services_address_if_the_pod_wishes_so() {
    let lab = start();
    let node = lab.node(1);
    let server = node.add_pod("server").unwrap();
    for own in server.addresses() {
        serve(server.place(), own);
    }
    publish(node, &server);
    let by_packets = add(node, "packets", "packet");
    let by_sockets = add(node, "sockets", "auto");
    for pod in [&by_packets, &by_sockets] {
        redirect(pod.place());
    }
    let look = |when: &str| {
        assert_eq!(translation(node, &by_packets), Some(Packet), "{when}");
        assert_eq!(translation(node, &by_sockets), Some(Auto), "{when}");
        for family in 0..2 {
            assert_eq!(seen(&by_packets, family), vip(family), "{when}");
            let endpoint = SocketAddr::new(server.addresses()[family], TARGET);
            assert_eq!(seen(&by_sockets, family), endpoint, "{when}");
            for pod in [&by_packets, &by_sockets] {
                let before = counted_datagrams(pod.place());
                exchange_datagrams(pod, vip(family));
                let sent = counted_datagrams(pod.place()) - before;
                assert_eq!(sent, 2, "{when}, {}", pod.id());
            }
        }
    };
    look("at first");
    node.kill_agent().unwrap();
    look_without_agent(&by_packets);
    node.start_agent_with(&SERVICES_FLAGS).unwrap();
    node.wait_ready().unwrap();
    look("with the next agent");
}

fn look_without_agent(pod: &Pod) {
    for family in 0..2 {
        assert_eq!(seen(pod, family), vip(family), "without an agent");
    }
}

#[test]
fn what_goes_by_packets_is_not_accelerated() {
    let lab = start();
    let node = lab.node(1);
    let enabled = (
        "SINABRO_TCP_ACCELERATION",
        TcpAcceleration::Enabled.as_str(),
    );
    let add = |id: &str, wish: ServiceTranslation| {
        let args = [enabled, ("SINABRO_SERVICE_TRANSLATION", wish.as_str())];
        node.add_pod_with(id, &args).unwrap()
    };
    let server = add("server", Auto);
    for own in server.addresses() {
        serve(server.place(), own);
    }
    publish(node, &server);
    let status = node.status().unwrap();
    let accelerates = status.modes["tcpAcceleration"].starts_with("on");
    for (id, wish) in [("sockets", Socket), ("packets", Packet)] {
        let pod = add(id, wish);
        for family in 0..2 {
            let sent = || node.endpoint(&pod).unwrap().unwrap().tx_packets;
            let before = sent();
            let connect = || Ok(TcpStream::connect_timeout(&vip(family), PATIENCE)?);
            let mut stream = pod.place().run(connect).unwrap();
            // Last, and of the last: after a long answer a server's next connection is not accelerated.
            let long: &[usize] = if wish == Packet { &[LONG, 3] } else { &[] };
            let lens = [1; ROUNDS].into_iter().chain(long.iter().copied());
            for len in lens {
                stream.write_all(format!("{len}\n").as_bytes()).unwrap();
                let mut answer = vec![0; len];
                stream.read_exact(&mut answer).unwrap();
                assert!(answer.iter().all(|byte| *byte == b'x'), "{id}");
            }
            let packets = sent() - before;
            let is_accelerated = packets < ROUNDS as u64 / 2;
            let expected = accelerates && wish == Socket;
            let why = node.endpoint(&pod).unwrap().unwrap().acceleration;
            assert_eq!(
                is_accelerated, expected,
                "{id}, {family}: {packets} packets, {why:?}"
            );
        }
    }
}

#[test]
fn a_pod_in_a_mesh_goes_by_packets_without_a_wish() {
    let lab = start();
    let node = lab.node(1);
    let with_annotations = |id: &str, annotations| {
        let place = node.make_sandbox(id).unwrap();
        let mut config = config();
        config["runtimeConfig"] = json!({"io.kubernetes.cri.pod-annotations": annotations});
        let answer = node.cni_configured("ADD", id, &config).unwrap();
        node.pod_of(id, &place, &answer.success().unwrap()).unwrap()
    };
    let injected = with_annotations("injected", json!({"sidecar.istio.io/status": "{}"}));
    assert_eq!(translation(node, &injected), Some(Packet));
    let plain = with_annotations("plain", json!({"istio.io/rev": "default"}));
    assert_eq!(translation(node, &plain), Some(Auto));

    let list = node
        .namespace()
        .path("/run/lab/cni/net.d/00-sinabro.conflist");
    fs::create_dir_all(list.parent().unwrap()).unwrap();
    let plugins = json!([{"type": "sinabro"}, {"type": "istio-cni"}]);
    fs::write(
        list,
        json!({"name": "sinabro", "plugins": plugins}).to_string(),
    )
    .unwrap();
    let ambient = node.add_pod("ambient").unwrap();
    assert_eq!(translation(node, &ambient), Some(Packet));
    let opted_out = add(node, "opted-out", "socket");
    assert_eq!(translation(node, &opted_out), Some(Socket));
}
