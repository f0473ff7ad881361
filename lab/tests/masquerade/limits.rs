//! How long connections are kept, as the settings say.

use crate::{
    crowds::crowd,
    kit::{FAMILIES, World},
};
use sinabro_common::api::{ConnectionStats, Request, Response};
use sinabro_lab::{traffic::crowd::Kind, wait::eventually};

fn stats(world: &World) -> ConnectionStats {
    match world.node().ask(Request::ConnectionStats).unwrap() {
        Response::ConnectionStats(stats) => stats,
        other => panic!("{other:?}"),
    }
}

/// An agent with another setting has the connections of before follow it. By default these would be there
/// for a day.
#[test]
fn an_idle_connection_is_forgotten_when_the_setting_says() {
    let world = World::with(1, &[], &[]);
    let node = world.node();
    let mut crowds = [0, 1].map(|family| {
        let mut crowd = crowd(&world, world.pods(), Kind::Connections, family);
        crowd.open(10_000..10_050, 0).unwrap();
        crowd
    });
    assert_eq!(stats(&world).by_class["established"], 100);
    node.kill_agent().unwrap();
    node.start_agent_with(&["--connection-tcp-timeout-established=5s"])
        .unwrap();
    node.wait_ready().unwrap();
    eventually("the connections to be forgotten", || {
        stats(&world).connections == 0
    });
    // Whoever goes on after that begins again, by the port that it had: TCP does not notice.
    for (crowd, family) in crowds.iter_mut().zip(FAMILIES) {
        crowd.open(10_000..10_050, 0).unwrap();
        assert_eq!(crowd.known().count(), 50, "{family}");
    }
}
