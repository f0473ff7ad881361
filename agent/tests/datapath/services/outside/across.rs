//! Past the stack, to endpoints of nodes that are sent no tunnels, and back.

use super::*;
use sinabro_agent::datapath::{Translation, Way};
use sinabro_common::{
    abi::{
        Addr,
        next_hop::{NATIVE, NextHop},
    },
    api::Mac,
};

const MTU: u32 = 1450;
/// A node that is sent tunnels.
const TUNNELS: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// The VXLAN device.
const DEVICE: u32 = 4712;
/// The other node.
const OTHER: [&str; 2] = ["192.0.2.2", "2001:db8::2"];
/// Who forwards to clients.
const ROUTER: [&str; 2] = ["192.0.2.254", "2001:db8::fe"];

/// Which way the other node is reached.
fn lead(e: &Edge, remote_mac: [u8; 6]) {
    let [v4, v6] = OTHER.map(|at| Addr::from(at.parse::<IpAddr>().unwrap()));
    let next = NextHop {
        gateway: v4,
        ifindex: e.w.b.ifindex,
        remote_mac,
        own_mac: HOST_MAC,
    };
    let way = Way {
        next,
        native_v6: Some(v6),
    };
    let hops = BTreeMap::from([(v4, way)]);
    e.w.datapath.set_next_hops(&hops).unwrap();
}

/// The other node is sent no tunnels, and nobody has rules for what is forwarded.
fn native(test: impl Fn(&Edge) + Send + Sync) {
    edge(|e| {
        if e.w.programs.skipped() {
            return;
        }
        kit::all_carry(&e.w.datapath, MTU);
        e.w.datapath.set_forwarding(true).unwrap();
        let device = Some((DEVICE, Mac([2, 0, 0, 9, 9, 9])));
        e.w.datapath.set_native(device).unwrap();
        lead(&e, NATIVE);
        let (here, link) = (kit::this_place(), &e.w.b.link);
        let mac = "02:00:00:00:00:09";
        let nets = ["192.0.2.0/24", "2001:db8::/64"];
        for ((router, other), net) in ROUTER.iter().zip(OTHER).zip(nets) {
            for command in [
                format!("route add {net} dev {link}"),
                format!("neigh replace {router} lladdr {mac} dev {link} nud permanent"),
                format!("neigh replace {other} lladdr {mac} dev {link} nud permanent"),
                format!("route add default via {router} dev {link}"),
            ] {
                kit::ip(&here, &command);
            }
        }
        test(&e);
    });
}

/// A connection of a client with a Service, whose first packet went by the stack.
struct Talk<'a> {
    e: &'a Edge,
    proto: u8,
    client: At,
    service: At,
    endpoint: At,
    /// What the endpoint sees of the client.
    near: At,
}

impl<'a> Talk<'a> {
    fn begin(e: &'a Edge, number: u32, proto: u8, like: IpAddr) -> Self {
        let service = e.w.service(number, proto);
        let (client, at) = (client(like), (vip(like), 80 + number as u16));
        let endpoint = e.endpoint(like, Place::OtherNodesPod);
        service.balance(&[endpoint], 1);
        service.frontend(at, 0);
        lead(e, TUNNELS);
        e.round(Place::OtherNodesPod, proto, client, at, SYN);
        let between = make(proto, client, endpoint, ACK);
        let out = e.forwarded(Place::OtherNodesPod, &between);
        lead(e, NATIVE);
        Self {
            e,
            proto,
            client,
            service: at,
            endpoint,
            near: (gateway(like), see(&out).ports.0),
        }
    }

    /// What the client sends, and what the endpoint is sent of it.
    fn asks(&self) -> [Ip; 2] {
        [
            make(self.proto, self.client, self.service, ACK),
            make(self.proto, self.near, self.endpoint, ACK),
        ]
    }

    /// What the endpoint sends, and what the client is sent of it.
    fn answers(&self) -> [Ip; 2] {
        [
            make(self.proto, self.endpoint, self.near, ACK),
            make(self.proto, self.service, self.client, ACK),
        ]
    }

    /// It goes past the stack, one hop less, and the uplink knows it by its mark.
    fn goes_as(&self, [sent, expected]: [Ip; 2]) {
        let (programs, uplink) = (&self.e.w.programs, self.e.w.b.ifindex);
        let ran = programs.run_marked("uplink_in", uplink, 0, 0, &framed(&sent));
        let (action, out, mark) = ran.unwrap();
        assert_eq!(action, REDIRECT, "{:?}", self.e.w.datapath.drops());
        let ttl = expected.ttl - 1;
        assert_eq!(out[14..], Ip { ttl, ..expected }.bytes());
        assert_ne!(mark, 0);
        let ran = programs.run_marked("uplink_out", uplink, uplink, mark, &out);
        assert_eq!(ran.unwrap(), (PASS, out, 0));
    }

    /// A client's packet goes on to the stack.
    fn enters(&self, sent: &Ip, what: &str) {
        let (action, out) = self.e.run("uplink_in", 0, &framed(sent));
        assert_eq!(action, PASS, "{what}: {:?}", self.e.w.datapath.drops());
        let hops = if sent.src.is_ipv4() { 22 } else { 21 };
        assert_eq!(out[hops], sent.ttl, "{what}");
    }

