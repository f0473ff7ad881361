//! ICMP errors as a socket hears of them: by its error queue (IP_RECVERR, ip(7); IPV6_RECVERR, ipv6(7)).
//!
//! The kernel gives an error to the socket whose packet it quotes: so one that arrives was right inside,
//! too.

use super::{PATIENCE, any, readable};
use crate::place::Place;
use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    sys::socket::{ControlMessageOwned, MsgFlags, getsockopt, recv, recvmsg, setsockopt, sockopt},
};
use std::{
    io::IoSliceMut,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsFd, AsRawFd as _},
    time::Instant,
};

/// An error, and who raised it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    pub from: IpAddr,
    /// Type and code as in the message.
    pub kind: u8,
    pub code: u8,
    /// The next link's MTU, of those that say it.
    pub mtu: u32,
    /// Of the packet that it is about, what lies behind the headers that the socket's kind has.
    pub quoted: Vec<u8>,
}

/// What comes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Error(Heard),
    Data(Vec<u8>),
}

impl Heard {
    /// Time exceeded in transit (RFC 792, RFC 4443 §3.3).
    pub fn is_of_a_router(&self) -> bool {
        let kind = if self.from.is_ipv4() { 11 } else { 3 };
        (self.kind, self.code) == (kind, 0)
    }

    /// Port unreachable (RFC 792, RFC 4443 §3.1).
    pub fn is_closed_port(&self) -> bool {
        let kind = if self.from.is_ipv4() { (3, 3) } else { (1, 4) };
        (self.kind, self.code) == kind
    }

    /// Fragmentation needed, or packet too big (RFC 1191 §4, RFC 4443 §3.2).
    pub fn is_too_big(&self) -> bool {
        let kind = if self.from.is_ipv4() { (3, 4) } else { (2, 0) };
        (self.kind, self.code) == kind
    }
}

/// Has a socket keep errors.
pub fn keep(socket: &impl AsFd, v4: bool) -> Result<()> {
    let set = match v4 {
        true => setsockopt(socket, sockopt::Ipv4RecvErr, &true),
        false => setsockopt(socket, sockopt::Ipv6RecvErr, &true),
    };
    set.context("cannot have errors kept")
}

/// The next error or packet that a socket gets before the deadline.
pub fn answer(socket: &impl AsFd, deadline: Instant) -> Result<Option<Answer>> {
    while readable(socket, deadline)? {
        if let Some(error) = pending(socket)? {
            return Ok(Some(Answer::Error(error)));
        }
        let mut buffer = vec![0; 1 << 16];
        match recv(
            socket.as_fd().as_raw_fd(),
            &mut buffer,
            MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(len) => {
                buffer.truncate(len);
                return Ok(Some(Answer::Data(buffer)));
            }
            // An error that came meanwhile: it is in the queue.
            Err(Errno::EAGAIN | Errno::ECONNREFUSED | Errno::EHOSTUNREACH | Errno::EMSGSIZE) => {}
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
    Ok(None)
}

/// The next error before the deadline; packets are read away.
pub fn error(socket: &impl AsFd, deadline: Instant) -> Result<Heard> {
    loop {
        match answer(socket, deadline)? {
            Some(Answer::Error(heard)) => return Ok(heard),
            Some(Answer::Data(_)) => {}
            None => bail!("no ICMP error came"),
        }
    }
}

/// The first error in the queue.
pub fn pending(socket: &impl AsFd) -> Result<Option<Heard>> {
    let mut quoted = vec![0; 1 << 16];
    let mut space = nix::cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
    let mut parts = [IoSliceMut::new(&mut quoted)];
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(
        socket.as_fd().as_raw_fd(),
        &mut parts,
        Some(&mut space),
        flags,
    );
    let message = match message {
        Ok(message) => message,
        Err(Errno::EAGAIN) => return Ok(None),
        Err(error) => return Err(error).context("cannot read the error queue"),
    };
    let mut found = None;
    for part in message.cmsgs()? {
        let (error, from): (_, Option<IpAddr>) = match part {
            ControlMessageOwned::Ipv4RecvErr(error, from) => {
                let from = from.map(|from| Ipv4Addr::from(u32::from_be(from.sin_addr.s_addr)));
                (error, from.map(Into::into))
            }
            ControlMessageOwned::Ipv6RecvErr(error, from) => {
                let from = from.map(|from| Ipv6Addr::from(from.sin6_addr.s6_addr));
                (error, from.map(Into::into))
            }
            _ => continue,
        };
        found = Some((error, from));
    }
    let len = message.bytes;
    let (error, from) = found.context("an error without its description")?;
    // What the sender's own kernel refuses has no other end.
    let from = from.with_context(|| {
        let errno = Errno::from_raw(error.ee_errno as i32);
        format!("an error of the own kernel's: {errno}")
    })?;
    quoted.truncate(len);
    Ok(Some(Heard {
        from,
        kind: error.ee_type,
        code: error.ee_code,
        mtu: error.ee_info,
        quoted,
    }))
}

/// What a connected socket takes for the MTU of its way (IP_MTU, ip(7); IPV6_MTU, ipv6(7)).
pub fn path_mtu(socket: &impl AsFd, v4: bool) -> Result<u32> {
    let mtu = match v4 {
        true => getsockopt(socket, sockopt::IpMtu),
        // nix knows it for IPv4 alone.
        false => return path_mtu_v6(socket),
    };
    Ok(mtu.context("cannot ask for the path MTU")? as u32)
}

fn path_mtu_v6(socket: &impl AsFd) -> Result<u32> {
    let mut mtu: libc::c_int = 0;
    let mut len = size_of_val(&mtu) as libc::socklen_t;
    // SAFETY: the option gives an int, for which there is room.
    Errno::result(unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU,
            (&raw mut mtu).cast(),
            &raw mut len,
        )
    })
    .context("cannot ask for the path MTU")?;
    Ok(mtu as u32)
}
/// What a socket that sends something to a port where nothing listens hears of it.
pub fn of_closed_port(from: &Place, target: SocketAddr, said: &[u8]) -> Result<Heard> {
    let ask = || {
        let socket = UdpSocket::bind((any(target.ip()), 0))?;
        socket.connect(target)?;
        keep(&socket, target.is_ipv4())?;
        socket.send(said)?;
        error(&socket, Instant::now() + PATIENCE)
    };
    from.run(ask)
        .with_context(|| format!("{} → {target}, where nothing listens", from.name()))
}
