use super::*;
use std::{
    collections::BTreeSet,
    io::Read as _,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// A content that shows whether it is whole, long enough to be written in several pages.
fn content(seed: u8) -> Vec<u8> {
    vec![seed; 10_000 + usize::from(seed)]
}

fn is_whole(found: &[u8]) -> bool {
    found.first().is_some_and(|seed| found == content(*seed))
}

fn names(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_file_is_replaced_with_its_mode_and_who_has_it_open_keeps_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plugin");
    AtomicFile::new(&path).replace(b"old").unwrap();
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(), 0o600);
    let mut old = File::open(&path).unwrap();
    let file = AtomicFile::new(&path).mode(0o777).durable();
    file.replace(b"new").unwrap();
    // No umask takes anything away.
    assert_eq!(mode(), 0o777);
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!(
        (text.as_str(), &*fs::read(&path).unwrap()),
        ("old", &b"new"[..])
    );
    assert_eq!(names(dir.path()).len(), 1);
}

#[test]
fn a_new_file_replaces_nothing_and_no_link_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("10.0.0.2");
    AtomicFile::new(&path).create(b"first").unwrap();
    let kind = |result: io::Result<()>| result.unwrap_err().kind();
    let again = AtomicFile::new(&path).create(b"second");
    assert_eq!(kind(again), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read(&path).unwrap(), b"first");

    let (link, target) = (dir.path().join("link"), dir.path().join("target"));
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let through = AtomicFile::new(&link).create(b"third");
    assert_eq!(kind(through), io::ErrorKind::AlreadyExists);
    AtomicFile::new(&link).replace(b"fourth").unwrap();
    assert!(!target.exists() && link.symlink_metadata().unwrap().is_file());
    assert_eq!(
        names(dir.path()),
        ["10.0.0.2", "link"].map(str::to_owned).into()
    );
}

#[test]
fn what_cannot_be_written_leaves_the_old_file_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a directory");
    fs::create_dir_all(path.join("with something")).unwrap();
    AtomicFile::new(&path).replace(b"x").unwrap_err();
    AtomicFile::new(&path).create(b"x").unwrap_err();
    assert_eq!(names(dir.path()), ["a directory".to_owned()].into());
    let nowhere = dir.path().join("missing/file");
    let error = AtomicFile::new(&nowhere).replace(b"x").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    AtomicFile::new(&nowhere).sweep().unwrap();
}

#[test]
fn a_sweep_takes_the_temporary_files_of_its_own_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("00-sinabro.conflist");
    let left = [
        ".00-sinabro.conflist.tmp",
        ".00-sinabro.conflist.tmp-0123456789abcdef",
        "00-sinabro.conflist.tmp",
        "00-sinabro.conflist.tmp-4711",
    ];
    let others = [
        "00-sinabro.conflist",
        ".00-sinabro.conflist",
        ".00-sinabro.conflist.tmpl",
        ".10-other.conflist.tmp-0123456789abcdef",
        "10-other.conflist.tmp",
    ];
    for name in left.iter().chain(&others) {
        fs::write(dir.path().join(name), "{").unwrap();
    }
    AtomicFile::new(&path).sweep().unwrap();
    AtomicFile::new(&path).sweep().unwrap();
    assert_eq!(names(dir.path()), others.map(str::to_owned).into());
}

#[test]
fn temporary_files_are_known_by_name() {
    let path = Path::new("/run/x/nodes.json");
    let ours = AtomicFile::new(path).temporary();
    assert_eq!(ours.parent(), path.parent());
    assert_ne!(ours, AtomicFile::new(path).temporary());
    let temporary = [
        ours.file_name().unwrap().to_str().unwrap(),
        ".tmp-1-1",
        ".snb000000000001",
        "snb000000000001.tmp-77",
    ];
    assert!(temporary.iter().all(|name| is_temporary(name.as_ref())));
    let whole = ["10.0.0.2", "fd00::2", "snb000000000001.json", "x.json.bad"];
    assert!(!whole.iter().any(|name| is_temporary(name.as_ref())));
}

/// Writers, readers and sweeps at the same time: one file, always whole.
#[test]
fn writers_at_the_same_time_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    AtomicFile::new(&path).replace(&content(0)).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (1..=8)
            .map(|seed| {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..50 {
                        AtomicFile::new(path).replace(&content(seed)).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(is_whole(&fs::read(&path).unwrap()));
            }
        });
        scope.spawn(|| {
            for _ in 0..20 {
                AtomicFile::new(&path).sweep().unwrap();
            }
        });
        let joined: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(joined.iter().all(Result::is_ok));
    });
    assert_eq!(names(dir.path()), ["file".to_owned()].into());
}

#[test]
fn of_several_that_create_one_file_one_does() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..50 {
        let path = dir.path().join(format!("{round}"));
        let made = thread::scope(|scope| {
            let create = |seed| {
                let path = &path;
                scope.spawn(move || AtomicFile::new(path).create(&content(seed)))
            };
            let writers: Vec<_> = (1..=4).map(create).collect();
            let outcomes = writers.into_iter().map(|writer| writer.join().unwrap());
            outcomes.filter(Result::is_ok).count()
        });
        assert_eq!(made, 1);
        assert!(is_whole(&fs::read(&path).unwrap()));
    }
    assert_eq!(names(dir.path()).len(), 50);
}

/// Names the file to the writer that [`a_killed_writer_leaves_the_file_whole`] starts and kills.
const WRITER: &str = "ATOMIC_FILE_WRITER";

#[test]
fn a_killed_writer_leaves_the_file_whole() {
    if let Some(path) = std::env::var_os(WRITER) {
        let path = PathBuf::from(path);
        for seed in (0..=u8::MAX).cycle() {
            AtomicFile::new(&path)
                .durable()
                .replace(&content(seed))
                .unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    for _ in 0..20 {
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "atomic_file::tests::a_killed_writer_leaves_the_file_whole",
            ])
            .env(WRITER, &path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // It is killed in the middle of one of its next writes.
        let before = fs::read(&path).ok();
        while fs::read(&path).ok() == before {
            assert!(writer.try_wait().unwrap().is_none(), "the writer ended");
            thread::yield_now();
        }
        writer.kill().unwrap();
        writer.wait().unwrap();
        assert!(is_whole(&fs::read(&path).unwrap()));
        AtomicFile::new(&path).sweep().unwrap();
        assert_eq!(names(dir.path()), ["file".to_owned()].into());
    }
}
