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

fn turn(place: &Place, interface: &str, features: &[u32], on: bool) -> Result<()> {
    place
        .run(|| {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
            for &command in features {
                // struct ethtool_value.
                let mut value = [command, u32::from(on)];
                // SAFETY: an ifreq is plain data, of which zero is a value.
                let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
                let name = request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1);
                name.zip(interface.bytes())
                    .for_each(|(to, from)| *to = from as _);
                request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
                // SAFETY: the request names an interface, a string that ends, and points to an
                // ethtool_value, which both live until the call ends.
                Errno::result(unsafe {
                    libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request)
                })?;
            }
            Ok(())
        })
        .with_context(|| format!("cannot set {interface} of {}", place.name()))
}
