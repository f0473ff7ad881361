//! Facts about Services from a file, followed live ([`crate::watch::followed_file`]).
//!
//! It is what `kubectl get services,endpointslices -o yaml` prints, or any YAML documents of such objects one after
//! the other; and of ServiceCIDR objects, for what addresses are Services' alone. A file that is broken or gone changes nothing: the last good facts stay, the problem is published and
//! logged once. An object that cannot be read costs that object alone, and what it said before stays.
//!
//! JSON is YAML, too, and is what a large cluster is better written down in: its objects become facts one by one, in a
//! tenth of the time.

use super::{
    Changes, Health, ServicesSource, Store,
    objects::{ApiRange, ApiService, ApiSlice, Metadata},
    packed::Packed,
    parse::{self, Common},
    ranges,
    store::{Kind, Object},
};
use crate::watch::{
    followed_file::{FollowedFile, read},
    nodes_parse::{cut, short},
};
use ipnet::IpNet;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;
use std::{
    collections::{BTreeSet, HashSet},
    fmt,
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
            let objects = into.read(|common| parse(&bytes, common))?;
            into.replace(objects.all);
            drop(bytes);
            // Nobody else reads a hundred megabytes at once.
            crate::memory::release();
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
pub(super) fn parse(bytes: &[u8], common: &mut Common) -> Result<Read, String> {
    let text = str::from_utf8(bytes).map_err(|_| "it is not UTF-8 text")?;
    let objects = match of_json(text, common) {
        Some(objects) => objects,
        // What is wrong with it is said as of YAML.
        None => of_yaml(text, common)?,
    };
    match objects.any {
        true => Ok(objects.read),
        false => Err(
            "it is empty; that there are no Services is written `{kind: List, items: []}`".into(),
        ),
    }
}

/// None if one of the documents is not JSON, or not as it should be.
fn of_json<'c>(text: &str, common: &'c mut Common) -> Option<Objects<'c>> {
    let mut objects = Objects::new(common);
    // Inside of a document no line can begin so (YAML 1.2.2, section 9.1.2).
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find("\n---").map_or(rest.len(), |before| before + 1);
        let (document, others) = rest.split_at(end);
        let document = document.strip_prefix("---").unwrap_or(document).trim();
        if !document.is_empty() {
            let mut parser = serde_json::Deserializer::from_str(document);
            Document(&mut objects).deserialize(&mut parser).ok()?;
            parser.end().ok()?;
        }
        rest = others;
    }
    Some(objects)
}

fn of_yaml<'c>(text: &str, common: &'c mut Common) -> Result<Objects<'c>, String> {
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
    let mut objects = Objects::new(common);
    for document in documents {
        objects.take(document, None);
    }
    Ok(objects)
}

/// What a file says.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) all: Vec<Object>,
    /// Of all ServiceCIDRs.
    pub(super) ranges: BTreeSet<IpNet>,
}

struct Objects<'c> {
    read: Read,
    names: HashSet<(Kind, String, String)>,
    /// Whether there is any document, be it an empty list.
    any: bool,
    common: &'c mut Common,
}

impl<'c> Objects<'c> {
    fn new(common: &'c mut Common) -> Self {
        Self {
            read: Read::default(),
            names: HashSet::new(),
            any: false,
            common,
        }
    }

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
            "Service" => self.service(&document),
            "EndpointSlice" => self.slice(&document),
            "ServiceCIDR" => match ApiRange::deserialize(&document) {
                Ok(range) => self.read.ranges.extend(ranges::of(&range)),
                Err(error) => warn!("passing over a ServiceCIDR that cannot be read: {error}"),
            },
            _ => warn!(
                "passing over an object that is neither Service, EndpointSlice nor ServiceCIDR but `{}`",
                cut(&kind)
            ),
        }
    }

    fn service(&mut self, document: &Value) {
        let (kind, read) = (Kind::Services, ApiService::deserialize(document));
        let object = read.map(|mut object| match self.is_new(kind, &mut object.metadata) {
            true => {
                let facts = parse::service(&object, self.common);
                Object::Service(object.metadata, facts)
            }
            false => twice(kind, object.metadata),
        });
        let object = object.unwrap_or_else(|error| self.unreadable(kind, document, &error));
        self.read.all.push(object);
    }

    fn slice(&mut self, document: &Value) {
        let (kind, read) = (Kind::Slices, ApiSlice::deserialize(document));
        let object = read.map(|mut object| match self.is_new(kind, &mut object.metadata) {
            true => {
                let facts = parse::slice(&object, self.common).map(Packed::from);
                Object::Slice(object.metadata, facts)
            }
            false => twice(kind, object.metadata),
        });
        let object = object.unwrap_or_else(|error| self.unreadable(kind, document, &error));
        self.read.all.push(object);
    }

    fn unreadable(&mut self, kind: Kind, document: &Value, error: &serde_json::Error) -> Object {
        let metadata = document.get("metadata").map(Metadata::deserialize);
        let mut metadata = metadata.and_then(Result::ok).unwrap_or_default();
        self.is_new(kind, &mut metadata);
        Object::Unreadable(kind, metadata, error.to_string())
    }

    /// Whether no object of that name came before; it is given its namespace.
    fn is_new(&mut self, kind: Kind, metadata: &mut Metadata) -> bool {
        if metadata.namespace.is_empty() {
            metadata.namespace = NAMESPACE.into();
        }
        let name = (kind, metadata.namespace.clone(), metadata.name.clone());
        self.names.insert(name)
    }
}

fn twice(kind: Kind, metadata: Metadata) -> Object {
    Object::Unreadable(kind, metadata, "it is in the file twice".into())
}

/// A document, of whose items one at a time is in memory beside what becomes of them.
struct Document<'o, 'c>(&'o mut Objects<'c>);

impl<'de> DeserializeSeed<'de> for Document<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<(), D::Error> {
        parser.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a list of objects")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let Self(objects) = self;
        let (mut others, mut unnamed) = (serde_json::Map::new(), None);
        while let Some(field) = fields.next_key::<String>()? {
            match field.as_str() {
                "items" => unnamed = Some(fields.next_value_seed(Items(objects))?),
                _ => drop(others.insert(field, fields.next_value()?)),
            }
        }
        match unnamed {
            None => objects.take(Value::Object(others), None),
            Some(unnamed) => {
                objects.any = true;
                let kind = others.get("kind").and_then(Value::as_str);
                let of = kind.and_then(|kind| kind.strip_suffix("List"));
                let items = unnamed.into_iter();
                items.for_each(|item| objects.take(item, of.filter(|of| !of.is_empty())));
            }
        }
        Ok(())
    }
}

/// Gives back those that do not say what they are: the list's kind may come after them.
struct Items<'o, 'c>(&'o mut Objects<'c>);

impl<'de> DeserializeSeed<'de> for Items<'_, '_> {
    type Value = Vec<Value>;

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<Vec<Value>, D::Error> {
        parser.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Items<'_, '_> {
    type Value = Vec<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    /// A Go server writes an empty list so.
    fn visit_unit<E>(self) -> Result<Vec<Value>, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<Value>, A::Error> {
        let mut unnamed = Vec::new();
        while let Some(item) = items.next_element::<Value>()? {
            match item.get("kind") {
                Some(_) => self.0.take(item, None),
                None => unnamed.push(item),
            }
        }
        Ok(unnamed)
    }
}
