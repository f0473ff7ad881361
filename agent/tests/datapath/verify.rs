//! `sinabroctl verify`, beside a data path that runs.

use crate::{acceleration::Cgroup, kit};
use sinabro_agent::datapath::verify;
use sinabro_common::{api::VerifiedProgram, names};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Programs that translate Services at sockets.
pub const SERVICE_SOCKETS: [&str; 9] = [
    "sock_release",
    "getpeername4",
    "getpeername6",
    "recvmsg4",
    "recvmsg6",
    "sendmsg4",
    "sendmsg6",
    "connect4",
    "connect6",
];

/// That the verifier may walk through for all programs: see `agent/build/globals.rs`.
const MOST_INSTRUCTIONS: u32 = 450_000;

/// Everything below a directory.
fn pins(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(pins(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

#[test]
fn every_program_is_verified_and_nothing_stays() {
    kit::fresh(|| {
        let dir = Path::new(names::BPF_DIR);
        let cgroup = Cgroup::enter();
        let cgroup = Some(cgroup.path.as_path());
        // Where there is no agent, and beside one.
        verify(dir, cgroup).unwrap();
        assert!(!dir.exists());
        let running = kit::load();
        let pod = kit::Pod::live(&running, 5);
        let before = (pins(dir), running.programs());

        let report = verify(dir, cgroup).unwrap();
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(report.kernel, release.trim());
        for row in &report.programs {
            let accelerates = ["pod_sockets", "pod_messages"].contains(&row.name.as_str());
            let may_fail = accelerates && kit::unaccelerated().is_some();
            assert!(row.ok || may_fail, "{row:?}");
            assert!(!row.ok || row.instructions.unwrap() > 10, "{row:?}");
        }
        // A node's programs are verified at each start of its agent: without global functions a million altogether.
        let programs = report.programs.iter().filter(|row| row.mode != "tcx");
        let walked: u32 = programs.filter_map(|row| row.instructions).sum();
        assert!(walked < MOST_INSTRUCTIONS, "{walked}");
        let of = |name: &str| -> Vec<&VerifiedProgram> {
            let rows = report.programs.iter();
            rows.filter(|row| row.name == name).collect()
        };
        for name in [
            "pod_out",
            "pod_in",
            "uplink_out",
            "uplink_in",
            "overlay_in",
            "overlay_out",
        ] {
            let modes: Vec<_> = of(name).iter().map(|row| row.mode.as_str()).collect();
            let expected = ["clsact", "tcx"];
            assert_eq!(modes, expected[..kit::modes().len()], "{name}");
            assert!(of(name).iter().all(|row| row.required));
        }
        for name in ["pod_sockets", "pod_messages"] {
            assert_eq!(of(name).len(), 1);
            assert!(!of(name)[0].required);
        }
        for name in SERVICE_SOCKETS {
            assert_eq!(of(name).len(), 1, "{name}");
            assert_eq!(of(name)[0].mode, "cgroup");
            assert!(!of(name)[0].required);
        }

        assert_eq!((pins(dir), running.programs()), before);
        // A pod's packets still go through what runs.
        let counted = || running.pod_counters(pod.ifindex).unwrap().unwrap();
        let sent = counted().tx_packets;
        pod.run(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.send_to(b"x", "10.1.0.1:9").unwrap();
        });
        kit::eventually("the pod's packet to be counted", || {
            counted().tx_packets > sent
        });
    });
}

/// What a process that was killed in the middle leaves, and what is not its own.
#[test]
fn leftovers_go_and_others_files_stay() {
    kit::fresh(|| {
        let dir = Path::new(names::BPF_DIR);
        let cgroup = Cgroup::enter();
        let cgroup = Some(cgroup.path.as_path());
        let left = dir.join(names::BPF_VERIFY_DIR);
        fs::create_dir_all(left.join(names::BPF_LINKS_DIR)).unwrap();
        verify(dir, cgroup).unwrap();
        assert!(!left.exists());

        let others = left.join("others");
        fs::create_dir_all(&others).unwrap();
        let error = verify(dir, cgroup).unwrap_err();
        assert!(error.to_string().contains("removing directory"), "{error}");
        assert!(others.exists());
    });
}

/// It says so once, and not of every program that the kernel refuses it.
#[test]
fn where_nothing_can_be_pinned_no_program_is_called_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = verify(&dir.path().join("sinabro"), None).unwrap_err();
    assert!(error.to_string().contains("mount one"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
