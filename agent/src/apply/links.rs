//! The VXLAN device.
//!
//! MAC, MTU and state are set on the living device; VNI, port and local address need a new one,
//! which loses its addresses and entries: the pass puts them back right after. Whether packets are taken without a checksum
//! needs a new one, too, but is not worth that.

use crate::plan::DeviceSpec;
use sinabro_netlink::{
    Conn, Error, Link, ResultExt,
    distrust::{distrust, forward_ipv4},
    link::{self, set_mac, set_mtu, set_up},
    sysctl,
    vxlan::{Vxlan, VxlanSettings},
};
use tracing::{info, warn};

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error(
        "link {name} is not a VXLAN device but {kind}: rename or delete it, or choose another device name"
    )]
    OtherKind { name: String, kind: String },
    #[error(
        "VXLAN device {other} already uses VNI {vni} and port {port}: delete it, or choose another VNI or port"
    )]
    InUse { other: String, vni: u32, port: u16 },
    #[error(transparent)]
    Netlink(#[from] Error),
}

/// The device as [`ensure`] leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub index: u32,
    /// Whether anything was done.
    pub changed: bool,
    /// Whether it takes UDP over IPv6 without a checksum, and its tunnels are over IPv6. One that an earlier version made
    /// does not, and stays: pods' packets are worth more.
    pub takes_zero_checksum: bool,
}

impl Device {
    fn of(link: &Link, changed: bool) -> Self {
        let takes = |vxlan: &VxlanSettings| {
            vxlan.zero_checksum6 && vxlan.local.is_some_and(|local| local.is_ipv6())
        };
        Self {
            index: link.index,
            changed,
            takes_zero_checksum: link.vxlan.as_ref().is_some_and(takes),
        }
    }
}

/// Makes the device as wanted, but for raising it ([`raise`]).
///
/// # Errors
/// If the name or the VNI is somebody else's, and those of the kernel.
pub fn ensure(conn: &mut Conn, spec: &DeviceSpec) -> Result<Device, LinkError> {
    let Some(link) = conn.link_by_name(&spec.name).ignore_not_found()? else {
        info!(device = spec.name, "making the VXLAN device");
        return Ok(Device::of(&create(conn, spec)?, true));
    };
    if link.kind.as_deref() != Some("vxlan") {
        return Err(LinkError::OtherKind {
            name: link.name,
            kind: link.kind.unwrap_or_else(|| "a physical device".into()),
        });
    }
    if !fits(&link, spec) {
        warn!(
            device = spec.name,
            "making the VXLAN device again: VNI, port or local address changed"
        );
        conn.execute(link::delete(link.index)).ignore_not_found()?;
        return Ok(Device::of(&create(conn, spec)?, true));
    }
    let mut requests = Vec::new();
    if link.mac != Some(spec.mac.0) {
        requests.push(set_mac(link.index, spec.mac.0));
    }
    if link.mtu != spec.mtu {
        info!(
            device = spec.name,
            from = link.mtu,
            to = spec.mtu,
            "changing the MTU"
        );
        requests.push(set_mtu(link.index, spec.mtu));
    }
    if lacks_forwarding(&link) {
        info!(device = spec.name, "having it forward IPv4");
        requests.push(forward_ipv4(link.index));
    }
    let changed = !requests.is_empty();
    conn.execute_all(requests)?;
    Ok(Device::of(&link, changed))
}

/// Whether a link does not forward what comes in by it although the node as a whole forwards IPv4.
pub fn lacks_forwarding(link: &Link) -> bool {
    let node_forwards = || sysctl::read(&["net", "ipv4", "ip_forward"]).is_ok_and(|on| on == "1");
    link.forwards_ipv4 == Some(false) && node_forwards()
}

/// Has an uplink forward again, by which answers come; whether it did not.
///
/// # Errors
/// Those of the kernel.
pub fn keep_forwarding(conn: &mut Conn, index: u32) -> Result<bool, Error> {
    let link = conn.link_by_index(index).ignore_not_found()?;
    let Some(link) = link.filter(lacks_forwarding) else {
        return Ok(false);
    };
    warn!(
        link = link.name,
        "having it forward IPv4 again: find what turns that off (grep -r forward /etc/sysctl.d)"
    );
    conn.execute(forward_ipv4(index))?;
    Ok(true)
}

