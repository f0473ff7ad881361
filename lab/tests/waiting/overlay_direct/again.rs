//! Super-packets that a pod gets past the stack, and sends again.

use super::*;
use std::net::IpAddr;

/// Behind a pod, which hands on what comes for one of its ports: `[IPv4, IPv6]`.
const BEHIND: [&str; 2] = ["10.99.0.2", "fd00:99::2"];
const BEFORE: [&str; 2] = ["10.99.0.1", "fd00:99::1"];
pub const PORT: u16 = 8080;

/// A place behind a pod, by a link named `lan`.
fn behind(pod: &Pod) -> Place {
    let place = Place::fresh("behind").unwrap();
    let (near, far) = (("lan", [2, 0, 0, 0, 9, 1]), ("eth0", [2, 0, 0, 0, 9, 2]));
    pod.place().cable(near, 1450, &place, far).unwrap();
    for (end, link, addresses) in [(pod.place(), "lan", BEFORE), (&place, "eth0", BEHIND)] {
        let nets = addresses.map(|address| {
            let length = if address.contains(':') { 64 } else { 24 };
            format!("{address}/{length}").parse().unwrap()
        });
        end.set_up(link, &nets).unwrap();
    }
    let targets = BEHIND.map(|to| (PORT, to.parse().unwrap()));
    hand_on(pod.place(), targets, "oifname lan masquerade");
    place
}

/// Has a place send on what comes for some of its ports, as a proxy by rules does it. `as_itself`: the rule for what it sends by its
/// own address.
pub fn hand_on(place: &Place, targets: impl IntoIterator<Item = (u16, IpAddr)>, as_itself: &str) {
    let rules: String = targets
        .into_iter()
        .map(|(port, to)| {
            let (proto, family) = match to {
                IpAddr::V4(_) => ("ipv4", "ip"),
                IpAddr::V6(_) => ("ipv6", "ip6"),
            };
            format!("meta nfproto {proto} meta l4proto {{ tcp, udp }} th dport {port} dnat {family} to {to}\n")
        })
        .collect();
    let table = format!(
        "table inet lab {{
            chain pre {{ type nat hook prerouting priority dstnat; {rules} }}
            chain post {{ type nat hook postrouting priority srcnat; {as_itself}; }}
        }}"
    );
    place.command(&["nft", &table]).unwrap();
    place.forward().unwrap();
}

#[test]
fn super_packets_leave_a_pod_again_as_they_came() {
    leave_again(&World::new([&[], &[]]), [false; 2]);
}

/// From the first node's pod to what is behind the second's. `by_devices`: whether their nodes' devices see it.
pub fn leave_again(world: &World, by_devices: [bool; 2]) {
    let [one, two] = &world.pods;
    let behind = behind(two);
    for is_cut in [false, true] {
        if is_cut {
            offload::cut_before(two.place(), "lan").unwrap();
        }
        for (address, of_behind) in two.addresses().into_iter().zip(BEHIND) {
            let name = format!("to what is behind {address}, cut: {is_cut}");
            let target = SocketAddr::new(address, PORT);
            let path = Path::new(&name, one.place(), &behind, of_behind.parse().unwrap());
            let path = path.through(target, PORT);
            let carried = world.carried(|| {
                let stream = Stream::open(&path).unwrap();
                stream.carry(16 << 20, 128 << 10).unwrap();
                println!("{name}: {:?}", stream.said().unwrap());
            });
            assert_eq!(carried.map(|both| both != [0, 0]), by_devices, "{name}");
        }
    }
}
