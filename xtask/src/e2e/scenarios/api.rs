//! The API server: what it lets the agent do, and what goes on without it.

use crate::{
    e2e::{
        load::{reaches, traffic},
        world::{SYSTEM, World},
    },
    workspace::output,
};
use anyhow::{Context as _, Result, ensure};
use std::{collections::BTreeSet, thread, time::Instant};

/// Asks as each agent would, with a token like the one in its pod.
pub fn rights(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.get(&["-n", SYSTEM, "pods", "-l", "app.kubernetes.io/name=sinabro"])?;
    let pods = pods["items"].as_array().context("no list of pods")?;
    let own = &nodes[0];
    let pod = pods.iter().find(|pod| pod["spec"]["nodeName"] == **own);
    let pod = pod.and_then(|pod| pod["metadata"]["name"].as_str());
    let pod = pod.with_context(|| format!("no agent on {own}"))?;
    let token = world.kubectl(&[
        "-n",
        SYSTEM,
        "create",
        "token",
        "sinabro",
        "--bound-object-kind=Pod",
        &format!("--bound-object-name={pod}"),
    ])?;
    let token = format!("--token={token}");
    let ask = |arguments: &[&str]| {
        output(
            world
                .cluster
                .kubectl_as_nobody()?
                .arg(&token)
                .args(arguments),
        )
    };
    let annotate = |node: &str| ask(&["annotate", "node", node, "--overwrite", "sinabro.io/e2e=1"]);
    annotate(own).context("the agent cannot change its own node")?;
    ask(&["annotate", "node", own, "sinabro.io/e2e-"])?;
    let Err(refused) = annotate(&nodes[1]) else {
        anyhow::bail!("the agent of {own} may change {}", nodes[1]);
    };
    let refused = format!("{refused:#}");
    ensure!(
        refused.contains("denied") || refused.contains("orbidden"),
        "changing another node failed for another reason: {refused}"
    );
    for (verb, what) in [
        ("get", "secrets"),
        ("list", "pods"),
        ("create", "pods"),
        ("delete", "nodes"),
        ("get", "configmaps"),
    ] {
        let answer = ask(&["auth", "can-i", verb, what, "-n", SYSTEM]);
        ensure!(answer.is_err(), "the agent may {verb} {what}");
    }
    Ok("own node yes; other nodes, pods, secrets no".into())
}

/// Sandboxes die while there is no API server: kubelets make new ones, and each is a DEL and an
/// ADD. An agent is killed in the middle, too.
pub fn away(world: &mut World) -> Result<String> {
    let nodes = world.nodes();
    let pods = world.run_pods(&[
        ("away-a", &nodes[0]),
        ("away-b", &nodes[0]),
        ("away-c", &nodes[1]),
        ("away-d", &nodes[0]),
        ("away-e", &nodes[1]),
    ])?;
    let traffic = traffic(world, [&pods[0], &pods[1], &pods[2]])?;
    let (started, outage) = (Instant::now(), world.outage);
    traffic.event("the API server went away")?;
    world.cluster.api_stop()?;
    let mut renewed = 0;
    let outcome = (|| -> Result<()> {
        for round in 0.. {
            if round > 0 && started.elapsed() > outage {
                break;
            }
            for (pod, node) in [("away-d", &nodes[0]), ("away-e", &nodes[1])] {
                if round == 1 {
                    traffic.event(&format!("the agent of {node} was killed"))?;
                    world.kill_agent(node)?;
                }
                renew_sandbox(world, node, pod)?;
                renewed += 1;
            }
            traffic.must_flow("while the API server is away")?;
        }
        for node in &nodes {
            let status = world.status(node)?;
            ensure!(
                status.ready,
                "the agent of {node} is not ready without the API server: {:?}",
                status.conditions
            );
        }
        Ok(())
    })();
    let gone = started.elapsed();
    traffic.event("the API server came back")?;
    world.cluster.api_start()?;
    outcome?;
    world.healthy()?;
    for name in ["away-d", "away-e"] {
        let pod = world.wait(&format!("{name} to have its new address"), || {
            let pod = world.running(name)?;
            reaches(&pods[0].place, &pod).map(|()| Some(pod))
        })?;
        ensure!(!pod.addresses.is_empty());
    }
    // Facts flow again.
    let late = world.run_pods(&[("away-late", &nodes[1])])?;
    reaches(&pods[0].place, &late[0])?;
    let told = traffic.finish()?;
    Ok(format!(
        "{renewed} sandboxes renewed in {:.0} s without it; {told}",
        gone.as_secs_f64()
    ))
}

/// Kills a pod's sandbox and waits for the next one's address.
fn renew_sandbox(world: &World, node: &str, pod: &str) -> Result<()> {
    let sandboxes = || -> Result<BTreeSet<String>> {
        let all = world.endpoints(node)?;
        let of_pod = all.into_iter().filter(|endpoint| endpoint.pod.name == pod);
        Ok(of_pod.map(|endpoint| endpoint.owner.container_id).collect())
    };
    let before = world.wait(&format!("an endpoint of {pod}"), || {
        // The agent may just be coming back.
        Ok(Some(sandboxes()?).filter(|all| !all.is_empty()))
    })?;
    for sandbox in &before {
        world.on_node(
            node,
            "ctr",
            &[
                "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", sandbox,
            ],
        )?;
    }
    world.wait(&format!("a new sandbox of {pod}"), || {
        let now = sandboxes()?;
        Ok((!now.is_empty() && now.is_disjoint(&before)).then_some(()))
    })?;
    // The kubelet backs off if it is called too often.
    thread::sleep(std::time::Duration::from_secs(1));
    Ok(())
}
