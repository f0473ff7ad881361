//! This node's Node object, for commands that do one thing and end: what `prepare` has to know of
//! it, what `debug` collects of it, and what `uninstall` takes off it.

use crate::{
    announce::{
        annotations::Annotation,
        node::{CONDITION, TAINT},
    },
    chain::Chain,
    cluster_api::{ClusterApi, ClusterApiError},
    config::{FactsFrom, Places},
    watch::nodes_parse,
};
use ipnet::IpNet;
use kube::{
    Client,
    api::{ListParams, Patch, PatchParams},
    core::Request,
};
use serde_json::{Value, json};
use std::{fs, io, path::PathBuf, time::Duration};
use tokio::time::{Instant, sleep, timeout};

const NODES: &str = "/api/v1/nodes";
/// How long a request may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long the controller manager may take to give a new node its pod ranges,
const RANGES: Duration = Duration::from_secs(15);
/// and how often it is asked for.
const AGAIN: Duration = Duration::from_millis(500);
/// How often what somebody else has changed meanwhile is tried again.
const CONFLICTS: usize = 10;

#[derive(Debug, thiserror::Error)]
pub enum OwnNodeError {
    #[error("nothing says which node this is, or how the Kubernetes API is reached")]
    Unknown,
    #[error(transparent)]
    Connect(#[from] ClusterApiError),
    #[error("node {name} cannot be read or changed in the Kubernetes API")]
    Request {
        name: String,
        source: Box<kube::Error>,
    },
    #[error("the Kubernetes API does not answer")]
    Silent,
    #[error("cannot start what asks the Kubernetes API")]
    Runtime(#[source] io::Error),
    #[error("nodes file {} cannot be used: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    #[error("node {0} is not among the nodes, or has no pod CIDR yet")]
    NoRanges(String),
}

/// The pod ranges of this node.
///
/// # Errors
/// If they cannot be read, or there are none in a while.
pub fn pod_cidrs(places: &Places) -> Result<Vec<IpNet>, OwnNodeError> {
    let name = places.node_name.as_ref().ok_or(OwnNodeError::Unknown)?;
    match &places.facts_from {
        None => Err(OwnNodeError::Unknown),
        Some(FactsFrom::NodesFile(path)) => {
            let failed = |reason: String| OwnNodeError::File {
                path: path.clone(),
                reason,
            };
            let text = fs::read(path).map_err(|error| failed(error.to_string()))?;
            let facts =
                nodes_parse::parse(&text).map_err(|error| failed(Chain(&error).to_string()))?;
            let own = facts.nodes.get(name);
            own.map(|own| own.pod_cidrs.clone())
                .filter(|cidrs| !cidrs.is_empty())
                .ok_or_else(|| OwnNodeError::NoRanges(name.clone()))
        }
        Some(FactsFrom::Kubernetes(access)) => wait(async {
            let client = ClusterApi::new(access).await?.client;
            ranges(&client, name).await
        }),
    }
}

/// What the kubelet says of this node: its own version, the container runtime's, the kernel's.
///
/// # Errors
/// If the Node cannot be read.
pub fn info(places: &Places) -> Result<Value, OwnNodeError> {
    let (Some(name), Some(FactsFrom::Kubernetes(access))) = (&places.node_name, &places.facts_from)
    else {
        return Err(OwnNodeError::Unknown);
    };
    wait(async {
        let client = ClusterApi::new(access).await?.client;
        let mut node = read(&client, name).await?;
        Ok(node["status"]["nodeInfo"].take())
    })
}

/// Takes the agent's taint, condition and annotations off this node; says what was there.
///
/// # Errors
/// If the Node cannot be read or changed.
pub fn clear(places: &Places) -> Result<Vec<String>, OwnNodeError> {
    let (Some(name), Some(FactsFrom::Kubernetes(access))) = (&places.node_name, &places.facts_from)
    else {
        return Ok(Vec::new());
    };
    wait(async {
        let client = ClusterApi::new(access).await?.client;
        take_off(&client, name).await
    })
}

fn wait<T>(work: impl Future<Output = Result<T, OwnNodeError>>) -> Result<T, OwnNodeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(OwnNodeError::Runtime)?;
    runtime.block_on(work)
}

async fn ranges(client: &Client, name: &str) -> Result<Vec<IpNet>, OwnNodeError> {
    let deadline = Instant::now() + RANGES;
    loop {
        let node = read(client, name).await?;
        let cidrs = node["spec"]["podCIDRs"].as_array().into_iter().flatten();
        let cidrs: Vec<IpNet> = cidrs
            .filter_map(|cidr| cidr.as_str()?.parse().ok())
            .collect();
        if !cidrs.is_empty() {
            return Ok(cidrs);
        }
        if Instant::now() >= deadline {
            return Err(OwnNodeError::NoRanges(name.to_owned()));
        }
        sleep(AGAIN).await;
    }
}

async fn take_off(client: &Client, name: &str) -> Result<Vec<String>, OwnNodeError> {
    let mut done = Vec::new();
    for attempt in 1.. {
        let node = read(client, name).await?;
        let taints = node["spec"]["taints"].as_array().cloned();
        let mut taints = taints.unwrap_or_default();
        let before = taints.len();
        taints.retain(|taint| taint["key"] != TAINT);
        if taints.len() == before {
            break;
        }
        // In the version that was read, so that nobody's change is lost.
        let patch = Patch::Merge(json!({
            "metadata": {"resourceVersion": node["metadata"]["resourceVersion"]},
            "spec": {"taints": taints},
        }));
        match patched(client, name, &patch).await {
            Ok(_) => {
                done.push(format!("taint {TAINT} of node {name}"));
                break;
            }
            Err(OwnNodeError::Request { source, .. })
                if attempt < CONFLICTS
                    && matches!(&*source, kube::Error::Api(status) if status.code == 409) => {}
            Err(error) => return Err(error),
        }
    }
    let node = read(client, name).await?;
    let conditions = node["status"]["conditions"].as_array();
    let ours = |condition: &Value| {
        condition["type"] == CONDITION && condition["reason"] == crate::announce::node::REASON
    };
    if conditions.is_some_and(|conditions| conditions.iter().any(ours)) {
        let patch = Patch::Strategic(json!({"status": {"conditions": [
            {"type": CONDITION, "$patch": "delete"},
        ]}}));
        let params = PatchParams::default();
        let patched = async {
            let request = Request::new(NODES).patch_subresource("status", name, &params, &patch);
            client
                .request(request.map_err(kube::Error::BuildRequest)?)
                .await
        };
        answer(name, patched).await?;
        done.push(format!("condition {CONDITION} of node {name}"));
    }
    for annotation in Annotation::EVERY {
        let key = annotation.key();
        if !node["metadata"]["annotations"][key].is_null() {
            patched(client, name, &Patch::Merge(annotation.patch(false))).await?;
            done.push(format!("annotation {key} of node {name}"));
        }
    }
    Ok(done)
}

async fn patched(client: &Client, name: &str, patch: &Patch<Value>) -> Result<Value, OwnNodeError> {
    let params = PatchParams::default();
    let patched = async {
        let request = Request::new(NODES).patch(name, &params, patch);
        client
            .request(request.map_err(kube::Error::BuildRequest)?)
            .await
    };
    answer(name, patched).await
}

/// By a list of one: the agent has the right to list nodes, and needs none to get one.
async fn read(client: &Client, name: &str) -> Result<Value, OwnNodeError> {
    let params = ListParams::default().fields(&format!("metadata.name={name}"));
    let listed = async {
        let request = Request::new(NODES).list(&params);
        client
            .request(request.map_err(kube::Error::BuildRequest)?)
            .await
    };
    let mut list = answer(name, listed).await?;
    let node = list["items"].as_array_mut().and_then(Vec::pop);
    node.ok_or_else(|| OwnNodeError::NoRanges(name.to_owned()))
}

async fn answer(
    name: &str,
    request: impl Future<Output = kube::Result<Value>>,
) -> Result<Value, OwnNodeError> {
    match timeout(DEADLINE, request).await {
        Ok(answer) => answer.map_err(|source| OwnNodeError::Request {
            name: name.to_owned(),
            source: Box::new(source),
        }),
        Err(_) => Err(OwnNodeError::Silent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stand_in::{Answer, StandIn};
    use sinabro_common::names::{ROUTING_ANNOTATION, TUNNELS_ANNOTATION};

    fn list(node: &Value) -> Answer {
        Answer::Whole(200, json!({"items": [node]}).to_string())
    }

    fn node(taints: &Value, reason: &str) -> Value {
        json!({
            "metadata": {"name": "n1", "resourceVersion": "7"},
            "spec": {"taints": taints, "podCIDRs": ["10.244.1.0/24"]},
            "status": {"conditions": [{"type": CONDITION, "reason": reason}, {"type": "Ready"}]},
        })
    }

    #[tokio::test]
    async fn ranges_that_come_late_are_waited_for() {
        let mut server = StandIn::start().await;
        let client = server.api().await.client;
        server.answer(list(&json!({"metadata": {"name": "n1"}, "spec": {}})));
        server.answer(list(&node(&json!([]), "")));
        let cidrs = ranges(&client, "n1").await.unwrap();
        assert_eq!(cidrs, ["10.244.1.0/24".parse().unwrap()]);
        let (request, _) = server.request().await;
        assert!(request.starts_with("GET /api/v1/nodes?"), "{request}");
        assert!(request.contains("metadata.name%3Dn1"), "{request}");
    }

    #[tokio::test]
    async fn taint_condition_and_annotations_go_and_others_stay() {
        let mut server = StandIn::start().await;
        let client = server.api().await.client;
        let taints = json!([{"key": "a", "effect": "NoExecute"}, {"key": TAINT}]);
        let mut tainted = node(&taints, crate::announce::node::REASON);
        tainted["metadata"]["annotations"] = json!({
            ROUTING_ANNOTATION: "native",
            TUNNELS_ANNOTATION: "a word of a later version",
            "x": "y",
        });
        server.answer(list(&tainted));
        server.fail(409, "the object has been modified");
        server.answer(list(&tainted));
        server.answer(Answer::Whole(200, "{}".into()));
        server.answer(list(&tainted));
        for _ in 0..3 {
            server.answer(Answer::Whole(200, "{}".into()));
        }
        let done = take_off(&client, "n1").await.unwrap();
        assert_eq!(done.len(), 4, "{done:?}");
        let mut patches = Vec::new();
        for _ in 0..8 {
            let (request, body) = server.request().await;
            if request.starts_with("PATCH") {
                patches.push((request, serde_json::from_str::<Value>(&body).unwrap()));
            }
        }
        assert_eq!(patches[1].1["spec"]["taints"], json!([taints[0]]));
        assert_eq!(patches[1].1["metadata"]["resourceVersion"], "7");
        assert!(patches[2].0.contains("/n1/status"), "{}", patches[2].0);
        let condition = &patches[2].1["status"]["conditions"][0];
        assert_eq!(*condition, json!({"type": CONDITION, "$patch": "delete"}));
        for (patch, annotation) in patches[3..]
            .iter()
            .zip([ROUTING_ANNOTATION, TUNNELS_ANNOTATION])
        {
            let annotations = json!({"metadata": {"annotations": {annotation: null}}});
            assert_eq!(patch.1, annotations);
        }

        // Nothing of ours.
        for _ in 0..2 {
            server.answer(list(&node(&json!([taints[0]]), "RouteCreated")));
        }
        assert_eq!(take_off(&client, "n1").await.unwrap(), [""; 0]);
    }
}
