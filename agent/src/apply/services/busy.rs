//! A Service that changes faster than entries rest.

use super::{
    scale::{name, plan},
    *,
};
use crate::datapath::{Services, grace};

const ENDPOINTS: u32 = 1_000;

/// As with a Deployment of that size that is rolled out, or one whose pods are all in trouble: an endpoint after the other.
#[test]
fn a_large_service_is_published_at_each_of_its_changes() {
    if !grace::wait_for_programs() {
        println!("skipped: this kernel does not say when programs have ended");
        return;
    }
    // For what it is, what it becomes, and once more for other Services.
    let room = ServiceRoom {
        frontends: 10,
        sets: 10,
        slots: 3 * ENDPOINTS,
        backends: 2 * ENDPOINTS,
    };
    let mut publisher = Publisher::restore(Services::apart(&room).unwrap()).unwrap();
    publisher.complete(Instant::now()).unwrap();
    for change in 0..200 {
        let endpoints = change * 100..change * 100 + ENDPOINTS;
        let plan = plan(0, endpoints.clone());
        publisher
            .apply(Instant::now(), &name(0), Some(&plan))
            .unwrap_or_else(|error| panic!("change {change}: {error}"));
        let usage = publisher.usage();
        assert_eq!((usage.waiting, usage.endpoints), (0, ENDPOINTS as usize));
    }
}
