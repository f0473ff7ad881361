//! Rows about calls that send.

use super::{
    Class, Connect, Failed, Row,
    stage::{LATE, Pair, Work, heard, pair},
};
use nix::errno::Errno;

pub static ROWS: &[Row] = &[Row {
    id: "splice-out",
    title: "splice from a socket to a pipe",
    meaning: "programs that read by splice(2) (Go's io.Copy, HAProxy) get EAGAIN for ever",
    class: Class::Behaviour,
    quick: true,
    run: splice_out,
}];

fn splice_out(connect: &dyn Connect) -> Result<String, Failed> {
    let Pair { client, server } = pair(connect)?;
    client.say(b"hello")?;
    server.hear(connect, 1, libc::MSG_PEEK)?;
    let (reading, writing) = nix::unistd::pipe().map_err(super::stage::failed("make a pipe"))?;
    let socket = server.clone();
    let splicing = Work::start(&[&server], move || {
        use std::os::fd::AsRawFd as _;
        let none = std::ptr::null_mut();
        // SAFETY: no offsets are given.
        let moved = unsafe {
            libc::splice(
                socket.raw(),
                none,
                writing.as_raw_fd(),
                none,
                100,
                libc::SPLICE_F_MOVE,
            )
        };
        Errno::result(moved)?;
        // So that there is an end to what can be read.
        drop(writing);
        let mut data = vec![0; 100];
        let got = nix::unistd::read(&reading, &mut data)?;
        data.truncate(got);
        Ok(data)
    })?;
    Ok(splicing.done(connect).map_or_else(|| LATE.into(), heard))
}
