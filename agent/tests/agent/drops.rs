//! From a packet that the kernel drops to a line of `sinabroctl drops --follow`.

use crate::support::Node;
use sinabro_common::{
    api::{DroppedPacket, Request, Response},
    names,
};
use sinabro_lab::wait::eventually_some;
use std::{
    io::{BufRead, BufReader, Read},
    net::UdpSocket,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
};

fn follow(node: &Node) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sinabroctl"));
    command
        .env("SINABRO_SOCKET", node.state(names::SOCKET))
        .args(["drops", "--follow", "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Has a pod ask for a hardware address in somebody else's name.
fn lie(node: &Node) {
    let send = || {
        let socket = UdpSocket::bind("203.0.113.7:0")?;
        socket.send_to(b"?", "203.0.113.8:9")?;
        Ok(())
    };
    node.pods().run(send).unwrap();
}

#[test]
fn a_drop_is_shown_as_it_happens_until_the_agent_goes() {
    let mut node = Node::new();
    node.start();
    let attachment = node.add("a");
    let net = "203.0.113.7/24".parse().unwrap();
    let interface = attachment.link.replace("snb", "pod");
    node.pods().set_up(&interface, &[net]).unwrap();

    let mut following = follow(&node);
    let (sender, lines) = mpsc::channel();
    let stdout = BufReader::new(following.stdout.take().unwrap());
    let reader = thread::spawn(move || {
        for line in stdout.lines() {
            let packet: DroppedPacket = serde_json::from_str(&line.unwrap()).unwrap();
            // Nobody hears it once the test has what it wants.
            let _ = sender.send(packet);
        }
    });
    // Its link has things to say of its own. What was dropped before it followed is not shown.
    let is_lie = |packet: &DroppedPacket| packet.detail.as_deref() == Some("of 203.0.113.7");
    let shown = eventually_some("the lie is shown", || {
        lie(&node);
        lines.try_iter().find(is_lie)
    });
    assert_eq!(shown.reason, "source_address");
    assert_eq!((shown.protocol.as_str(), shown.bytes), ("arp", 42));
    assert_eq!(shown.program, "pod_out");
    assert_eq!(shown.source_mac, Some(attachment.mac));
    // The runtime named no pod.
    assert_eq!(shown.pod.as_deref(), Some("a"));

    // Whoever comes later sees it, too.
    let later = node.connect().call(Request::DropEvents {
        after: 0,
        wait_milliseconds: 0,
    });
    let Ok(Response::DropEvents(later)) = later else {
        panic!("{later:?}");
    };
    assert!(later.packets.contains(&shown));

    // Nobody holds the agent up by waiting.
    assert!(node.stop());
    let mut told = String::new();
    let stderr = following.stderr.as_mut().unwrap();
    stderr.read_to_string(&mut told).unwrap();
    assert_eq!(following.wait().unwrap().code(), Some(3));
    assert!(told.contains("the agent went away"), "{told}");
    reader.join().unwrap();
}
