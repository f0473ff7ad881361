//! What is known of Services, by their names, and which of them changed.
//!
//! Two kinds of objects make a Service's facts, and each kind is listed and then watched by itself. Nothing is told
//! before both have been listed once: a Service whose endpoints did not come yet would look like one without. A list
//! adds and changes as it comes, and only its end removes what was not in it; so one that breaks off takes nothing away.

use super::{
    objects::{ApiService, ApiSlice, Metadata},
    packed::Packed,
    parse::{self, Common},
    slice_name::SliceName,
};
use crate::plan::services::{Service, ServiceName, Slice};
use k8s_openapi::jiff::Timestamp;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};
use tokio::sync::watch;
use tracing::warn;

/// More that wait to be asked for are not counted.
const MAX_TRIGGERS: usize = 65_536;

/// What is listed and watched by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Services = 0,
    Slices = 1,
}

/// What a source read: whose it is, and the facts or why there are none.
#[derive(Debug)]
pub(super) enum Object {
    Service(Metadata, Result<Service, String>),
    Slice(Metadata, Result<Packed, String>),
    /// Whose it is can be read, and no more.
    Unreadable(Kind, Metadata, String),
}

/// What is known.
#[derive(Debug, Default)]
pub struct Store {
    known: Mutex<Known>,
    /// Told whenever [`Known::changed`] has something that may be taken.
    news: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Known {
    services: HashMap<ServiceName, Entry>,
    /// Since all were told, which begins with everything.
    changed: HashSet<ServiceName>,
    /// How many lists were begun of each [`Kind`].
    lists: [u32; 2],
    is_listed: [bool; 2],
    /// When it was told that everything is listed.
    told: Option<Timestamp>,
    /// Of endpoints that changed since: what for, and when.
    triggers: Vec<Timestamp>,
    /// Of each [`Kind`], by the object: what is wrong, and the list it was seen in or after.
    faults: [BTreeMap<String, (String, u32)>; 2],
    common: Common,
}

#[derive(Debug, Default)]
struct Entry {
    service: Option<Box<Service>>,
    /// The list that the Service was seen in or after.
    listed: u32,
    slices: Vec<NamedSlice>,
}

#[derive(Debug)]
struct NamedSlice {
    name: SliceName,
    slice: Packed,
    listed: u32,
}

impl Store {
    /// A Service's facts; none if there is no such Service.
    pub fn get(&self, name: &ServiceName) -> Option<(Service, Vec<Slice>)> {
        let known = self.lock();
        let entry = known.services.get(name)?;
        let service = Service::clone(entry.service.as_deref()?);
        let slices = entry.slices.iter().map(|named| named.slice.open());
        Some((service, slices.collect()))
    }

    /// Tells of every Service again, because something else changed what they come to.
    pub fn tell_all(&self) {
        self.change(|known| {
            if known.told.is_some() {
                known.changed = known.names().collect();
            }
        });
    }

    /// What is wrong with objects, by kind and name: `Service default/web`.
    pub fn faults(&self) -> BTreeMap<String, String> {
        let known = self.lock();
        let faults = known.faults.iter().flatten();
        faults
            .map(|(object, (why, _))| (object.clone(), why.clone()))
            .collect()
    }

    /// How many objects of a kind are known. Takes a look at all.
    pub fn count(&self, kind: Kind) -> usize {
        let known = self.lock();
        let entries = known.services.values();
        match kind {
            Kind::Services => entries.filter(|entry| entry.service.is_some()).count(),
            Kind::Slices => entries.map(|entry| entry.slices.len()).sum(),
        }
    }

    /// At how many places endpoints are: about as many as there are nodes with any.
    pub fn places(&self) -> usize {
        self.lock().common.places()
    }

    /// Whether all kinds have been listed once.
    pub fn is_complete(&self) -> bool {
        self.lock().is_complete()
    }

    /// Tells when something may be taken.
    pub(super) fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// Until nobody waits for news.
    pub(super) async fn closed(&self) {
        self.news.closed().await;
    }

    /// Whether [`Self::take_changed`] would give something.
    pub(super) fn has_changed(&self) -> bool {
        self.lock().has_changed()
    }

    /// The names of what changed since this was asked last; the first time of everything, once that was listed.
    pub(super) fn take_changed(&self) -> Option<BTreeSet<ServiceName>> {
        let mut known = self.lock();
        if !known.has_changed() {
            return None;
        }
        if known.told.is_none() {
            known.told = Some(Timestamp::now());
            return Some(known.names().collect());
        }
        Some(mem::take(&mut known.changed).into_iter().collect())
    }

    /// What changes of endpoints came of, since this was asked last.
    pub fn take_triggers(&self) -> Vec<Timestamp> {
        mem::take(&mut self.lock().triggers)
    }

