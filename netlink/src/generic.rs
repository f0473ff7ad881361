//! Generic netlink (linux/genetlink.h): families that are known by name, whose messages have a header and attributes.

use crate::{
    Conn, NetNs, Request, Result,
    conn::malformed,
    wire::{self, Garbage, Raw},
};

/// Who names the other families (GENL_ID_CTRL), its command to look for one, and attributes.
const CONTROLLER: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// `struct genlmsghdr`: command, version, reserved.
pub(crate) const HEADER: usize = 4;
const VERSION: u8 = 1;
/// NLA_F_NESTED.
const NESTED: u16 = 1 << 15;

/// Opens a socket in a network namespace; with it the number of the family that has this name.
pub(crate) fn open(netns: &NetNs, family: &str) -> Result<(Conn, u16)> {
    let mut conn = netns.run(Conn::generic)??;
    let what = format!("find generic netlink's {family}");
    let name = attr(FAMILY_NAME, &[family.as_bytes(), &[0]].concat());
    let body = [header(GET_FAMILY), name].concat();
    let answer = conn.query(Request::get(what.clone(), CONTROLLER, &Raw(&body)))?;
    let family = family_of(&answer).map_err(|garbage| malformed(what, garbage))?;
    Ok((conn, family))
}

pub(crate) fn header(command: u8) -> Vec<u8> {
    vec![command, VERSION, 0, 0]
}

/// Padded.
pub(crate) fn attr(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(wire::align(bytes.len()), 0);
    bytes
}

pub(crate) fn nested(kind: u16, attrs: &[u8]) -> Vec<u8> {
    attr(kind | NESTED, attrs)
}

fn family_of(body: &[u8]) -> std::result::Result<u16, Garbage> {
    for attr in wire::attrs_after(body, HEADER)? {
        let attr = attr?;
        if attr.kind == FAMILY_ID {
            return attr.array().map(u16::from_ne_bytes);
        }
    }
    wire::garbage("a family without a number")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_familys_number_is_found() {
        let family = [vec![0; HEADER], attr(FAMILY_ID, &27u16.to_ne_bytes())].concat();
        assert_eq!(family_of(&family).ok(), Some(27));
        assert!(family_of(&family[..HEADER]).is_err());
    }

    proptest! {
        #[test]
        fn garbage_never_panics(body in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = family_of(&body);
        }
    }
}
