use crate::pair;
use ipnet::IpNet;
use sinabro_netlink::{
    Conn, Family,
    netns::in_fresh,
    nft::{FORWARD, Nft, Ports, Rule},
    tc::{Direction, Place, add_clsact, delete_filter, set_program},
    xtables,
};
use std::{
    fs::File,
    io::Write as _,
    os::fd::OwnedFd,
    process::{Command, Stdio},
    sync::Arc,
};

/// Has `nft` load a ruleset into the calling thread's namespace.
fn load(rules: &str) {
    let mut nft = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    nft.stdin
        .take()
        .unwrap()
        .write_all(rules.as_bytes())
        .unwrap();
    assert!(nft.wait().unwrap().success());
}

#[test]
fn chains_and_rules_of_a_firewall_are_read() {
    in_fresh(|| {
        assert_eq!(Nft::new().unwrap().chains().unwrap(), []);
        load(
            "table ip filter {
               chain FORWARD {
                 type filter hook forward priority 10; policy drop;
                 iifname \"eth0\" counter jump mine
               }
               chain mine {
                 ip daddr 10.0.0.0/8 accept
                 return
               }
             }
             table ip6 other {
               chain out {
                 type filter hook output priority -5;
               }
             }",
        );
        let mut nft = Nft::new().unwrap();
        let chains = nft.chains().unwrap();
        let texts: Vec<_> = chains.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "ip filter FORWARD type filter hook forward priority 10 policy drop uses 1",
                "ip filter mine uses 3",
                "ip6 other out type filter hook output priority -5 policy accept uses 0",
            ]
        );
        let base = chains[0].base.as_ref().unwrap();
        assert!(base.drops && base.hook == FORWARD);
        let rules = nft.rules().unwrap();
        let texts: Vec<_> = rules
            .iter()
            .map(|rule| format!("{}: {}", rule.chain, rule.expressions.join(" ")))
            .collect();
        assert_eq!(
            texts,
            [
                "FORWARD: meta cmp counter(0 packets, 0 bytes) jump(mine)",
                "mine: payload cmp accept",
                "mine: return",
            ]
        );
    });
}

/// By `nft` and by both ways in which `iptables` writes a port.
#[test]
fn the_ports_that_rules_compare_are_read() {
    in_fresh(|| {
        let rules = [
            ("ip saddr 10.0.0.1 drop", Ports::Any),
            ("tcp sport 30082 drop", Ports::Any),
            ("tcp dport 30082 drop", Ports::In(vec![30082..=30082])),
            ("udp dport 30000-30100 drop", Ports::In(vec![30000..=30100])),
            (
                "th dport > 29999 th dport < 30005 drop",
                Ports::In(vec![30000..=30004]),
            ),
            ("tcp dport { 80, 30082 } drop", Ports::Some),
            ("tcp dport != 30082 drop", Ports::Some),
            // Another field is compared in the register that had a port.
            (
                "tcp dport 30082 meta iiftype ether drop",
                Ports::In(vec![30082..=30082]),
            ),
            (
                "ip6 saddr fd00::1 tcp dport 22 tcp sport 30082 drop",
                Ports::In(vec![22..=22]),
            ),
        ];
        let texts: Vec<_> = rules.iter().map(|(text, _)| *text).collect();
        load(&format!(
            "table inet t {{ chain c {{\n{}\n}}\n}}",
            texts.join("\n")
        ));
        let found = Nft::new().unwrap().rules().unwrap();
        assert_eq!(found.len(), rules.len());
        for (rule, (text, ports)) in found.iter().zip(rules) {
            assert_eq!(rule.ports, ports, "{text}");
            let is_in = matches!(ports, Ports::Some)
                || text.contains("30") && ports != Ports::Any && !text.contains("dport 22");
            assert_eq!(rule.ports.may_be_in(&(30000..=32767)), is_in, "{text}");
        }
    });
    in_fresh(|| {
        for arguments in [
            "-p tcp --dport 30082",
            "-p udp -m udp --dport 30000:30100",
            "-p tcp ! --dport 30082",
            "-p tcp -m multiport --dports 80,30082",
            "-p tcp --syn",
        ] {
            let mut iptables = Command::new("iptables");
            iptables.args("-w -t raw -A PREROUTING -j DROP".split(' '));
            assert!(
                iptables
                    .args(arguments.split(' '))
                    .status()
                    .unwrap()
                    .success()
            );
        }
        let found = Nft::new().unwrap().rules().unwrap();
        let is_fence = |rule: &Rule| rule.ports.may_be_in(&(30082..=30082));
        assert_eq!(
            found.iter().map(is_fence).collect::<Vec<_>>(),
            [true, true, true, true, false]
        );
    });
}

