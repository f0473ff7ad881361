//! What of a packet is left to the interface that sends it (ethtool(8), `-K`).

use crate::place::Place;
use anyhow::{Context as _, Result};
use nix::errno::Errno;
use socket2::{Domain, Socket, Type};
use std::os::fd::AsRawFd as _;

/// linux/ethtool.h and linux/sockios.h.
const ETHTOOL_STXCSUM: u32 = 0x17;
const ETHTOOL_STSO: u32 = 0x1f;
const ETHTOOL_SGSO: u32 = 0x24;
const ETHTOOL_SGRO: u32 = 0x2c;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_SFEATURES: u32 = 0x3b;
/// Features have no numbers of their own: their names are a set of strings.
const ETH_SS_FEATURES: u32 = 4;
const ETH_GSTRING_LEN: usize = 32;
const SIOCETHTOOL: libc::Ioctl = 0x8946;

/// What cuts TCP's segments to size behind an interface.
const CUT: [u32; 2] = [ETHTOOL_STSO, ETHTOOL_SGSO];

/// Has an interface send packets as they are on the wire: without it, TCP's are cut to size behind it or
/// never, and what is counted is larger than any of them.
pub fn cut_before(place: &Place, interface: &str) -> Result<()> {
    turn(place, interface, &CUT, false)
}

/// Undoes [`cut_before`].
pub fn cut_behind(place: &Place, interface: &str) -> Result<()> {
    turn(place, interface, &CUT, true)
}

/// Has an interface send no packet whose checksum is left to it.
pub fn sum_before(place: &Place, interface: &str) -> Result<()> {
    turn(place, interface, &[ETHTOOL_STXCSUM], false)
}

/// Has an interface put together what comes of one stream (GRO).
pub fn gather(place: &Place, interface: &str) -> Result<()> {
    turn(place, interface, &[ETHTOOL_SGRO], true)
}

/// How an interface puts datagrams of one flow together (GRO) that are not for a socket which asks for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Datagrams {
    /// Not.
    Single,
    /// Into one packet, as a socket sends many (Linux 5.12).
    Joined,
    /// Into a list of packets (Linux 5.6).
    Listed,
}

impl Datagrams {
    pub const ALL: [Self; 3] = [Self::Single, Self::Joined, Self::Listed];
}

pub fn gather_datagrams(place: &Place, interface: &str, how: Datagrams) -> Result<()> {
    for (feature, means) in [
        ("rx-udp-gro-forwarding", Datagrams::Joined),
        ("rx-gro-list", Datagrams::Listed),
    ] {
        turn_named(place, interface, feature, how == means)?;
    }
    Ok(())
}

/// `ethtool -K INTERFACE FEATURE on`, or off.
fn turn_named(place: &Place, interface: &str, feature: &str, on: bool) -> Result<()> {
    let turn = || {
        // struct ethtool_sset_info: the set asked for is a bit of 64, and its length what comes back.
        let mut info = [ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_FEATURES, 0, 0];
        ask(interface, &mut info)?;
        let count = info[4] as usize;
        // struct ethtool_gstrings.
        let mut strings = vec![0; 3 + count * ETH_GSTRING_LEN / 4];
        strings[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, ETH_SS_FEATURES, count as u32]);
        ask(interface, &mut strings)?;
        let bytes: Vec<u8> = strings[3..]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        let mut names = bytes.chunks(ETH_GSTRING_LEN);
        let is_it = |name: &[u8]| name.split(|byte| *byte == 0).next() == Some(feature.as_bytes());
        let at = names
            .position(is_it)
            .context("this kernel does not know it")?;
        // struct ethtool_sfeatures: of 32 features each those that are meant, and those of them that are wanted.
        let blocks = count.div_ceil(32);
        let mut features = vec![0; 2 + 2 * blocks];
        features[..2].copy_from_slice(&[ETHTOOL_SFEATURES, blocks as u32]);
        let bit = 1 << (at % 32);
        features[2 + 2 * (at / 32)] = bit;
        features[3 + 2 * (at / 32)] = if on { bit } else { 0 };
        ask(interface, &mut features)
    };
    place.run(turn).with_context(|| {
        let place = place.name();
        format!("cannot set {feature} of {interface} of {place}")
    })
}

fn turn(place: &Place, interface: &str, features: &[u32], on: bool) -> Result<()> {
    place
        .run(|| {
            // struct ethtool_value.
            let mut values = features.iter().map(|command| [*command, u32::from(on)]);
            values.try_for_each(|mut value| ask(interface, &mut value))
        })
        .with_context(|| format!("cannot set {interface} of {}", place.name()))
}

/// Gives the kernel a command and its arguments, in which it writes what it says.
fn ask(interface: &str, command: &mut [u32]) -> Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    // SAFETY: an ifreq is plain data, of which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1);
    name.zip(interface.bytes())
        .for_each(|(to, from)| *to = from as _);
    request.ifr_ifru.ifru_data = command.as_mut_ptr().cast();
    // SAFETY: the request names an interface, a string that ends, and points to a command's structure, as long as the callers say in
    // it; both live until the call ends.
    Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) })?;
    Ok(())
}
