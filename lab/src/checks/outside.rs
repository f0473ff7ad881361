//! Beyond the cluster: a host that knows the nodes' addresses and no pod's.

use super::{Family, Scene};
use crate::{
    Place,
    traffic::{PATIENCE, bursts, icmp, readable, tcp, udp},
};
use anyhow::{Result, ensure};
use std::{
    net::{IpAddr, UdpSocket},
    time::Instant,
};

/// More than any link between them takes at once.
const IN_PARTS: usize = 5000;

/// The outside has no route to pods, so any answer proves that it saw the node's address; what
/// it saw is compared all the same.
pub fn masquerade(scene: &Scene) -> Result<String> {
    let outside = scene.lab().outside().place();
    let addresses = scene.lab().outside_addresses()?;
    for number in [1, 2] {
        for family in Family::BOTH {
            let node = family.pick(&scene.node(number).addresses())?;
            let address = family.pick(&addresses)?;
            for pod in [scene.pod(number, 1), scene.pod(number, 2)] {
                let from = pod.place();
                let seen = [
                    ("TCP", tcp::transfer(from, outside, address, 1 << 20)?.seen),
                    ("UDP", udp::echo(from, outside, address, 500, false)?),
                    (
                        "UDP in parts",
                        udp::echo(from, outside, address, IN_PARTS, false)?,
                    ),
                    (
                        "UDP, many by one call",
                        bursts::seen(from, outside, address)?,
                    ),
                    ("ICMP", icmp::ping_seen(from, outside, address)?),
                ];
                for (protocol, seen) in seen {
                    ensure!(
                        seen == node,
                        "{protocol} from {}: the outside saw {seen} instead of {node}",
                        from.name()
                    );
                }
            }
        }
    }
    Ok("TCP, UDP, in parts, many by one call, ICMP; the outside saw each node's address, v4 and v6".into())
}

/// Who was asked may answer through the masquerade, by the port that the node lent to the pod;
/// nobody else gets in by it, not even another port of the same host.
pub fn replies_only(scene: &Scene) -> Result<String> {
    let outside = scene.lab().outside().place();
    let address = Family::V4.pick(&scene.lab().outside_addresses()?)?;
    let bind = |place: &Place, ip: IpAddr| place.run(|| Ok(UdpSocket::bind((ip, 0))?));
    let (asked, stranger) = (bind(outside, address)?, bind(outside, address)?);
    let pod = scene.pod(1, 1);
    let client = bind(pod.place(), pod.v4())?;
    let deadline = || Instant::now() + PATIENCE;
    let mut buffer = [0; 64];

    client.send_to(b"question", asked.local_addr()?)?;
    ensure!(readable(&asked, deadline())?, "the question did not arrive");
    let (_, node) = asked.recv_from(&mut buffer)?;
    ensure!(node.ip() != pod.v4(), "the outside saw the pod's address");
    stranger.send_to(b"intrusion", node)?;
    // On the same way and after it: once this is there, the other one would be, too.
    asked.send_to(b"answer", node)?;
    ensure!(readable(&client, deadline())?, "the answer did not arrive");
    let (len, from) = client.recv_from(&mut buffer)?;
    ensure!(
        &buffer[..len] == b"answer" && from == asked.local_addr()?,
        "the pod got {:?} of {from}",
        String::from_utf8_lossy(&buffer[..len])
    );
    ensure!(
        !readable(&client, Instant::now())?,
        "the pod got more than the answer"
    );
    Ok(format!(
        "{node} leads to the pod for who was asked, and for nobody else"
    ))
}
