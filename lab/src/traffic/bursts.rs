//! Datagrams as QUIC's libraries send and take them: many by one call, for the kernel or a card to cut (UDP_SEGMENT), and many by
//! one, as they were put together on the way (UDP_GRO).
//!
//! Each has a number, from which all of its bytes follow: what is missing, comes twice, is cut otherwise or is damaged is named.

use super::{PATIENCE, any, bind, errors, path::Path, readable};
use crate::place::Place;
use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    cmsg_space,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg, setsockopt, sockopt,
    },
};
use std::{
    collections::BTreeSet,
    io::{IoSlice, IoSliceMut},
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    time::Instant,
};

/// The longest of UDP, and the most that one call may be cut into on every kernel (UDP_MAX_SEGMENTS).
const LONGEST: usize = 65_507;
const MOST: usize = 64;
/// Room for some bursts, with all that the kernel keeps beside a packet.
const BUFFER: usize = 8 << 20;
/// Of a datagram's number.
const NUMBER: usize = 8;

/// What one call sends.
#[derive(Clone, Copy, Debug)]
pub struct Burst {
    /// Bytes of each datagram; none: as many as a packet on the sender's way has room for.
    pub size: Option<usize>,
    /// How many, at most as many as there is room for.
    pub datagrams: usize,
    /// Bytes of one more at the end, if any.
    pub last: usize,
}

/// Of many sizes: as QUIC begins, as it goes on, the smallest, with an odd end and without, and of one datagram.
pub const ALL: [Burst; 7] = [
    burst(Some(1200), 10, 0),
    burst(Some(1200), 2, 700),
    burst(None, MOST, 0),
    burst(None, 20, NUMBER + 1),
    burst(Some(101), MOST, 0),
    burst(Some(1200), 1, 0),
    burst(Some(999), 50, 998),
];

const fn burst(size: Option<usize>, datagrams: usize, last: usize) -> Burst {
    Burst {
        size,
        datagrams,
        last,
    }
}

/// What the ends of an exchange saw.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Whom the server took for the client.
    pub client: SocketAddr,
    /// Bursts that each of them sent,
    pub bursts: u64,
    /// and the datagrams that these were, of each.
    pub datagrams: u64,
    /// The most that the server and the client got by one call.
    pub at_once: [usize; 2],
}

/// Which of the ends of an exchange take what was put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// One datagram by a call: what is not cut yet is cut by the socket.
    Single,
    Gathered,
}

impl Take {
    pub const BOTH: [Self; 2] = [Self::Single, Self::Gathered];
}

/// Has a client send bursts, and a server answer each with one of its own.
pub fn exchange(path: &Path, bursts: &[Burst], take: Take) -> Result<Seen> {
    let open_and_talk = || -> Result<Seen> {
        let server = End::open(&path.to, path.listen(), take)?;
        let target = path.target(server.socket.local_addr()?);
        let client = End::open(&path.from, SocketAddr::new(any(target.ip()), 0), take)?;
        client.socket.connect(target)?;
        talk(&client, &server, bursts)
    };
    open_and_talk().with_context(|| format!("bursts, {}", path.name))
}

/// The same between a place and an address of another one, taken as they come. The client's address, as the server saw it.
pub fn seen(from: &Place, to: &Place, address: IpAddr) -> Result<IpAddr> {
    let name = format!("{} → {} {address}", from.name(), to.name());
    let path = Path::new(&name, from, to, address);
    Ok(exchange(&path, &ALL, Take::Gathered)?.client.ip())
}

fn talk(client: &End, server: &End, bursts: &[Burst]) -> Result<Seen> {
    let (mut number, mut answer) = (0, 1 << 32);
    let mut at_once = [0; 2];
    let mut seen = None;
    for burst in bursts {
        let sent = client.send(number, *burst).context("request")?;
        let got = server.take(number, &sent);
        let (from, most) = got.with_context(|| format!("request, {burst:?}"))?;
        ensure!(
            seen.is_none_or(|seen| seen == from),
            "{from} is {seen:?} no more"
        );
        seen = Some(from);
        at_once[0] = at_once[0].max(most);
        number += sent.len() as u64;
        if answer == 1 << 32 {
            server.socket.connect(from)?;
        }
        let sent = server.send(answer, *burst).context("answer")?;
        let got = client.take(answer, &sent);
        let (_, most) = got.with_context(|| format!("answer, {burst:?}"))?;
        at_once[1] = at_once[1].max(most);
        answer += sent.len() as u64;
    }
    for end in [client, server] {
        end.has_no_more()?;
    }
    Ok(Seen {
        client: seen.context("no bursts")?,
        bursts: bursts.len() as u64,
        datagrams: number,
        at_once,
    })
}

/// A socket of one end.
pub struct End {
    socket: UdpSocket,
    take: Take,
}

