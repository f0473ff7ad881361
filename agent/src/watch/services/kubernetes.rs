//! Facts about Services from the Kubernetes API, by a watch on Services and one on EndpointSlices
//! ([`crate::watch::kubernetes`]).
//!
//! What has no address is not asked for, nor are the endpoints of what another proxy implements, as kube-proxy does not: the
//! control plane marks the slices as it finds their Services marked.

use super::{
    Changes, Health, ServicesSource, Store,
    objects::{ApiService, ApiSlice, Metadata},
    ranges,
    store::Kind,
};
use crate::{
    cluster_api::ClusterApi,
    watch::kubernetes::{Keep, Watcher},
};
use ipnet::IpNet;
use std::{
    collections::BTreeSet,
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};
use tokio::sync::watch;

/// The label is a mark by being there.
const SERVICES: &str = "!service.kubernetes.io/headless";
/// As is [`super::objects::Labels::proxy`]. Services that have it are wanted for their addresses, which are somebody's.
const SLICES: &str = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name";

/// Watches as long as somebody waits for changes. `ranges`: what is known of the ranges of Services' addresses; else they
/// are watched, too.
pub fn spawn(api: ClusterApi, ranges: Option<BTreeSet<IpNet>>) -> ServicesSource {
    let store = Arc::new(Store::default());
    let (sender, health) = watch::channel(Health::default());
    let reports = Arc::new(Reports {
        sender,
        of: Mutex::default(),
    });
    let from = format!("Kubernetes API at {}", api.server);
    let services = Watcher::new(api.clone(), Kept::<ApiService>::new(&store, &reports));
    let slices = Watcher::new(api.clone(), Kept::<ApiSlice>::new(&store, &reports));
    let is_watched = ranges.is_none();
    let (told, ranges) = watch::channel(ranges.unwrap_or_default());
    let watched = is_watched.then(|| Watcher::new(api, ranges::Kept::new(told, &store)));
    let watch_ranges = async {
        if let Some(watched) = watched {
            watched.run().await;
        }
    };
    ServicesSource {
        from,
        changes: Changes::of(&store),
        store,
        health,
        ranges,
        task: tokio::spawn(async move {
            tokio::join!(services.run(), slices.run(), watch_ranges);
        }),
    }
}

/// What the watches report, as one.
struct Reports {
    sender: watch::Sender<Health>,
    of: Mutex<[Health; 2]>,
}

impl Reports {
    fn report(&self, kind: Kind, health: Health) {
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        of[kind as usize] = health;
        let worst = of.iter().find(|health| health.problem.is_some());
        let worst = worst.cloned().unwrap_or_default();
        self.sender.send_if_modified(|health| {
            let is_new = *health != worst;
            *health = worst;
            is_new
        });
    }
}

/// An object that makes a part of a Service's facts.
trait Part: Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static {
    const KIND: Kind;
    const PATH: &str;
    const SELECTOR: &str;
    const NAMES: [&str; 2];

    fn metadata(&self) -> &Metadata;
    fn put(&self, store: &Store, changed: bool);
}

impl Part for ApiService {
    const KIND: Kind = Kind::Services;
    const PATH: &str = "/api/v1/services";
    const SELECTOR: &str = SERVICES;
    const NAMES: [&str; 2] = ["a Service", "services"];

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn put(&self, store: &Store, _: bool) {
        store.put_service(self);
    }
}

impl Part for ApiSlice {
    const KIND: Kind = Kind::Slices;
    const PATH: &str = "/apis/discovery.k8s.io/v1/endpointslices";
    const SELECTOR: &str = SLICES;
    const NAMES: [&str; 2] = ["an EndpointSlice", "endpoint slices"];

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn put(&self, store: &Store, changed: bool) {
        store.put_slice(self, changed);
    }
}

/// Puts objects into the store as they come, which tells of them by itself.
struct Kept<T> {
    store: Arc<Store>,
    reports: Arc<Reports>,
    part: PhantomData<fn() -> T>,
}

impl<T> Kept<T> {
    fn new(store: &Arc<Store>, reports: &Arc<Reports>) -> Self {
        Self {
            store: store.clone(),
            reports: reports.clone(),
            part: PhantomData,
        }
    }
}

impl<T: Part> Keep for Kept<T> {
    type Object = T;
    type List = Arc<Store>;
    const PATH: &str = T::PATH;
    const SELECTOR: Option<&str> = Some(T::SELECTOR);
    const NAMES: [&str; 2] = T::NAMES;

    fn version(object: &T) -> &str {
        &object.metadata().resource_version
    }

    fn begin_list(&mut self) -> Arc<Store> {
        self.store.begin_list(T::KIND);
        self.store.clone()
    }

    fn listed(store: &mut Arc<Store>, object: &T) {
        object.put(store, false);
    }

    fn unlisted(store: &mut Arc<Store>, object: &T) {
        store.remove(T::KIND, object.metadata());
    }

    fn end_list(&mut self, store: Arc<Store>) {
        store.end_list(T::KIND);
    }

    fn present(&mut self, object: &T, changed: bool) -> bool {
        object.put(&self.store, changed);
        false
    }

    fn gone(&mut self, object: &T) -> bool {
        self.store.remove(T::KIND, object.metadata());
        false
    }

    fn publish(&mut self) {}

    fn count(&self) -> usize {
        self.store.count(T::KIND)
    }

    fn agents(&self) -> usize {
        self.store.places()
    }

    fn has_facts(&self) -> bool {
        self.store.is_complete()
    }

    fn report(&mut self, problem: Option<(String, SystemTime)>) {
        let (problem, stale_since) = problem.unzip();
        let health = Health {
            problem,
            stale_since,
        };
        self.reports.report(T::KIND, health);
    }

    fn closed(&self) -> impl Future<Output = ()> + Send + use<T> {
        let store = self.store.clone();
        async move { store.closed().await }
    }
}
