use super::*;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use proptest::prelude::*;
use sinabro_lab::residue::run;
use std::{process, thread};

#[test]
fn finds_the_unified_and_the_hybrid_mount() {
    let unified = b"25 30 0:23 / /sys rw shared:7 - sysfs sysfs rw\n\
        29 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
    assert_eq!(parse(unified), [Path::new("/sys/fs/cgroup")]);
    let hybrid = b"30 25 0:27 / /sys/fs/cgroup rw - tmpfs cgroup2 rw\n\
        31 30 0:28 / /sys/fs/cgroup/unified rw a:1 b:2 - cgroup2 none rw\n";
    assert_eq!(parse(hybrid), [Path::new("/sys/fs/cgroup/unified")]);
    let several = b"1 0 0:1 /../.. /host\\040s/cgroup rw - cgroup2 c rw\n\
        2 0 0:1 / /sys/fs/cgroup rw - cgroup2 c rw";
    let expected = [Path::new("/host s/cgroup"), Path::new("/sys/fs/cgroup")];
    assert_eq!(parse(several), expected);
}

#[test]
fn finds_nothing_where_there_is_nothing() {
    for text in [
        &b""[..],
        b"\n\n",
        b"- cgroup2",
        b"1 2 3 / /x rw - ext4 x rw\n",
        b"1 2 3 / /x rw - cgroup x rw\n",
        b"1 2 3 / /x rw -",
    ] {
        assert_eq!(parse(text), Vec::<PathBuf>::new());
    }
}

proptest! {
    #[test]
    fn never_panics(text: Vec<u8>) {
        parse(&text);
        unescape(&text);
    }
}

/// A cgroup of this machine's, which goes with it.
struct Group(PathBuf);

impl Group {
    fn new(name: &str) -> Self {
        let name = format!("sinabro-test{}-{name}-{}", run::in_name(), process::id());
        let path = find(None).unwrap().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs where mounts are nobody else's, with a directory for them. It is removed from outside, where nothing is mounted.
fn with_own_mounts(f: impl FnOnce(&Path) + Send) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap();
    let run = || {
        unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS).unwrap();
        mount_to(None, "/".as_ref(), MsFlags::MS_REC | MsFlags::MS_PRIVATE);
        f(&path);
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap());
    dir.close().unwrap();
}

fn mount_to(source: Option<&Path>, target: &Path, flags: MsFlags) {
    let none = None::<&str>;
    mount(source, target, none, flags, none).unwrap();
}

#[test]
fn a_named_directory_is_one_or_has_one_below() {
    let machines = below("/sys/fs/cgroup".as_ref()).unwrap();
    with_own_mounts(|dir| {
        assert!(matches!(below(dir), Err(CgroupError::NotBelow(_))));
        assert!(matches!(
            below(&dir.join("none")),
            Err(CgroupError::Look { .. })
        ));
        let unified = dir.join("host/unified");
        fs::create_dir_all(&unified).unwrap();
        mount_to(Some(&machines), &unified, MsFlags::MS_BIND);
        std::os::unix::fs::symlink(dir.join("host"), dir.join("link")).unwrap();
        for named in ["host", "host/unified", "link"] {
            assert_eq!(below(&dir.join(named)).unwrap(), unified, "{named}");
        }
        // What its name begins with is not what it is below.
        fs::create_dir(dir.join("ho")).unwrap();
        let beside = below(&dir.join("ho"));
        assert!(matches!(beside, Err(CgroupError::NotBelow(_))));
    });
}

#[test]
fn a_part_of_the_hierarchy_is_taken_only_if_it_is_named() {
    let group = Group::new("part");
    let machines = below("/sys/fs/cgroup".as_ref()).unwrap();
    with_own_mounts(|host| {
        let (part, root) = (host.join("part"), host.join("root"));
        for (dir, source) in [(&part, &group.0), (&root, &machines)] {
            fs::create_dir(dir).unwrap();
            mount_to(Some(source), dir, MsFlags::MS_BIND);
        }
        // As a container sees it: its own part wherever the whole was.
        let whole = mounts().unwrap();
        for mount in whole.iter().filter(|mount| **mount != root) {
            mount_to(Some(&part), mount, MsFlags::MS_BIND);
        }
        assert_eq!(find(None).unwrap(), root);
        mount_to(Some(&part), &root, MsFlags::MS_BIND);
        let error = find(None).unwrap_err();
        assert!(matches!(error, CgroupError::Part(_)), "{error}");
        assert!(error.to_string().contains("--cgroup-dir"), "{error}");
        assert_eq!(find(Some(&machines)).unwrap(), machines);
    });
}
