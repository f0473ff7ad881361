//! What outlives the agent, and what does not fit the next one.

mod kept;
mod layouts;
mod misfits;
mod overlay;
mod services;
mod uplinks;

use crate::{
    kit::{self, OUTSIDE, Outside, Pod},
    run::Programs,
};
use aya::{
    maps::{MapData, MapInfo},
    programs::links::{FdLink, PinnedLink},
};
use sinabro_agent::datapath::{self, AttachMode, Datapath, DatapathConfig, Level};
use sinabro_common::names;
use sinabro_netlink::{
    Conn, link,
    vxlan::{Vxlan, VxlanSettings},
};
use std::{
    collections::{BTreeMap, HashSet},
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

const MAPS: [&str; 26] = [
    "CONFIG",
    "ENDPOINTS",
    "POD_LINKS",
    "POD_COUNTERS",
    "v2/PEER_COUNTERS",
    "v2/NATIVE_COUNTERS",
    "v2/POD_PLACES",
    "v2/PEER_PLACES",
    "v2/NATIVE_PLACES",
    "DROPS",
    "v3/CONNECTIONS",
    "v2/ALIASES",
    "v2/FRAGMENTS",
    "v2/EARLY_FRAGMENTS",
    "v2/SHARES",
    "v2/LIMITS",
    "NON_MASQUERADE",
    "NODES",
    "POD_RANGES",
    "OVERLAY",
    "v2/UPLINKS",
    "HOST_PORTS",
    "v2/PORT_BITMAPS",
    "v2/RESERVED_PORTS",
    "LAYOUTS",
    "LAYOUT_FIELDS",
];

fn pin(name: &str) -> PathBuf {
    Path::new(names::BPF_DIR).join(name)
}

/// Kernel ids of every map.
fn maps() -> BTreeMap<&'static str, u32> {
    maps_but(&[])
}

/// The same of those that are there anyway.
fn maps_but(others: &[&str]) -> BTreeMap<&'static str, u32> {
    let those = MAPS.into_iter().filter(|name| !others.contains(name));
    those
        .map(|name| (name, MapInfo::from_pin(pin(name)).unwrap().id()))
        .collect()
}

/// Kernel id of every pinned link, and of its program.
fn links() -> BTreeMap<String, (u32, u32)> {
    fs::read_dir(pin(names::BPF_LINKS_DIR))
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let link: FdLink = PinnedLink::from_pin(entry.path()).unwrap().into();
            let info = link.info().unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, (info.id(), info.program_id()))
        })
        .collect()
}

fn load(attach: AttachMode) -> Datapath {
    Datapath::load(&DatapathConfig {
        attach,
        ..kit::config()
    })
    .unwrap()
}

/// Runs a test about links, where the kernel has such (tcx, Linux 6.6).
fn with_links(test: impl FnOnce() + Send) {
    if !kit::modes().contains(&AttachMode::Tcx) {
        println!("skipped: this kernel attaches by filters alone");
        return;
    }
    kit::fresh(test);
}

/// A connection that can be asked whether it still works.
struct Call {
    client: TcpStream,
    server: TcpStream,
}

impl Call {
    fn new(listener: TcpListener, client: TcpStream) -> Self {
        let (server, _) = listener.accept().unwrap();
        for stream in [&server, &client] {
            let timeout = Some(Duration::from_secs(10));
            stream.set_read_timeout(timeout).unwrap();
        }
        Self { client, server }
    }

    fn works(&mut self) {
        let mut got = [0; 4];
        self.client.write_all(b"ping").unwrap();
        self.server.read_exact(&mut got).unwrap();
        self.server.write_all(b"pong").unwrap();
        self.client.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"pong");
    }
}
