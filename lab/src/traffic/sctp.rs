//! An SCTP association (RFC 9260), where the kernel has it.

use super::{PATIENCE, any};
use crate::place::Place;
use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    thread,
};

/// IANA's protocol number.
const SCTP: i32 = 132;
const SAID: &[u8] = b"over SCTP";

/// Sends some bytes over an association and has them come back.
pub fn exchange(from: &Place, to: &Place, address: IpAddr) -> Result<()> {
    let what = || format!("SCTP, {} → {} {address}", from.name(), to.name());
    associate(from, to, address).with_context(what)
}

fn associate(from: &Place, to: &Place, address: IpAddr) -> Result<()> {
    let listener = to.run(|| {
        let listener = socket(address)?;
        listener.bind(&SockAddr::from(SocketAddr::new(any(address), 0)))?;
        listener.listen(1)?;
        Ok(listener)
    })?;
    let port = listener
        .local_addr()?
        .as_socket()
        .context("no port")?
        .port();
    thread::scope(|scope| {
        let server = scope.spawn(|| -> Result<()> {
            let (mut stream, _) = listener.accept()?;
            let mut heard = [0; SAID.len()];
            stream.read_exact(&mut heard)?;
            Ok(stream.write_all(&heard)?)
        });
        let heard = from.run(|| {
            let mut stream = socket(address)?;
            stream.connect_timeout(&SocketAddr::new(address, port).into(), PATIENCE)?;
            stream.write_all(SAID)?;
            let mut heard = [0; SAID.len()];
            stream.read_exact(&mut heard)?;
            Ok(heard)
        });
        // Accepting gives up by itself if nobody came.
        let served = server
            .join()
            .map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        ensure!(heard? == SAID, "other bytes came back");
        served
    })
}

fn socket(like: IpAddr) -> Result<Socket> {
    let domain = match like {
        IpAddr::V4(_) => Domain::IPV4,
        IpAddr::V6(_) => Domain::IPV6,
    };
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::from(SCTP)))
        .context("the kernel has no SCTP")?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    Ok(socket)
}
