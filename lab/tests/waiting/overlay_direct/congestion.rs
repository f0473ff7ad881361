//! What a router between the nodes says of congestion, it says of the outer packets (RFC 6040).

use super::{fabric::Fabric, *};

#[test]
fn congestion_on_the_way_is_heard_of_in_the_pods() {
    is_heard_of(&World::new([&[], &[]]));
}

#[test]
fn congestion_on_the_way_over_ipv6_is_heard_of_in_the_pods() {
    let by_ipv6 = |lab: &Lab| over_ipv6::nodes(lab, [true; 2]);
    is_heard_of(&World::on(by_ipv6, [&[], &[]]));
}

/// Of packets whose outer headers are of one family, and what is in them of both.
fn is_heard_of(world: &World) {
    assert!(world.lab.nodes().iter().all(goes_direct));
    let [one, two] = &world.pods;
    for pod in &world.pods {
        let asks = || Ok(sysctl::write(&["net", "ipv4", "tcp_ecn"], "1")?);
        pod.place().run(asks).unwrap();
    }
    Fabric(&world.lab).marks();
    for address in two.addresses() {
        let heard = || snmp::congested(two.place()).unwrap();
        let before = heard();
        let carried = world.carried(|| {
            let path = Path::new("stream", one.place(), two.place(), address);
            let stream = Stream::open(&path).unwrap();
            stream.carry(1 << 20, 128 << 10).unwrap();
        });
        assert_eq!(carried, [[0, 0]; 2], "{address}");
        assert!(heard() > before, "{address}");
    }
}
