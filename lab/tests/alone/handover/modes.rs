//! kube-proxy changes its mode from nftables to iptables: connections go on by the way that they have, and take no rule of it for one of
//! somebody else.

use super::{
    BEFORE, Exchanges, OFF, PACE, World,
    beside_proxy::{Idle, drop_invalid_in, nothing_is_invalid_in, straight},
    firewall::OF_SERVICES,
    must_flow_directly,
};
use sinabro_lab::traffic::{path::Path, unbroken::Traffic};
use std::fmt::Write as _;

/// As kube-proxy makes them with iptables, and the kubelet beside it.
fn rules(world: &World, family: usize, pods: &str) -> String {
    let (mut chains, mut rules) = (String::new(), String::new());
    let leads = world.leads().into_iter().enumerate();
    let of_family = leads.filter(|(_, (frontend, _))| frontend.is_ipv4() == (family == 0));
    for (number, (frontend, endpoints)) in of_family {
        let (ip, port) = (frontend.ip(), frontend.port());
        writeln!(chains, ":KUBE-SVC-{number} - [0:0]").unwrap();
        for proto in ["tcp", "udp"] {
            let to = format!("-d {ip} -p {proto} -m {proto} --dport {port}");
            writeln!(
                rules,
                "-A KUBE-SERVICES {to} -j KUBE-SVC-{number}\n\
                 -A KUBE-SVC-{number} ! -s {pods} {to} -j KUBE-MARK-MASQ"
            )
            .unwrap();
        }
        for (at, endpoint) in endpoints.iter().enumerate() {
            let chain = format!("KUBE-SEP-{number}-{at}");
            writeln!(chains, ":{chain} - [0:0]").unwrap();
            let chance = match endpoints.len() - at {
                1 => String::new(),
                left => format!(
                    "-m statistic --mode random --probability {} ",
                    1.0 / left as f64
                ),
            };
            writeln!(rules, "-A KUBE-SVC-{number} {chance}-j {chain}").unwrap();
            for proto in ["tcp", "udp"] {
                writeln!(
                    rules,
                    "-A {chain} -p {proto} -m {proto} -j DNAT --to-destination {endpoint}"
                )
                .unwrap();
            }
        }
    }
    format!(
        "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n{chains}\
         -A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n\
         -A KUBE-POSTROUTING -j MASQUERADE --random-fully\n\
         {rules}COMMIT\n\
         *filter\n:KUBE-FORWARD - [0:0]\n-A FORWARD -j KUBE-FORWARD\n\
         -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
         -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\nCOMMIT\n"
    )
}

#[test]
fn connections_notice_nothing_of_another_mode_of_kube_proxy() {
    let world = World::new();
    world.add_rules();
    drop_invalid_in(&world, OF_SERVICES);
    world.restart(OFF);
    world.is_direct();
    let exchanges = Exchanges::start(&world);
    let paths: Vec<Path> = world.paths().into_iter().chain(straight(&world)).collect();
    let traffic = Traffic::start(&paths, PACE).unwrap();
    traffic.watch(BEFORE);
    let mut idle = Idle::all(&world, 20);
    traffic.event("rules with iptables came").unwrap();
    for node in world.lab.nodes() {
        for (family, pods, restore) in [
            (0, "10.244.0.0/16", "iptables-nft-restore"),
            (1, "fd00:10:244::/48", "ip6tables-nft-restore"),
        ] {
            let rules = rules(&world, family, pods);
            let command = format!("{restore} --noflush <<'END'\n{rules}END\n");
            node.command(&["sh", "-c", &command]).unwrap();
        }
    }
    must_flow_directly(&world, &traffic, "with both");
    traffic.event("rules with nftables went").unwrap();
    world.remove_rules();
    must_flow_directly(&world, &traffic, "with iptables");
    for idle in &mut idle {
        idle.speaks("with iptables");
    }
    world.is_direct();
    for family in 0..2 {
        assert!(world.is_by_rules(world.client.place(), family), "new");
    }
    println!("{}", world.told(exchanges.finish()));
    println!("{}", traffic.finish().unwrap());
    nothing_is_invalid_in(&world, OF_SERVICES);
}
