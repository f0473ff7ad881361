//! Cables that carry frames as bytes, as real ones do: what the kernel notes beside a packet does not pass. Each end is a tap device, and a
//! thread reads from one and writes to the other.
//!
//! Between machines it is what is between network cards ([`Wire::to`]). With what a hypervisor writes before frames it is what is
//! between a virtual machine and its host, which leave checksums and cutting to each other ([`Tap::of_machine`]).

use crate::{
    Lab, Place,
    traffic::{offload, seat::cpu_set},
};
use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{sched_getcpu, sched_setaffinity},
    unistd::Pid,
};
use sinabro_netlink::bridge;
use socket2::{Domain, Socket, Type};
use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::OpenOptionsExt as _,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Bytes of `struct virtio_net_hdr` (linux/virtio_net.h).
const OF_HYPERVISOR: usize = 10;
/// Packets that wait to be read: more than a window of TCP's, so that none is lost.
const QUEUE: libc::c_int = 20_000;
/// linux/sockios.h.
const SIOCSIFTXQLEN: libc::Ioctl = 0x8943;
/// Nanoseconds that a packet waits for the next of its stream.
const HELD: u32 = 200_000;
/// The largest super-packet, and what is before it.
const ROOM: usize = 1 << 17;

/// A tap device, which is there as long as this lives.
#[derive(Debug)]
pub struct Tap {
    file: File,
    /// Bytes before each frame.
    before: usize,
}

impl Tap {
    /// One that sends frames as they are on a wire.
    pub fn new(place: &Place, name: &str) -> Result<Self> {
        Self::open(place, name, libc::IFF_TAP, 0)
    }

    /// One that sends packets without a header of a link's, as VPNs do.
    pub fn of_packets(place: &Place, name: &str) -> Result<Self> {
        Self::open(place, name, libc::IFF_TUN, 0)
    }

    /// One whose reader does what a hypervisor does: it is given super-packets of TCP, and packets without a checksum. Both ends of a wire
    /// have to be like that.
    pub fn of_machine(place: &Place, name: &str) -> Result<Self> {
        let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
        Self::open(place, name, libc::IFF_TAP | libc::IFF_VNET_HDR, offloads)
    }

    fn open(place: &Place, name: &str, flags: i32, offloads: u32) -> Result<Self> {
        let open = || -> Result<Self> {
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            let file = options
                .custom_flags(libc::O_NONBLOCK)
                .open("/dev/net/tun")?;
            // SAFETY: an ifreq is plain data, of which zero is a value.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            let to = request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1);
            to.zip(name.bytes()).for_each(|(to, from)| *to = from as _);
            let flags = libc::IFF_NO_PI | flags;
            request.ifr_ifru.ifru_flags = flags as libc::c_short;
            // SAFETY: reads and writes the structure alone.
            Errno::result(unsafe {
                libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request)
            })?;
            // SAFETY: takes a number.
            Errno::result(unsafe {
                libc::ioctl(
                    file.as_raw_fd(),
                    libc::TUNSETOFFLOAD,
                    offloads as libc::c_ulong,
                )
            })?;
            // ifr_qlen, a number as well.
            request.ifr_ifru.ifru_metric = QUEUE;
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
            // SAFETY: as above.
            Errno::result(unsafe {
                libc::ioctl(socket.as_raw_fd(), SIOCSIFTXQLEN, &raw mut request)
            })?;
            let before = match flags & libc::IFF_VNET_HDR {
                0 => 0,
                _ => OF_HYPERVISOR,
            };
            Ok(Self { file, before })
        };
        let made = place.run(open);
        made.with_context(|| format!("cannot make the tap device {name} of {}", place.name()))
    }
}

impl Tap {
    /// Bytes of a frame that is cut no more, its header counted; of a super-packet those of a segment, and of the shortest headers.
    fn uncut(&self, frame: &[u8]) -> usize {
        const HEADERS: usize = 14 + 20 + 20;
        match frame[..self.before] {
            // Flags, what is to be cut, length of headers, length of a segment.
            [_, kind, _, _, low, high, ..] if kind != 0 => {
                HEADERS + usize::from(u16::from_ne_bytes([low, high]))
            }
            _ => frame.len() - self.before,
        }
    }
}

/// Carries frames as long as it lives.
#[derive(Debug)]
pub struct Wire {
    largest: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    pub fn between(ends: [Tap; 2]) -> Result<Self> {
        let (largest, stop) = (Arc::default(), Arc::default());
        let carry = {
            let (largest, stop) = (Arc::clone(&largest), Arc::clone(&stop));
            move || carry(&ends, &largest, &stop)
        };
        let thread = thread::Builder::new().name("wire".into()).spawn(carry);
        Ok(Self {
            largest,
            stop,
            thread: Some(thread.context("cannot start a thread")?),
        })
    }

    /// Has all that a node sends and gets pass a wire before the underlay's bridge. What comes of one stream is put together again, as
    /// cards' drivers do (GRO).
    pub fn to(lab: &Lab, number: usize) -> Result<Self> {
        let router = lab.router().place();
        let (beside, port) = (format!("br{number}"), format!("to-n{number}"));
        router.conn()?.execute(bridge::create(&beside))?;
        let [near, far] = ["a", "b"].map(|end| format!("wire{number}{end}"));
        let ends = [Tap::new(router, &near)?, Tap::new(router, &far)?];
        for (link, bridge) in [(&near, "br0"), (&far, &*beside), (&port, &*beside)] {
            router.plug(link, bridge)?;
        }
        let wire = Self::between(ends)?;
        for link in [&beside, &near, &far] {
            router.set_up(link, &[])?;
        }
        // A veth pair does it with what its other end has cut.
        offload::cut_before(router, &port)?;
        let node = lab.node(number).place();
        offload::gather(node, "eth0")?;
        let wait = format!(
            "mount -t sysfs none /sys && echo {HELD} > /sys/class/net/eth0/gro_flush_timeout"
        );
        node.command(&["unshare", "--mount", "sh", "-c", &wait])?;
        Ok(wire)
    }

    /// Bytes of the largest frame since this was last asked, as it is or is to be on a wire, its header counted.
    pub fn largest(&self) -> usize {
        self.largest.swap(0, Ordering::Relaxed)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It says nothing, and a panic of its own has been printed.
            let _ = thread.join();
        }
    }
}

fn stay_on_one() -> Result<()> {
    Ok(sched_setaffinity(
        Pid::from_raw(0),
        &cpu_set(sched_getcpu()?)?,
    )?)
}

fn carry(ends: &[Tap; 2], largest: &AtomicUsize, stop: &AtomicBool) {
    // What another processor is given later may be handled before. Without it that is all that happens.
    let _ = stay_on_one();
    let mut frame = vec![0; ROOM];
    while !stop.load(Ordering::Relaxed) {
        let mut ready = [0, 1].map(|end| PollFd::new(ends[end].file.as_fd(), PollFlags::POLLIN));
        // Interrupted, or over: the flag says which.
        let _ = poll(&mut ready, PollTimeout::from(100u8));
        for [from, to] in [[0, 1], [1, 0]].map(|way| way.map(|end| &ends[end])) {
            while let Ok(len) = (&from.file).read(&mut frame) {
                largest.fetch_max(from.uncut(&frame[..len]), Ordering::Relaxed);
                // One that is not up yet takes none, and one that is full loses it, as a wire does.
                let _ = (&to.file).write(&frame[..len]);
            }
        }
    }
}
