//! UDP-Lite's checksum, over all of a packet or a part, which is never none: what sums up to zero is sent as all ones
//! (RFC 3828 §3.1).

use super::{protocols::families, *};
use crate::packet::{IcmpError, icmp_error, see_error, udplite_covering};

type At = (IpAddr, u16);

/// Over all of the packet, and over the header and the two bytes behind it.
const COVERAGES: [u16; 2] = [0, 10];

/// Two bytes with which the checksum between two ends would be zero.
fn data(coverage: u16, src: At, dst: At) -> [u8; 2] {
    let with = |data: [u8; 2]| {
        let ip = udplite_covering(src, dst, coverage, &data);
        [ip.payload[6], ip.payload[7]]
    };
    let data = with([0; 2]);
    assert_eq!(with(data), [0xff; 2]);
    data
}

#[test]
fn what_sums_up_to_zero_once_it_is_translated_has_a_checksum() {
    world(|w| {
        for (pod, node, far) in families(&w) {
            for coverage in COVERAGES {
                let make =
                    |src: At, dst: At, data: &[u8; 2]| udplite_covering(src, dst, coverage, data);
                let (client, server) = ((pod, 4001), (far, 443));
                let port = w.sent(&make(client, server, &[0; 2])).ports.0;
                assert_ne!(port, 4001, "it has another one outside");
                let outside = (node, port);
                let given = |ip: &Ip| (PASS, World::frame(ip));

                let asks = data(coverage, outside, server);
                let sent = make(outside, server, &asks);
                assert_eq!(w.out(&make(client, server, &asks)), given(&sent));

                let answers = data(coverage, server, client);
                let heard = make(server, client, &answers);
                assert_eq!(w.come(&make(server, outside, &answers)), given(&heard));

                // An error quotes what had none of it outside.
                let asks = data(coverage, client, server);
                let inside = make(client, server, &asks).bytes();
                let quoted = make(outside, server, &asks).bytes();
                let error = icmp_error(far, node, IcmpError::NoPort, &quoted);
                let (verdict, frame) = w.come(&error);
                assert_eq!((verdict, see_error(&frame).quoted), (PASS, inside));
            }
        }
    });
}
