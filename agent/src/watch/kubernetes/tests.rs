use super::{events::Events, *};
use crate::stand_in::{Answer, Lines, StandIn, status};
use crate::watch::cache::tests::StateDir;
use futures::{StreamExt as _, future, stream};
use serde_json::{Value, json};
use tokio::time::timeout;

/// A server, and what is known of it.
struct Test {
    server: StandIn,
    dir: StateDir,
    source: Source,
    own: watch::Receiver<Option<OwnNode>>,
}

fn node(name: &str, n: u8, version: u32) -> Value {
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {
            "name": name, "uid": format!("uid-{name}"), "resourceVersion": version.to_string(),
            "labels": {"a": "b"}, "managedFields": [{"manager": "kubelet"}],
        },
        "spec": {"podCIDR": format!("10.244.{n}.0/24"), "podCIDRs": [format!("10.244.{n}.0/24")]},
        "status": {
            "addresses": [
                {"type": "Hostname", "address": name},
                {"type": "InternalIP", "address": format!("192.168.0.{n}")},
            ],
            "images": [{"names": ["x"], "sizeBytes": 1}],
        },
    })
}

fn event(kind: &str, object: &Value) -> String {
    json!({"type": kind, "object": object}).to_string()
}

fn bookmark(version: u32, ends: bool) -> String {
    let annotations = match ends {
        true => json!({"k8s.io/initial-events-end": "true"}),
        false => json!({}),
    };
    let metadata = json!({"resourceVersion": version.to_string(), "annotations": annotations});
    event(
        "BOOKMARK",
        &json!({"kind": "Node", "apiVersion": "v1", "metadata": metadata}),
    )
}

impl Test {
    async fn new() -> Self {
        let server = StandIn::start().await;
        let dir = StateDir::made();
        let (source, own) = watch_nodes(&server, &dir).await;
        Self {
            server,
            dir,
            source,
            own,
        }
    }

    /// With a watch that has begun with these nodes.
    async fn with(nodes: &[Value], version: u32) -> (Self, Lines) {
        let mut test = Self::new().await;
        let lines = test.server.watch();
        for node in nodes {
            lines.send(event("ADDED", node)).unwrap();
        }
        lines.send(bookmark(version, true)).unwrap();
        let (request, _) = test.server.request().await;
        assert!(request.contains("sendInitialEvents=true"), "{request}");
        let names = nodes.iter().map(|n| n["metadata"]["name"].as_str());
        let names: Vec<&str> = names.map(Option::unwrap).collect();
        test.until("listed", |s| has(s, &names) && s.problem.is_none())
            .await;
        (test, lines)
    }

    async fn until(&mut self, what: &str, is: impl Fn(&Snapshot) -> bool) -> Snapshot {
        let updates = &mut self.source.updates;
        let found = async { updates.wait_for(|s| is(s)).await.unwrap().clone() };
        let found = timeout(Duration::from_secs(30), found).await.ok();
        found.unwrap_or_else(|| panic!("{what}: still {:?}", self.source.updates.borrow()))
    }

    /// The next request, which must be a watch that goes on from a point.
    async fn resumed_from(&mut self, version: u32) {
        let (request, _) = self.server.request().await;
        let from = format!("resourceVersion={version}");
        assert!(request.ends_with(&from), "{request}");
        assert!(request.contains("allowWatchBookmarks=true"), "{request}");
        assert!(!request.contains("sendInitialEvents"), "{request}");
    }
}

async fn watch_nodes(
    server: &StandIn,
    dir: &StateDir,
) -> (Source, watch::Receiver<Option<OwnNode>>) {
    let cache = dir.path().join("nodes.json");
    spawn(server.api().await, "n1".into(), cache)
}

fn names(snapshot: &Snapshot) -> Vec<String> {
    let facts = snapshot.facts.as_ref();
    facts.map_or_else(Vec::new, |facts| facts.nodes.keys().cloned().collect())
}

