//! Connections between two pods of a node that the node's stack translates, as it does for kube-proxy, and that keep to it.

use super::{ALONE, Size, from, only_of, say, scene};
use sinabro_lab::{
    Binaries,
    checks::Scene,
    traffic::{PATIENCE, accept, bind, connect, readable},
};
use socket2::{Domain, Socket, Type};
use std::{
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::PoisonError,
    time::Instant,
};

/// The port of servers to which [`service`] leads.
const PORT: u16 = 8080;

/// An address of no machine, behind which the second pod of the first node is.
pub fn service(scene: &Scene) -> SocketAddr {
    let service = SocketAddr::new("10.96.0.10".parse().unwrap(), 80);
    let server = server(scene);
    let table = format!(
        "table ip lab {{
            chain pre {{
                type nat hook prerouting priority dstnat
                ip daddr {} meta l4proto {{ tcp, udp }} th dport {} dnat to {server}
            }}
        }}",
        service.ip(),
        service.port()
    );
    scene.node(1).place().command(&["nft", &table]).unwrap();
    service
}

fn server(scene: &Scene) -> SocketAddr {
    let addresses = scene.pod(1, 2).addresses();
    SocketAddr::new(addresses[0], PORT)
}

/// A socket for datagrams at a port that others have, too.
fn shared(at: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    Ok(socket.into())
}

/// A connection and a flow of datagrams between the two, to the Service or to the server itself.
pub struct Kept {
    client: TcpStream,
    server: TcpStream,
    asks: UdpSocket,
    answers: UdpSocket,
    said: u64,
}

impl Kept {
    pub fn open(scene: &Scene, to: SocketAddr) -> Self {
        let (from, server) = (scene.pod(1, 1).place(), server(scene));
        let bound = scene
            .pod(1, 2)
            .place()
            .run(|| Ok((bind::tcp(server)?, shared(server)?)));
        let (listener, answers) = bound.unwrap();
        let opened = from.run(|| {
            let asks = UdpSocket::bind(("0.0.0.0", 0))?;
            asks.connect(to)?;
            Ok((connect(to)?, asks))
        });
        let (client, asks) = opened.unwrap();
        let (server, _) = accept(&listener, Instant::now() + PATIENCE).unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        let kept = Self {
            client,
            server,
            asks,
            answers,
            said: 0,
        };
        // Others use the same port: this one hears its own client alone.
        kept.asks.send(&[0]).unwrap();
        let (_, client) = kept.answers.recv_from(&mut [0]).unwrap();
        kept.answers.connect(client).unwrap();
        kept
    }

    /// Both ways, the server first; datagrams as well.
    pub fn goes_on(&mut self, when: &str) {
        self.said += 1;
        let said = self.said.to_be_bytes();
        let mut heard = [0; 8];
        for (from, to) in [(&self.server, &self.client), (&self.client, &self.server)] {
            say(from, to, said, when);
        }
        for (from, to) in [(&self.answers, &self.asks), (&self.asks, &self.answers)] {
            from.send(&said).unwrap();
            let deadline = Instant::now() + PATIENCE;
            assert!(readable(to, deadline).unwrap(), "{when}: no datagram");
            to.recv(&mut heard).unwrap();
            assert_eq!(heard, said, "{when}");
        }
    }
}

/// Pods' programs give way to others one pod after the other, while some still note what they see in the table of before.
#[test]
fn what_keeps_to_the_stack_does_so_since_release_and_while_programs_of_two_tables_run() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Binaries::find().unwrap();
    let scene = scene(&from("SINABRO_EARLIER_DIR"), Size::Small, &[]);
    let node = scene.node(1);
    let service = service(&scene);
    let mut all = vec![
        Kept::open(&scene, service),
        Kept::open(&scene, server(&scene)),
    ];
    for size in [Size::Large, Size::Small, Size::Large] {
        node.stop_agent().unwrap();
        node.set_binaries(now.clone());
        node.start_agent_held_at("loaded,pods-swapped", &[&size.flag()])
            .unwrap();
        for point in ["no pod has other programs", "the pods have other programs"] {
            node.wait_held().unwrap();
            let when = format!("towards {size:?}, {point}");
            all.iter_mut().for_each(|kept| kept.goes_on(&when));
            for to in [service, server(&scene)] {
                all.push(Kept::open(&scene, to));
            }
            all.iter_mut().for_each(|kept| kept.goes_on(&when));
            node.let_agent_go_on().unwrap();
        }
        node.wait_ready().unwrap();
        let when = format!("{size:?} runs");
        all.iter_mut().for_each(|kept| kept.goes_on(&when));
        only_of(node, size);
    }
}
