//! Bytes between two pods, by programs in the pods: sockets of this process are in no pod's cgroup,
//! so nothing accelerates them.

use super::{
    pods::KubePod,
    world::{NAMESPACE, World},
};
use anyhow::{Context as _, Result, ensure};
use std::process::{Child, Stdio};

const PORT: u16 = 9000;
/// On the client's link, for a connection's begin and end and whatever else a pod says.
const PACKETS: u64 = 200;
/// Bytes in a block, and how many of them there are at least.
const BLOCK: u64 = 100_000;
const LEAST: u64 = 100;

/// One accelerated connection that says random bytes all the time, digested at both ends.
pub struct Whole<'a> {
    world: &'a World,
    node: String,
    client: String,
    packets: u64,
    /// Server and client.
    ends: [Child; 2],
}

impl<'a> Whole<'a> {
    pub fn start(world: &'a World, node: &str, [client, server]: [&KubePod; 2]) -> Result<Self> {
        let packets = packets(world, node, &client.name)?;
        let target = server.primary()?;
        let family = if target.is_ipv4() { 4 } else { 6 };
        let listens = format!("nc -{family} -l {PORT} | sha256sum");
        let server_end = exec(world, &server.name, &listens)?;
        let heard = format!("ss -Hltn 'sport = :{PORT}' | grep -q .");
        world.wait("the server in a pod to listen", || {
            exec(world, &server.name, &heard)?
                .wait()
                .map(|status| status.success().then_some(()))
                .map_err(Into::into)
        })?;
        let says = format!(
            "mkfifo /tmp/digest; sha256sum < /tmp/digest & \
             {{ blocks=0; while [ ! -e /tmp/stop ]; do \
               head -c {BLOCK} /dev/urandom; blocks=$((blocks + 1)); sleep 0.02; \
             done; echo $blocks >&2; }} | tee /tmp/digest | nc -N {target} {PORT}; wait"
        );
        let client_end = exec(world, &client.name, &says)?;
        Ok(Self {
            world,
            node: node.into(),
            client: client.name.clone(),
            packets,
            ends: [server_end, client_end],
        })
    }

    /// Ends the connection; how many megabytes arrived whole, past the link.
    pub fn finish(self) -> Result<u64> {
        let mut stop = exec(self.world, &self.client, "touch /tmp/stop")?;
        ensure!(
            stop.wait()?.success(),
            "cannot stop the program in {}",
            self.client
        );
        let [server, client] = self.ends.map(|end| -> Result<[String; 2]> {
            let output = end.wait_with_output()?;
            let [said, beside] = [output.stdout, output.stderr]
                .map(|text| String::from_utf8_lossy(&text).trim().to_owned());
            ensure!(
                output.status.success(),
                "a program in a pod failed: {said} {beside}"
            );
            Ok([said, beside])
        });
        let ([received, _], [sent, blocks]) = (server?, client?);
        ensure!(
            sent == received && !sent.is_empty(),
            "the digests differ: sent {sent}, received {received}"
        );
        let blocks: u64 = blocks
            .parse()
            .with_context(|| format!("`{blocks}` is no number of blocks"))?;
        ensure!(blocks >= LEAST, "only {blocks} blocks were sent");
        let packets = packets(self.world, &self.node, &self.client)?;
        // An agent with another layout of the counters begins at zero.
        let packets = packets.checked_sub(self.packets).unwrap_or(packets);
        ensure!(
            packets < PACKETS,
            "{packets} packets on the link of a pod whose connection was accelerated"
        );
        Ok(blocks * BLOCK / 1_000_000)
    }
}

fn packets(world: &World, node: &str, pod: &str) -> Result<u64> {
    let reports = world.endpoints(node)?;
    let report = reports.iter().find(|report| report.pod.name == pod);
    Ok(report
        .with_context(|| format!("no endpoint of {pod}"))?
        .tx_packets)
}

/// Starts a shell's script in a pod.
fn exec(world: &World, pod: &str, script: &str) -> Result<Child> {
    let mut command = world.cluster.kubectl();
    command
        .args(["-n", NAMESPACE, "exec", pod, "--", "bash", "-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().context("cannot start kubectl")
}