fn has(snapshot: &Snapshot, wanted: &[&str]) -> bool {
    snapshot.facts.is_some() && names(snapshot) == wanted
}

#[tokio::test]
async fn changes_follow_the_list_and_a_watch_that_ends_is_taken_up_where_it_was() {
    let (mut test, lines) = Test::with(&[node("n1", 1, 3), node("n2", 2, 4)], 7).await;
    lines.send(event("ADDED", &node("n3", 3, 8))).unwrap();
    lines.send(event("DELETED", &node("n2", 2, 9))).unwrap();
    let now = test.until("changed", |s| has(s, &["n1", "n3"])).await;
    let n3 = &now.facts.unwrap().nodes["n3"];
    assert_eq!(
        n3.addresses,
        ["192.168.0.3".parse::<std::net::IpAddr>().unwrap()]
    );
    assert_eq!(n3.pod_cidrs, ["10.244.3.0/24".parse().unwrap()]);

    // An end after more than a moment is what the server does every few minutes.
    sleep(TOO_SHORT).await;
    let next = test.server.watch();
    drop(lines);
    test.resumed_from(9).await;
    next.send(bookmark(20, false)).unwrap();
    sleep(TOO_SHORT * 2).await;
    let last = test.server.watch();
    drop(next);
    test.resumed_from(20).await;
    last.send(event("ADDED", &node("n4", 4, 21))).unwrap();
    test.until("resumed", |s| has(s, &["n1", "n3", "n4"])).await;
    assert_eq!(test.source.updates.borrow().problem, None);
}

