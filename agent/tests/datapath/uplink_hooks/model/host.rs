//! The node's own flows: its processes' ports are no pod's, and what answers them is theirs.

use super::*;
use socket2::{Domain, Protocol, Socket, Type};
use std::net::SocketAddr;

/// Gives the node its address, and the ends outside a link that nobody is behind.
pub fn prepare() {
    let place = kit::this_place();
    for command in [
        "link add far0 type veth peer name far1",
        // Nobody is asked for hardware addresses: connections wait for an answer for as long as the test takes.
        "link set far0 up arp off",
        "link set far1 up",
        &format!("addr add {NODE_IP}/32 dev far0"),
        &format!("addr add {NODE_IP6}/128 dev far0"),
        "route add 203.0.113.0/24 dev far0",
        "route add 2001:db8:f::/64 dev far0",
    ] {
        kit::ip(&place, command);
    }
}

/// A socket of the node that speaks with a remote end; one of TCP waits for its first answer.
fn connect(key: &Key) -> Socket {
    let (proto, own, port, far, far_port) = *key;
    let (kind, protocol) = match proto {
        TCP => (Type::STREAM, Protocol::TCP),
        _ => (Type::DGRAM, Protocol::UDP),
    };
    let (own, far) = (SocketAddr::new(own, port), SocketAddr::new(far, far_port));
    let socket = Socket::new(Domain::for_address(own), kind, Some(protocol)).unwrap();
    // Others have the port towards other ends.
    socket.set_reuse_address(true).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.bind(&own.into()).unwrap();
    match socket.connect(&far.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => {
            panic!("{own} to {far}: {error}")
        }
        _ => socket,
    }
}

impl Model<'_> {
    /// A packet of the node's: what its later parts, if it has any, have for their source.
    pub fn host_out(&mut self, key: Key, making: Making) -> Result<Option<IpAddr>, TestCaseError> {
        let (proto, node, port, far, far_port) = key;
        let begins = proto != TCP || making.flags == SYN;
        if has_sockets(proto) && !self.has_socket(&key) {
            if !begins {
                return Ok(None);
            }
            self.flows.entry(key).or_default().socket = Some(connect(&key));
        }
        let inside = making.first((node, port), (far, far_port));
        let (verdict, frame) = self.w.host_out(&inside);
        let unchanged = (PASS, World::frame(&inside));
        if let Some(record) = self.record(&key) {
            if !(proto == TCP && begins && record.is_closed()) {
                let given = record.port;
                return self.goes_on(key, making, given, (verdict, frame));
            }
            // What it had is nobody's from now on, sooner or later.
            self.left.insert((proto, far, far_port, record.port));
            self.end(&key);
        }
        if !begins {
            prop_assert_eq!((verdict, frame), unchanged);
            return Ok(None);
        }
        let is_taken = self.holder(&key, port).is_some() || self.is_left(&key, port);
        if !is_taken && has_sockets(proto) {
            prop_assert_eq!(&(verdict, frame), &unchanged);
            let last = (inside.bytes(), inside.bytes());
            let flow = self.flows.entry(key).or_default();
            flow.last = making.id.is_none().then_some(last);
            return Ok(None);
        }
        if verdict == DROP {
            prop_assert!(is_taken, "nobody had the port of {key:?}");
            self.nothing_is_free(&key)?;
            self.seen.portless_refused += usize::from(!has_ports(proto));
            return Ok(None);
        }
        let given = making.source_port(&frame);
        prop_assert!(is_taken || given == port, "{key:?} got {given}");
        if given != port {
            prop_assert!(PORTS.contains(&given), "{key:?} got {given}");
            self.count_luck(&key, given);
            self.seen.host_moved += 1;
        }
        self.takes(key, given)?;
        self.goes_on(key, making, given, (verdict, frame))
    }

    fn has_socket(&self, key: &Key) -> bool {
        self.flows
            .get(key)
            .is_some_and(|flow| flow.socket.is_some())
    }

    pub fn close(&mut self, at: usize) -> Result<(), TestCaseError> {
        let of_host: Vec<_> = self
            .flows
            .iter()
            .filter(|(_, flow)| flow.socket.is_some())
            .map(|(key, _)| *key)
            .collect();
        if let Some(at) = at.checked_rem(of_host.len()) {
            let key = of_host[at];
            self.closed.insert((key.0, key.3, key.4, key.2));
            self.flows.entry(key).or_default().socket = None;
            self.flows.retain(|_, flow| !flow.is_gone());
        }
        Ok(())
    }
}
