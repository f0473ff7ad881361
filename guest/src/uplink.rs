//! What leads from the machine to the host outside.

use anyhow::{Context as _, Result};
use sinabro_guest::Uplink;
use sinabro_lab::Place;
use sinabro_netlink::vlan;
use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    os::fd::AsRawFd as _,
    thread,
};

/// Where a VLAN is tagged.
const VLAN: u16 = 5;
/// Longest packet of a tunnel device.
const MTU: usize = 1500;

/// Lays it, and says what it is called at both ends.
pub fn lay(kind: Uplink, this: &Place, outside: &Place) -> Result<&'static str> {
    match kind {
        Uplink::Veth => veth(this, outside).map(|()| "eth0"),
        Uplink::Vlan => {
            veth(this, outside)?;
            for place in [this, outside] {
                let on = place.set_up("eth0", &[])?;
                place.conn()?.execute(vlan::create("eth0.5", on, VLAN))?;
            }
            Ok("eth0.5")
        }
        Uplink::Tun => tun(this, outside).map(|()| "tun0"),
    }
}

fn veth(this: &Place, outside: &Place) -> Result<()> {
    let ends = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 9]];
    this.cable(("eth0", ends[0]), MTU as u32, outside, ("eth0", ends[1]))?;
    Ok(())
}

/// Two devices whose packets are read and written by this program, and have no header in front of that of IP.
fn tun(this: &Place, outside: &Place) -> Result<()> {
    let [one, two] = [this, outside].map(|place| place.run(|| open("tun0")));
    let (one, two) = (one?, two?);
    let (from_one, from_two) = (one.try_clone()?, two.try_clone()?);
    // Until the machine is off.
    thread::spawn(move || carry(from_one, two));
    thread::spawn(move || carry(from_two, one));
    Ok(())
}

/// A device that is gone, or not up yet, refuses packets: they are lost, as on a wire.
fn carry(mut from: File, mut to: File) {
    let mut packet = [0; MTU];
    loop {
        if let Ok(len) = from.read(&mut packet) {
            let _ = to.write(&packet[..len]);
        }
    }
}

/// Makes a device (Documentation/networking/tuntap.rst) that is there as long as the file is open.
fn open(name: &str) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .context("cannot open /dev/net/tun")?;
    // SAFETY: zeros are a value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the descriptor is open, and the request lives for as long as the call.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    nix::errno::Errno::result(made).with_context(|| format!("cannot make {name}"))?;
    Ok(file)
}
