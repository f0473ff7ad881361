//! Receiving by recvmsg(2), with what comes beside the data.

use super::stage::Socket;
use nix::errno::Errno;
use std::io::IoSliceMut;

/// One control message.
pub struct Beside {
    pub level: i32,
    pub kind: i32,
    pub data: Vec<u8>,
}

/// Receives into several buffers.
pub fn receive(
    from: &Socket,
    into: &mut [&mut [u8]],
    flags: i32,
) -> Result<(usize, Vec<Beside>), Errno> {
    let mut vectors: Vec<_> = into.iter_mut().map(|data| IoSliceMut::new(data)).collect();
    // Eight-byte words, as control messages are aligned.
    let mut control = [0u64; 64];
    // SAFETY: all fields of the structure may be zero.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = vectors.as_mut_ptr().cast();
    header.msg_iovlen = vectors.len() as _;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the buffers live until the call returns, with these lengths.
    let got = unsafe { libc::recvmsg(from.raw(), &raw mut header, flags) };
    let got = Errno::result(got)?;
    let mut beside = Vec::new();
    // SAFETY: a header that the kernel has filled in.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: what the macros give lies within the control buffer.
    while let Some(message) = unsafe { next.as_ref() } {
        // SAFETY: as above.
        let start = unsafe { libc::CMSG_DATA(next) };
        // A `socklen_t` with some C libraries.
        #[allow(clippy::unnecessary_cast)]
        let len = (next.addr() + message.cmsg_len as usize).saturating_sub(start.addr());
        beside.push(Beside {
            level: message.cmsg_level,
            kind: message.cmsg_type,
            // SAFETY: as above.
            data: unsafe { std::slice::from_raw_parts(start, len) }.to_vec(),
        });
        // SAFETY: as above.
        next = unsafe { libc::CMSG_NXTHDR(&raw const header, next) };
    }
    Ok((got as usize, beside))
}