    /// An answer goes into the VXLAN device as it is.
    fn is_given_to_the_device(&self, sent: &Ip, what: &str) {
        let frame = framed(sent);
        let (action, out) = self.e.run("uplink_in", 0, &frame);
        assert_eq!(action, REDIRECT, "{what}: {:?}", self.e.w.datapath.drops());
        assert_eq!(out[12..], frame[12..], "{what}");
    }
}

/// A connection of each protocol that Services have, of each family.
fn all(e: &Edge) -> Vec<Talk<'_>> {
    let mut talks = Vec::new();
    for proto in PROTOCOLS {
        for like in e.w.clients() {
            let number = 1 + talks.len() as u32;
            talks.push(Talk::begin(e, number, proto, like));
        }
    }
    talks
}

#[test]
fn what_follows_the_first_packet_needs_no_stack() {
    native(|e| {
        for talk in all(e) {
            for _ in 0..2 {
                talk.goes_as(talk.asks());
                talk.goes_as(talk.answers());
            }
        }
    });
}

#[test]
fn it_goes_by_the_stack_as_soon_as_it_may_not() {
    native(|e| {
        let talks = all(e);
        let datapath = &e.w.datapath;
        let check = |goes: bool, what: &str| {
            for talk in &talks {
                let [asks, answers] = [talk.asks(), talk.answers()];
                if goes {
                    talk.goes_as(asks);
                    talk.goes_as(answers);
                } else {
                    talk.enters(&asks[0], what);
                    talk.is_given_to_the_device(&answers[0], what);
                }
            }
        };
        check(true, "all is ours");
        datapath.set_forwarding(false).unwrap();
        check(false, "the stack is to forward");
        datapath.set_forwarding(true).unwrap();
        datapath.set_services(Translation::Handover).unwrap();
        check(false, "others translate");
        datapath.set_services(true).unwrap();
        check(true, "all is ours again");
        // In tunnels the way there: the way back is who answers' to choose.
        lead(e, TUNNELS);
        for talk in &talks {
            talk.enters(&talk.asks()[0], "tunnels");
            talk.goes_as(talk.answers());
        }
        lead(e, NATIVE);
        let default = |what: &str| {
            for family in ["-4", "-6"] {
                kit::ip(
                    &kit::this_place(),
                    &format!("{family} route {what} default"),
                );
            }
        };
        default("del");
        for talk in &talks {
            talk.goes_as(talk.asks());
            talk.is_given_to_the_device(&talk.answers()[0], "no route");
        }
    });
}

#[test]
fn a_router_has_its_part() {
    native(|e| {
        for talk in all(e) {
            let [asks, answers] = [talk.asks(), talk.answers()].map(|[sent, _]| sent);
            let change = |whole: &Ip, change: &dyn Fn(&mut Ip)| {
                let mut changed = whole.clone();
                change(&mut changed);
                changed
            };
            let last_hop = |ip: &mut Ip| ip.ttl = 1;
            let options = |ip: &mut Ip| ip.options = vec![1; 8];
            let large = |ip: &mut Ip| ip.payload.resize(MTU as usize, 7);
            let is_tcp = talk.proto == TCP;
            for (what, is_told, alter) in [
                ("a last hop", true, &last_hop as &dyn Fn(&mut Ip)),
                ("options", true, &options),
                // Whose checksum, which is not that of what it has become, is nobody's concern here.
                ("too large", is_tcp, &large),
            ] {
                if is_told {
                    talk.enters(&change(&asks, alter), what);
                    talk.is_given_to_the_device(&change(&answers, alter), what);
                }
            }
            let part = in_parts(change(&answers, &|ip| ip.payload.extend([7; 64])));
            talk.is_given_to_the_device(&part[0], "a first part");
            if is_tcp {
                let again = packet::tcp(talk.endpoint, talk.near, SYN | ACK, b"");
                talk.is_given_to_the_device(&again, "a segment that says how large they may be");
            }
            talk.goes_as(talk.asks());
            talk.goes_as(talk.answers());
        }
    });
}

#[test]
fn only_a_clients_endpoint_is_handed_on() {
    native(|e| {
        for talk in all(e) {
            let (address, port) = talk.near;
            let other = (far(address, 77), talk.endpoint.1);
            for (from, to, what) in [
                (other, talk.near, "another pod"),
                (talk.endpoint, (address, port ^ 1), "another port"),
                ((talk.endpoint.0, 9), talk.near, "of another port"),
            ] {
                talk.is_given_to_the_device(&make(talk.proto, from, to, ACK), what);
            }
        }
    });
}

/// The alias of one that has just ended is there for a moment more.
#[test]
fn what_has_lost_its_record_is_the_stacks() {
    native(|e| {
        for (number, like) in (1..).zip(e.w.clients()) {
            let talk = Talk::begin(e, number, TCP, like);
            talk.goes_as(talk.asks());
            talk.goes_as(talk.answers());
            let mut connections = open::<ConnectionKey, Connection>("CONNECTIONS");
            for key in table().keys() {
                connections.remove(key).unwrap();
            }
            talk.enters(&talk.asks()[0], "no record");
            talk.is_given_to_the_device(&talk.answers()[0], "no record");
        }
    });
}
