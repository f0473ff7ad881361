//! Which addresses are Services' alone: by ServiceCIDR objects, which the control plane gives Services their addresses from
//! (KEP-1880; `networking.k8s.io/v1` since Kubernetes 1.33). A server that has none of them, or does not show them, is
//! asked again now and then, and that is no trouble: what is dropped for nobody is less then.

use super::{Store, objects::ApiRange};
use crate::watch::{kubernetes::Keep, nodes_parse::cut};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::SystemTime,
};
use tokio::sync::watch;
use tracing::warn;

/// What an object says; what of it is no range is passed over, with a warning.
pub fn of(object: &ApiRange) -> BTreeSet<IpNet> {
    let ranges = object.spec.cidrs.iter();
    let parsed = ranges.filter_map(|text| match text.parse::<IpNet>() {
        Ok(range) => Some(range.trunc()),
        Err(_) => {
            let name = cut(&object.metadata.name);
            warn!(
                "ServiceCIDR {name}: spec.cidrs: `{}` is not a range",
                cut(text)
            );
            None
        }
    });
    parsed.collect()
}

/// By the object's name.
type Ranges = BTreeMap<String, BTreeSet<IpNet>>;

/// Keeps what the API has, and tells it.
pub(super) struct Kept {
    known: Ranges,
    told: watch::Sender<BTreeSet<IpNet>>,
    /// As long as somebody waits for its changes.
    store: Arc<Store>,
}

impl Kept {
    pub(super) fn new(told: watch::Sender<BTreeSet<IpNet>>, store: &Arc<Store>) -> Self {
        Self {
            known: Ranges::new(),
            told,
            store: store.clone(),
        }
    }
}

impl Keep for Kept {
    type Object = ApiRange;
    type List = Ranges;
    const PATH: &str = "/apis/networking.k8s.io/v1/servicecidrs";
    const SELECTOR: Option<&str> = None;
    const NAMES: [&str; 2] = ["a ServiceCIDR", "ranges of Services' addresses"];
    const MAY_BE_ABSENT: bool = true;

    fn version(object: &ApiRange) -> &str {
        &object.metadata.resource_version
    }

    fn begin_list(&mut self) -> Ranges {
        Ranges::new()
    }

    fn listed(list: &mut Ranges, object: &ApiRange) {
        list.insert(object.metadata.name.clone(), of(object));
    }

    fn unlisted(list: &mut Ranges, object: &ApiRange) {
        list.remove(&object.metadata.name);
    }

    fn end_list(&mut self, list: Ranges) {
        self.known = list;
    }

    fn present(&mut self, object: &ApiRange, _: bool) -> bool {
        let ranges = of(object);
        let before = self
            .known
            .insert(object.metadata.name.clone(), ranges.clone());
        before != Some(ranges)
    }

    fn gone(&mut self, object: &ApiRange) -> bool {
        self.known.remove(&object.metadata.name).is_some()
    }

    fn publish(&mut self) {
        let all = self.known.values().flatten().copied().collect();
        self.told.send_if_modified(|told| {
            let is_new = *told != all;
            *told = all;
            is_new
        });
    }

    fn count(&self) -> usize {
        self.known.len()
    }

    fn agents(&self) -> usize {
        self.store.places()
    }

    fn has_facts(&self) -> bool {
        !self.known.is_empty()
    }

    /// The watches of Services and slices say the same of the server.
    fn report(&mut self, _: Option<(String, SystemTime)>) {}

    fn closed(&self) -> impl Future<Output = ()> + Send + use<> {
        let store = self.store.clone();
        async move { store.closed().await }
    }
}
