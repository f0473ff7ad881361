//! Sets whose slots are a table: an endpoint has many of them ([`maglev`]), and who the client is says which slot it has.
//!
//! To whatever reads no more than the set it is one like any other, in which each endpoint is as often as any other.

use super::tables::Tables;
use crate::plan::services::maglev;
use sinabro_common::abi::service::{Set, Slot};
use std::{collections::BTreeSet, net::SocketAddr};

/// The endpoints of a set, each once, in no order.
pub fn members(tables: &impl Tables, set: Set) -> Vec<u32> {
    let slots = set.base()..set.base().saturating_add(set.count());
    let mut ids: Vec<u32> = slots.map(|slot| tables.slot(slot).backend).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// What is in the slots of a table, by the ids of its endpoints in their order.
pub fn ids(endpoints: &BTreeSet<SocketAddr>, ids: &[u32], length: u32) -> Vec<u32> {
    let table = maglev::table(endpoints, length).into_iter();
    table.map(|who| ids[who as usize]).collect()
}

/// Whether the set is the table of these endpoints, of which `slots` are, in their order. It is made only where it has no
/// other endpoints.
pub fn is_table(
    tables: &impl Tables,
    set: Set,
    endpoints: &BTreeSet<SocketAddr>,
    slots: &[Slot],
) -> bool {
    if tables.table_length(endpoints.len()) != Some(set.count()) {
        return false;
    }
    let mut wanted: Vec<u32> = slots.iter().map(|slot| slot.backend).collect();
    wanted.sort_unstable();
    if members(tables, set) != wanted {
        return false;
    }
    let mut table = (set.base()..).zip(maglev::table(endpoints, set.count()));
    table.all(|(index, who)| tables.slot(index) == slots[who as usize])
}

#[cfg(test)]
mod tests {
    use crate::{
        apply::services::{
            Publisher, ServiceError,
            room::REST,
            scale::{self, name},
        },
        datapath::{ServiceRoom, Services},
        plan::services::{FrontendKind, FrontendPlan, ServicePlan, SetPlan},
    };
    use sinabro_common::{
        abi::service::FRONTEND_CONSISTENT,
        api::{ServiceBalancing, ServiceClients},
    };
    use std::time::Instant;

    /// With an external address whose clients have their endpoints by a table, or by chance.
    fn plan(service: u32, endpoints: std::ops::Range<u32>, is_consistent: bool) -> ServicePlan {
        let mut plan = scale::plan(service, endpoints);
        let at = ([192, 0, 2, service as u8], 80).into();
        let kind = FrontendKind::ExternalIp;
        for port in plan.ports.values_mut() {
            port.frontends.insert(FrontendPlan { kind, at });
            let [v4, _] = &mut port.sets;
            if let SetPlan::Balance(endpoints) = &v4.external
                && is_consistent
            {
                v4.external = SetPlan::Consistent(endpoints.clone());
            }
        }
        plan
    }

    fn with_room(slots: u32) -> Publisher<Services> {
        let room = ServiceRoom {
            frontends: 20,
            sets: 20,
            slots,
            backends: 20,
        };
        let mut publisher = Publisher::restore(Services::apart(&room).unwrap()).unwrap();
        publisher.complete(Instant::now()).unwrap();
        publisher
    }

    /// Endpoints of clients outside of a Service, and whether by a table.
    fn outside(publisher: &Publisher<Services>, service: u32) -> (u32, bool) {
        let page = publisher.page(None, Some(&name(service)));
        let mut sets = page.services[0].ports[0].sets.iter();
        let is_tables = |flags| flags & FRONTEND_CONSISTENT != 0;
        let applied = publisher.services[&name(service)].open();
        let flagged = applied
            .frontends
            .iter()
            .filter(|(_, frontend)| is_tables(frontend.flags));
        match sets.find(|set| set.clients == ServiceClients::Outside) {
            Some(set) => {
                assert_eq!(set.balancing, Some(ServiceBalancing::Maglev));
                assert_eq!(
                    (set.endpoints.len(), flagged.count()),
                    (set.count as usize, 1)
                );
                (set.count, true)
            }
            None => {
                assert_eq!(flagged.count(), 0);
                let page = publisher.page(None, Some(&name(service)));
                (page.services[0].ports[0].sets[0].count, false)
            }
        }
    }

    #[test]
    fn without_room_for_its_table_a_service_is_balanced_by_chance_until_there_is() {
        let mut publisher = with_room(17_000);
        let mut now = Instant::now();
        let (first, second) = (plan(1, 0..3, true), plan(2, 3..6, true));
        publisher.apply(now, &name(1), Some(&first)).unwrap();
        let error = publisher.apply(now, &name(2), Some(&second)).unwrap_err();
        assert!(
            matches!(
                error,
                ServiceError::NoTable {
                    map: "SLOTS",
                    room: 17_000,
                    ..
                }
            ),
            "{error}"
        );
        assert_eq!(outside(&publisher, 1), (3, true));
        assert_eq!(outside(&publisher, 2), (3, false));
        // Its endpoints are followed all the same.
        let second = plan(2, 4..8, true);
        assert!(publisher.apply(now, &name(2), Some(&second)).is_err());
        assert_eq!(outside(&publisher, 2), (4, false));
        // What it let go of itself is tried once, and not for ever.
        assert_eq!(publisher.waiting_for_what_went(), [name(2)].into());
        assert!(publisher.apply(now, &name(2), Some(&second)).is_err());
        assert_eq!(publisher.waiting_for_what_went(), [].into());
        // The other one does without.
        let first = plan(1, 0..3, false);
        publisher.apply(now, &name(1), Some(&first)).unwrap();
        assert_eq!(outside(&publisher, 1), (3, false));
        assert_eq!(publisher.waiting_for_what_went(), [name(2)].into());
        now += REST;
        publisher.apply(now, &name(2), Some(&second)).unwrap();
        assert_eq!(outside(&publisher, 2), (4, true));
        assert_eq!(publisher.waiting().count(), 0);
        // And what it has is as it was after all of it.
        publisher.apply(now, &name(2), None).unwrap();
        publisher.apply(now, &name(1), None).unwrap();
        let usage = publisher.usage();
        assert!(
            usage
                .maps
                .iter()
                .all(|(_, taken, resting, _)| taken == resting)
        );
    }

    #[test]
    fn one_endpoint_fewer_and_its_table_is_still_that_of_all_nodes() {
        let mut publisher = with_room(3 * 16_381);
        let mut now = Instant::now();
        for endpoints in [0..10, 0..9, 3..9, 3..4, 0..10] {
            let plan = plan(1, endpoints.clone(), true);
            publisher.apply(now, &name(1), Some(&plan)).unwrap();
            assert_eq!(outside(&publisher, 1), (endpoints.len() as u32, true));
            now += REST;
        }
        let kept = publisher.backends.count();
        assert_eq!(kept, 10);
        // Applied again: nothing is taken for it.
        let before = publisher.usage();
        publisher
            .apply(now, &name(1), Some(&plan(1, 0..10, true)))
            .unwrap();
        assert_eq!(publisher.usage(), before);
    }
}
