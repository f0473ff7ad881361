//! Which addresses of Services' ranges are nobody's.
//!
//! Said to the programs only while every Service is known and has all that it wants: an address is nobody's only if it is
//! certain that no Service has it, on whoever's proxy. So what an agent before said is taken back at first.

use crate::{
    chain::Chain,
    datapath::{Datapath, client_prefixes as prefixes},
    plan::services::{
        ServiceName,
        facts::{Exclusion, Service},
    },
};
use ipnet::IpNet;
use sinabro_common::abi::service::MAX_SERVICE_RANGES;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

/// What is known of addresses in the ranges.
#[derive(Debug, Default)]
pub struct Ranges(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// By Service, its addresses that are others'.
    others: BTreeMap<ServiceName, BTreeSet<IpAddr>>,
    /// What the programs were told, and of which of these addresses they were told that they are others'; none if that
    /// is not known.
    told: Option<(BTreeSet<IpNet>, BTreeSet<IpAddr>)>,
}

impl Ranges {
    /// Notes which addresses of a Service are others': another proxy's, or those of this node's links.
    pub fn note(&self, name: &ServiceName, service: Option<&Service>, links: &BTreeSet<IpAddr>) {
        let of_others = service.into_iter().flat_map(|service| {
            let v4 = service.cluster_v4.map(IpAddr::from);
            let addresses = v4.into_iter().chain(service.cluster_v6.map(IpAddr::from));
            let all = service.excluded == Some(Exclusion::OtherProxy);
            addresses.filter(move |address| all || links.contains(address))
        });
        let of_others: BTreeSet<IpAddr> = of_others.collect();
        let mut known = self.lock();
        match of_others.is_empty() {
            true => drop(known.others.remove(name)),
            false => drop(known.others.insert(name.clone(), of_others)),
        }
    }

    /// Has the programs drop what is for nobody in these ranges: none, if it is not certain what is.
    pub fn tell(&self, datapath: &Datapath, ranges: &BTreeSet<IpNet>, is_certain: bool) {
        let mut known = self.lock();
        let others = known.others.values().flatten();
        let others: BTreeSet<IpAddr> = others
            .filter(|address| ranges.iter().any(|range| range.contains(*address)))
            .copied()
            .collect();
        let fits = ranges.len() + others.len() <= MAX_SERVICE_RANGES as usize;
        let wanted = match is_certain && fits {
            true => (ranges.clone(), others),
            false => Default::default(),
        };
        if known.told.as_ref() == Some(&wanted) {
            return;
        }
        if !fits {
            tracing::warn!(
                "what is sent to unused addresses of Services is not dropped: {} Services of other proxies are too many",
                known.others.len()
            );
        }
        let ranges = wanted.0.iter().flat_map(prefixes).collect();
        let addresses = wanted.1.iter().map(|address| IpNet::from(*address));
        let others = addresses.flat_map(|address| prefixes(&address)).collect();
        known.told = match datapath.services().set_ranges(&ranges, &others) {
            Ok(()) => Some(wanted),
            Err(error) => {
                let error = Chain(&error);
                tracing::warn!(
                    "what is sent to unused addresses of Services is not dropped everywhere: {error}"
                );
                None
            }
        };
    }

    /// The ranges of which what is for nobody is dropped.
    pub fn told(&self) -> Vec<IpNet> {
        let known = self.lock();
        let told = known.told.iter().flat_map(|(ranges, _)| ranges);
        told.copied().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
