//! An SCTP association (RFC 9260), where the kernel has it.

use super::{PATIENCE, any, bind};
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
    exchange_by(&[from], 0, to, address).map(|_| ())
}

/// The same over associations that are all there at the same time, each from the same port of a place of its own (zero:
/// any), and whom the other end takes them for.
pub fn exchange_by(
    from: &[&Place],
    port: u16,
    to: &Place,
    address: IpAddr,
) -> Result<Vec<SocketAddr>> {
    let what = || {
        let names: Vec<_> = from.iter().map(|from| from.name()).collect();
        format!("SCTP, {} → {} {address}", names.join(" and "), to.name())
    };
    associate(from, port, to, address).with_context(what)
}

fn associate(
    from: &[&Place],
    from_port: u16,
    to: &Place,
    address: IpAddr,
) -> Result<Vec<SocketAddr>> {
    let listener = to.run(|| {
        let listener = socket(address)?;
        listener.bind(&SockAddr::from(SocketAddr::new(any(address), 0)))?;
        listener.listen(16)?;
        Ok(listener)
    })?;
    let local = listener.local_addr()?.as_socket();
    let port = local.context("no port")?.port();
    thread::scope(|scope| {
        let server = scope.spawn(|| -> Result<Vec<SocketAddr>> {
            let mut streams = Vec::new();
            for _ in from {
                streams.push(listener.accept()?);
            }
            for (stream, _) in &mut streams {
                let mut heard = [0; SAID.len()];
                stream.read_exact(&mut heard)?;
                stream.write_all(&heard)?;
            }
            let peers = streams.iter().map(|(_, peer)| peer.as_socket());
            peers.map(|peer| peer.context("no address")).collect()
        });
        let heard = || -> Result<()> {
            let mut streams = Vec::new();
            for from in from {
                streams.push(from.run(|| {
                    let stream = socket(address)?;
                    bind::freed(|| {
                        stream.bind(&SockAddr::from(SocketAddr::new(any(address), from_port)))
                    })?;
                    stream.connect_timeout(&SocketAddr::new(address, port).into(), PATIENCE)?;
                    Ok(stream)
                })?);
            }
            for stream in &mut streams {
                stream.write_all(SAID)?;
                let mut heard = [0; SAID.len()];
                stream.read_exact(&mut heard)?;
                ensure!(heard == SAID, "other bytes came back");
            }
            Ok(())
        };
        let heard = heard();
        // Accepting gives up by itself if nobody came.
        let served = server
            .join()
            .map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        heard.and(served)
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
