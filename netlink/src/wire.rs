//! Framing and attributes of what the kernel sends.
//!
//! Requests are encoded by netlink-packet-route's types. Answers are taken apart here, attribute
//! by attribute, because one attribute that a newer kernel words differently must not hide a
//! whole link or route: unknown ones are skipped, known ones of a wrong size are an error.
//! Nothing here trusts a length.

use crate::Mac;
use netlink_packet_core::NlasIterator;
use std::net::IpAddr;

/// Length of `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;

const NLMSGERR_ATTR_MSG: u16 = 1;

/// Why an answer makes no sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Garbage(pub(crate) String);

pub(crate) fn garbage<T>(reason: impl Into<String>) -> Result<T, Garbage> {
    Err(Garbage(reason.into()))
}

impl From<netlink_packet_core::DecodeError> for Garbage {
    fn from(error: netlink_packet_core::DecodeError) -> Self {
        Garbage(error.to_string())
    }
}

/// A body that is made elsewhere.
pub(crate) struct Raw<'a>(pub(crate) &'a [u8]);

impl netlink_packet_core::Emitable for Raw<'_> {
    fn buffer_len(&self) -> usize {
        self.0.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(self.0);
    }
}

/// One netlink message within a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub kind: u16,
    pub flags: u16,
    pub seq: u32,
    pub body: &'a [u8],
}

/// Splits a datagram into its messages. Ends after the first malformed one.
pub(crate) struct Messages<'a>(&'a [u8]);

pub(crate) fn messages(datagram: &[u8]) -> Messages<'_> {
    Messages(datagram)
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, Garbage>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = std::mem::take(&mut self.0);
        if rest.is_empty() {
            return None;
        }
        let (Some(length), Some(kind), Some(flags), Some(seq)) = (
            u32_at(rest, 0),
            u16_at(rest, 4),
            u16_at(rest, 6),
            u32_at(rest, 8),
        ) else {
            return Some(garbage(format!(
                "{} bytes where a header should be",
                rest.len()
            )));
        };
        let length = length as usize;
        let Some(body) = rest.get(HEADER..length) else {
            return Some(garbage(format!(
                "a message of {length} bytes in {} left",
                rest.len()
            )));
        };
        self.0 = rest.get(align(length)..).unwrap_or_default();
        Some(Ok(Message {
            kind,
            flags,
            seq,
            body,
        }))
    }
}

/// What NLMSG_ERROR and NLMSG_DONE say: zero or a positive errno, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub errno: i32,
    pub message: Option<String>,
}

impl Ack {
    /// Of an NLMSG_ERROR message: errno, the request's header, perhaps its body, attributes.
    pub(crate) fn of_error(message: &Message<'_>) -> Result<Ack, Garbage> {
        let errno = code(message.body)?;
        let echoed = match u32_at(message.body, 4) {
            Some(_) if message.flags & libc::NLM_F_CAPPED as u16 != 0 => HEADER,
            Some(length) => align(length as usize),
            None => return garbage("an error without the header it is about"),
        };
        Ok(Ack {
            errno,
            message: explanation(message, echoed.saturating_add(4)),
        })
    }

    /// Of an NLMSG_DONE message; old kernels and some dumps send no code.
    pub(crate) fn of_done(message: &Message<'_>) -> Result<Ack, Garbage> {
        if message.body.is_empty() {
            return Ok(Ack {
                errno: 0,
                message: None,
            });
        }
        Ok(Ack {
            errno: code(message.body)?,
            message: explanation(message, 4),
        })
    }
}

fn code(body: &[u8]) -> Result<i32, Garbage> {
    match u32_at(body, 0).map(|code| code as i32) {
        Some(code) if code <= 0 && code != i32::MIN => Ok(-code),
        Some(code) => garbage(format!("error code {code}")),
        None => garbage("an error without a code"),
    }
}

/// The kernel's text. It only explains: if it is damaged, the errno still counts.
fn explanation(message: &Message<'_>, at: usize) -> Option<String> {
    if message.flags & libc::NLM_F_ACK_TLVS as u16 == 0 {
        return None;
    }
    attrs(message.body.get(at..)?)
        .filter_map(Result::ok)
        .find(|attr| attr.kind == NLMSGERR_ATTR_MSG)
        .map(|attr| attr.text())
}

/// One attribute, without its nesting and byte order flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attr<'a> {
    pub kind: u16,
    pub value: &'a [u8],
}

/// Splits a message's tail into attributes. Ends after the first malformed one.
pub(crate) fn attrs(tail: &[u8]) -> impl Iterator<Item = Result<Attr<'_>, Garbage>> {
    // NlasIterator hands out buffers whose length field it has checked against the tail; but its
    // `value` borrows from the buffer, so the value is cut out of the tail itself.
    let mut position = 0;
    NlasIterator::new(tail).map(move |nla| {
        let nla = nla?;
        let length = usize::from(nla.length());
        let Some(value) = tail.get(position + 4..position + length) else {
            return garbage("an attribute beyond its message");
        };
        position += align(length);
        Ok(Attr {
            kind: nla.kind(),
            value,
        })
    })
}

/// The attributes behind a message's fixed header.
pub(crate) fn attrs_after(
    body: &[u8],
    header: usize,
) -> Result<impl Iterator<Item = Result<Attr<'_>, Garbage>>, Garbage> {
    match body.get(header..) {
        Some(tail) => Ok(attrs(tail)),
        None => garbage(format!("{} bytes where {header} are the least", body.len())),
    }
}

impl<'a> Attr<'a> {
    pub(crate) fn u8(&self) -> Result<u8, Garbage> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u32(&self) -> Result<u32, Garbage> {
        self.array().map(u32::from_ne_bytes)
    }

    pub(crate) fn u16_be(&self) -> Result<u16, Garbage> {
        self.array().map(u16::from_be_bytes)
    }

    /// Up to the terminating zero, if there is one.
    pub(crate) fn text(&self) -> String {
        let text = self.value.split(|byte| *byte == 0).next();
        String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
    }

    /// An address of either family, known by its length.
    pub(crate) fn ip(&self) -> Result<IpAddr, Garbage> {
        match self.value.len() {
            4 => self.array::<4>().map(IpAddr::from),
            16 => self.array::<16>().map(IpAddr::from),
            other => garbage(format!("an IP address of {other} bytes")),
        }
    }

    /// Absent if the link layer is not Ethernet.
    pub(crate) fn mac(&self) -> Option<Mac> {
        self.value.try_into().ok()
    }

    pub(crate) fn array<const N: usize>(&self) -> Result<[u8; N], Garbage> {
        self.value.try_into().map_err(|_| {
            Garbage(format!(
                "attribute {} of {} bytes where {N} are expected",
                self.kind,
                self.value.len()
            ))
        })
    }
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    field.try_into().ok().map(u16::from_ne_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    field.try_into().ok().map(u32::from_ne_bytes)
}

/// Messages and attributes start at multiples of four (NLMSG_ALIGNTO, NLA_ALIGNTO).
pub(crate) fn align(length: usize) -> usize {
    length.saturating_add(3) & !3
}

/// `02:00:00:00:00:01`, for descriptions.
pub(crate) fn mac_text(mac: Mac) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

#[cfg(test)]
#[path = "wire_tests.rs"]
pub(crate) mod tests;
