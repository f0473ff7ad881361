//! Agents die and come back under load: no request fails, no connection notices.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use sinabro_lab::{
    Lab, Place, Pod,
    checks::Scene,
    traffic::{http::Load, load::Stream},
};
use std::{
    net::IpAddr,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

/// Between blocks of a stream, so that eight of them leave the machine time to breathe.
const PAUSE: Duration = Duration::from_millis(2);
const PHASE: Duration = Duration::from_secs(2);

struct Traffic {
    streams: Vec<Stream>,
    loads: Vec<Load>,
}

impl Traffic {
    /// Within a node, across nodes, and out through the masquerade.
    fn start(scene: &Scene) -> Self {
        let (a, near, far) = (scene.pod(1, 1), scene.pod(1, 2), scene.pod(2, 1));
        let outside = scene.lab().outside().place();
        let outside_v4 = scene.lab().outside_addresses().unwrap()[0];
        let pairs: [(&Pod, &Place, IpAddr); 5] = [
            (a, near.place(), near.v4()),
            (a, near.place(), near.v6()),
            (a, far.place(), far.v4()),
            (far, a.place(), a.v6()),
            (near, outside, outside_v4),
        ];
        Self {
            streams: pairs
                .iter()
                .map(|(from, to, address)| {
                    Stream::start(from.place(), to, *address, PAUSE).unwrap()
                })
                .collect(),
            loads: pairs
                .iter()
                .map(|(from, to, address)| Load::start(from.place(), to, *address, 2).unwrap())
                .collect(),
        }
    }

    /// Everything must move on during the next moments.
    fn must_flow(&self, when: &str) {
        let before: Vec<u64> = self.progress();
        thread::sleep(PHASE);
        let names = self
            .streams
            .iter()
            .map(Stream::name)
            .chain(self.loads.iter().map(Load::name));
        for ((name, before), after) in names.zip(before).zip(self.progress()) {
            assert!(after > before, "{name} stood still {when}");
        }
    }

    fn progress(&self) -> Vec<u64> {
        let streams = self.streams.iter().map(Stream::received);
        streams
            .chain(self.loads.iter().map(Load::requests))
            .collect()
    }

    fn finish(self) {
        for stream in self.streams {
            stream.finish().unwrap();
        }
        for load in self.loads {
            let name = load.name().to_string();
            let report = load.finish().unwrap();
            println!(
                "{name}: {} requests, slowest {:?}",
                report.requests, report.slowest
            );
            assert!(report.failures.is_empty(), "{name}: {:?}", report.failures);
            assert!(report.requests > 0, "{name}: no request was made");
        }
    }
}

#[test]
fn a_killed_and_restarted_agent_breaks_no_connection() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let (server, client) = (scene.pod(2, 2), scene.pod(1, 3));
    let _server = iperf_server(server.place());
    let iperf = iperf_client(client.place(), server.v4(), 15);
    let traffic = Traffic::start(&scene);
    traffic.must_flow("before");
    for node in scene.lab().nodes() {
        node.kill_agent().unwrap();
    }
    traffic.must_flow("without agents");
    for node in scene.lab().nodes() {
        node.start_agent().unwrap();
    }
    // While programs are being replaced, too.
    traffic.must_flow("while agents start");
    for node in scene.lab().nodes() {
        node.wait_ready().unwrap();
    }
    traffic.must_flow("after");
    traffic.finish();
    iperf_ran_through(iperf);
}

#[test]
fn a_stopped_agent_leaves_traffic_and_pods_alone() {
    let scene = Scene::new(Lab::for_test(2).unwrap()).unwrap();
    let traffic = Traffic::start(&scene);
    for _ in 0..2 {
        for node in scene.lab().nodes() {
            node.stop_agent().unwrap();
        }
        traffic.must_flow("without agents");
        for node in scene.lab().nodes() {
            node.start_agent().unwrap();
            node.wait_ready().unwrap();
        }
        traffic.must_flow("after");
    }
    traffic.finish();
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn iperf_server(place: &Place) -> Running {
    let spawn = || {
        Ok(Command::new("iperf3")
            .args(["-s", "-1"])
            .stdout(Stdio::null())
            .spawn()?)
    };
    let server = Running(place.run(spawn).expect("iperf3: run `cargo xtask setup`"));
    thread::sleep(Duration::from_millis(300));
    server
}

fn iperf_client(place: &Place, server: IpAddr, seconds: u32) -> Running {
    let spawn = || {
        let mut command = Command::new("iperf3");
        command.args(["-J", "-c", &server.to_string(), "-t", &seconds.to_string()]);
        // Leaves room for everything else that runs meanwhile.
        command.args(["-b", "500M"]);
        Ok(command.stdout(Stdio::piped()).spawn()?)
    };
    Running(place.run(spawn).unwrap())
}

/// iperf3 reports no error and no second without bytes.
fn iperf_ran_through(mut client: Running) {
    let mut text = String::new();
    std::io::Read::read_to_string(client.0.stdout.as_mut().unwrap(), &mut text).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report.get("error"), None, "{text}");
    let intervals = report["intervals"].as_array().unwrap();
    assert!(intervals.len() >= 14, "{text}");
    for interval in intervals {
        assert!(interval["sum"]["bytes"].as_u64().unwrap() > 0, "{interval}");
    }
}
