//! What nodes are connected by: cables to the router's bridge, or what is made on top of them. The devices on top have the
//! addresses of the drawing then, and what is below has none.

use crate::place::Place;
use anyhow::Result;
use ipnet::{IpNet, Ipv4Net};
use sinabro_netlink::{
    bond, link, vlan,
    wireguard::{self, Peer, Wireguard},
};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};

/// The router's, which cables lead to.
pub(crate) const BRIDGE: &str = "br0";
const BOND: &str = "bond0";
const VLAN: u16 = 5;
/// Milliseconds, after which a bond has another look at the carriers of its links.
const LOOK_EVERY: u32 = 10;
/// Where WireGuard listens.
const PORT: u16 = 51_820;
/// The router's number among those that WireGuard connects.
pub(crate) const ROUTER: u8 = 0;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Underlay {
    /// A cable of each node.
    #[default]
    Cable,
    /// A VLAN on it.
    Vlan,
    /// Two cables of each node, one of which is in use.
    Bond,
    VlanOnBond,
    /// Two cables of each node, both in use by LACP.
    Lacp,
    /// WireGuard between each two of the nodes and the router. Packets begin with their IP header.
    Wireguard,
}

impl Underlay {
    /// The device that has a node's addresses.
    pub fn link(self) -> &'static str {
        match self {
            Self::Cable => "eth0",
            Self::Vlan => "eth0.5",
            Self::Bond | Self::Lacp => BOND,
            Self::VlanOnBond => "bond0.5",
            Self::Wireguard => "wg0",
        }
    }

    /// The device that has the router's.
    pub(crate) fn routers_link(self) -> &'static str {
        match self {
            Self::Cable | Self::Bond | Self::Lacp => BRIDGE,
            Self::Vlan | Self::VlanOnBond => "br0.5",
            Self::Wireguard => "wg0",
        }
    }

    /// A node's ends of its cables.
    pub(crate) fn legs(self) -> &'static [&'static str] {
        match self.is_bond() {
            true => &["eth0", "eth1"],
            false => &["eth0"],
        }
    }

    fn bond(self) -> Option<bond::Mode> {
        match self {
            Self::Bond | Self::VlanOnBond => Some(bond::Mode::ActiveBackup),
            Self::Lacp => Some(bond::Mode::Lacp),
            Self::Cable | Self::Vlan | Self::Wireguard => None,
        }
    }

    pub fn is_bond(self) -> bool {
        self.bond().is_some()
    }

    /// Whether a packet on the device begins with an Ethernet header.
    pub fn is_ethernet(self) -> bool {
        self != Self::Wireguard
    }

    fn is_vlan(self) -> bool {
        matches!(self, Self::Vlan | Self::VlanOnBond)
    }

    /// Makes the device of a node whose cables are laid, up.
    pub(crate) fn lay(self, place: &Place, number: u8) -> Result<()> {
        let mut below = self.legs()[0];
        if let Some(mode) = self.bond() {
            tie(place, BOND, mode, self.legs())?;
            below = BOND;
        }
        self.lay_on(place, below, self.link(), number)
    }

    /// Plugs the router's ends of a node's cables into its bridge: together, where the node asks for that by LACP.
    pub(crate) fn plug_in(self, router: &Place, node: &str, ports: &[String]) -> Result<()> {
        if self != Self::Lacp {
            return ports.iter().try_for_each(|port| router.plug(port, BRIDGE));
        }
        for port in ports {
            router
                .conn()?
                .execute(link::set_down(router.index(port)?))?;
        }
        let lag = format!("lag-{node}");
        tie(router, &lag, bond::Mode::Lacp, ports)?;
        router.plug(&lag, BRIDGE)
    }

    /// Makes the router's on its bridge.
    pub(crate) fn lay_on_bridge(self, router: &Place) -> Result<()> {
        self.lay_on(router, BRIDGE, self.routers_link(), ROUTER)
    }

    fn lay_on(self, place: &Place, below: &str, link: &str, number: u8) -> Result<()> {
        let below_it = place.set_up(below, &[])?;
        if self.is_vlan() {
            let create = vlan::create(link, below_it, VLAN);
            place.conn()?.execute(create)?;
        }
        if self == Self::Wireguard {
            place.set_up(below, &[Ipv4Net::new(outer(number), 24)?.into()])?;
            place.conn()?.execute(wireguard::create(link))?;
            let device = place.index(link)?;
            // Nobody is to be kept out.
            let key = [number + 1; 32];
            Wireguard::in_netns(place.net())?.set_key(device, key, PORT)?;
            place.set_up(link, &[])?;
        }
        Ok(())
    }
}

/// Makes one of several links, which are down.
fn tie(place: &Place, bond: &str, mode: bond::Mode, links: &[impl AsRef<str>]) -> Result<()> {
    let create = bond::create(bond, mode, LOOK_EVERY);
    place.conn()?.execute(create)?;
    links
        .iter()
        .try_for_each(|link| place.plug(link.as_ref(), bond))
}

/// The router's end of a node's cable, of the first or of another.
pub fn port(node: &str, leg: u8) -> String {
    match leg {
        0 => format!("to-{node}"),
        _ => format!("to-{node}-{leg}"),
    }
}

/// The address outside of WireGuard's tunnels.
fn outer(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, 10 + number)
}

/// One of those that WireGuard connects.
pub(crate) struct Member<'a> {
    pub place: &'a Place,
    pub number: u8,
    pub addresses: Vec<IpAddr>,
}

impl Member<'_> {
    fn device(&self) -> Result<(Wireguard, u32)> {
        let link = self.place.index(Underlay::Wireguard.link())?;
        Ok((Wireguard::in_netns(self.place.net())?, link))
    }

    fn as_peer(&self) -> Result<Peer> {
        let (mut wireguard, link) = self.device()?;
        // Whoever is no member is behind the router.
        let addresses = match self.number {
            ROUTER => vec![IpNet::V4(Default::default()), IpNet::V6(Default::default())],
            _ => self.addresses.iter().copied().map(IpNet::from).collect(),
        };
        Ok(Peer {
            key: wireguard.public_key(link)?,
            at: SocketAddrV4::new(outer(self.number), PORT),
            addresses,
        })
    }

    /// Has two know each other.
    pub(crate) fn meet(&self, other: &Self) -> Result<()> {
        for (of, to) in [(self, other), (other, self)] {
            let (mut wireguard, link) = of.device()?;
            wireguard.add_peer(link, &to.as_peer()?)?;
        }
        Ok(())
    }
}
