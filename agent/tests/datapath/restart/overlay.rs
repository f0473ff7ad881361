//! The programs of the VXLAN device.

use super::*;

/// A VXLAN device as the agent makes it, down.
fn device() -> u32 {
    let mut conn = Conn::new().unwrap();
    let device = Vxlan {
        name: names::VXLAN_LINK,
        mac: [2, 0x5b, 0, 0, 0, 1],
        mtu: 1450,
        settings: VxlanSettings::new(names::VXLAN_VNI, names::VXLAN_PORT, kit::NODE.into()),
    };
    conn.execute(device.create()).unwrap();
    conn.link_by_name(names::VXLAN_LINK).unwrap().index
}

/// Where a device's programs are attached, what comes out of tunnels first, and which programs those are: of their links,
/// or of its only filters.
fn overlay_programs(mode: AttachMode, device: u32) -> [(u32, u32); 2] {
    if mode == AttachMode::Tcx {
        return OVERLAY_LINKS.map(|link| links()[link]);
    }
    let filters = Conn::new().unwrap().filters(device).unwrap();
    assert_eq!(filters.len(), 2, "{filters:?}");
    ["overlay_in", "overlay_out"].map(|name| {
        let of_name = filters.iter().find_map(|filter| {
            let (found, program) = filter.program.clone()?;
            (found == name).then_some((filter.handle, program))
        });
        of_name.unwrap_or_else(|| panic!("{filters:?}"))
    })
}

const OVERLAY_LINKS: [&str; 2] = ["sinabro_vxlan-in", "sinabro_vxlan-out"];

#[test]
fn the_overlay_keeps_its_programs() {
    for &mode in kit::modes() {
        kit::fresh(|| {
            let first = device();
            let datapath = load(mode);
            datapath.attach_overlay(first).unwrap();
            let before = overlay_programs(mode, first);
            datapath.attach_overlay(first).unwrap();
            assert_eq!(overlay_programs(mode, first), before);
            drop(datapath);
            // Another agent has other programs in the same places: in links as soon as they are loaded.
            let datapath = load(mode);
            if mode == AttachMode::Clsact {
                datapath.attach_overlay(first).unwrap();
            }
            let next = overlay_programs(mode, first);
            assert_eq!(next.map(|(place, _)| place), before.map(|(place, _)| place));
            for (next, before) in next.iter().zip(before) {
                assert_ne!(next.1, before.1);
            }
            // They are no pod's: what is left of pods is cleared away without them.
            datapath.retain_pods(&HashSet::new()).unwrap();
            assert_eq!(overlay_programs(mode, first), next);
            // Another device has links or filters of its own.
            let mut conn = Conn::new().unwrap();
            conn.execute(link::delete(first)).unwrap();
            let second = device();
            datapath.attach_overlay(second).unwrap();
            for (of_second, of_first) in overlay_programs(mode, second).iter().zip(next) {
                assert_eq!(of_second.1, of_first.1);
                assert_eq!(of_second.0 == of_first.0, mode == AttachMode::Clsact);
            }
        });
    }
}

#[test]
fn the_overlays_way_of_attaching_can_change() {
    with_links(|| {
        let device = device();
        for (mode, pinned) in [
            (AttachMode::Tcx, true),
            (AttachMode::Clsact, false),
            (AttachMode::Tcx, true),
        ] {
            load(mode).attach_overlay(device).unwrap();
            // Never by both.
            for link in OVERLAY_LINKS {
                assert_eq!(links().contains_key(link), pinned, "{link}");
            }
            let filters = Conn::new().unwrap().filters(device).unwrap();
            assert_eq!(filters.len(), if pinned { 0 } else { 2 }, "{filters:?}");
        }
    });
}
