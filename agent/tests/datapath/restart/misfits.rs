//! Pins of another shape, a kernel that refuses, a directory that is no bpffs.

use super::*;
use sinabro_common::abi::layout::{MapRecord, Place, key};

const CONNECTIONS: Place<'_> = Place {
    name: "CONNECTIONS",
    number: 3,
};

#[test]
fn a_pin_that_does_not_fit_is_replaced() {
    with_links(|| {
        let datapath = load(AttachMode::Tcx);
        let pod = Pod::live(&datapath, 5);
        let fitting = maps();
        drop(datapath);

        // Another map's shape, a program, a directory.
        fs::remove_file(pin("v3/CONNECTIONS")).unwrap();
        MapData::from_pin(pin("DROPS"))
            .unwrap()
            .pin(pin("v3/CONNECTIONS"))
            .unwrap();
        fs::remove_file(pin("v2/ALIASES")).unwrap();
        fs::create_dir(pin("v2/ALIASES")).unwrap();
        fs::remove_file(pin("POD_LINKS")).unwrap();
        let link = pin(names::BPF_LINKS_DIR).join(format!("{}-in", pod.link));
        fs::rename(&link, pin("POD_LINKS")).unwrap();
        // And what a process left that was killed while it replaced.
        MapData::from_pin(pin("CONFIG"))
            .unwrap()
            .pin(pin("v3/CONNECTIONS_next"))
            .unwrap();

        let before = links();
        let datapath = load(AttachMode::Tcx);
        for (name, id) in maps() {
            let kept = fitting[name] == id;
            let misfit = ["v3/CONNECTIONS", "v2/ALIASES", "POD_LINKS"].contains(&name);
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

        assert!(!pin("v3/CONNECTIONS_next").exists());

        let fitting = maps();
        drop(datapath);
        load(AttachMode::Tcx);
        assert_eq!(maps(), fitting, "all fit now");
    });
}

/// Names of the maps that are others than before.
fn changed_since(before: &BTreeMap<&'static str, u32>) -> Vec<&'static str> {
    let changed = maps().into_iter().filter(|(name, id)| before[name] != *id);
    changed.map(|(name, _)| name).collect()
}

#[test]
fn a_map_whose_bytes_mean_something_else_does_not_fit() {
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        let pod = Pod::live(&datapath, 5);
        drop(datapath);
        drop(load(AttachMode::Auto));
        let before = maps();
        let open = || -> aya::maps::HashMap<MapData, u64, MapRecord> {
            let map = aya::maps::Map::HashMap(MapData::from_pin(pin("LAYOUTS")).unwrap());
            map.try_into().unwrap()
        };
        let record = open().get(&key(CONNECTIONS), 0).unwrap();
        assert_eq!(record.id, before["v3/CONNECTIONS"], "this very map");

        // As of a version that has another meaning in the same bytes.
        let other = MapRecord {
            layout: record.layout + 1,
            ..record
        };
        open().insert(key(CONNECTIONS), other, 0).unwrap();
        let datapath = load(AttachMode::Auto);
        assert_eq!(changed_since(&before), ["v3/CONNECTIONS"]);
        let now = open().get(&key(CONNECTIONS), 0).unwrap();
        assert_eq!(
            (now.layout, now.id),
            (record.layout, maps()["v3/CONNECTIONS"])
        );
        drop(datapath);
        let before = maps();
        drop(load(AttachMode::Auto));
        assert_eq!(maps(), before, "and it fits from now on");
        drop(pod);
    });
}

#[test]
fn a_table_of_another_size_takes_over_what_was_in_the_one_before() {
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        datapath.set_node_config(kit::node_config()).unwrap();
        let outside = Outside::new(&datapath);
        let pod = Pod::live(&datapath, 5);
        let listener = outside.run(|| TcpListener::bind((OUTSIDE, 80)).unwrap());
        let client = pod.run(|| TcpStream::connect((OUTSIDE, 80)).unwrap());
        let mut call = Call::new(listener, client);
        call.works();
        drop(datapath);
        for entries in [1000, 3000] {
            let before = maps();
            let datapath = Datapath::load(&DatapathConfig {
                connections: Some(entries),
                ..kit::config()
            })
            .unwrap();
            assert_eq!(datapath.connection_usage().capacity, u64::from(entries));
            assert_eq!(changed_since(&before), ["v2/ALIASES", "v3/CONNECTIONS"]);
            call.works();
            pod.attach(&datapath);
            datapath
                .set_uplinks(&[kit::leads_out(outside.uplink)])
                .unwrap();
            call.works();
        }
    });
}

#[test]
fn maps_of_another_layout_are_listed_and_go() {
    kit::fresh(|| {
        drop(load(AttachMode::Auto));
        let directory = Path::new(names::BPF_DIR);
        // Of a version that did not say that its programs run.
        let leave = || {
            fs::create_dir(pin("v7")).unwrap();
            let other = MapData::from_pin(pin("DROPS")).unwrap();
            other.pin(pin("v7/MAP")).unwrap();
        };
        leave();
        let lines = datapath::pins::describe(directory).unwrap();
        let listed = |line: &String| line.starts_with("v7/MAP: per-CPU array of ");
        assert!(lines.iter().any(listed), "{lines:?}");
        let datapath = load(AttachMode::Auto);
        assert!(
            pin("v7/MAP").exists(),
            "programs may use it until others do"
        );
        let outside = Outside::new(&datapath);
        assert!(!pin("v7").exists());
        drop((datapath, outside));
        leave();
        let removed = datapath::remove(directory);
        assert!(removed.problems.is_empty(), "{:?}", removed.problems);
        assert!(!directory.exists());
    });
}

#[test]
fn a_kernel_that_refuses_leaves_everything_as_it_was() {
    kit::fresh(|| {
        let datapath = load(AttachMode::Auto);
        let pod = Pod::live(&datapath, 5);
        drop(datapath);
        fs::remove_file(pin("v3/CONNECTIONS")).unwrap();
        MapData::from_pin(pin("DROPS"))
            .unwrap()
            .pin(pin("v3/CONNECTIONS"))
            .unwrap();
        let before = (maps(), links());

        let choice = std::thread::scope(|scope| {
            let refused = scope.spawn(|| {
                without_program_rights();
                Datapath::load(&kit::config()).unwrap().choice().clone()
            });
            refused.join().unwrap()
        });
        assert_eq!(choice.level, Level::None);
        let why = &choice.refused[0];
        assert!(
            why.contains(": pod_") && why.contains("os error 1"),
            "{why}"
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
