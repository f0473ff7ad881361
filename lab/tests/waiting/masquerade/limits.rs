//! How long connections are kept, as the settings say.

use super::{
    crowds::crowd,
    kit::{FAMILIES, Way, World},
};
use sinabro_lab::{node::SERVICES_FLAGS, traffic::crowd::Kind, wait::eventually};

/// An agent with another setting has the connections of before follow it. By default these would be there
/// for a day.
#[test]
fn an_idle_connection_is_forgotten_when_the_setting_says() {
    const FLAG: &str = "--connection-tcp-timeout-established=5s";
    // Both at once, as they mostly wait.
    let worlds = Way::BOTH.map(|way| {
        let world = World::by(way, 1, &[], &[]);
        let crowds = [0, 1].map(|family| {
            let mut crowd = crowd(&world, world.pods(), Kind::Connections, family);
            crowd.open(10_000..10_050, 0).unwrap();
            crowd
        });
        assert_eq!(world.stats().by_class["established"], 100, "{way:?}");
        world.node().kill_agent().unwrap();
        (way, world, crowds)
    });
    for (way, world, _) in &worlds {
        let flags = match way {
            Way::Stack => vec![FLAG],
            Way::Direct => [&SERVICES_FLAGS, &[FLAG][..]].concat(),
        };
        world.node().start_agent_with(&flags).unwrap();
    }
    for (way, world, crowds) in worlds {
        world.node().wait_ready().unwrap();
        let what = format!("the connections to be forgotten, {way:?}");
        eventually(&what, || world.stats().connections == 0);
        // Whoever goes on after that begins again, by the port that it had: TCP does not notice.
        for (mut crowd, family) in crowds.into_iter().zip(FAMILIES) {
            crowd.open(10_000..10_050, 0).unwrap();
            assert_eq!(crowd.known().count(), 50, "{way:?}, {family}");
        }
    }
}
