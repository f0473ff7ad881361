use sinabro_netlink::netns::in_fresh;
use sinabro_netlink::{Conn, Error, NetNs};

#[test]
fn a_closure_runs_inside_and_the_caller_stays_outside() {
    in_fresh(|| {
        let before = NetNs::current().unwrap().id().unwrap();
        let other = NetNs::create().unwrap();
        assert_ne!(other.id().unwrap(), before);
        let inside = other
            .run(|| NetNs::current().unwrap().id().unwrap())
            .unwrap();
        assert_eq!(inside, other.id().unwrap());
        assert_eq!(NetNs::current().unwrap().id().unwrap(), before);
    });
}

#[test]
fn a_cookie_tells_namespaces_apart() {
    in_fresh(|| {
        let other = NetNs::create().unwrap();
        let cookie = |conn: Conn| conn.netns_cookie().unwrap();
        let own = cookie(Conn::new().unwrap());
        let first = cookie(Conn::in_netns(&other).unwrap());
        assert_eq!(first, cookie(Conn::in_netns(&other).unwrap()));
        // Both are none where the kernel has no cookies.
        assert!(own.is_none() || own != first, "{own:?}");
    });
}

#[test]
fn a_panic_inside_is_an_error_with_its_text() {
    in_fresh(|| {
        let other = NetNs::create().unwrap();
        let error = other.run(|| panic!("number {}", 7)).unwrap_err();
        assert!(matches!(&error, Error::Panicked { message, .. } if message == "number 7"));
        other.run(|| ()).unwrap();
    });
}

#[test]
fn a_panic_in_a_fresh_namespace_reaches_the_caller() {
    let panic = std::panic::catch_unwind(|| in_fresh(|| panic!("seen")));
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"seen"));
}

#[test]
fn a_fresh_namespace_is_new_and_has_loopback_up() {
    let outside = NetNs::current().unwrap().id().unwrap();
    let inside = in_fresh(|| {
        assert!(Conn::new().unwrap().link_by_name("lo").unwrap().up);
        std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        std::net::TcpListener::bind("[::1]:0").unwrap();
        NetNs::current().unwrap().id().unwrap()
    });
    assert_ne!(inside, outside);
}

#[test]
fn a_named_namespace_is_made_opened_and_removed() {
    // A mount namespace of its own: nothing stays behind if the test is killed.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            nix::sched::unshare(
                nix::sched::CloneFlags::CLONE_FS | nix::sched::CloneFlags::CLONE_NEWNS,
            )
            .unwrap();
            let private = nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE;
            let none = None::<&str>;
            nix::mount::mount(none, "/", none, private, none).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("pod");

            assert!(NetNs::open(&path).unwrap_err().is_not_found());
            let made = NetNs::create_at(&path).unwrap();
            let id = made.id().unwrap();
            assert!(NetNs::create_at(&path).unwrap_err().is_exists());
            drop(made);
            assert_eq!(NetNs::open(&path).unwrap().id().unwrap(), id);

            NetNs::remove_at(&path).unwrap();
            assert!(!path.exists());
            assert!(NetNs::remove_at(&path).unwrap_err().is_not_found());
            // Left by someone who got as far as the file.
            std::fs::write(&path, "").unwrap();
            NetNs::remove_at(&path).unwrap();
            let error = NetNs::create_at(dir.path().join("no/such/pod")).unwrap_err();
            assert!(error.is_not_found(), "{error}");
        });
    });
}

#[test]
fn what_is_no_network_namespace_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = NetNs::open(file.path()).unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
    assert!(error.to_string().contains("not a namespace"), "{error}");
    let error = NetNs::open("/proc/self/ns/mnt").unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
}

#[test]
fn nothing_stays_open_after_use() {
    // Alone in its process: other tests open files meanwhile.
    const CHILD: &str = "SINABRO_TEST_COUNTS_DESCRIPTORS";
    if std::env::var_os(CHILD).is_none() {
        let run = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "netns::nothing_stays_open_after_use",
                "--exact",
                "--test-threads=1",
            ])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let round = || {
        let netns = NetNs::create().unwrap();
        let mut conn = Conn::in_netns(&netns).unwrap();
        conn.link_by_name("lo").unwrap();
        assert!(conn.link_by_name("no").is_err());
        let _ = netns.run(|| panic!("on purpose"));
        assert!(NetNs::open("/proc/self/ns/mnt").is_err());
        in_fresh(|| drop(Conn::new().unwrap()));
    };
    round();
    let before = (count(), threads());
    for _ in 0..20 {
        round();
    }
    assert_eq!((count(), threads()), before);
}