#[tokio::test]
async fn a_heartbeat_is_not_published_but_counts_as_the_point_to_go_on_from() {
    let mut ready = node("n1", 1, 3);
    ready["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    let (mut test, lines) = Test::with(std::slice::from_ref(&ready), 7).await;
    test.source.updates.mark_unchanged();
    let mut beat = ready;
    beat["metadata"]["resourceVersion"] = "8".into();
    beat["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:00:00Z".into();
    lines.send(event("MODIFIED", &beat)).unwrap();
    sleep(TOO_SHORT * 2).await;
    let _next = test.server.watch();
    drop(lines);
    test.resumed_from(8).await;
    assert!(!test.source.updates.has_changed().unwrap());
}

#[tokio::test]
async fn the_own_node_is_shown_with_taints_and_condition() {
    let mut own = node("n1", 1, 3);
    own["spec"]["taints"] = json!([{"key": "k", "effect": "NoSchedule"}]);
    own["status"]["conditions"] = json!([
        {"type": "Ready", "status": "True"},
        {"type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated"},
    ]);
    let (test, lines) = Test::with(&[node("n0", 2, 2), own.clone()], 7).await;
    let shown = test.own.borrow().clone().unwrap();
    assert_eq!(shown.uid, "uid-n1");
    assert_eq!(shown.resource_version, "3");
    assert_eq!(shown.taints[0].key, "k");
    let condition = Some(("True".into(), "NoRouteCreated".into()));
    assert_eq!(shown.network_unavailable, condition);
    lines.send(event("DELETED", &own)).unwrap();
    let gone = async { test.own.clone().wait_for(Option::is_none).await.map(|_| ()) };
    timeout(Duration::from_secs(30), gone)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_server_that_forgot_the_point_is_asked_for_all_again() {
    let (mut test, lines) = Test::with(&[node("n1", 1, 3), node("n2", 2, 4)], 7).await;
    // As an event of the watch.
    let next = test.server.watch();
    let gone: Value = serde_json::from_str(&status(410, "too old resource version")).unwrap();
    lines.send(event("ERROR", &gone)).unwrap();
    let (request, _) = test.server.request().await;
    assert!(request.contains("sendInitialEvents=true"), "{request}");
    next.send(event("ADDED", &node("n1", 1, 3))).unwrap();
    // Half a list is none.
    sleep(PAUSE * 4).await;
    assert!(has(&test.source.updates.borrow(), &["n1", "n2"]));
    next.send(bookmark(30, true)).unwrap();
    test.until("listed again", |s| has(s, &["n1"])).await;
    // As the answer to the request.
    sleep(TOO_SHORT * 2).await;
    test.server.fail(410, "too old resource version");
    let last = test.server.watch();
    drop(next);
    test.resumed_from(30).await;
    last.send(bookmark(40, true)).unwrap();
    test.until("empty", |s| has(s, &[])).await;
    assert_eq!(test.source.updates.borrow().problem, None);
}

/// The point that a request asks for, as it stands in its query.
fn asked_for(request: &str) -> Option<&str> {
    let (_, query) = request.split_once('?')?;
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find_map(|(name, value)| (name == "resourceVersion").then_some(value))
}

#[tokio::test]
async fn all_nodes_are_asked_of_the_servers_cache_and_never_older_than_before() {
    let mut test = Test::new().await;
    let lines = test.server.watch();
    let (first, _) = test.server.request().await;
    assert_eq!(asked_for(&first), Some("0"), "{first}");
    assert!(
        first.contains("resourceVersionMatch=NotOlderThan"),
        "{first}"
    );
    lines.send(event("ADDED", &node("n1", 1, 3))).unwrap();
    lines.send(bookmark(7, true)).unwrap();
    test.until("listed", |s| has(s, &["n1"])).await;

    let gone: Value = serde_json::from_str(&status(410, "too old")).unwrap();
    lines.send(event("ERROR", &gone)).unwrap();
    let (again, _) = test.server.request().await;
    assert!(again.contains("sendInitialEvents=true"), "{again}");
    assert_eq!(asked_for(&again), Some("7"), "{again}");

    // A server whose data were put back from a backup will never have that point.
    let mut ahead: Value = serde_json::from_str(&status(504, "Too large version")).unwrap();
    ahead["details"] = json!({"causes": [{"reason": "ResourceVersionTooLarge"}]});
    test.server.answer(Answer::Whole(504, ahead.to_string()));
    let lines = test.server.watch();
    let (anything, _) = test.server.request().await;
    assert_eq!(asked_for(&anything), Some("0"), "{anything}");
    lines.send(event("ADDED", &node("n2", 2, 2))).unwrap();
    lines.send(bookmark(2, true)).unwrap();
    test.until("older", |s| has(s, &["n2"]) && s.problem.is_none())
        .await;
}

/// By time alone, so without a server: what it sends in time may come too late where the machine stands still.
#[tokio::test]
async fn a_bookmark_is_a_sign_of_life() {
    let server = StandIn::start().await;
    let dir = StateDir::made();
    let (sender, _updates) = watch::channel(Snapshot::default());
    let (own, _) = watch::channel(None);
    let nodes = Nodes::new("n1".into(), dir.path().join("nodes.json"), sender, own);
    let mut watcher = Watcher::new(server.api().await, nodes);
    watcher.silence = LONGEST_PAUSE;
    let begun = Instant::now();
    let bookmarks = stream::unfold(0, async |sent| {
        if sent == 9 {
            return future::pending().await;
        }
        sleep(LONGEST_PAUSE / 3).await;
        let event = serde_json::from_str(&bookmark(sent + 1, false)).unwrap();
        Some((Ok(event), sent + 1))
    });
    let over = watcher.take_changes(&mut Events(bookmarks.boxed())).await;
    assert!(matches!(over, Err(WatchError::Silent)), "{over:?}");
    assert_eq!(watcher.point, Point::After("9".into()));
    assert!(begun.elapsed() >= LONGEST_PAUSE * 4);
}

/// So is the watch of a server whose data were put back from a backup, until they have come as far as before.
#[tokio::test]
async fn after_a_silent_watch_all_nodes_are_asked_for_again() {
    let mut server = StandIn::start().await;
    let dir = StateDir::made();
    let (sender, mut updates) = watch::channel(Snapshot::default());
    let (own, _) = watch::channel(None);
    let nodes = Nodes::new("n1".into(), dir.path().join("nodes.json"), sender, own);
    let mut watcher = Watcher::new(server.api().await, nodes);
    watcher.silence = 2 * LONGEST_PAUSE;
    tokio::spawn(watcher.run());

    let lines = server.watch();
    server.request().await;
    lines.send(event("ADDED", &node("n1", 1, 3))).unwrap();
    lines.send(bookmark(7, true)).unwrap();
    lines.send(bookmark(10, false)).unwrap();
    updates.wait_for(|s| has(s, &["n1"])).await.unwrap();
    let next = server.watch();
    let (again, _) = server.request().await;
    assert!(again.contains("sendInitialEvents=true"), "{again}");
    assert_eq!(asked_for(&again), Some("10"), "{again}");
    next.send(event("ADDED", &node("n2", 2, 2))).unwrap();
    next.send(bookmark(12, true)).unwrap();
    let listed = updates.wait_for(|s| has(s, &["n2"]) && s.problem.is_none());
    timeout(Duration::from_secs(30), listed)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn agents_do_not_come_back_together() {
    let mut seen = BTreeSet::new();
    for _ in 0..64 {
        let seconds = watch_seconds();
        assert!(WATCH.contains(&seconds));
        seen.insert(seconds);
    }
    assert!(seen.len() > 16, "{seen:?}");
}

#[tokio::test]
async fn a_server_without_streamed_lists_is_asked_for_all_its_cache_has() {
    let mut test = Test::new().await;
    test.server.fail(422, "sendInitialEvents is forbidden");
    let list = |nodes: &[Value]| {
        let metadata = json!({"resourceVersion": "50"});
        json!({"kind": "NodeList", "metadata": metadata, "items": nodes}).to_string()
    };
    let whole = list(&[node("n1", 1, 3), node("n2", 2, 3)]);
    // One that breaks off is none.
    let half = whole[..whole.len() / 2].to_owned();
    test.server.answer(Answer::Whole(200, half));
    test.server.answer(Answer::Whole(200, whole));
    let lines = test.server.watch();
    assert!(test.server.request().await.0.contains("sendInitialEvents"));
    for _ in 0..2 {
        let (request, _) = test.server.request().await;
        assert_eq!(asked_for(&request), Some("0"), "{request}");
        assert!(!request.contains("limit"), "no cache has pages: {request}");
        assert!(test.source.updates.borrow().facts.is_none());
    }
    test.resumed_from(50).await;
    test.until("listed", |s| has(s, &["n1", "n2"])).await;
    lines.send(event("DELETED", &node("n1", 1, 51))).unwrap();
    test.until("changed", |s| has(s, &["n2"])).await;
    assert_eq!(test.source.updates.borrow().problem, None);
}

#[tokio::test]
async fn garbage_in_a_node_costs_that_node_alone() {
    let mut bad = node("n2", 2, 4);
    bad["status"]["addresses"][1]["address"] = "192.168.0.256".into();
    let (mut test, lines) = Test::with(&[node("n1", 1, 3)], 7).await;
    lines.send(event("ADDED", &bad)).unwrap();
    // Not a Node by its form: nothing is known of whom it is about.
    lines.send(event("ADDED", &json!({"metadata": 7}))).unwrap();
    lines.send("{\"type\":".into()).unwrap();
    lines.send("\u{1}garbage".into()).unwrap();
    lines.send(event("ADDED", &node("n3", 3, 9))).unwrap();
    let now = test.until("told", |s| has(s, &["n1", "n3"])).await;
    let why = &now.facts.unwrap().unreadable["n2"];
    assert_eq!(why, "InternalIP `192.168.0.256` is not an IP address");
    lines.send(event("MODIFIED", &node("n2", 2, 10))).unwrap();
    let now = test.until("mended", |s| has(s, &["n1", "n2", "n3"])).await;
    assert!(now.facts.unwrap().unreadable.is_empty());
}

#[tokio::test]
async fn while_the_server_is_away_the_facts_stay_and_the_problem_says_since_when() {
    let (mut test, _lines) = Test::with(&[node("n1", 1, 3)], 7).await;
    sleep(TOO_SHORT).await;
    test.server.stop().await;
    let lost = test.until("lost", |s| s.problem.is_some()).await;
    assert!(has(&lost, &["n1"]));
    let problem = lost.problem.unwrap();
    for part in [
        "no connection",
        &test.server.address.to_string(),
        "since 20",
        "stay in use",
    ] {
        assert!(problem.contains(part), "{problem}");
    }
    // More failures are no news.
    test.source.updates.mark_unchanged();
    sleep(FIRST_RETRY * 6).await;
    let now = test.source.updates.borrow().clone();
    assert_eq!(
        (now.problem, now.stale_since),
        (Some(problem), lost.stale_since)
    );

    test.server.restart().await;
    let lines = test.server.watch();
    test.resumed_from(7).await;
    // That it answers is enough, nothing need happen to a Node.
    let back = test.until("back", |s| s.problem.is_none()).await;
    assert!(has(&back, &["n1"]) && back.stale_since.is_none());
    lines.send(event("ADDED", &node("n2", 2, 8))).unwrap();
    test.until("changed", |s| has(s, &["n1", "n2"])).await;
}

#[tokio::test]
async fn an_agent_that_starts_while_the_server_is_away_has_the_last_nodes() {
    let (mut test, lines) = Test::with(&[node("n1", 1, 3)], 7).await;
    lines.send(event("ADDED", &node("n2", 2, 8))).unwrap();
    test.until("changed", |s| has(s, &["n1", "n2"])).await;
    let kept = test.dir.path().join("nodes.json");
    let written = async {
        while !std::fs::read_to_string(&kept).is_ok_and(|text| text.contains("n2")) {
            sleep(PAUSE).await;
        }
    };
    timeout(Duration::from_secs(30), written).await.unwrap();
    let Test {
        mut server,
        dir,
        source,
        own,
    } = test;
    drop(own);
    server.stop().await;
    drop(source);

    let (source, own) = watch_nodes(&server, &dir).await;
    let mut test = Test {
        server,
        dir,
        source,
        own,
    };
    let now = test.until("kept", |s| has(s, &["n1", "n2"])).await;
    assert!(now.problem.is_some() && now.stale_since.is_some());
    test.server.restart().await;
    let lines = test.server.watch();
    let (request, _) = test.server.request().await;
    assert!(request.contains("sendInitialEvents=true"), "{request}");
    lines.send(event("ADDED", &node("n1", 1, 3))).unwrap();
    lines.send(bookmark(30, true)).unwrap();
    test.until("true again", |s| has(s, &["n1"]) && s.problem.is_none())
        .await;
}

#[tokio::test]
async fn whatever_the_server_answers_the_watch_goes_on() {
    let mut test = Test::new().await;
    test.server.answer(Answer::Reset);
    test.until("reset", |s| s.problem.is_some()).await;
    test.server.fail(403, "nodes is forbidden: not allowed");
    test.until("refused", |s| {
        s.problem
            .as_ref()
            .is_some_and(|p| p.contains("not allowed (403)"))
    })
    .await;
    // A watch that ends at once, before its list and without anything.
    drop(test.server.watch());
    test.until("ended", |s| {
        s.problem.as_ref().is_some_and(|p| p.contains("at once"))
    })
    .await;
    assert!(test.source.updates.borrow().facts.is_none());
    test.server.answer(Answer::Whole(200, "<html>".into()));
    let lines = test.server.watch();
    lines.send(event("ADDED", &node("n1", 1, 3))).unwrap();
    lines.send(bookmark(7, true)).unwrap();
    test.until("well", |s| has(s, &["n1"]) && s.problem.is_none())
        .await;
}

#[tokio::test]
async fn the_task_ends_with_its_last_receiver() {
    let (test, _lines) = Test::with(&[], 7).await;
    let Source { updates, task, .. } = test.source;
    drop(updates);
    timeout(Duration::from_secs(30), task)
        .await
        .unwrap()
        .unwrap();
}