/// By `nft` and by `iptables`, which compares whole bytes of an address where it can.
#[test]
fn the_addresses_that_rules_compare_are_read() {
    let pods: Vec<IpNet> = ["10.1.0.0/16", "fd00:1::/64"]
        .map(|range| range.parse().unwrap())
        .into();
    let excludes = |rules: &[Rule]| -> Vec<bool> {
        let excludes = |rule: &Rule| rule.addresses.exclude(&pods);
        rules.iter().map(excludes).collect()
    };
    in_fresh(|| {
        let rules = [
            ("ip daddr 169.254.0.0/16 drop", true),
            ("ip saddr 192.0.2.0/27 drop", true),
            ("ip saddr 10.1.0.0/27 drop", false),
            (
                "ip saddr 10.1.0.0/16 ip daddr != 10.0.0.0/9 masquerade",
                true,
            ),
            ("ip6 daddr fd00:2::/64 drop", true),
            ("ip6 daddr fd00:1::7 drop", false),
            ("ip daddr { 192.0.2.1, 192.0.2.9 } drop", false),
            ("ip daddr > 192.0.2.1 drop", false),
            ("ip daddr & 0.0.0.255 == 0.0.0.7 drop", false),
            ("tcp dport 80 drop", false),
            // Other fields are compared in the register that had an address.
            ("ip daddr 10.1.0.7 meta mark 5 drop", false),
            ("ip6 saddr fd00:1::7 meta iifname eth0 drop", false),
            ("ip daddr 10.1.0.7 ct mark 5 drop", false),
            ("drop", false),
        ];
        let texts: Vec<_> = rules.iter().map(|(text, _)| *text).collect();
        load(&format!(
            "table inet t {{ chain c {{ type nat hook postrouting priority 0;\n{}\n}}\n}}",
            texts.join("\n")
        ));
        let found = Nft::new().unwrap().rules().unwrap();
        assert_eq!(excludes(&found), rules.map(|(_, excludes)| excludes));
    });
    in_fresh(|| {
        let rules = [
            ("iptables", "-d 127.0.0.11/32", true),
            ("iptables", "-s 172.17.0.0/16 -i docker0", true),
            ("iptables", "-s 10.1.0.0/16 ! -d 10.1.0.0/16", true),
            ("iptables", "-s 10.0.0.0/8", false),
            ("iptables", "! -d 224.0.0.0/4", false),
            ("ip6tables", "-d fd00:2::/48", true),
            ("ip6tables", "-d fd00:1::/49", false),
        ];
        for (program, arguments, _) in rules {
            let mut iptables = Command::new(program);
            iptables.args("-w -t raw -A PREROUTING -j DROP".split(' '));
            let ran = iptables.args(arguments.split(' ')).status();
            assert!(ran.unwrap().success());
        }
        let found = Nft::new().unwrap().rules().unwrap();
        assert_eq!(excludes(&found), rules.map(|(.., excludes)| excludes));
    });
}

#[test]
fn more_rules_than_a_datagram_holds_are_all_read() {
    in_fresh(|| {
        let mut rules = String::from("table inet many { chain every {\n");
        for port in 1..=3000 {
            rules.push_str(&format!("tcp dport {port} counter drop\n"));
        }
        load(&(rules + "}\n}\n"));
        let rules = Nft::new().unwrap().rules().unwrap();
        assert_eq!(rules.len(), 3000);
        assert!(
            rules
                .iter()
                .all(|rule| rule.expressions.last().unwrap() == "drop")
        );
    });
}

#[test]
fn a_link_without_filters_has_none() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let link = pair(&mut conn);
        assert_eq!(conn.filters(link).unwrap(), []);
    });
}

#[test]
fn a_filter_needs_a_qdisc_and_a_program() {
    in_fresh(|| {
        let mut conn = Conn::new().unwrap();
        let link = pair(&mut conn);
        let place = Place {
            direction: Direction::Egress,
            priority: 7,
            handle: 1,
        };
        let no_program = Arc::new(OwnedFd::from(File::open("/dev/null").unwrap()));
        let set = || set_program(link, place, "none", &no_program);
        assert!(conn.execute(set()).is_err());
        conn.execute(add_clsact(link)).unwrap();
        assert!(conn.execute(add_clsact(link)).unwrap_err().is_exists());
        assert!(conn.execute(set()).is_err());
        assert_eq!(conn.filters(link).unwrap(), []);
        assert!(conn.execute(delete_filter(link, place)).is_err());
        assert!(conn.execute(add_clsact(999)).is_err());
    });
}

#[test]
fn a_legacy_table_is_read_and_not_made() {
    for (family, program) in [
        (Family::V4, "iptables-legacy"),
        (Family::V6, "ip6tables-legacy"),
    ] {
        in_fresh(move || {
            let run = |arguments: &[&str]| {
                let done = Command::new(program).args(arguments).status().unwrap();
                assert!(done.success(), "{program} {arguments:?}");
            };
            let read = || xtables::filter(family).unwrap();
            for _ in 0..2 {
                assert_eq!(read(), None);
            }
            run(&["-A", "INPUT", "-i", "eth7", "-j", "ACCEPT"]);
            let filter = read().unwrap();
            assert!(!filter.drops_forwarded);
            assert_eq!(filter.interfaces, [b"eth7"]);
            run(&["-P", "FORWARD", "DROP"]);
            run(&["-N", "MINE"]);
            run(&["-A", "FORWARD", "-p", "tcp", "-j", "MINE"]);
            run(&[
                "-A",
                "MINE",
                "-i",
                "snb+",
                "-o",
                "a123456789abcde",
                "-j",
                "ACCEPT",
            ]);
            let filter = read().unwrap();
            assert!(filter.drops_forwarded);
            let all: [&[u8]; 3] = [b"eth7", b"snb+", b"a123456789abcde"];
            assert_eq!(filter.interfaces, all);
            run(&["-P", "FORWARD", "ACCEPT"]);
            assert!(!read().unwrap().drops_forwarded);
        });
    }
}
