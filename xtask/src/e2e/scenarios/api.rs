//! The API server: what it lets the agent do, and what goes on without it.

use crate::{
    e2e::{
        load::{reaches, traffic},
        world::{SYSTEM, World},
    },
    workspace::output,
};
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
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
    let agent = Asker::new(world, token.trim())?;
    let allowed = may_write(world, &agent, own)?;
    let refused = may_not_write(world, &agent, own, &nodes[1])?;
    let token = format!("--token={token}");
    for (verb, what) in [
        ("get", "nodes"),
        ("get", "secrets"),
        ("list", "pods"),
        ("create", "pods"),
        ("delete", "nodes"),
        ("get", "configmaps"),
        ("delete", "events.events.k8s.io"),
    ] {
        let mut can_i = world.cluster.kubectl_as_nobody()?;
        can_i.args([&token, "auth", "can-i", verb, what, "-n", SYSTEM]);
        ensure!(output(&mut can_i).is_err(), "the agent may {verb} {what}");
    }
    Ok(format!(
        "{allowed} writes about the own node yes; {refused} others, pods, secrets no"
    ))
}

/// Requests with a token, as they are: kubectl reads an object before it changes it.
struct Asker<'a> {
    world: &'a World,
    server: String,
    authority: String,
    token: String,
}

impl<'a> Asker<'a> {
    fn new(world: &'a World, token: &str) -> Result<Self> {
        let kubectl = world.cluster.kubectl_as_nobody()?;
        let flag = |name: &str| {
            let mut arguments = kubectl.get_args().filter_map(|text| text.to_str());
            let value = arguments.find_map(|text| text.strip_prefix(name));
            value
                .map(str::to_owned)
                .with_context(|| format!("no {name}"))
        };
        Ok(Self {
            world,
            server: flag("--server=")?,
            authority: flag("--certificate-authority=")?,
            token: token.to_owned(),
        })
    }

    /// The status of the answer, and the answer.
    fn send(&self, method: &str, kind: &str, path: &str, body: &Value) -> Result<(u16, String)> {
        let mut curl = self.world.cluster.in_control_network("curl")?;
        let answer = output(curl.args([
            "--noproxy",
            "*",
            "--silent",
            "--show-error",
            "--cacert",
            &self.authority,
            "--request",
            method,
            "--header",
            &format!("Authorization: Bearer {}", self.token),
            "--header",
            &format!("Content-Type: {kind}"),
            "--data",
            &body.to_string(),
            "--write-out",
            "\n%{http_code}",
            &format!("{}{path}", self.server),
        ]))?;
        let (text, code) = answer.trim_end().rsplit_once('\n').context("no status")?;
        Ok((code.parse()?, text.to_owned()))
    }

    fn patch_node(&self, node: &str, body: &Value) -> Result<(u16, String)> {
        // Conditions are merged by their type, everything else is replaced.
        let (kind, path) = match body.get("status") {
            Some(_) => ("application/strategic-merge-patch+json", "/status"),
            None => ("application/merge-patch+json", ""),
        };
        self.send("PATCH", kind, &format!("/api/v1/nodes/{node}{path}"), body)
    }

    fn post_event(&self, namespace: &str, event: &Value) -> Result<(u16, String)> {
        let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
        self.send("POST", "application/json", &path, event)
    }
}

/// An Event as the agent of a node writes it about that node.
fn event(node: &str, more: Value) -> Value {
    let mut event = json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": "e2e-", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "action": "ConfigureNode",
        "reason": "Test",
        "note": "a test of rights",
        "type": "Warning",
        "reportingController": "sinabro-agent",
        "reportingInstance": node,
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        event[key] = value.clone();
    }
    event
}

fn may_write(world: &World, agent: &Asker<'_>, own: &str) -> Result<usize> {
    let taints = world.get(&["node", own])?["spec"]["taints"].clone();
    let mut more = taints.as_array().cloned().unwrap_or_default();
    more.push(json!({"key": "sinabro.io/e2e", "effect": "PreferNoSchedule"}));
    let condition = json!({"type": "NetworkUnavailable", "status": "False", "reason": "SinabroIsUp",
        "message": "pods of this node have their network from Sinabro"});
    let ours = "sinabro.io/e2e";
    let answers = [
        agent.patch_node(own, &json!({"spec": {"taints": more}}))?,
        agent.patch_node(own, &json!({"spec": {"taints": taints}}))?,
        agent.patch_node(own, &json!({"metadata": {"annotations": {ours: "1"}}}))?,
        agent.patch_node(own, &json!({"metadata": {"annotations": {ours: null}}}))?,
        agent.patch_node(own, &json!({"status": {"conditions": [condition]}}))?,
        agent.post_event("default", &event(own, Value::Null))?,
    ];
    for (code, text) in &answers {
        ensure!(
            (200..300).contains(code),
            "the agent of {own} may not: {code} {text}"
        );
    }
    Ok(answers.len())
}

fn may_not_write(world: &World, agent: &Asker<'_>, own: &str, other: &str) -> Result<usize> {
    let node = world.get(&["node", own])?;
    let mut taints = node["spec"]["taints"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    taints.push(json!({"key": "e2e", "effect": "PreferNoSchedule"}));
    let ours = json!([{"key": "sinabro.io/e2e", "effect": "PreferNoSchedule"}]);
    let address = json!([{"type": "InternalIP", "address": "192.0.2.1"}]);
    let ready = json!([{"type": "Ready", "status": "False", "reason": "E2e", "message": ""}]);
    let patches = [
        (other, json!({"spec": {"taints": ours}})),
        (
            other,
            json!({"metadata": {"annotations": {"sinabro.io/routing": "native"}}}),
        ),
        (own, json!({"spec": {"taints": taints}})),
        (own, json!({"spec": {"unschedulable": true}})),
        (own, json!({"spec": {"providerID": "e2e://x"}})),
        (own, json!({"metadata": {"labels": {"e2e": "1"}}})),
        (own, json!({"metadata": {"annotations": {"e2e": "1"}}})),
        (own, json!({"metadata": {"finalizers": ["e2e.example/x"]}})),
        (own, json!({"status": {"addresses": address}})),
        (own, json!({"status": {"conditions": ready}})),
        (
            own,
            json!({"status": {"capacity": {"example.com/e2e": "1"}}}),
        ),
        (own, json!({"status": {"allocatable": {"pods": "1"}}})),
        (
            own,
            json!({"status": {"nodeInfo": {"kernelVersion": "e2e"}}}),
        ),
    ];
    let about_other = json!({"regarding": {"apiVersion": "v1", "kind": "Node", "name": other}});
    let elsewhere = json!({"regarding": {"apiVersion": "v1", "kind": "Pod", "name": "x",
        "namespace": SYSTEM}});
    let events = [
        json!({"reportingController": "kubelet"}),
        json!({"reportingInstance": other}),
        json!({"type": "Normal"}),
        json!({"regarding": {"apiVersion": "v1", "kind": "Secret", "name": "x"}}),
        about_other,
        elsewhere,
    ];
    let mut answers = Vec::new();
    for (node, patch) in &patches {
        answers.push((patch, agent.patch_node(node, patch)?));
    }
    for more in &events {
        answers.push((
            more,
            agent.post_event("default", &event(own, more.clone()))?,
        ));
    }
    for (what, (code, text)) in &answers {
        ensure!(
            *code == 403 && text.contains("sinabro may"),
            "the agent of {own} was not refused by the policy: {what}: {code} {text}"
        );
    }
    Ok(answers.len())
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
    // Facts flow again, kubelets' at once.
    world.restart_kubelets()?;
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