impl End {
    pub fn open(place: &Place, address: SocketAddr, take: Take) -> Result<Self> {
        let socket = place
            .run(|| bind::udp(address))
            .with_context(|| format!("{} cannot bind UDP {address}", place.name()))?;
        setsockopt(&socket, sockopt::RcvBufForce, &BUFFER).context("cannot make room")?;
        let gathers = take == Take::Gathered;
        setsockopt(&socket, sockopt::UdpGroSegment, &gathers).context("cannot ask for UDP_GRO")?;
        Ok(Self { socket, take })
    }

    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Sends a burst to who is connected, and says how long each of its datagrams is. Their numbers go on from the first.
    pub fn send(&self, first: u64, burst: Burst) -> Result<Vec<usize>> {
        let size = match burst.size {
            Some(size) => size,
            None => self.full()?,
        };
        let mut lens = vec![size; burst.datagrams.min((LONGEST - burst.last) / size)];
        lens.extend((burst.last != 0).then_some(burst.last));
        ensure!(lens.len() <= MOST, "{} datagrams are too many", lens.len());
        let numbered = lens.iter().zip(first..);
        let bytes: Vec<u8> = numbered
            .flat_map(|(len, number)| datagram(number, *len))
            .collect();
        let (parts, segment) = ([IoSlice::new(&bytes)], size as u16);
        let cut = [ControlMessage::UdpGsoSegments(&segment)];
        let fd = self.socket.as_raw_fd();
        let sent = sendmsg::<()>(fd, &parts, &cut, MsgFlags::empty(), None);
        let sent = sent.with_context(|| format!("cannot send {burst:?}"))?;
        ensure!(
            sent == bytes.len(),
            "{sent} of {} bytes were sent",
            bytes.len()
        );
        Ok(lens)
    }

    /// The most that one packet has room for, as the socket knows its way.
    pub fn full(&self) -> Result<usize> {
        let to = self.socket.peer_addr()?;
        let headers = if to.is_ipv4() { 20 + 8 } else { 40 + 8 };
        Ok(errors::path_mtu(&self.socket, to.is_ipv4())? as usize - headers)
    }

    /// Gets the datagrams of a burst, each once and whole. From whom, and the most of them that came at once.
    pub fn take(&self, first: u64, lens: &[usize]) -> Result<(SocketAddr, usize)> {
        let mut left: BTreeSet<u64> = (first..first + lens.len() as u64).collect();
        let (mut from, mut most) = (None, 0);
        let deadline = Instant::now() + PATIENCE;
        while !left.is_empty() {
            let there = readable(&self.socket, deadline)?;
            ensure!(
                there,
                "{} of {} did not come: {left:?}",
                left.len(),
                lens.len()
            );
            let (peer, datagrams) = self.receive()?;
            most = most.max(datagrams.len());
            ensure!(
                from.is_none_or(|from| from == peer),
                "{peer}, after {from:?}"
            );
            from = Some(peer);
            for bytes in datagrams {
                let number = bytes
                    .first_chunk::<NUMBER>()
                    .context("a datagram without a number")?;
                let number = u64::from_be_bytes(*number);
                ensure!(
                    left.remove(&number),
                    "{number} was not expected, of {left:?}"
                );
                let len = lens[(number - first) as usize];
                ensure!(
                    bytes.len() == len,
                    "{number}: {} bytes of {len}",
                    bytes.len()
                );
                ensure!(bytes == datagram(number, len), "{number} is damaged");
            }
        }
        Ok((from.context("an empty burst")?, most))
    }

    /// What one call gives.
    fn receive(&self) -> Result<(SocketAddr, Vec<Vec<u8>>)> {
        let mut buffer = vec![0; 1 << 16];
        let mut space = cmsg_space!(i32);
        let (len, from, size) = {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let fd = self.socket.as_raw_fd();
            let message = recvmsg::<nix::sys::socket::SockaddrStorage>(
                fd,
                &mut parts,
                Some(&mut space),
                MsgFlags::empty(),
            )
            .context("cannot receive")?;
            let size = message.cmsgs()?.find_map(|part| match part {
                ControlMessageOwned::UdpGroSegments(size) => Some(size as usize),
                _ => None,
            });
            let from = message.address.context("from nobody")?;
            let from = match (from.as_sockaddr_in(), from.as_sockaddr_in6()) {
                (Some(v4), _) => SocketAddr::V4((*v4).into()),
                (_, Some(v6)) => SocketAddr::V6((*v6).into()),
                _ => bail!("from no address of IP's"),
            };
            (message.bytes, from, size)
        };
        ensure!(
            size.is_none() || self.take == Take::Gathered,
            "gathered, unasked"
        );
        let size = size.unwrap_or(len).max(1);
        let datagrams = buffer[..len].chunks(size).map(<[u8]>::to_vec);
        Ok((from, datagrams.collect()))
    }

    fn has_no_more(&self) -> Result<()> {
        match readable(&self.socket, Instant::now())? {
            true => bail!("there is more: {:?}", self.receive()?),
            false => Ok(()),
        }
    }
}

/// The datagram of a number: bytes that no other has (splitmix64, of Steele, Lea and Flood, 2014).
fn datagram(number: u64, len: usize) -> Vec<u8> {
    let words = (1..).map(|word: u64| {
        let mut z = number.wrapping_add(word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_be_bytes()
    });
    let bytes = number.to_be_bytes().into_iter().chain(words.flatten());
    bytes.take(len).collect()
}
