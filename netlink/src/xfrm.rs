//! IPsec's policies in the network namespace (xfrm), counted: linux/xfrm.h. Takes CAP_NET_ADMIN.

use crate::{
    Conn, Error, Request, Result,
    conn::malformed,
    wire::{self, Garbage, Raw},
};
use netlink_sys::protocols::NETLINK_XFRM;
use std::fs;

/// Of the calling thread's network namespace.
const SOCKETS: &str = "/proc/thread-self/net/netlink";

/// XFRM_MSG_GETSPDINFO.
const GET: u16 = 0x25;
/// XFRMA_SPD_INFO, a struct xfrmu_spdinfo: policies for what comes in, for what leaves, for what is forwarded; then those of sockets.
const INFO: u16 = 1;
const OUT: usize = 4;
/// The flags in front of the attributes.
const HEADER: usize = 4;

/// How many policies there are for what leaves the calling thread's network namespace, by whatever protocol and to
/// whatever address. Where the kernel's part that takes policies is not loaded there are none, and it is not loaded by asking.
///
/// # Errors
/// If the kernel does not tell.
pub fn policies_out() -> Result<u32> {
    let what = "count the policies of IPsec";
    let sockets = fs::read_to_string(SOCKETS).map_err(|error| Error::system(what, &error))?;
    if !is_loaded(&sockets) {
        return Ok(0);
    }
    let mut conn = Conn::xfrm()?;
    let body = conn.query(Request::get(what.into(), GET, &Raw(&[0; HEADER])))?;
    parse(&body).map_err(|garbage| malformed(what.into(), garbage))
}

/// Whether the kernel has a socket of its own for it: netlink's sockets, a line each, the second column the protocol.
fn is_loaded(sockets: &str) -> bool {
    let protocol = NETLINK_XFRM.to_string();
    let mut lines = sockets.lines();
    lines.any(|line| line.split_ascii_whitespace().nth(1) == Some(&protocol))
}

fn parse(body: &[u8]) -> std::result::Result<u32, Garbage> {
    for attr in wire::attrs_after(body, HEADER)? {
        let attr = attr?;
        if attr.kind == INFO {
            let count = wire::u32_at(attr.value, OUT);
            return count.ok_or_else(|| Garbage("a count of policies is cut short".into()));
        }
    }
    wire::garbage("no count of policies")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_count_of_what_leaves_is_taken() {
        let numbers = [7u32, 3, 9, 0, 0, 0].map(u32::to_ne_bytes).concat();
        let attr = |kind: u16, value: &[u8]| {
            let length = (4 + value.len()) as u16;
            [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat()
        };
        let body = [vec![0; HEADER], attr(2, &[1; 8]), attr(INFO, &numbers)].concat();
        assert_eq!(parse(&body).ok(), Some(3));
        for body in [
            vec![0; HEADER],
            vec![0; HEADER - 1],
            [vec![0; HEADER], attr(INFO, &numbers[..7])].concat(),
        ] {
            assert!(parse(&body).is_err(), "{body:?}");
        }
    }

    #[test]
    fn it_is_loaded_where_the_kernel_listens() {
        let line = |protocol| format!("0000000012345678 {protocol}   0 00000000 0 0 0 2 0 77\n");
        let head = "sk               Eth Pid        Groups   Rmem     Wmem     Dump\n";
        assert!(is_loaded(&[head, &line(0), &line(6)].concat()));
        assert!(!is_loaded(&[head, &line(0), &line(16), &line(66)].concat()));
        assert!(!is_loaded(""));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(body in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse(&body);
        }
    }
}