    /// Takes these objects for all that there are, at one blow.
    pub(super) fn replace(&self, objects: impl IntoIterator<Item = Object>) {
        self.change(|known| {
            for kind in [Kind::Services, Kind::Slices] {
                known.begin_list(kind);
            }
            for object in objects {
                match object {
                    Object::Service(metadata, facts) => {
                        known.put_service(&metadata, |_| facts);
                    }
                    Object::Slice(metadata, facts) => {
                        known.put_slice(&metadata, false, |_| facts);
                    }
                    Object::Unreadable(kind, metadata, why) => {
                        known.put_unreadable(kind, &metadata, why)
                    }
                }
            }
            for kind in [Kind::Services, Kind::Slices] {
                known.end_list(kind);
            }
        });
    }

    /// Has facts read without holding up who asks for others; what these have in common is there once. By one reader at
    /// a time.
    pub(super) fn read<T>(&self, read: impl FnOnce(&mut Common) -> T) -> T {
        let mut common = mem::take(&mut self.lock().common);
        let done = read(&mut common);
        self.lock().common = common;
        done
    }

    /// All objects of a kind are about to be told.
    pub(super) fn begin_list(&self, kind: Kind) {
        self.lock().begin_list(kind);
    }

    /// All were told: others of the kind are gone.
    pub(super) fn end_list(&self, kind: Kind) {
        self.change(|known| known.end_list(kind));
    }

    pub(super) fn put_service(&self, object: &ApiService) {
        self.change(|known| {
            known.put_service(&object.metadata, |common| parse::service(object, common));
        });
    }

    /// Whether `moved`: whether the slice may have been another Service's before.
    pub(super) fn put_slice(&self, object: &ApiSlice, moved: bool) {
        self.change(|known| {
            known.put_slice(&object.metadata, moved, |common| {
                parse::slice(object, common).map(Packed::from)
            });
        });
    }

    pub(super) fn remove(&self, kind: Kind, metadata: &Metadata) {
        self.change(|known| known.remove(kind, metadata));
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.lock();
        change(&mut known);
        if known.has_changed() {
            self.news.send_replace(());
        }
    }

    /// What is inside is whole between any two statements that can panic.
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn is_complete(&self) -> bool {
        self.is_listed == [true; 2]
    }

    fn has_changed(&self) -> bool {
        self.is_complete() && (self.told.is_none() || !self.changed.is_empty())
    }

    fn names(&self) -> impl Iterator<Item = ServiceName> {
        self.services.keys().cloned()
    }

    fn tell(&mut self, name: ServiceName) {
        if self.told.is_some() {
            self.changed.insert(name);
        }
    }

    fn begin_list(&mut self, kind: Kind) {
        self.lists[kind as usize] += 1;
    }

    fn end_list(&mut self, kind: Kind) {
        let list = self.lists[kind as usize];
        let mut changed = Vec::new();
        for (key, entry) in &mut self.services {
            let before = entry.slices.len();
            let gone = match kind {
                Kind::Services => entry.listed != list && entry.service.take().is_some(),
                Kind::Slices => {
                    entry.slices.retain(|slice| slice.listed == list);
                    entry.slices.len() != before
                }
            };
            if gone {
                changed.push(key.clone());
            }
        }
        changed.into_iter().for_each(|name| self.tell(name));
        self.services.retain(|_, entry| !entry.is_empty());
        self.faults[kind as usize].retain(|_, (_, listed)| *listed == list);
        self.is_listed[kind as usize] = true;
    }

    fn put_service(
        &mut self,
        metadata: &Metadata,
        facts: impl FnOnce(&mut Common) -> Result<Service, String>,
    ) {
        let Some(name) = self.named(Kind::Services, metadata) else {
            return;
        };
        match facts(&mut self.common) {
            Ok(service) => {
                match parse::unknown_wish(metadata) {
                    None => self.good(Kind::Services, metadata),
                    Some(why) => {
                        let object = describe(Kind::Services, metadata);
                        self.put_fault(Kind::Services, object, why, "this is passed over");
                    }
                }
                let list = self.lists[Kind::Services as usize];
                let entry = self.entry(&name);
                entry.listed = list;
                if entry.service.as_deref() != Some(&service) {
                    entry.service = Some(Box::new(service));
                    self.tell(name);
                }
            }
            Err(why) => self.put_unreadable(Kind::Services, metadata, why),
        }
    }

    fn put_slice(
        &mut self,
        metadata: &Metadata,
        moved: bool,
        facts: impl FnOnce(&mut Common) -> Result<Packed, String>,
    ) {
        if self.named(Kind::Slices, metadata).is_none() {
            return;
        }
        let owner = parse::owner(metadata);
        let is_known = owner.as_ref().is_some_and(|owner| {
            let entry = self.services.get(owner);
            entry.is_some_and(|entry| entry.has(owner, metadata))
        });
        if moved && !is_known {
            self.remove_slice_anywhere(metadata);
        }
        let Some(owner) = owner else {
            return;
        };
        let slice = match facts(&mut self.common) {
            Ok(slice) => slice,
            Err(why) => return self.put_unreadable(Kind::Slices, metadata, why),
        };
        self.good(Kind::Slices, metadata);
        let listed = self.lists[Kind::Slices as usize];
        let slices = &mut self.entry(&owner).slices;
        match slices
            .iter_mut()
            .find(|known| known.name.is(&metadata.name, owner.name()))
        {
            Some(known) => {
                known.listed = listed;
                if known.slice == slice {
                    return;
                }
                known.slice = slice;
            }
            None => {
                // Most have one, and there are many.
                slices.reserve_exact(1);
                slices.push(NamedSlice {
                    name: SliceName::new(&metadata.name, owner.name()),
                    slice,
                    listed,
                });
            }
        }
        self.tell(owner);
        // What came to be before this was begun says nothing of how quickly it follows.
        let trigger = metadata.trigger_time();
        let is_later = |time: &Timestamp| self.told.is_some_and(|told| *time > told);
        if self.triggers.len() < MAX_TRIGGERS {
            self.triggers.extend(trigger.filter(is_later));
        }
    }

