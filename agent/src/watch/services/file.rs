//! Facts about Services from a file, followed live ([`crate::watch::followed_file`]).
//!
//! It is what `kubectl get services,endpointslices -o yaml` prints, or any YAML documents of such objects one after
//! the other; and of ServiceCIDR objects, for what addresses are Services' alone. A file that is broken or gone changes nothing: the last good facts stay, the problem is published and
//! logged once. An object that cannot be read costs that object alone, and what it said before stays.

use super::{
    Changes, Health, ServicesSource, Store,
    objects::{ApiRange, ApiService, ApiSlice, Metadata},
    ranges,
    store::{Kind, Object},
};
use crate::watch::{
    followed_file::{FollowedFile, read},
    nodes_parse::{cut, short},
};
use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use std::{
    collections::{BTreeSet, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};
use tokio::{sync::watch, task::spawn_blocking};
use tracing::{info, warn};

/// Twice what 50,000 Services with five endpoints each are as JSON.
pub const MAX_LEN: usize = 128 << 20;
/// Where an object is that does not say so, as kubectl has it.
const NAMESPACE: &str = "default";

/// Follows the file as long as somebody waits for changes. It need not exist yet.
/// `ranges`: as of [`super::kubernetes::spawn`].
pub fn spawn(path: PathBuf, ranges: Option<BTreeSet<IpNet>>) -> ServicesSource {
    let store = Arc::new(Store::default());
    let (sender, health) = watch::channel(Health::default());
    let is_read = ranges.is_none();
    let (told, ranges) = watch::channel(ranges.unwrap_or_default());
    let told = is_read.then_some(told);
    ServicesSource {
        from: format!("services file {}", path.display()),
        changes: Changes::of(&store),
        health,
        ranges,
        task: tokio::spawn(follow(path, store.clone(), sender, told)),
        store,
    }
}

async fn follow(
    path: PathBuf,
    store: Arc<Store>,
    health: watch::Sender<Health>,
    ranges: Option<watch::Sender<BTreeSet<IpNet>>>,
) {
    let mut file = FollowedFile::new(path);
    loop {
        tokio::select! {
            () = store.closed() => return,
            () = file.changed() => {}
        }
        let (from, into) = (file.path().to_owned(), store.clone());
        let taken = spawn_blocking(move || {
            let bytes = read(&from, MAX_LEN).map_err(|error| error.to_string())?;
            let objects = parse(&bytes)?;
            into.replace(objects.all);
            Ok(objects.ranges)
        });
        let taken = taken.await.map_err(|error| error.to_string()).flatten();
        let taken = taken.map(|read| {
            if let Some(ranges) = &ranges {
                ranges.send_if_modified(|told| {
                    let is_new = *told != read;
                    *told = read;
                    is_new
                });
            }
        });
        file.again(taken.is_err());
        publish(file.path(), &store, &health, taken);
    }
}

fn publish(path: &Path, store: &Store, health: &watch::Sender<Health>, taken: Result<(), String>) {
    let path = path.display();
    let problem = taken.err().map(|why| {
        let kept = match store.is_complete() {
            true => "; what it said last stays in use",
            false => "",
        };
        format!("services file {path}: {why}{kept}")
    });
    health.send_if_modified(|health| {
        if problem.is_none() {
            info!(
                services = store.count(Kind::Services),
                "read services file {path}"
            );
        }
        if problem == health.problem {
            return false;
        }
        if let Some(problem) = &problem {
            warn!("{problem}");
        }
        let since = || health.stale_since.unwrap_or_else(SystemTime::now);
        health.stale_since = problem.as_ref().map(|_| since());
        health.problem = problem;
        true
    });
}

/// The objects of a file.
///
/// # Errors
/// If the text as a whole is none.
pub(super) fn parse(bytes: &[u8]) -> Result<Objects, String> {
    let text = str::from_utf8(bytes).map_err(|_| "it is not UTF-8 text")?;
    // Far above what fits in the longest file: only what a few bytes unfold into is to be bounded.
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: MAX_LEN / 16,
            max_nodes: MAX_LEN / 2,
            max_events: MAX_LEN,
            max_total_scalar_bytes: MAX_LEN,
        },
    };
    let documents: Vec<Value> =
        serde_saphyr::from_multiple_with_options(text, options).map_err(|error| short(&error))?;
    let mut objects = Objects::default();
    for document in documents {
        objects.take(document, None);
    }
    match objects.any {
        true => Ok(objects),
        false => Err(
            "it is empty; that there are no Services is written `{kind: List, items: []}`".into(),
        ),
    }
}

#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) all: Vec<Object>,
    /// Of all ServiceCIDRs.
    pub(super) ranges: BTreeSet<IpNet>,
    names: HashSet<(Kind, String, String)>,
    /// Whether there is any document, be it an empty list.
    any: bool,
}

impl Objects {
    fn take(&mut self, mut document: Value, listed_as: Option<&str>) {
        if document.is_null() {
            return;
        }
        self.any = true;
        let kind = document.get("kind").and_then(Value::as_str).or(listed_as);
        let kind = kind.unwrap_or_default().to_owned();
        if let Some(of) = kind.strip_suffix("List") {
            // The items of a ServiceList do not repeat what they are.
            let of = (!of.is_empty()).then_some(of);
            match document.get_mut("items").map(Value::take) {
                Some(Value::Array(items)) => items.into_iter().for_each(|item| self.take(item, of)),
                Some(Value::Null) => {}
                _ => warn!("passing over a {kind} without items"),
            }
            return;
        }
        match kind.as_str() {
            "Service" => self.add::<ApiService>(Kind::Services, document, Object::Service),
            "EndpointSlice" => self.add::<ApiSlice>(Kind::Slices, document, Object::Slice),
            "ServiceCIDR" => match serde_json::from_value::<ApiRange>(document) {
                Ok(range) => self.ranges.extend(ranges::of(&range)),
                Err(error) => warn!("passing over a ServiceCIDR that cannot be read: {error}"),
            },
            _ => warn!(
                "passing over an object that is neither Service, EndpointSlice nor ServiceCIDR but `{}`",
                cut(&kind)
            ),
        }
    }

    fn add<T: HasMetadata>(&mut self, kind: Kind, document: Value, wrap: fn(Box<T>) -> Object) {
        let metadata = document.get("metadata").cloned().unwrap_or_default();
        let mut metadata = Metadata::deserialize(metadata).unwrap_or_default();
        if metadata.namespace.is_empty() {
            metadata.namespace = NAMESPACE.into();
        }
        let name = (kind, metadata.namespace.clone(), metadata.name.clone());
        let is_new = self.names.insert(name);
        let object = match serde_json::from_value::<T>(document) {
            Ok(_) if !is_new => {
                Object::Unreadable(kind, metadata, "it is in the file twice".into())
            }
            Ok(mut object) => {
                *object.metadata() = metadata;
                wrap(Box::new(object))
            }
            Err(error) => Object::Unreadable(kind, metadata, error.to_string()),
        };
        self.all.push(object);
    }
}

trait HasMetadata: for<'de> Deserialize<'de> {
    fn metadata(&mut self) -> &mut Metadata;
}

impl HasMetadata for ApiService {
    fn metadata(&mut self) -> &mut Metadata {
        &mut self.metadata
    }
}

impl HasMetadata for ApiSlice {
    fn metadata(&mut self) -> &mut Metadata {
        &mut self.metadata
    }
}
