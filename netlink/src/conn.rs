//! One NETLINK_ROUTE socket in one network namespace.
//!
//! - Many requests go to the kernel in one system call. It works them off within that call, in
//!   order, and has queued every answer by the time the call returns.
//! - Answers are matched to requests by sequence number; a late one of an earlier request is
//!   skipped.
//! - A dump during which the tables changed (NLM_F_DUMP_INTR) is begun again, a few times.
//! - An answer may have any size: it is measured before it is read.

use crate::wire::{self, Ack, Garbage, HEADER, Message};
use crate::{Error, NetNs, Result};
use netlink_packet_core::Emitable;
use netlink_sys::{
    Socket, SocketAddr,
    protocols::{
        NETLINK_GENERIC, NETLINK_NETFILTER, NETLINK_ROUTE, NETLINK_SOCK_DIAG, NETLINK_XFRM,
    },
};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt::ReceiveTimeout};
use nix::sys::time::TimeVal;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

/// The kernel has answered before the request's system call returns; this only keeps a kernel
/// that never answers from holding the caller for ever.
const ANSWER_TIMEOUT_SECONDS: i64 = 10;

const DUMP_TRIES: usize = 8;

/// Requests per system call: their answers have to fit the socket's receive buffer (208 KiB by
/// default, some 1 KiB each), else the kernel drops them.
const BATCH: usize = 64;

const ACK: u16 = libc::NLM_F_ACK as u16;
const DUMP: u16 = libc::NLM_F_DUMP as u16;
pub(crate) const CREATE: u16 = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
pub(crate) const REPLACE: u16 = (libc::NLM_F_CREATE | libc::NLM_F_REPLACE) as u16;
pub(crate) const APPEND: u16 = (libc::NLM_F_CREATE | libc::NLM_F_APPEND) as u16;

/// A change to make, ready to be sent. Made by the nouns' verbs, executed by a [`Conn`].
///
/// One that can not be right, such as a link name that is too long, is made too; executing it
/// gives the error.
#[must_use = "a request does nothing until a Conn executes it"]
#[derive(Debug)]
pub struct Request {
    what: String,
    kind: u16,
    flags: u16,
    body: std::result::Result<Vec<u8>, Error>,
    /// Kept open until the kernel has seen its number in the message.
    fd: Option<Arc<OwnedFd>>,
}

impl Request {
    /// A request that the kernel acknowledges.
    pub(crate) fn new(what: String, kind: u16, flags: u16, body: &impl Emitable) -> Request {
        Request::with_flags(what, kind, flags | ACK, body)
    }

    /// A request that the kernel answers with an object.
    pub(crate) fn get(what: String, kind: u16, body: &impl Emitable) -> Request {
        Request::with_flags(what, kind, 0, body)
    }

    fn with_flags(what: String, kind: u16, flags: u16, body: &impl Emitable) -> Request {
        let mut bytes = vec![0; body.buffer_len()];
        body.emit(&mut bytes);
        Request {
            what,
            kind,
            flags: flags | libc::NLM_F_REQUEST as u16,
            body: Ok(bytes),
            fd: None,
        }
    }

    pub(crate) fn wrong(what: String, error: Error) -> Request {
        Request {
            what,
            kind: 0,
            flags: 0,
            body: Err(error),
            fd: None,
        }
    }

    pub(crate) fn holding(mut self, fd: Arc<OwnedFd>) -> Request {
        self.fd = Some(fd);
        self
    }

    #[cfg(test)]
    pub(crate) fn body_for_test(&self) -> &[u8] {
        self.body.as_deref().expect("a request that can be sent")
    }

    /// What it attempts, such as `add route 10.0.0.0/24 dev #3`.
    pub fn what(&self) -> &str {
        &self.what
    }
}