/// Raises the device; whether it was down.
///
/// # Errors
/// Those of the kernel.
pub fn raise(conn: &mut Conn, index: u32) -> Result<bool, LinkError> {
    let link = conn.link_by_index(index)?;
    if link.up {
        return Ok(false);
    }
    match distrust(conn, index, &link.name) {
        // In its container the agent may write no sysctls. What comes out of a tunnel is checked
        // to come from a pod or a node, and no router message counts that does.
        Err(Error::Permission(_)) => {}
        other => other?,
    }
    conn.execute(set_up(index))?;
    Ok(true)
}

/// Whether what cannot be changed on a living device is as it has to be.
fn fits(link: &Link, spec: &DeviceSpec) -> bool {
    link.vxlan.as_ref().is_some_and(|vxlan| {
        vxlan.vni == spec.vni
            && vxlan.port == spec.port
            && vxlan.local == Some(spec.local)
            && vxlan.device.is_none()
            && !vxlan.learning
    })
}

fn vxlan(spec: &DeviceSpec, zero_checksum6: bool) -> Vxlan<'_> {
    Vxlan {
        name: &spec.name,
        mac: spec.mac.0,
        mtu: spec.mtu,
        settings: VxlanSettings {
            zero_checksum6,
            ..VxlanSettings::new(spec.vni, spec.port, spec.local)
        },
    }
}

fn create(conn: &mut Conn, spec: &DeviceSpec) -> Result<Link, LinkError> {
    let vxlan = vxlan(spec, spec.local.is_ipv6());
    if let Err(error) = conn.execute(vxlan.create()) {
        return Err(match holder(conn, spec) {
            Some(other) if error.is_exists() => LinkError::InUse {
                other,
                vni: spec.vni,
                port: spec.port,
            },
            _ => error.into(),
        });
    }
    Ok(conn.link_by_name(&spec.name)?)
}

/// Another device with the same VNI and port: the kernel allows one of each.
fn holder(conn: &mut Conn, spec: &DeviceSpec) -> Option<String> {
    let links = conn.links().ok()?;
    let same = |link: &Link| {
        let vxlan = link.vxlan.as_ref();
        vxlan.is_some_and(|v| (v.vni, v.port) == (spec.vni, spec.port))
    };
    links.into_iter().find(same).map(|link| link.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_common::api::Mac;
    use sinabro_netlink::netns::in_fresh;

    fn spec(local: &str) -> DeviceSpec {
        DeviceSpec {
            name: "vx".into(),
            vni: 1,
            port: 8472,
            local: local.parse().unwrap(),
            mac: Mac([2, 0, 0, 0, 0, 1]),
            mtu: 1400,
        }
    }

    #[test]
    fn a_device_takes_what_lacks_a_checksum_over_ipv6_and_nothing_changes_over_ipv4() {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            // The address decides, also where the device has to be made again for it.
            for (local, takes) in [
                ("192.0.2.1", false),
                ("fd00::1", true),
                ("192.0.2.1", false),
            ] {
                for changed in [true, false] {
                    let device = ensure(&mut conn, &spec(local)).unwrap();
                    let index = conn.link_by_name("vx").unwrap().index;
                    let expected = Device {
                        index,
                        changed,
                        takes_zero_checksum: takes,
                    };
                    assert_eq!(device, expected, "{local}");
                }
                let vxlan = conn.link_by_name("vx").unwrap().vxlan.unwrap();
                assert_eq!(vxlan.zero_checksum6, takes, "{local}");
            }
        });
    }

    #[test]
    fn a_device_of_an_earlier_version_stays_and_takes_nothing_without_a_checksum() {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let spec = spec("fd00::1");
            conn.execute(vxlan(&spec, false).create()).unwrap();
            let index = conn.link_by_name("vx").unwrap().index;
            let kept = Device {
                index,
                changed: false,
                takes_zero_checksum: false,
            };
            assert_eq!(ensure(&mut conn, &spec).unwrap(), kept);
            conn.execute(link::delete(index)).unwrap();
            assert!(ensure(&mut conn, &spec).unwrap().takes_zero_checksum);
        });
    }

    /// Over IPv4 the flag, which somebody may have set, says nothing that others have to hear.
    #[test]
    fn what_a_device_over_ipv4_says_of_ipv6_is_nothing() {
        in_fresh(|| {
            let mut conn = Conn::new().unwrap();
            let spec = spec("192.0.2.1");
            conn.execute(vxlan(&spec, true).create()).unwrap();
            let device = ensure(&mut conn, &spec).unwrap();
            assert!(!device.changed && !device.takes_zero_checksum, "{device:?}");
        });
    }
}
