//! The translator in plain Rust, and what it expects of the programs.

use super::*;

/// Cases that the packets came to.
#[derive(Debug, Default)]
pub struct Seen {
    /// Connections that got another port than their mapping's.
    pub apart: usize,
    /// Pods and processes of the node that another one's flow without ports was in the way of.
    pub portless_refused: usize,
    /// Flows of the node whose port was somebody else's.
    pub host_moved: usize,
    /// Pods that did not get a port that is free but for the node's process that has it.
    pub kept_off: usize,
    /// Parts that came before their first, and were sent behind it.
    pub waited: usize,
}

impl Seen {
    pub fn add(&mut self, other: &Self) {
        self.apart += other.apart;
        self.portless_refused += other.portless_refused;
        self.host_moved += other.host_moved;
        self.kept_off += other.kept_off;
        self.waited += other.waited;
    }
}

pub struct Model<'a> {
    pub w: &'a World,
    pub flows: BTreeMap<Key, Flow>,
    /// Whether UDP has endpoint-independent mappings,
    pub maps: bool,
    /// and those that there are: by pod and its port the one outside.
    pub mappings: BTreeMap<(IpAddr, u16), u16>,
    /// Ports of the node's connections that were begun again by another one: somebody may get them, or not yet.
    pub left: BTreeSet<(u8, IpAddr, u16, u16)>,
    /// Ports that sockets of the node had: a search for a free one may take them for theirs until the next sweep.
    pub closed: BTreeSet<(u8, IpAddr, u16, u16)>,
    /// Of the last packet in parts.
    pub id: u32,
    /// Connections that got a port of another mapping although others were left: ports are tried at random.
    pub unlucky: usize,
    pub seen: Seen,
}

impl<'a> Model<'a> {
    pub fn new(w: &'a World, maps: bool) -> Self {
        Self {
            w,
            flows: BTreeMap::new(),
            maps,
            mappings: BTreeMap::new(),
            left: BTreeSet::new(),
            closed: BTreeSet::new(),
            id: 0,
            unlucky: 0,
            seen: Seen::default(),
        }
    }

