//! By which interface a packet came that has a pod's address as its source.

use super::*;
use aya::maps::{Array, Map, MapData};
use sinabro_common::{
    abi::{
        Addr,
        uplink::{Uplink, checked_place},
    },
    names,
};

/// Nothing of the network's: a second network card, a bridge of containers.
const OTHER: &str = "other";

#[test]
fn by_an_interface_of_others_nobody_speaks_for_a_pod() {
    both(|w| {
        let here = kit::this_place();
        let (near, far) = ([2, 0, 0, 0, 9, 3], [2, 0, 0, 0, 9, 4]);
        let other = here
            .cable((OTHER, near), 1500, &here, ("beyond", far))
            .unwrap();
        let [uplink, device] = [UPLINK, "far"].map(|link| here.index(link).unwrap());
        let leads_out = Uplink {
            v6: Addr::v6(kit::NODE6.octets()),
            ..kit::leads_out(uplink).1
        };
        w.datapath.set_uplinks(&[(uplink, leads_out)]).unwrap();
        let judge = |program: &str, dst, rows: &[(IpAddr, u32, bool)]| {
            for &(src, from, passes) in rows {
                let by = if program == "uplink_out" {
                    uplink
                } else {
                    w.a.ifindex
                };
                let before = kit::dropped(&w.datapath, PodSource);
                let sent = frame(&from_to(src, dst));
                let (action, _) = w.programs.run_from(program, by, from, &sent).unwrap();
                let dropped = kit::dropped(&w.datapath, PodSource) - before;
                let what = format!("{program} from {src} by {from}");
                assert_eq!(
                    (action == PASS, dropped),
                    (passes, u64::from(!passes)),
                    "{what}"
                );
            }
        };
        // Before it is known what tunnels end in, what may have come out of one is let pass.
        let elsewhere = ip("10.2.0.7");
        judge(
            "pod_in",
            w.a.v4,
            &[(elsewhere, other, true), (w.b.v4, other, false)],
        );
        w.datapath.attach_overlay(device).unwrap();
        let families = [
            (
                w.a.v4,
                w.b.v4,
                [
                    "10.1.0.1",
                    "10.2.0.7",
                    "10.3.0.7",
                    "203.0.113.9",
                    "203.0.113.8",
                ],
            ),
            (
                w.a.v6,
                w.b.v6,
                [
                    "fd00:1::1",
                    "fd00:2::7",
                    "fd00:3::7",
                    "2001:db8:9::9",
                    "2001:db8:9::8",
                ],
            ),
        ];
        for (a, b, others) in families {
            let [gateway, elsewhere, third, stranger, unasked] = others.map(ip);
            // What the source of a packet is, what it came in by, and whether it is let pass.
            let sockets = 0;
            let ours = [
                (b, w.b.ifindex, true),
                (b, sockets, true),
                (b, uplink, true),
                (b, other, false),
                // A pod's own link lets no other pod's address out.
                (b, w.a.ifindex, true),
            ];
            let cluster = [
                (elsewhere, device, true),
                (elsewhere, uplink, true),
                (elsewhere, other, false),
                (elsewhere, w.b.ifindex, true),
                (gateway, sockets, true),
                // What the stack has masqueraded.
                (gateway, other, true),
                (stranger, other, true),
                (stranger, uplink, true),
            ];
            judge("pod_in", a, &[&ours[..], &cluster].concat());
            judge("overlay_out", third, &[&ours[..], &cluster].concat());
            // The first begins a connection, the last would go on with it.
            let others_link = (b, w.a.ifindex, false);
            judge("uplink_out", stranger, &[ours[0], ours[3], others_link]);
            judge("uplink_out", unasked, &[ours[3], others_link]);
        }
        // A pod's link that comes later may have the same place among those that are checked.
        let data = MapData::from_pin(format!("{}/CHECKED_LINKS", names::BPF_DIR)).unwrap();
        let mut checked: Array<MapData, u32> = Map::Array(data).try_into().unwrap();
        checked.set(checked_place(device), 4_000_000, 0).unwrap();
        for (to, third, elsewhere) in [
            (w.a.v4, "10.3.0.7", "10.2.0.7"),
            (w.a.v6, "fd00:3::7", "fd00:2::7"),
        ] {
            let rows = [(ip(elsewhere), device, true), (ip(elsewhere), other, false)];
            judge("pod_in", to, &rows);
            judge("overlay_out", ip(third), &rows);
        }
    });
}
