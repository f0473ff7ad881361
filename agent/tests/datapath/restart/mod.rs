//! What outlives the agent, and what does not fit the next one.

use crate::{
    kit::{self, OUTSIDE, Outside, Pod},
    run::Programs,
};
use aya::{
    maps::{MapData, MapInfo},
    programs::links::{FdLink, PinnedLink},
};
use sinabro_agent::datapath::{AttachMode, Datapath, DatapathConfig, DatapathError};
use sinabro_common::names;
use sinabro_netlink::{
    Conn, link,
    vxlan::{Vxlan, VxlanSettings},
};
use std::{
    collections::{BTreeMap, HashSet},
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

const MAPS: [&str; 11] = [
    "CONFIG",
    "ENDPOINTS",
    "POD_LINKS",
    "POD_COUNTERS",
    "DROPS",
    "STACK_FLOWS",
    "NAT",
    "NON_MASQUERADE",
    "NODES",
    "POD_RANGES",
    "OVERLAY",
];

fn pin(name: &str) -> PathBuf {
    Path::new(names::BPF_DIR).join(name)
}

/// Kernel ids of every map.
fn maps() -> BTreeMap<&'static str, u32> {
    MAPS.into_iter()
        .map(|name| (name, MapInfo::from_pin(pin(name)).unwrap().id()))
        .collect()
}

/// Kernel id of every pinned link, and of its program.
fn links() -> BTreeMap<String, (u32, u32)> {
    fs::read_dir(pin(names::BPF_LINKS_DIR))
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let link: FdLink = PinnedLink::from_pin(entry.path()).unwrap().into();
            let info = link.info().unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, (info.id(), info.program_id()))
        })
        .collect()
}

fn load(attach: AttachMode) -> Datapath {
    Datapath::load(&DatapathConfig {
        attach,
        ..kit::config()
    })
    .unwrap()
}

/// Runs a test about links, where the kernel has such (tcx, Linux 6.6).
fn with_links(test: impl FnOnce() + Send) {
    if !kit::modes().contains(&AttachMode::Tcx) {
        println!("skipped: this kernel attaches by filters alone");
        return;
    }
    kit::fresh(test);
}

/// A connection that can be asked whether it still works.
struct Call {
    client: TcpStream,
    server: TcpStream,
}

impl Call {
    fn new(listener: TcpListener, client: TcpStream) -> Self {
        let (server, _) = listener.accept().unwrap();
        for stream in [&server, &client] {
            let timeout = Some(Duration::from_secs(10));
            stream.set_read_timeout(timeout).unwrap();
        }
        Self { client, server }
    }

    fn works(&mut self) {
        let mut got = [0; 4];
        self.client.write_all(b"ping").unwrap();
        self.server.read_exact(&mut got).unwrap();
        self.server.write_all(b"pong").unwrap();
        self.client.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"pong");
    }
}

#[test]
fn a_restart_keeps_every_flow() {
    for mode in kit::modes() {
        kit::fresh(|| {
            let datapath = load(mode);
            datapath.set_node_config(kit::node_config()).unwrap();
            let outside = Outside::new(&datapath);
            let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
            let near = b.run(|| TcpListener::bind((b.v4, 80)).unwrap());
            let mut near = Call::new(near, a.run(|| TcpStream::connect((b.v4, 80)).unwrap()));
            let far = outside.run(|| TcpListener::bind((OUTSIDE, 80)).unwrap());
            let mut far = Call::new(far, a.run(|| TcpStream::connect((OUTSIDE, 80)).unwrap()));
            near.works();
            far.works();
            let counted = datapath.pod_counters(b.ifindex).unwrap().unwrap();
            let before = (maps(), links(), datapath.programs());
            drop(datapath);

            // Nobody at home.
            near.works();
            far.works();

            let datapath = load(mode);
            near.works();
            far.works();
            a.attach(&datapath);
            b.attach(&datapath);
            datapath.set_uplinks(&[outside.uplink]).unwrap();
            let live = HashSet::from([a.link.clone(), b.link.clone()]);
            assert!(datapath.retain_pods(&live).unwrap().is_empty());
            near.works();
            far.works();
            let now = datapath.pod_counters(b.ifindex).unwrap().unwrap();
            assert!(now.rx_packets > counted.rx_packets);

            assert_eq!(maps(), before.0);
            let ids: HashSet<u32> = datapath.programs().iter().map(|p| p.id).collect();
            assert!(before.2.iter().all(|program| !ids.contains(&program.id)));
            let now = links();
            assert_eq!(now.len(), if mode == AttachMode::Tcx { 6 } else { 0 });
            for (name, (id, program)) in &now {
                assert_eq!(before.1[name].0, *id, "{name}: the same link");
                assert!(ids.contains(program), "{name}: the new program");
            }

            // Each program is there once: five packets are five.
            let sent = datapath
                .pod_counters(a.ifindex)
                .unwrap()
                .unwrap()
                .tx_packets;
            a.run(|| {
                let socket = std::net::UdpSocket::bind((a.v4, 0)).unwrap();
                for _ in 0..5 {
                    socket.send_to(b"x", (OUTSIDE, 9)).unwrap();
                }
            });
            let now = datapath
                .pod_counters(a.ifindex)
                .unwrap()
                .unwrap()
                .tx_packets;
            assert_eq!(now - sent, 5);
        });
    }
}

