//! What a pod began with an address outside before that was a Service's.

use super::*;
use sinabro_common::abi::connection::KEEPS_SOURCE;

/// It goes on, as with any other proxy, until its port is used for another connection: that is the Service's.
#[test]
fn a_connection_outlives_that_its_destination_becomes_a_services() {
    edge(|e| {
        let pod = e.w.a.ifindex;
        for (number, like) in (1..).zip(e.w.clients()) {
            let (from, at) = ((like, 2000), (client(like).0, 443));
            let sent = |flags| make(TCP, from, at, flags);
            // What the pod sends goes by the stack, as it is, and gets its source at the uplink.
            let leaves = |flags| {
                e.w.leaves_as(&sent(flags), &sent(flags));
                let (verdict, out) = e.run("uplink_out", pod, &framed(&sent(flags)));
                assert_eq!(verdict, PASS, "{:?}", e.w.datapath.drops());
                let seen = see(&out);
                assert_eq!((seen.src, seen.dst), (node(like), at.0));
                seen.ports.0
            };
            let port = leaves(SYN);
            let answer = make(TCP, at, (node(like), port), SYN | ACK);
            e.enters_as(&answer, &make(TCP, at, from, SYN | ACK));
            assert_eq!(leaves(ACK), port);
            assert!(aliases().values().all(|alias| alias.pad[0] == KEEPS_SOURCE));

            let service = e.w.service(number, TCP);
            let endpoint = endpoints(like, 1)[0];
            service.balance(&[endpoint], 1);
            service.frontend(at, 0);
            assert_eq!(leaves(ACK), port);
            let other = make(TCP, (like, 2001), at, SYN);
            assert_eq!(e.w.goes_to(&other), endpoint);
            assert_eq!(leaves(ACK), port);

            for flags in [SYN, ACK] {
                e.w.leaves_as(&sent(flags), &make(TCP, from, endpoint, flags));
            }
            let answer = make(TCP, endpoint, from, SYN | ACK);
            e.w.arrives_as(&answer, &make(TCP, at, from, SYN | ACK));
        }
        // What leads to the records that are gone is looked for now and then, and goes when it is found twice.
        for _ in 0..=16 {
            e.w.sweep_at(0);
        }
        check_table();
    });
}