fn emit(kind: u16, flags: u16, seq: u32, body: &[u8], out: &mut Vec<u8>) {
    let length = HEADER + body.len();
    out.extend_from_slice(&(length as u32).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(&flags.to_ne_bytes());
    out.extend_from_slice(&seq.to_ne_bytes());
    out.extend_from_slice(&0u32.to_ne_bytes());
    out.extend_from_slice(body);
    out.resize(wire::align(out.len()), 0);
}

/// A NETLINK_ROUTE socket. It works in the namespace it was opened in, whatever thread uses it.
#[derive(Debug)]
pub struct Conn {
    socket: Socket,
    seq: u32,
    datagram: Vec<u8>,
}

impl Conn {
    /// Opens a socket in the calling thread's network namespace.
    pub fn new() -> Result<Conn> {
        open(NETLINK_ROUTE).map_err(|error| Error::system("open a netlink socket", &error))
    }

    /// Opens a socket of another protocol, for nf_tables.
    pub(crate) fn netfilter() -> Result<Conn> {
        open(NETLINK_NETFILTER)
            .map_err(|error| Error::system("open a netlink socket of netfilter", &error))
    }

    /// Opens a socket that tells of sockets.
    pub(crate) fn sock_diag() -> Result<Conn> {
        open(NETLINK_SOCK_DIAG)
            .map_err(|error| Error::system("open a netlink socket of sock_diag", &error))
    }

    /// Opens a socket that tells of IPsec.
    pub(crate) fn xfrm() -> Result<Conn> {
        open(NETLINK_XFRM).map_err(|error| Error::system("open a netlink socket of xfrm", &error))
    }

    /// Opens a socket for families that have no protocol of their own.
    pub(crate) fn generic() -> Result<Conn> {
        open(NETLINK_GENERIC)
            .map_err(|error| Error::system("open a socket of generic netlink", &error))
    }

    /// Opens a socket in another network namespace; the calling thread stays where it is.
    pub fn in_netns(netns: &NetNs) -> Result<Conn> {
        netns.run(Conn::new)?
    }

    /// The cookie of the socket's network namespace: a number that never comes again until the
    /// machine restarts, and that programs on sockets can read. None before Linux 5.14.
    pub fn netns_cookie(&self) -> Result<Option<u64>> {
        let mut cookie = 0u64;
        let mut size = size_of_val(&cookie) as libc::socklen_t;
        // SAFETY: both pointers are to locals that outlive the call, and `size` is the cookie's.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_NETNS_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut size,
            )
        };
        match Errno::result(result) {
            Ok(_) => Ok(Some(cookie)),
            Err(Errno::ENOPROTOOPT) => Ok(None),
            Err(errno) => Err(Error::refused(
                "read a socket's network namespace cookie",
                errno,
                None,
            )),
        }
    }

    /// Executes one request and waits for the kernel's answer.
    pub fn execute(&mut self, request: Request) -> Result<()> {
        self.execute_all([request])
    }

    /// Executes requests in order, many per system call. The error is the first that failed.
    ///
    /// The kernel goes on after a refusal: requests behind the failing one are executed too, so
    /// an undo has to cover them all.
    pub fn execute_all(&mut self, requests: impl IntoIterator<Item = Request>) -> Result<()> {
        self.execute_each(requests).into_iter().collect()
    }

    /// Executes requests in order, many per system call, and returns the outcome of each.
    pub fn execute_each(&mut self, requests: impl IntoIterator<Item = Request>) -> Vec<Result<()>> {
        self.transact(requests.into_iter().collect())
            .into_iter()
            .map(|outcome| outcome.map(drop))
            .collect()
    }

    /// Executes one request that is answered by an object.
    pub(crate) fn query(&mut self, request: Request) -> Result<Vec<u8>> {
        let what = request.what.clone();
        match self.transact(vec![request]).pop() {
            Some(outcome) => outcome,
            None => Err(malformed(what, Garbage("no answer".into()))),
        }
    }

    /// The outcome of each request: an object's body if it asked for one, else nothing.
    pub(crate) fn transact(&mut self, requests: Vec<Request>) -> Vec<Result<Vec<u8>>> {
        let mut outcomes = Vec::with_capacity(requests.len());
        let mut rest = requests.into_iter();
        loop {
            let batch: Vec<_> = rest.by_ref().take(BATCH).collect();
            if batch.is_empty() {
                return outcomes;
            }
            outcomes.append(&mut self.transact_batch(batch));
        }
    }

    fn transact_batch(&mut self, requests: Vec<Request>) -> Vec<Result<Vec<u8>>> {
        let first = self.seq;
        self.seq = first.wrapping_add(requests.len() as u32);
        let mut out = Vec::with_capacity(requests.len() * 128);
        let mut batch = Batch::new(first, requests, &mut out);
        if batch.open > 0 {
            let talked = self.send(&out).and_then(|()| {
                while batch.open > 0 {
                    self.receive()?;
                    batch.take(&self.datagram);
                }
                Ok(())
            });
            if let Err(error) = talked {
                batch.give_up(&error);
            }
        }
        batch
            .entries
            .into_iter()
            .filter_map(|(_, outcome)| outcome)
            .collect()
    }

    /// Lists objects: every message of the answer goes to `parse`, which may pass over it.
    pub(crate) fn dump<T>(
        &mut self,
        what: &str,
        kind: u16,
        body: &impl Emitable,
        mut parse: impl FnMut(&Message<'_>) -> std::result::Result<Option<T>, Garbage>,
    ) -> Result<Vec<T>> {
        for _ in 0..DUMP_TRIES {
            let request = Request::with_flags(what.to_string(), kind, DUMP, body);
            if let Some(found) = self.dump_once(request, &mut parse)? {
                return Ok(found);
            }
        }
        Err(Error::Interrupted { what: what.into() })
    }

    /// Nothing if the tables changed meanwhile.
    fn dump_once<T>(
        &mut self,
        request: Request,
        parse: &mut impl FnMut(&Message<'_>) -> std::result::Result<Option<T>, Garbage>,
    ) -> Result<Option<Vec<T>>> {
        let seq = self.seq;
        self.seq = seq.wrapping_add(1);
        let mut out = Vec::new();
        let what = request.what;
        emit(request.kind, request.flags, seq, &request.body?, &mut out);
        self.send(&out).map_err(|error| lost(&what, &error))?;

        let mut found = Vec::new();
        let mut interrupted = false;
        // After the first one the answer is still read to its end: a dump that is left half read
        // keeps the socket from beginning another.
        let mut wrong = None;
        loop {
            self.receive().map_err(|error| lost(&what, &error))?;
            for message in wire::messages(&self.datagram) {
                let message = match message {
                    Ok(message) => message,
                    Err(garbage) => return Err(malformed(what, garbage)),
                };
                if message.seq != seq {
                    continue;
                }
                interrupted |= message.flags & libc::NLM_F_DUMP_INTR as u16 != 0;
                let ack = match i32::from(message.kind) {
                    libc::NLMSG_ERROR => Ack::of_error(&message),
                    libc::NLMSG_DONE => Ack::of_done(&message),
                    libc::NLMSG_NOOP => continue,
                    _ => {
                        match parse(&message) {
                            Ok(object) => found.extend(object),
                            Err(garbage) => wrong = wrong.or(Some(garbage)),
                        }
                        continue;
                    }
                };
                return match (ack, wrong) {
                    (Err(garbage), _) | (_, Some(garbage)) => Err(malformed(what, garbage)),
                    // The kernel's way to say that it had to stop between two parts.
                    (Ok(ack), _) if ack.errno == libc::EINTR => Ok(None),
                    (Ok(ack), _) if ack.errno != 0 => Err(refused(what, ack)),
                    (Ok(_), None) if interrupted => Ok(None),
                    (Ok(_), None) => Ok(Some(found)),
                };
            }
        }
    }

    fn send(&self, out: &[u8]) -> io::Result<()> {
        let kernel = SocketAddr::new(0, 0);
        retry(|| self.socket.send_to(out, &kernel, 0)).map(drop)
    }

    fn receive(&mut self) -> io::Result<()> {
        receive(&self.socket, &mut self.datagram, 0)
    }
}

/// Requests that were sent together, each with its outcome once known.
struct Batch {
    /// Sequence number of the first.
    first: u32,
    /// How many have no outcome.
    open: usize,
    entries: Vec<(Request, Option<Result<Vec<u8>>>)>,
}

impl Batch {
    /// Frames the requests that can be sent; the others have their outcome already.
    fn new(first: u32, requests: Vec<Request>, out: &mut Vec<u8>) -> Batch {
        let mut batch = Batch {
            first,
            open: 0,
            entries: Vec::with_capacity(requests.len()),
        };
        for mut request in requests {
            let seq = first.wrapping_add(batch.entries.len() as u32);
            let outcome = match std::mem::replace(&mut request.body, Ok(Vec::new())) {
                Ok(body) => {
                    emit(request.kind, request.flags, seq, &body, out);
                    batch.open += 1;
                    None
                }
                Err(error) => Some(Err(error)),
            };
            batch.entries.push((request, outcome));
        }
        batch
    }

    fn take(&mut self, datagram: &[u8]) {
        for message in wire::messages(datagram) {
            // What follows a malformed message is lost; the deadline ends the wait for it.
            let Ok(message) = message else { return };
            let at = message.seq.wrapping_sub(self.first) as usize;
            let Some((request, outcome @ None)) = self.entries.get_mut(at) else {
                continue;
            };
            let what = || request.what.clone();
            *outcome = match i32::from(message.kind) {
                libc::NLMSG_ERROR => Some(match Ack::of_error(&message) {
                    Ok(ack) if ack.errno == 0 => Ok(Vec::new()),
                    Ok(ack) => Err(refused(what(), ack)),
                    Err(garbage) => Err(malformed(what(), garbage)),
                }),
                libc::NLMSG_NOOP | libc::NLMSG_DONE => None,
                // An object counts as the answer only where one was asked for.
                _ if request.flags & ACK == 0 => Some(Ok(message.body.to_vec())),
                _ => None,
            };
            if outcome.is_some() {
                self.open -= 1;
            }
        }
    }

    fn give_up(&mut self, error: &io::Error) {
        for (request, outcome) in &mut self.entries {
            outcome.get_or_insert_with(|| Err(lost(&request.what, error)));
        }
    }
}

fn open(protocol: isize) -> io::Result<Conn> {
    let socket = Socket::new(protocol)?;
    setsockopt(
        &socket,
        ReceiveTimeout,
        &TimeVal::new(ANSWER_TIMEOUT_SECONDS, 0),
    )?;
    // All three are there from 4.20 and only make answers better: texts with errors, no echo of
    // the request, dumps filtered by the kernel (what it does not filter is filtered here).
    let _ = socket.set_ext_ack(true);
    let _ = socket.set_cap_ack(true);
    let _ = socket.set_netlink_get_strict_chk(true);
    Ok(Conn {
        socket,
        seq: 1,
        datagram: Vec::new(),
    })
}

/// Reads one datagram of the kernel's, however long.
pub(crate) fn receive(
    socket: &Socket,
    datagram: &mut Vec<u8>,
    flags: libc::c_int,
) -> io::Result<()> {
    loop {
        let size = retry(|| {
            socket.recv(
                &mut &mut [0u8; 0][..],
                flags | libc::MSG_PEEK | libc::MSG_TRUNC,
            )
        })?;
        datagram.clear();
        datagram.reserve(size.max(1));
        let (read, from) = retry(|| socket.recv_from(datagram, flags))?;
        // Another process with CAP_NET_ADMIN may send here; only the kernel is port 0.
        if from.port_number() == 0 && read == size {
            return Ok(());
        }
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => return other,
        }
    }
}

fn refused(what: String, ack: Ack) -> Error {
    Error::refused(what, Errno::from_raw(ack.errno), ack.message)
}

/// The answer did not come.
fn lost(what: &str, error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::WouldBlock {
        Error::Timeout { what: what.into() }
    } else {
        Error::system(what, error)
    }
}

pub(crate) fn malformed(what: String, Garbage(reason): Garbage) -> Error {
    Error::Malformed { what, reason }
}

#[cfg(test)]
#[path = "conn_tests.rs"]
pub(crate) mod tests;