#[test]
fn links_are_updated_before_anyone_asks() {
    with_links(|| {
        let datapath = load(AttachMode::Tcx);
        let _pod = Pod::live(&datapath, 5);
        let before = links();
        drop(datapath);
        let datapath = load(AttachMode::Tcx);
        let ids: HashSet<u32> = datapath.programs().iter().map(|p| p.id).collect();
        for (name, (id, program)) in links() {
            assert_eq!(before[&name].0, id);
            assert!(ids.contains(&program), "{name}");
        }
    });
}

#[test]
fn the_way_of_attaching_can_change() {
    with_links(|| {
        let mut datapath = load(AttachMode::Tcx);
        datapath.set_node_config(kit::node_config()).unwrap();
        let outside = Outside::new(&datapath);
        let pod = Pod::live(&datapath, 5);
        for (mode, pins) in [
            (AttachMode::Clsact, 0),
            (AttachMode::Tcx, 4),
            // Links for uplinks, filters for pods.
            (AttachMode::Auto, 2),
        ] {
            drop(datapath);
            datapath = load(mode);
            pod.attach(&datapath);
            datapath.set_uplinks(&[outside.uplink]).unwrap();
            assert_eq!(links().len(), pins);
            let count = || {
                datapath
                    .pod_counters(pod.ifindex)
                    .unwrap()
                    .unwrap()
                    .tx_packets
            };
            // Once each, and what the pod's IPv6 says by itself. The kernel takes a link off some
            // time after its pin is gone; until then what replaces it counts beside it.
            kit::eventually(&format!("{mode:?}: every packet is counted once"), || {
                let before = count();
                pod.run(|| {
                    let socket = std::net::UdpSocket::bind((pod.v4, 0)).unwrap();
                    for _ in 0..100 {
                        socket.send_to(b"x", (OUTSIDE, 9)).unwrap();
                    }
                });
                let counted = count() - before;
                assert!(counted >= 100, "{mode:?}: {counted}");
                counted < 150
            });
        }
    });
}

#[test]
fn what_vanished_pods_left_is_removed() {
    for mode in kit::modes() {
        kit::fresh(|| {
            let datapath = load(mode);
            let (a, b) = (Pod::live(&datapath, 5), Pod::live(&datapath, 6));
            drop(datapath);
            Conn::new()
                .unwrap()
                .execute(link::delete(a.ifindex))
                .unwrap();

            let datapath = load(mode);
            b.attach(&datapath);
            let gone = datapath
                .retain_pods(&HashSet::from([b.link.clone()]))
                .unwrap();
            if mode == AttachMode::Tcx {
                assert_eq!(gone, std::slice::from_ref(&a.link));
                assert!(links().keys().all(|name| name.starts_with(&b.link)));
                assert_eq!(links().len(), 2);
            }
            assert_eq!(datapath.pod_counters(a.ifindex).unwrap(), None);
            assert!(datapath.pod_counters(b.ifindex).unwrap().is_some());
            // The address leads nowhere any more: the stack is asked.
            let frame = crate::packet::udp((b.v4, 1), (a.v4, 2), b"");
            let frame = crate::packet::eth(names::HOST_MAC, b.mac, 0x0800, &frame.bytes());
            datapath.set_node_config(kit::node_config()).unwrap();
            let (verdict, _) = Programs::of(&datapath).run("pod_out", b.ifindex, &frame);
            assert_eq!(verdict, crate::run::PASS);

            // A pod that this process attached stays, listed or not.
            assert!(datapath.retain_pods(&HashSet::new()).unwrap().is_empty());
            assert!(datapath.pod_counters(b.ifindex).unwrap().is_some());
        });
    }
}

#[test]
fn a_link_of_the_same_name_is_attached_anew() {
    with_links(|| {
        let datapath = load(AttachMode::Tcx);
        let old = Pod::live(&datapath, 5);
        Conn::new()
            .unwrap()
            .execute(link::delete(old.ifindex))
            .unwrap();
        let before = links();
        let new = Pod::live(&datapath, 5);
        assert_ne!(old.ifindex, new.ifindex);
        let after = links();
        assert_eq!(after.len(), 2);
        assert!(after.iter().all(|(name, (id, _))| before[name].0 != *id));
    });
}

