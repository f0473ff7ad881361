//! Agents die and come back under load: no request fails, no packet is lost, no connection
//! notices, no path stands still.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use sinabro_lab::{
    Lab, Pod,
    checks::Scene,
    traffic::unbroken::{Pace, Traffic},
};
use sinabro_netlink::{Conn, link};
use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Between blocks of a stream, so that a dozen of them leave the machine time to breathe.
const PAUSE: Duration = Duration::from_millis(10);
const PHASE: Duration = Duration::from_secs(2);
/// With all that came before, as long as what happens afterwards.
const BEFORE: Duration = Duration::from_secs(8);

fn start(scene: &Scene) -> Traffic {
    let pace = Pace {
        pause: PAUSE,
        clients: 1,
    };
    let traffic = Traffic::start(&scene.paths().unwrap(), pace).unwrap();
    traffic.watch(BEFORE);
    traffic
}

/// What is going on goes on for a while, and everything moves on during it.
fn must_flow(traffic: &Traffic, when: &str) {
    traffic.watch(PHASE);
    traffic.must_flow(when).unwrap();
}

#[test]
fn a_killed_and_restarted_agent_breaks_no_connection() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let started = Instant::now();
    let iperf = [
        Iperf::start(scene.pod(1, 3), scene.pod(2, 2)),
        Iperf::start(scene.pod(2, 2), scene.pod(2, 3)),
    ];
    let traffic = start(&scene);
    must_flow(&traffic, "before");
    traffic.event("the agents were killed").unwrap();
    for node in scene.lab().nodes() {
        node.kill_agent().unwrap();
    }
    must_flow(&traffic, "without agents");
    traffic.event("new agents were started").unwrap();
    for node in scene.lab().nodes() {
        node.start_agent().unwrap();
    }
    // While programs are being replaced, too.
    must_flow(&traffic, "while agents start");
    for node in scene.lab().nodes() {
        node.wait_ready().unwrap();
    }
    must_flow(&traffic, "after");
    println!("{}", traffic.finish().unwrap());
    let ran = started.elapsed();
    for iperf in iperf {
        iperf.finish(ran);
    }
}

#[test]
fn a_stopped_agent_leaves_traffic_and_pods_alone() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let traffic = start(&scene);
    for _ in 0..2 {
        traffic.event("the agents were stopped").unwrap();
        for node in scene.lab().nodes() {
            node.stop_agent().unwrap();
        }
        must_flow(&traffic, "without agents");
        traffic.event("new agents were started").unwrap();
        for node in scene.lab().nodes() {
            node.start_agent().unwrap();
            node.wait_ready().unwrap();
        }
        must_flow(&traffic, "after");
    }
    println!("{}", traffic.finish().unwrap());
}

/// What the two tests above must see: a node's cable is out for 50 ms, which costs no request and
/// no stream anything but time.
#[test]
fn a_blackout_of_50_ms_does_not_pass() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let traffic = start(&scene);
    traffic.event("a cable was pulled").unwrap();
    let mut router = Conn::in_netns(scene.lab().router().place().net()).unwrap();
    let port = router.link_by_name("to-n2").unwrap().index;
    router.execute(link::set_master(port, None)).unwrap();
    thread::sleep(Duration::from_millis(50));
    let bridge = router.link_by_name("br0").unwrap().index;
    router
        .execute(link::set_master(port, Some(bridge)))
        .unwrap();
    must_flow(&traffic, "after the cable was back");
    let told = format!("{:#}", traffic.finish().unwrap_err());
    println!("{told}");
    assert!(told.contains("UDP, across nodes, IPv4: of "), "{told}");
    assert!(told.contains("ms after a cable was pulled"), "{told}");
    // The others did not notice: what the meter says is of each path by itself.
    assert!(told.contains(" 0 lost"), "{told}");
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// iperf3 from one pod to another, for as long as the test wants.
struct Iperf {
    client: Running,
    _server: Running,
}

impl Iperf {
    fn start(from: &Pod, to: &Pod) -> Self {
        let server = to.place().run(|| {
            let mut command = Command::new("iperf3");
            command
                .args(["-s", "-1", "--forceflush"])
                .stderr(Stdio::null());
            Ok(command.stdout(Stdio::piped()).spawn()?)
        });
        let mut server = Running(server.expect("iperf3: run `cargo xtask setup`"));
        let says = BufReader::new(server.0.stdout.take().unwrap());
        let mut says = says.lines().map_while(Result::ok);
        assert!(
            says.any(|line| line.contains("listening")),
            "no iperf3 server"
        );
        // Read on, so that it never waits for a full pipe.
        thread::spawn(move || says.for_each(drop));

        let client = from.place().run(|| {
            let mut command = Command::new("iperf3");
            command.args(["-J", "-c", &to.v4().to_string(), "-t", "3600"]);
            // Leaves room for everything else that runs meanwhile.
            command.args(["-b", "300M"]);
            Ok(command.stdout(Stdio::piped()).spawn()?)
        });
        Self {
            client: Running(client.unwrap()),
            _server: server,
        }
    }

    /// Interrupts it: it must have run up to here, without error and without a second that saw
    /// no bytes.
    fn finish(mut self, ran: Duration) {
        let pid = Pid::from_raw(self.client.0.id() as i32);
        kill(pid, Signal::SIGINT).unwrap();
        let mut text = String::new();
        let mut stdout = self.client.0.stdout.take().unwrap();
        stdout.read_to_string(&mut text).unwrap();
        let report: Value = serde_json::from_str(&text).unwrap();
        let error = report["error"].as_str().unwrap_or_default();
        assert!(error.starts_with("interrupt"), "it ended by itself: {text}");
        // The interrupt cuts the last one short.
        let [whole @ .., _] = report["intervals"].as_array().unwrap().as_slice() else {
            panic!("it never ran: {text}");
        };
        for interval in whole {
            assert!(interval["sum"]["bytes"].as_u64().unwrap() > 0, "{interval}");
        }
        let seconds: f64 = whole
            .iter()
            .map(|interval| interval["sum"]["seconds"].as_f64().unwrap())
            .sum();
        assert!(seconds + 2.0 > ran.as_secs_f64(), "ran {ran:?}: {text}");
    }
}
