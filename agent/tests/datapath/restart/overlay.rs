//! The program of the VXLAN device.

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

/// Where a device's program is attached, and which program that is: of its link, or of its only
/// filter.
fn overlay_program(mode: AttachMode, device: u32) -> (u32, u32) {
    if mode == AttachMode::Tcx {
        return links()[OVERLAY_LINK];
    }
    let filters = Conn::new().unwrap().filters(device).unwrap();
    assert_eq!(filters.len(), 1, "{filters:?}");
    let (_, program) = filters[0].program.clone().unwrap();
    (filters[0].handle, program)
}

const OVERLAY_LINK: &str = "sinabro_vxlan-in";

#[test]
fn the_overlay_keeps_its_program() {
    for mode in kit::modes() {
        kit::fresh(|| {
            let first = device();
            let datapath = load(mode);
            datapath.attach_overlay(first).unwrap();
            let (place, program) = overlay_program(mode, first);
            datapath.attach_overlay(first).unwrap();
            assert_eq!(overlay_program(mode, first), (place, program));
            drop(datapath);
            // Another agent has another program in the same place: in a link as soon as it is
            // loaded.
            let datapath = load(mode);
            if mode == AttachMode::Clsact {
                datapath.attach_overlay(first).unwrap();
            }
            let (again, next) = overlay_program(mode, first);
            assert_eq!(again, place);
            assert_ne!(next, program);
            // It is no pod's: what is left of pods is cleared away without it.
            datapath.retain_pods(&HashSet::new()).unwrap();
            assert_eq!(overlay_program(mode, first), (again, next));
            // Another device has a link or a filter of its own.
            let mut conn = Conn::new().unwrap();
            conn.execute(link::delete(first)).unwrap();
            let second = device();
            datapath.attach_overlay(second).unwrap();
            let (other, program) = overlay_program(mode, second);
            assert_eq!(program, next);
            assert_eq!(other == place, mode == AttachMode::Clsact);
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
            assert_eq!(links().contains_key(OVERLAY_LINK), pinned);
            let filters = Conn::new().unwrap().filters(device).unwrap();
            assert_eq!(filters.len(), usize::from(!pinned), "{filters:?}");
        }
    });
}