#[test]
fn uplinks_come_and_go() {
    for mode in kit::modes() {
        kit::fresh(|| {
            let datapath = load(mode);
            datapath.set_node_config(kit::node_config()).unwrap();
            let outside = Outside::new(&datapath);
            let pod = Pod::live(&datapath, 5);
            let server = outside.run(|| std::net::UdpSocket::bind((OUTSIDE, 53)).unwrap());
            let client = pod.run(|| std::net::UdpSocket::bind((pod.v4, 0)).unwrap());
            let source = || {
                client.send_to(b"x", (OUTSIDE, 53)).unwrap();
                server.recv_from(&mut [0; 8]).unwrap().1.ip()
            };
            assert_eq!(source(), kit::NODE);
            // Pods' links may serve as uplinks of nothing: both at once.
            datapath
                .set_uplinks(&[outside.uplink, pod.ifindex])
                .unwrap();
            assert_eq!(source(), kit::NODE);
            datapath.set_uplinks(&[pod.ifindex]).unwrap();
            // The kernel takes a program away in its own time.
            kit::eventually("leaving the uplink", || source() == pod.v4);
            datapath.set_uplinks(&[outside.uplink]).unwrap();
            assert_eq!(source(), kit::NODE);
            if mode == AttachMode::Tcx {
                let host = |name: &&String| name.starts_with("host-");
                assert_eq!(links().keys().filter(host).count(), 2);
            }
        });
    }
}

#[test]
fn a_pin_that_does_not_fit_is_replaced() {
    with_links(|| {
        let datapath = load(AttachMode::Tcx);
        let pod = Pod::live(&datapath, 5);
        let fitting = maps();
        drop(datapath);

        // Another map's shape, a program, a directory.
        fs::remove_file(pin("NAT")).unwrap();
        MapData::from_pin(pin("DROPS"))
            .unwrap()
            .pin(pin("NAT"))
            .unwrap();
        fs::remove_file(pin("STACK_FLOWS")).unwrap();
        fs::create_dir(pin("STACK_FLOWS")).unwrap();
        fs::remove_file(pin("POD_LINKS")).unwrap();
        let link = pin(names::BPF_LINKS_DIR).join(format!("{}-in", pod.link));
        fs::rename(&link, pin("POD_LINKS")).unwrap();
        // And what a process left that was killed while it replaced.
        MapData::from_pin(pin("CONFIG"))
            .unwrap()
            .pin(pin("NAT_next"))
            .unwrap();

        let before = links();
        let datapath = load(AttachMode::Tcx);
        for (name, id) in maps() {
            let kept = fitting[name] == id;
            let misfit = ["NAT", "STACK_FLOWS", "POD_LINKS"].contains(&name);
            assert_eq!(kept, !misfit, "{name}");
        }
        // Nothing is swapped until the new maps are filled.
        assert_eq!(links(), before);
        datapath.set_node_config(kit::node_config()).unwrap();
        pod.attach(&datapath);
        let ids: HashSet<u32> = datapath.programs().iter().map(|p| p.id).collect();
        assert_eq!(links().len(), 2);
        assert!(links().values().all(|(_, program)| ids.contains(program)));
        pod.run(|| {
            let error = TcpStream::connect("10.1.0.1:9").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
        });

        assert!(!pin("NAT_next").exists());

        let fitting = maps();
        drop(datapath);
        load(AttachMode::Tcx);
        assert_eq!(maps(), fitting, "all fit now");
    });
}

#[test]
fn a_smaller_table_is_a_table_that_does_not_fit() {
    kit::fresh(|| {
        drop(load(AttachMode::Auto));
        let before = maps();
        let datapath = Datapath::load(&DatapathConfig {
            nat_entries: Some(1000),
            ..kit::config()
        })
        .unwrap();
        assert_eq!(datapath.nat_usage().capacity, 500);
        let changed: Vec<_> = maps()
            .into_iter()
            .filter(|(name, id)| before[name] != *id)
            .map(|(name, _)| name)
            .collect();
        assert_eq!(changed, ["NAT"]);
    });
}

