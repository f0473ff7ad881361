//! A way out without an Ethernet header, as VPNs have: what the node writes to a tun device comes out of
//! one of the outside host's, and back.

use super::kit::{Way, lab, leave_by, start, works};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sinabro_lab::{Place, raise::Raise};
use std::{
    ffi::{c_char, c_short},
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::OpenOptionsExt as _,
    },
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// Less than pods have: senders learn of it from the node.
const MTU: u32 = 1400;

/// `struct ifreq` as TUNSETIFF reads it.
#[repr(C)]
struct Request {
    name: [c_char; libc::IFNAMSIZ],
    flags: c_short,
    pad: [u8; 22],
}

/// Makes a tun device that is there as long as the file is.
fn tun(place: &Place, name: &str) -> File {
    place
        .run(|| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open("/dev/net/tun")?;
            let mut request = Request {
                name: [0; libc::IFNAMSIZ],
                flags: (libc::IFF_TUN | libc::IFF_NO_PI) as c_short,
                pad: [0; 22],
            };
            for (to, from) in request.name.iter_mut().zip(name.bytes()) {
                *to = from as c_char;
            }
            // SAFETY: reads and writes no more than the structure.
            let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) };
            match made {
                0 => Ok(file),
                _ => Err(io::Error::last_os_error().into()),
            }
        })
        .unwrap()
}

/// Carries packets between two devices until it is told to stop; the parts of one backwards.
fn pump(ends: [&File; 2], stop: &AtomicBool) {
    let mut packet = vec![0; 65_536];
    let mut parts = [Vec::new(), Vec::new()];
    while !stop.load(Ordering::Relaxed) {
        let mut ready = ends.map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
        poll(&mut ready, PollTimeout::from(100u8)).unwrap();
        let ways = [(ends[0], ends[1]), (ends[1], ends[0])];
        for ((mut from, mut to), parts) in ways.into_iter().zip(&mut parts) {
            while let Ok(len) = from.read(&mut packet) {
                parts.push(packet[..len].to_vec());
                if !has_more(&packet[..len]) {
                    // One that is not up yet takes none.
                    parts.drain(..).rev().for_each(|part| drop(to.write(&part)));
                }
            }
        }
    }
}

/// Whether more parts of the same packet are behind it (RFC 791 §3.1, RFC 8200 §4.5).
fn has_more(packet: &[u8]) -> bool {
    match packet[0] >> 4 {
        4 => packet[6] & 0x20 != 0,
        _ => packet[6] == 44 && packet[43] & 1 != 0,
    }
}

#[test]
fn a_tunnel_without_a_link_layer_leads_out() {
    let lab = lab();
    let (node, outside) = (lab.node(1), lab.outside().place());
    let devices = [tun(node.place(), "tun0"), tun(outside, "tun0")];
    let stop = AtomicBool::new(false);
    let way = Way::new("tun0", 9);
    way.set_up(node, outside);
    for place in [node.place(), outside] {
        super::kit::ip(place, &[format!("link set tun0 mtu {MTU}")]);
    }
    leave_by(node, &[&way]);
    thread::scope(|scope| {
        scope.spawn(|| pump([&devices[0], &devices[1]], &stop));
        // Also when an assertion fails.
        let _raise = Raise(&stop);
        let pod = start(node, &["eth0", "tun0"], &[]);
        for family in [0, 1] {
            let address = lab.outside_addresses().unwrap()[family];
            works(&pod, outside, address, way.near[family]);
        }
    });
}