    fn put_unreadable(&mut self, kind: Kind, metadata: &Metadata, why: String) {
        let list = self.lists[kind as usize];
        // As if the list had it as it was.
        let owner = match kind {
            Kind::Services => parse::name(metadata).ok(),
            Kind::Slices => parse::owner(metadata),
        };
        if let Some(owner) = owner
            && let Some(entry) = self.services.get_mut(&owner)
        {
            match kind {
                Kind::Services => entry.listed = list,
                Kind::Slices => {
                    let mut slices = entry.slices.iter_mut();
                    let is = |slice: &&mut NamedSlice| slice.name.is(&metadata.name, owner.name());
                    if let Some(slice) = slices.find(is) {
                        slice.listed = list;
                    }
                }
            }
        }
        let object = describe(kind, metadata);
        self.put_fault(kind, object, why, "what it said last stays in use");
    }

    /// Notes what is wrong with an object, and says it once, with what becomes of it.
    fn put_fault(&mut self, kind: Kind, object: String, why: String, so: &str) {
        let list = self.lists[kind as usize];
        let faults = &mut self.faults[kind as usize];
        let before = faults.insert(object.clone(), (why.clone(), list));
        if before.is_none_or(|(before, _)| before != why) {
            warn!("{object}: {why}; {so}");
        }
    }

    fn remove(&mut self, kind: Kind, metadata: &Metadata) {
        self.good(kind, metadata);
        match kind {
            Kind::Services => {
                let Ok(name) = parse::name(metadata) else {
                    return;
                };
                let entry = self.services.get_mut(&name);
                if entry.is_some_and(|entry| entry.service.take().is_some()) {
                    self.forget_if_empty(&name);
                    self.tell(name);
                }
            }
            Kind::Slices => {
                let Some(owner) = parse::owner(metadata) else {
                    return;
                };
                if self.remove_slice(&owner, &metadata.name) {
                    self.tell(owner);
                }
            }
        }
    }

    /// Whether the slice was there.
    fn remove_slice(&mut self, owner: &ServiceName, name: &str) -> bool {
        let Some(entry) = self.services.get_mut(owner) else {
            return false;
        };
        let before = entry.slices.len();
        entry
            .slices
            .retain(|slice| !slice.name.is(name, owner.name()));
        let removed = entry.slices.len() != before;
        self.forget_if_empty(owner);
        removed
    }

    /// A slice whose label named another Service until now, which nobody does who makes slices by program.
    fn remove_slice_anywhere(&mut self, metadata: &Metadata) {
        let has = |(owner, entry): &(&ServiceName, &Entry)| entry.has(owner, metadata);
        let owners = self.services.iter().filter(has);
        let owners: Vec<_> = owners.map(|(owner, _)| owner.clone()).collect();
        for owner in owners {
            if owner.namespace() == metadata.namespace {
                self.remove_slice(&owner, &metadata.name);
                self.tell(owner);
            }
        }
    }

    fn entry(&mut self, name: &ServiceName) -> &mut Entry {
        self.services.entry(name.clone()).or_default()
    }

    fn forget_if_empty(&mut self, name: &ServiceName) {
        if self.services.get(name).is_some_and(Entry::is_empty) {
            self.services.remove(name);
        }
    }

    /// The object's own name; what has none is a fault.
    fn named(&mut self, kind: Kind, metadata: &Metadata) -> Option<ServiceName> {
        match parse::name(metadata) {
            Ok(name) => Some(name),
            Err(why) => {
                self.put_unreadable(kind, metadata, why);
                None
            }
        }
    }

    fn good(&mut self, kind: Kind, metadata: &Metadata) {
        // Nearly always there is none, and a name need not be made.
        let faults = &mut self.faults[kind as usize];
        if !faults.is_empty() {
            faults.remove(&describe(kind, metadata));
        }
    }
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.service.is_none() && self.slices.is_empty()
    }

    /// Whether it has the slice; `owner`: whose it is.
    fn has(&self, owner: &ServiceName, slice: &Metadata) -> bool {
        let mut slices = self.slices.iter();
        slices.any(|known| known.name.is(&slice.name, owner.name()))
    }
}

fn describe(kind: Kind, metadata: &Metadata) -> String {
    use crate::watch::nodes_parse::cut;
    let kind = match kind {
        Kind::Services => "Service",
        Kind::Slices => "EndpointSlice",
    };
    format!(
        "{kind} {}/{}",
        cut(&metadata.namespace),
        cut(&metadata.name)
    )
}
