//! The VXLAN device.
//!
//! MAC, MTU and state are set on the living device; VNI, port and local address need a new one,
//! which loses its addresses and entries: the pass puts them back right after.

use crate::plan::DeviceSpec;
use sinabro_netlink::{
    Conn, Error, Link, ResultExt,
    distrust::distrust,
    link::{self, set_mac, set_mtu, set_up},
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

/// Makes the device as wanted, but for raising it ([`raise`]); its index, and whether anything
/// was done.
///
/// # Errors
/// If the name or the VNI is somebody else's, and those of the kernel.
pub fn ensure(conn: &mut Conn, spec: &DeviceSpec) -> Result<(u32, bool), LinkError> {
    let Some(link) = conn.link_by_name(&spec.name).ignore_not_found()? else {
        info!(device = spec.name, "making the VXLAN device");
        return Ok((create(conn, spec)?, true));
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
        return Ok((create(conn, spec)?, true));
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
    let changed = !requests.is_empty();
    conn.execute_all(requests)?;
    Ok((link.index, changed))
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

/// Whether what cannot be changed on a living device is as wanted.
fn fits(link: &Link, spec: &DeviceSpec) -> bool {
    link.vxlan.as_ref().is_some_and(|vxlan| {
        vxlan.vni == spec.vni
            && vxlan.port == spec.port
            && vxlan.local == Some(spec.local)
            && vxlan.device.is_none()
            && !vxlan.learning
    })
}

fn create(conn: &mut Conn, spec: &DeviceSpec) -> Result<u32, LinkError> {
    let vxlan = Vxlan {
        name: &spec.name,
        mac: spec.mac.0,
        mtu: spec.mtu,
        settings: VxlanSettings::new(spec.vni, spec.port, spec.local),
    };
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
    Ok(conn.link_by_name(&spec.name)?.index)
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
