use super::*;
use crate::plan::services::{Here, plan};
use std::{fmt::Write as _, time::Instant};

/// What the process has in memory, in bytes; without what the allocator could give back.
fn resident() -> usize {
    // SAFETY: it takes a number, and touches nothing but what is free.
    unsafe { libc::malloc_trim(0) };
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim()
        .trim_end_matches(" kB")
        .parse::<usize>()
        .unwrap()
        << 10
}

/// Of a cluster of `services`, each with five endpoints on some of 1,000 nodes in three zones.
fn fill(store: &Store, services: usize) {
    for kind in [Kind::Services, Kind::Slices] {
        store.begin_list(kind);
    }
    let mut hint = String::new();
    for n in 0..services {
        let mut object = api_service(
            &format!("service-{n}"),
            &format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255),
        );
        object["spec"]["ports"][0]["nodePort"] = (30_000 + n % 2_000).into();
        put(store, &object);
        let addresses: Vec<String> = (0..5)
            .map(|k| format!("10.{}.{}.{}", 100 + k, n >> 8, n & 255))
            .collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        let mut object = api_slice(
            &format!("service-{n}"),
            &format!("service-{n}-x7k2p"),
            &addresses,
        );
        for (k, endpoint) in object["endpoints"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .enumerate()
        {
            let node = (n * 7 + k * 211) % 1_000;
            hint.clear();
            write!(hint, "zone-{}", node % 3).unwrap();
            endpoint["nodeName"] = format!("node-{node}.example.net").into();
            endpoint["hints"] = json!({"forZones": [{"name": hint}]});
        }
        store.put_slice(&serde_json::from_value(object).unwrap(), false);
    }
    for kind in [Kind::Services, Kind::Slices] {
        store.end_list(kind);
    }
}

/// How much memory and time: `cargo test -p sinabro-agent --lib --release how_much -- --nocapture --test-threads=1`.
/// Asserted is only what no other test, and no slow machine, has a part in.
#[tokio::test]
async fn how_much_thousands_of_services_cost() {
    let here = Here {
        node: "node-7.example.net".into(),
        zone: "zone-1".into(),
        ..Here::default()
    };
    // The larger number takes long where the code is not optimised.
    let sizes: &[usize] = match cfg!(debug_assertions) {
        true => &[5_000],
        false => &[5_000, 50_000],
    };
    for &services in sizes {
        let store = Arc::new(Store::default());
        let mut changes = Changes::of(&store);
        let before = resident();
        let begun = Instant::now();
        fill(&store, services);
        let (read, memory) = (begun.elapsed(), resident().saturating_sub(before));
        let begun = Instant::now();
        let told = changes.next().await;
        assert_eq!(told.len(), services);
        let (mut planned, mut frontends) = (0, 0);
        for name in &told {
            let (service, slices) = store.get(name).unwrap();
            let plan = plan(&service, &slices.iter().collect::<Vec<_>>(), &here);
            planned += plan.ports.len();
            frontends += plan.ports["http"].frontends.len();
        }
        assert_eq!((planned, frontends), (services, services * 2));
        assert!(
            store.places() <= 2_064,
            "nodes are shared: {}",
            store.places()
        );
        println!(
            "{services} services, {} endpoints: read in {read:?}, {} KiB; planned in {:?}",
            services * 5,
            memory >> 10,
            begun.elapsed(),
        );
    }
}
