//! The socket: who may speak, and what is said that should not be.

use crate::support::{DEADLINE, Node, Plugin, allocate, eventually};
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use sinabro_common::{
    api::{ErrorCode, Request, frame},
    names,
};
use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

#[test]
fn garbage_gets_an_error_and_hurts_nobody() {
    let mut node = Node::new();
    node.start();
    let mut working = node.connect();
    working.allocate("a").unwrap();
    let framed = |body: &str| [&(body.len() as u32).to_be_bytes(), body.as_bytes()].concat();
    for (bytes, code, part) in [
        (
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            ErrorCode::Invalid,
            "longer than",
        ),
        (vec![0xff; 64], ErrorCode::Invalid, "longer than"),
        (framed("{"), ErrorCode::Invalid, "not valid"),
        (framed(""), ErrorCode::Invalid, "not valid"),
        (
            framed("{\"version\":2,\"request\":{\"call\":\"x\"}}"),
            ErrorCode::Version,
            "version 1",
        ),
        (
            framed("{\"version\":1,\"request\":{\"call\":\"x\"}}"),
            ErrorCode::Invalid,
            "unknown variant",
        ),
    ] {
        let mut plugin = node.connect();
        plugin.0.write_all(&bytes).unwrap();
        let error = plugin.reply().unwrap_err();
        assert!(
            error.code == code && error.message.contains(part),
            "{error:?}"
        );
        plugin.0.shutdown(Shutdown::Write).unwrap();
        assert!(plugin.is_closed());
    }
    // A frame that never ends, in pieces.
    for cut in [1, 3, 4, 20] {
        let mut plugin = node.connect();
        let whole = frame::encode(&allocate("b")).unwrap();
        plugin.0.write_all(&whole[..cut]).unwrap();
        plugin.0.shutdown(Shutdown::Write).unwrap();
        assert!(plugin.is_closed());
    }
    // Garbage after a good request takes the ADD back.
    let mut plugin = node.connect();
    plugin.allocate("c").unwrap();
    plugin.0.write_all(&framed("nonsense")).unwrap();
    assert_eq!(plugin.reply().unwrap_err().code, ErrorCode::Invalid);
    assert!(node.connect().release("c").is_ok());
    eventually("the other's leases are free", || node.leases().len() == 2);
    working.release("a").unwrap();
}

#[test]
fn requests_that_contradict_their_connection_are_refused() {
    let mut node = Node::new();
    node.start();
    let mut plugin = node.connect();
    let error = plugin.activate("a", 1).unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid);
    let attachment = plugin.allocate("a").unwrap();
    assert_eq!(plugin.allocate("b").unwrap_err().code, ErrorCode::Invalid);
    assert_eq!(
        plugin.activate("b", 1).unwrap_err().code,
        ErrorCode::Invalid
    );
    // The wrong link, then the right one.
    let error = plugin.activate("a", 1).unwrap_err();
    assert!(
        error.code == ErrorCode::Invalid && error.message.contains("its name is lo"),
        "{error}"
    );
    let ifindex = node.add_link(&attachment);
    plugin.activate("a", ifindex).unwrap();
    // Owners that no runtime has.
    for id in ["", "a b", "a\n", &"x".repeat(300)] {
        assert_eq!(plugin.allocate(id).unwrap_err().code, ErrorCode::Invalid);
        assert_eq!(plugin.release(id).unwrap_err().code, ErrorCode::Invalid);
    }
}

#[test]
fn texts_that_a_lease_file_cannot_hold_are_refused() {
    let mut node = Node::new();
    node.start();
    let Request::Allocate {
        owner,
        network,
        pod,
        addresses,
        mac,
        acceleration,
        ..
    } = allocate("a")
    else {
        unreachable!()
    };
    let request = |netns: String| Request::Allocate {
        owner: owner.clone(),
        network: network.clone(),
        netns,
        pod: pod.clone(),
        addresses: addresses.clone(),
        mac,
        acceleration,
        local_mtu: None,
        service_translation: None,
        host_ports: None,
        warnings: Vec::new(),
    };
    let error = node
        .connect()
        .call(request("x".repeat(100_000)))
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Invalid);
    assert!(node.leases().is_empty());
    // The longest that is taken, in the form that grows most, is read back at start.
    node.connect().call(request("\0".repeat(1024))).unwrap();
    let mut plugin = node.connect();
    plugin.call(request("\u{1}".repeat(1024))).unwrap();
    node.kill();
    node.start();
    assert!(node.ipam().problems.is_empty());
}

#[test]
fn a_slow_frame_does_not_hold_up_others() {
    let mut node = Node::new();
    node.start();
    let slow: Vec<_> = (0..20)
        .map(|_| {
            let mut plugin = node.connect();
            plugin.0.write_all(&[0, 0, 1]).unwrap();
            plugin
        })
        .collect();
    let started = Instant::now();
    node.add("a");
    assert!(started.elapsed() < DEADLINE);
    // Each is answered that its time is up.
    for mut plugin in slow {
        let error = plugin.reply().unwrap_err();
        assert!(error.message.contains("in time"), "{error}");
        let mut rest = Vec::new();
        plugin.0.shutdown(Shutdown::Write).unwrap();
        plugin.0.read_to_end(&mut rest).unwrap();
    }
}

#[test]
fn other_users_are_refused_whatever_the_sockets_mode() {
    let mut node = Node::new();
    node.start();
    let socket = node.state(names::SOCKET);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(&node.state("")), 0o700);
    let open =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(&socket, 0o666);
    open(&node.state(""), 0o755);
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", "socket::child_talks_to_the_agent"])
        .args(["--ignored", "--nocapture"])
        .env("SOCKET", Path::new(names::STATE_DIR).join(names::SOCKET))
        .stdin(Stdio::null());
    node.namespace().put(&mut child);
    // SAFETY: only system calls. Not Command::uid: without root nothing enters the namespace.
    unsafe {
        child.pre_exec(|| {
            setgroups(&[])?;
            setgid(Gid::from_raw(65534))?;
            Ok(setuid(Uid::from_raw(65534))?)
        });
    }
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("user 65534 may not talk to the agent"),
        "{output:?}"
    );
    assert!(node.status().is_some());
}

#[test]
#[ignore = "run as another user by other_users_are_refused_whatever_the_sockets_mode"]
fn child_talks_to_the_agent() {
    let socket = std::env::var("SOCKET").unwrap();
    let mut plugin = Plugin(UnixStream::connect(socket).unwrap());
    println!("{:?}", plugin.call(Request::Status));
}