#[test]
fn a_kernel_that_refuses_leaves_everything_as_it_was() {
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        let pod = Pod::live(&datapath, 5);
        drop(datapath);
        fs::remove_file(pin("NAT")).unwrap();
        MapData::from_pin(pin("DROPS"))
            .unwrap()
            .pin(pin("NAT"))
            .unwrap();
        let before = (maps(), links());

        let error = std::thread::scope(|scope| {
            let refused = scope.spawn(|| {
                without_program_rights();
                Datapath::load(&kit::config()).err()
            });
            refused.join().unwrap().unwrap()
        });
        assert!(
            matches!(&error, DatapathError::Refused { program, .. } if program.starts_with("pod_")),
            "{error:?}"
        );
        assert_eq!((maps(), links()), before);
        pod.run(|| {
            let error = TcpStream::connect("10.1.0.1:9").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
        });
    });
}

/// Takes from this thread what loading a classifier needs (CAP_NET_ADMIN, CAP_SYS_ADMIN), and
/// leaves it what making a map needs (CAP_BPF).
fn without_program_rights() {
    const NET_ADMIN: u32 = 12;
    const SYS_ADMIN: u32 = 21;
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable; low words, then high ones.
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: both live until the calls return and have the size of the version.
    unsafe {
        let got = libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr());
        assert_eq!(got, 0);
        sets[0][0] &= !(1 << NET_ADMIN | 1 << SYS_ADMIN);
        let set = libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr());
        assert_eq!(set, 0);
    }
}

#[test]
fn a_directory_elsewhere_is_refused_with_advice() {
    kit::fresh(|| {
        let directory = tempfile::tempdir().unwrap();
        let error = Datapath::load(&DatapathConfig {
            bpf_dir: directory.path().join("sinabro"),
            ..kit::config()
        })
        .err()
        .unwrap();
        let text = error.to_string();
        assert!(text.contains("sinabroctl prepare"), "{text}");
        assert!(text.contains(directory.path().to_str().unwrap()), "{text}");
    });
}

/// A VXLAN device as the agent makes it, down.
fn device() -> u32 {
    let mut conn = Conn::new().unwrap();
    let device = Vxlan {
        name: names::VXLAN_LINK,
        mac: [2, 0x5b, 0, 0, 0, 1],
        mtu: 1450,
        settings: VxlanSettings::new(names::VXLAN_VNI, names::VXLAN_PORT, kit::NODE.into()),
    };
    conn.execute(device.create()).unwrap();
    conn.link_by_name(names::VXLAN_LINK).unwrap().index
}

/// Where a device's program is attached, and which program that is: of its link, or of its only
/// filter.
fn overlay_program(mode: AttachMode, device: u32) -> (u32, u32) {
    if mode == AttachMode::Tcx {
        return links()[OVERLAY_LINK];
    }
    let filters = Conn::new().unwrap().filters(device).unwrap();
    assert_eq!(filters.len(), 1, "{filters:?}");
    let (_, program) = filters[0].program.clone().unwrap();
    (filters[0].handle, program)
}

const OVERLAY_LINK: &str = "sinabro_vxlan-in";

#[test]
fn the_overlay_keeps_its_program() {
    for mode in kit::modes() {
        kit::fresh(|| {
            let first = device();
            let datapath = load(mode);
            datapath.attach_overlay(first).unwrap();
            let (place, program) = overlay_program(mode, first);
            datapath.attach_overlay(first).unwrap();
            assert_eq!(overlay_program(mode, first), (place, program));
            drop(datapath);
            // Another agent has another program in the same place: in a link as soon as it is
            // loaded.
            let datapath = load(mode);
            if mode == AttachMode::Clsact {
                datapath.attach_overlay(first).unwrap();
            }
            let (again, next) = overlay_program(mode, first);
            assert_eq!(again, place);
            assert_ne!(next, program);
            // It is no pod's: what is left of pods is cleared away without it.
            datapath.retain_pods(&HashSet::new()).unwrap();
            assert_eq!(overlay_program(mode, first), (again, next));
            // Another device has a link or a filter of its own.
            let mut conn = Conn::new().unwrap();
            conn.execute(link::delete(first)).unwrap();
            let second = device();
            datapath.attach_overlay(second).unwrap();
            let (other, program) = overlay_program(mode, second);
            assert_eq!(program, next);
            assert_eq!(other == place, mode == AttachMode::Clsact);
        });
    }
}

#[test]
fn the_overlays_way_of_attaching_can_change() {
    with_links(|| {
        let device = device();
        for (mode, pinned) in [
            (AttachMode::Tcx, true),
            (AttachMode::Clsact, false),
            (AttachMode::Tcx, true),
        ] {
            load(mode).attach_overlay(device).unwrap();
            // Never by both.
            assert_eq!(links().contains_key(OVERLAY_LINK), pinned);
            let filters = Conn::new().unwrap().filters(device).unwrap();
            assert_eq!(filters.len(), usize::from(!pinned), "{filters:?}");
        }
    });
}
