//! What people try a network with: `ping`, `traceroute`, `nslookup`, `wget` and the like, in a pod, to a host two routers away.
//!
//! What is said is what they print. Of programs that are not there the test says that they are left out.

use super::{
    exchange::{addresses_of_node, raw},
    kit::{FAMILIES, Way, World, far, narrow, routers},
};
use sinabro_lab::{
    Place,
    tools::{Said, Tool},
    traffic::{PATIENCE, accept, bind, readable},
    wait::eventually,
};
use socket2::Socket;
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, TcpListener},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const NARROW: u32 = 1400;

/// By both ways, and with a link between the two routers that carries less than the others, or not.
fn worlds() -> impl Iterator<Item = (World, String, bool)> {
    let all = Way::BOTH
        .into_iter()
        .flat_map(|way| [(way, false), (way, true)]);
    all.map(|(way, is_narrow)| {
        let world = World::guarded(way, 1, &[]);
        if is_narrow {
            narrow(&world, NARROW);
        }
        (world, format!("{way:?}, narrow: {is_narrow}"), is_narrow)
    })
}

/// The programs that there are; the test says which it does without.
fn there(tools: &[(&'static str, Option<Tool>)]) -> Vec<(&'static str, Tool)> {
    let found = tools.iter().filter_map(|(name, tool)| {
        if tool.is_none() {
            println!("left out: this machine has no {name}");
        }
        Some((*name, tool.clone()?))
    });
    found.collect()
}

fn run(tool: &Tool, place: &Place, arguments: &str) -> Said {
    let arguments: Vec<_> = arguments.split(' ').collect();
    tool.run(place, &arguments).unwrap()
}

/// Does something with a server, which serves until that is done; both results.
fn while_serving<S: Send, T>(
    serve: impl FnOnce(&AtomicBool) -> S + Send,
    act: impl FnOnce() -> T,
) -> (S, T) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let served = scope.spawn(|| serve(&done));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        done.store(true, Ordering::Relaxed);
        let served = served.join().unwrap();
        match result {
            Ok(result) => (served, result),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

/// Who sent what a raw socket of the far host has heard since it was opened.
fn heard(ear: &Socket) -> Vec<IpAddr> {
    let mut from = Vec::new();
    while readable(ear, Instant::now()).unwrap() {
        let mut buffer = Vec::with_capacity(1 << 16);
        let (_, address) = ear.recv_from(buffer.spare_capacity_mut()).unwrap();
        from.push(address.as_socket().unwrap().ip());
    }
    from
}

#[test]
fn ping_gets_all_of_its_answers() {
    let tools = there(&[
        ("busybox", Tool::of_busybox("ping")),
        ("ping of its own", Tool::of_machine("ping")),
    ]);
    for (world, what, is_narrow) in worlds() {
        for (family, far) in far().into_iter().enumerate() {
            let icmp = [1, 58][family];
            for (name, ping) in &tools {
                for size in [56, 4000] {
                    let what = format!("{what}, {far}, {name}, {size} bytes");
                    let ear = raw(&world.beyond, far, icmp);
                    let pod = world.pod(1).place();
                    if is_narrow && size > NARROW {
                        // Each end has to hear first what the way carries, by what is lost.
                        run(ping, pod, &format!("-c 4 -w 15 -s {size} {far}"));
                    }
                    let said = run(ping, pod, &format!("-c 2 -w 15 -s {size} {far}"));
                    let text = &said.text;
                    assert!(said.success, "{what}: {text}");
                    assert!(text.contains(", 0% packet loss"), "{what}: {text}");
                    assert!(
                        text.contains(&format!("bytes from {far}: ")),
                        "{what}: {text}"
                    );
                    let own = world.own()[family];
                    let requests = heard(&ear).into_iter().filter(|from| *from == own);
                    assert!(requests.count() >= 2, "{what}");
                }
            }
        }
    }
}

/// Who is named on the lines of hops, which begin with a number.
fn hops(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        words.next()?.parse::<u32>().ok()?;
        words.find_map(|word| word.parse().ok())
    });
    lines.collect()
}

/// Routers limit how many errors they raise: a trace with gaps is made once more.
fn traces(world: &World, tool: &Tool, family: usize, arguments: &str, what: &str) -> String {
    let far = far()[family];
    let [first, second] = routers()[family];
    let nodes = addresses_of_node(world);
    let mut last = None;
    eventually(what, || {
        let said = run(tool, world.pod(1).place(), &format!("{arguments} {far}"));
        assert!(said.success, "{what}: {}", said.text);
        let hops = hops(&said.text);
        let is_whole = matches!(&hops[..], [own, way @ ..]
            if nodes.contains(own) && way == [first, second, far]);
        last = Some(said.text);
        is_whole
    });
    last.unwrap()
}

#[test]
fn traceroute_prints_every_hop() {
    let tools = there(&[
        ("traceroute", Tool::traceroute()),
        ("busybox", Tool::of_busybox("traceroute")),
        ("busybox", Tool::of_busybox("traceroute6")),
    ]);
    for (world, what, _) in worlds() {
        for (family, in_family) in FAMILIES.iter().enumerate() {
            for (at, (name, tool)) in tools.iter().enumerate() {
                let modes: &[&str] = match *name {
                    "traceroute" => &["", " -I", " -T -p 33434", " -U -p 33434", " -F"],
                    // Two of its programs, one for each family.
                    _ if at + 1 - usize::from(tools[0].0 == "traceroute") == family + 1 => &[""],
                    _ => &[],
                };
                for mode in modes {
                    let what = format!("{what}, {in_family}, {name}{mode}");
                    traces(&world, tool, family, &format!("-n -q 2 -w 2{mode}"), &what);
                }
            }
        }
    }
}

/// With `--mtu` it finds out what each link on the way carries, by what routers say of that.
#[test]
fn traceroute_prints_what_the_links_carry() {
    let Some((_, tool)) = there(&[("traceroute", Tool::traceroute())]).pop() else {
        return;
    };
    for (world, what, is_narrow) in worlds() {
        for (family, in_family) in FAMILIES.iter().enumerate() {
            let what = format!("{what}, {in_family}");
            let text = traces(&world, &tool, family, "-n --mtu -q 1 -w 2", &what);
            assert_eq!(
                text.contains(&format!("F={NARROW}")),
                is_narrow,
                "{what}: {text}"
            );
        }
    }
}

/// An answer of DNS (RFC 1035) with one address, whatever is asked for. Where names that are compressed point to is the question.
fn answer(question: &[u8], [v4, v6]: [IpAddr; 2]) -> Vec<u8> {
    const HEADER: usize = 12;
    let end = question[HEADER..]
        .iter()
        .position(|byte| *byte == 0)
        .unwrap()
        + HEADER
        + 5;
    let kind = question[end - 3];
    let address = match (v4, v6) {
        (IpAddr::V4(v4), _) if kind == 1 => v4.octets().to_vec(),
        (_, IpAddr::V6(v6)) if kind == 28 => v6.octets().to_vec(),
        _ => Vec::new(),
    };
    let answers = u8::from(!address.is_empty());
    let flags = [0x85, 0x80, 0, 1, 0, answers, 0, 0, 0, 0];
    let mut message = [&question[..2], &flags, &question[HEADER..end]].concat();
    if answers > 0 {
        message.extend([
            0xc0,
            HEADER as u8,
            0,
            kind,
            0,
            1,
            0,
            0,
            0,
            60,
            0,
            address.len() as u8,
        ]);
        message.extend(address);
    }
    message
}

#[test]
fn names_are_looked_up_at_a_server_outside() {
    const NAMED: [&str; 2] = ["198.51.100.53", "2001:db8:3::53"];
    const NAME: &str = "host.example.org";
    let named = NAMED.map(|text| text.parse().unwrap());
    let tools = there(&[
        ("busybox", Tool::of_busybox("nslookup")),
        ("nslookup of its own", Tool::of_machine("nslookup")),
        ("dig", Tool::of_machine("dig")),
    ]);
    for (world, what, _) in worlds() {
        for (family, far) in far().into_iter().enumerate() {
            let server = world.beyond.run(|| bind::udp((far, 53))).unwrap();
            for (name, tool) in &tools {
                let what = format!("{what}, {far}, {name}");
                let arguments = match *name {
                    "dig" => format!("@{far} +short +tries=3 {NAME} A {NAME} AAAA"),
                    _ => format!("{NAME} {far}"),
                };
                let serve = |done: &AtomicBool| {
                    let mut clients = Vec::new();
                    let mut question = [0; 512];
                    while !done.load(Ordering::Relaxed) {
                        if readable(&server, soon()).unwrap() {
                            let (len, from) = server.recv_from(&mut question).unwrap();
                            let answer = answer(&question[..len], named);
                            server.send_to(&answer, from).unwrap();
                            clients.push(from.ip());
                        }
                    }
                    clients
                };
                let (clients, said) =
                    while_serving(serve, || run(tool, world.pod(1).place(), &arguments));
                assert!(said.success, "{what}: {}", said.text);
                for named in NAMED {
                    assert!(said.text.contains(named), "{what}: {}", said.text);
                }
                let own = world.own()[family];
                assert!(
                    !clients.is_empty() && clients.iter().all(|from| *from == own),
                    "{what}: {clients:?}"
                );
            }
        }
    }
}

/// A page of many packets, of which each line is another.
fn page() -> String {
    (0..40_000)
        .map(|line| format!("line {line} of the page\n"))
        .collect()
}

#[test]
fn pages_are_fetched_from_a_server_outside() {
    let tools = there(&[
        ("busybox", Tool::of_busybox("wget")),
        ("wget of its own", Tool::of_machine("wget")),
        ("curl", Tool::of_machine("curl")),
    ]);
    let page = page();
    for (world, what, _) in worlds() {
        for (family, far) in far().into_iter().enumerate() {
            let listener = world
                .beyond
                .run(|| Ok(TcpListener::bind((far, 0))?))
                .unwrap();
            let url = format!("http://{}/page", listener.local_addr().unwrap());
            for (name, tool) in &tools {
                let what = format!("{what}, {url}, {name}");
                let arguments = match *name {
                    "curl" => format!("-s -g {url}"),
                    _ => format!("-q -O - {url}"),
                };
                let serve = |_: &AtomicBool| {
                    let (mut stream, from) = accept(&listener, Instant::now() + PATIENCE).unwrap();
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n") {
                        let mut byte = [0];
                        stream.read_exact(&mut byte).unwrap();
                        request.push(byte[0]);
                    }
                    let head = format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                        page.len()
                    );
                    stream.write_all(head.as_bytes()).unwrap();
                    stream.write_all(page.as_bytes()).unwrap();
                    (from.ip(), String::from_utf8(request).unwrap())
                };
                let ((from, request), said) =
                    while_serving(serve, || run(tool, world.pod(1).place(), &arguments));
                assert_eq!(from, world.own()[family], "{what}");
                assert!(
                    request.starts_with("GET /page HTTP/1."),
                    "{what}: {request}"
                );
                assert!(
                    said.success && said.text == page,
                    "{what}: {} bytes",
                    said.text.len()
                );
            }
        }
    }
}