    pub fn far(end: End) -> IpAddr {
        match end.v6 {
            false => Ipv4Addr::new(203, 0, 113, end.host + 1).into(),
            true => Ipv6Addr::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, end.host.into()).into(),
        }
    }

    pub fn node(v6: bool) -> IpAddr {
        match v6 {
            false => NODE_IP,
            true => NODE_IP6.parse().unwrap(),
        }
    }

    pub fn is_of_node(key: &Key) -> bool {
        key.1 == Self::node(key.1.is_ipv6())
    }

    pub fn key(&self, end: End) -> Key {
        let own = match (end.who, end.v6) {
            (Who::Node, v6) => Self::node(v6),
            (Who::Pod, false) => self.w.a.v4,
            (Who::Pod, true) => self.w.a.v6,
            (Who::SecondPod, false) => self.w.b.v4,
            (Who::SecondPod, true) => self.w.b.v6,
        };
        (end.proto, own, end.port, Self::far(end), end.host_port)
    }

    pub fn step(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Out(end, flags) => self
                .out(self.key(end), Making::request(end.proto, flags))
                .map(drop),
            Op::OutInParts(end, flags, order) => self.out_in_parts(self.key(end), flags, &order),
            Op::Answer(at, flags) => self.answer(at, flags),
            Op::AnswersInParts(at, flags, order) => self.answers_in_parts(at, flags, &order),
            Op::Stray(end, port) => self.stray(end, port),
            Op::Come(end) => self.come(end),
            Op::ComeBack(end, order) => self.come_back(end, &order),
            Op::Refused(at, by_router) => self.refused(at, by_router),
            Op::Close(at) => self.close(at),
            Op::Away => {
                self.w.sweep_at(AWAY);
                for (key, flow) in &mut self.flows {
                    if flow
                        .record
                        .as_ref()
                        .is_some_and(|record| !record.stays(key.0))
                    {
                        flow.forget();
                    }
                }
                self.flows.retain(|_, flow| !flow.is_gone());
                self.mappings.clear();
                self.closed.clear();
                Ok(())
            }
            Op::Turn => {
                self.maps = !self.maps;
                set_config(self.w, self.maps);
                Ok(())
            }
        }
    }

    pub fn record(&self, key: &Key) -> Option<&Record> {
        self.flows.get(key)?.record.as_ref()
    }

    /// Whose record has a port outside towards that end.
    pub fn holder(&self, key: &Key, port: u16) -> Option<Key> {
        let has = |(other, flow): &(&Key, &Flow)| {
            (other.0, other.3, other.4) == (key.0, key.3, key.4)
                && flow
                    .record
                    .as_ref()
                    .is_some_and(|record| record.port == port)
        };
        self.flows.iter().find(has).map(|(other, _)| *other)
    }

    /// Whether a process of the node has a port towards that end.
    fn is_of_process(&self, key: &Key, port: u16) -> bool {
        let node = Self::node(key.1.is_ipv6());
        let flow = self.flows.get(&(key.0, node, port, key.3, key.4));
        flow.is_some_and(|flow| flow.socket.is_some())
    }

    pub fn is_left(&self, key: &Key, port: u16) -> bool {
        self.left.contains(&(key.0, key.3, key.4, port))
    }

    fn is_taken(&self, key: &Key, port: u16) -> bool {
        self.holder(key, port).is_some() || self.is_of_process(key, port) || self.is_left(key, port)
    }

    /// Whether a connection may get a port that is no mapping's of its own.
    pub fn is_free(&self, key: &Key, port: u16) -> bool {
        let v6 = key.1.is_ipv6();
        let mut mapped = self.mappings.iter().filter(|(of, _)| of.0.is_ipv6() == v6);
        let is_mapped = self.maps && key.0 == UDP && mapped.any(|(_, mapped)| *mapped == port);
        !self.is_taken(key, port) && !is_mapped
    }

    /// A port that whoever searches for one finds.
    fn some_free(&self, key: &Key) -> Option<u16> {
        let is_seen = |port: &u16| !self.closed.contains(&(key.0, key.3, key.4, *port));
        let mut seen = PORTS.filter(is_seen);
        seen.find(|port| self.is_free(key, *port))
    }

    pub fn count_luck(&mut self, key: &Key, given: u16) {
        let is_left = self.some_free(key).is_some();
        let is_unlucky = self.maps && key.0 == UDP && is_left && !self.is_free(key, given);
        self.unlucky += usize::from(is_unlucky);
    }

    /// Who is refused could get no port.
    pub fn nothing_is_free(&self, key: &Key) -> Result<(), TestCaseError> {
        if has_ports(key.0) {
            let is_own_free = PORTS.contains(&key.2) && self.is_free(key, key.2);
            prop_assert!(!is_own_free, "{key:?} was refused");
            prop_assert_eq!(self.some_free(key), None, "for {:?}", key);
        } else {
            prop_assert!(self.holder(key, 0).is_some(), "for {key:?}");
        }
        Ok(())
    }

    /// Nothing is remembered of a flow any more.
    pub fn end(&mut self, key: &Key) {
        if let Some(flow) = self.flows.get_mut(key) {
            flow.forget();
        }
        self.flows.retain(|_, flow| !flow.is_gone());
    }

    /// A flow gets a port, which another one has had at most.
    pub fn takes(&mut self, key: Key, port: u16) -> Result<(), TestCaseError> {
        match self.holder(&key, port) {
            Some(other) if other != key => {
                prop_assert!(self.flows[&other].is_closed(), "{other:?} has {port}");
                self.end(&other);
            }
            _ => {}
        }
        self.left.remove(&(key.0, key.3, key.4, port));
        self.flows.entry(key).or_default().record = Some(Record::new(port));
        Ok(())
    }

    /// A packet of a flow that has this port outside: what later parts have for their source.
    pub fn goes_on(
        &mut self,
        key: Key,
        making: Making,
        port: u16,
        got: (i32, Vec<u8>),
    ) -> Result<Option<IpAddr>, TestCaseError> {
        let (_, own, own_port, far, far_port) = key;
        let node = Self::node(own.is_ipv6());
        let flow = self.flows.entry(key).or_default();
        if let Some(record) = &mut flow.record {
            record.client.add(&mut record.server, making.flags);
        }
        if making.keeps_port() && port != own_port {
            prop_assert_eq!(got.0, DROP);
            return Ok(Some(node));
        }
        let outside = making.first((node, port), (far, far_port));
        prop_assert_eq!(got, (PASS, World::frame(&outside)));
        if making.id.is_none() {
            let inside = making.first((own, own_port), (far, far_port));
            flow.last = Some((inside.bytes(), outside.bytes()));
        }
        Ok(Some(node))
    }

    /// A packet, or the first part of one, of a pod or the node: what its later parts have for their source, if that is
    /// noted.
    pub fn out(&mut self, key: Key, making: Making) -> Result<Option<IpAddr>, TestCaseError> {
        if Self::is_of_node(&key) {
            return self.host_out(key, making);
        }
        let (proto, pod, port, far, far_port) = key;
        let inside = making.first((pod, port), (far, far_port));
        let (verdict, frame) = self.w.out(&inside);
        let begins = proto != TCP || making.flags == SYN;
        let known = self
            .record(&key)
            .map(|record| (record.port, record.is_closed()));
        if proto == TCP && known.is_none() && matches!(making.flags, RST | 0x12) {
            prop_assert_eq!((verdict, frame), (PASS, World::frame(&inside)));
            return Ok(Some(pod));
        }
        let renewed = proto == TCP && begins && known.is_some_and(|(_, is_closed)| is_closed);
        if let Some((given, _)) = known.filter(|_| !renewed) {
            return self.goes_on(key, making, given, (verdict, frame));
        }
        let maps = self.maps && proto == UDP;
        let mapped = self.mappings.get(&(pod, port)).copied();
        let mapped = mapped.filter(|_| maps);
        let has_mapped = mapped.filter(|port| !self.is_taken(&key, *port));
        if verdict == DROP {
            prop_assert_eq!(has_mapped, None, "for {:?}", key);
            self.nothing_is_free(&key)?;
            self.end(&key);
            self.seen.portless_refused += usize::from(!has_ports(proto));
            return Ok(None);
        }
        let given = making.source_port(&frame);
        let mut starts = false;
        match known {
            // Closed and begun again, it may keep what it had.
            Some((port, _)) if given == port => {}
            _ if has_mapped.is_some() => prop_assert_eq!(Some(given), has_mapped),
            _ if !has_ports(proto) => {}
            _ => {
                prop_assert!(PORTS.contains(&given));
                prop_assert!(!self.is_of_process(&key, given), "the node has {given}");
                let is_free = self.is_free(&key, given);
                self.count_luck(&key, given);
                starts = mapped.is_none() && is_free;
                if PORTS.contains(&port) && self.is_free(&key, port) {
                    prop_assert_eq!(given, port, "its own is free");
                }
                let is_in_way = self.is_of_process(&key, port) && self.holder(&key, port).is_none();
                self.seen.kept_off += usize::from(PORTS.contains(&port) && is_in_way);
            }
        }
        self.takes(key, given)?;
        if maps {
            self.seen.apart += usize::from(mapped.is_some_and(|mapped| mapped != given));
            if starts {
                self.mappings.insert((pod, port), given);
            }
        }
        self.goes_on(key, making, given, (verdict, frame))
    }

    pub fn some(&self, at: usize) -> Option<Key> {
        let at = at.checked_rem(self.flows.len())?;
        self.flows.keys().nth(at).copied()
    }

    /// The port outside of a flow that can be answered: one of the node's without a record has its own.
    pub fn answered(&self, key: &Key) -> Option<u16> {
        match self.record(key) {
            Some(record) => Some(record.port),
            // Somebody else's at the moment, who had it before.
            None if self.holder(key, key.2).is_some() || self.is_left(key, key.2) => None,
            None => Some(key.2),
        }
    }

    pub fn notes_answer(&mut self, key: &Key, flags: u8) {
        let flow = self.flows.get_mut(key);
        if let Some(record) = flow.and_then(|flow| flow.record.as_mut()) {
            record.server.add(&mut record.client, flags);
        }
    }

    fn answer(&mut self, at: usize, flags: u8) -> Result<(), TestCaseError> {
        let Some(key) = self.some(at) else {
            return Ok(());
        };
        let Some(outside) = self.answered(&key) else {
            return Ok(());
        };
        let (proto, own, port, far, far_port) = key;
        let node = Self::node(own.is_ipv6());
        let make = |to| Making::answer(proto, flags).first((far, far_port), to);
        let (verdict, frame) = self.w.come(&make((node, outside)));
        prop_assert_eq!((verdict, frame), (PASS, World::frame(&make((own, port)))));
        self.notes_answer(&key, flags);
        Ok(())
    }

    /// Nobody's, unless somebody has that port.
    fn stray(&mut self, end: End, port: u16) -> Result<(), TestCaseError> {
        let port = if has_ports(end.proto) { port } else { 0 };
        if self.is_taken(&self.key(end), port) {
            return Ok(());
        }
        let (from, to) = ((Self::far(end), end.host_port), (Self::node(end.v6), port));
        let packet = Making::answer(end.proto, SYN).first(from, to);
        prop_assert_eq!(self.w.come(&packet), (PASS, World::frame(&packet)));
        Ok(())
    }

    pub fn come(&mut self, end: End) -> Result<(), TestCaseError> {
        let (proto, pod, port, far, far_port) = self.key(end.of_server());
        let packet = Making::request(proto, SYN).first((far, far_port), (pod, port));
        prop_assert_eq!(self.w.come(&packet), (PASS, World::frame(&packet)));
        Ok(())
    }

    fn refused(&mut self, at: usize, by_router: bool) -> Result<(), TestCaseError> {
        let Some(key) = self.some(at) else {
            return Ok(());
        };
        let (_, own, _, far, _) = key;
        let (Some((inside, outside)), Some(_)) = (&self.flows[&key].last, self.answered(&key))
        else {
            return Ok(());
        };
        let router: IpAddr = match own {
            IpAddr::V4(_) => Ipv4Addr::new(203, 0, 113, 78).into(),
            IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 77).into(),
        };
        let (error, from) = match by_router {
            true => (IcmpError::TooBig(1300), router),
            false => (IcmpError::NoPort, far),
        };
        let node = Self::node(own.is_ipv6());
        let (verdict, frame) = self.w.come(&icmp_error(from, node, error, outside));
        prop_assert_eq!(verdict, PASS);
        let mut seen = see_error(&frame);
        prop_assert_eq!((seen.src, seen.dst), (from, own));
        if key.0 == SCTP {
            // What is quoted of a packet has its checksum as it was outside.
            let header = if own.is_ipv4() { 20 } else { 40 };
            let at = header + 8;
            seen.quoted[at..at + 4].copy_from_slice(&inside[at..at + 4]);
        }
        prop_assert_eq!(&seen.quoted, inside);
        Ok(())
    }
}
