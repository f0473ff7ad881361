//! Between nodes without a tunnel.

use crate::e2e::{load::traffic, world::World};
use anyhow::{Result, ensure};
use sinabro_common::{api::PeerPath, names::ROUTING_ANNOTATION};

/// The agents get a setting by their ConfigMap, and lose it again, one after the other and under load.
pub fn native(world: &mut World) -> Result<String> {
    let world = &*world;
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("native-a", &nodes[0]),
        ("native-b", &nodes[0]),
        ("native-c", &nodes[1]),
    ])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    let begun = (|| {
        traffic.event("the agents were told to do without tunnels where that is answered")?;
        set(world, "routing: auto\n")?;
        reached(world, &PeerPath::Native)?;
        let said = said(world)?;
        ensure!(
            said.iter().all(|said| said == "native"),
            "the nodes say {said:?}"
        );
        Ok(())
    })();
    let ended = (|| {
        traffic.event("the agents were told to have tunnels again")?;
        set(world, "")?;
        reached(world, &PeerPath::Direct { why: None })?;
        world.wait("the nodes to say nothing of routing", || {
            let is_silent = said(world)?.iter().all(String::is_empty);
            Ok(is_silent.then_some(()))
        })
    })();
    begun.and(ended)?;
    world.healthy()?;
    traffic.finish()
}

/// Settings, and agents that have them.
fn set(world: &World, settings: &str) -> Result<()> {
    world.cluster.configure(settings)?;
    world.roll_out()
}

/// Waits until each node reaches all others by that way.
fn reached(world: &World, way: &PeerPath) -> Result<()> {
    for node in world.nodes() {
        world.wait(&format!("{node} to reach all by {way:?}"), || {
            let peers = world.peers(&node)?;
            let mut others = peers.iter().filter(|peer| !peer.local);
            let all = others.all(|peer| peer.path.as_ref() == Some(way));
            Ok(all.then_some(()))
        })?;
    }
    Ok(())
}

/// What the nodes say of themselves; nothing is empty.
fn said(world: &World) -> Result<Vec<String>> {
    let of = |node: String| -> Result<String> {
        let node = world.get(&["node", &node])?;
        let said = node["metadata"]["annotations"][ROUTING_ANNOTATION].as_str();
        Ok(said.unwrap_or_default().to_owned())
    };
    world.nodes().into_iter().map(of).collect()
}
