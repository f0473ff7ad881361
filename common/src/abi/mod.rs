//! `repr(C)` keys and values of the BPF maps.
//!
//! Rules: every byte is a named field (no hidden padding, the verifier refuses to copy
//! uninitialised stack into a map), sizes are asserted, addresses and ports are in network
//! byte order and typed as byte arrays, everything else is in host order.

pub mod acceleration;
pub mod config;
pub mod connection;
pub mod counters;
pub mod drop;
pub mod endpoint;
pub mod flow;
pub mod fragment;
pub mod layout;
pub mod next_hop;
pub mod node;
pub mod service;
pub mod uplink;

/// An IPv6 address, or an IPv4 address mapped into one (`::ffff:a.b.c.d`, RFC 4291 §2.5.5.2).
///
/// One key type serves both families; network byte order.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Addr(pub [u8; 16]);

impl Addr {
    /// `::`, the absence of an address.
    pub const UNSPECIFIED: Self = Self([0; 16]);

    /// Maps an IPv4 address given as its four bytes on the wire.
    #[inline(always)]
    pub const fn v4(a: [u8; 4]) -> Self {
        let mapped = u32::from_ne_bytes([0, 0, 0xff, 0xff]);
        Self::of_words([0, 0, mapped, u32::from_ne_bytes(a)])
    }

    /// The address at a place, read by words. Of an assignment from a raw pointer the programs' compiler makes a call of
    /// memmove: a loop over bytes, behind which the verifier takes every number for one that matters.
    ///
    /// # Safety
    /// There is an address at the place.
    #[inline(always)]
    pub const unsafe fn at(place: *const Self) -> Self {
        let words = place.cast::<u32>();
        // SAFETY: the caller's promise; an address is four words, aligned to four bytes.
        unsafe {
            Self::of_words([
                words.read(),
                words.add(1).read(),
                words.add(2).read(),
                words.add(3).read(),
            ])
        }
    }

    /// A copy, read as by [`Self::at`]: where one place may overlap the other the compiler makes that call, too.
    #[inline(always)]
    pub const fn by_words(&self) -> Self {
        // SAFETY: a reference leads to an address.
        unsafe { Self::at(self) }
    }

    /// Its words as they lie in memory.
    #[inline(always)]
    pub const fn words(&self) -> [u32; 4] {
        // SAFETY: a reference leads to an address, which is four words, aligned to four bytes.
        unsafe { core::ptr::from_ref(self).cast::<[u32; 4]>().read() }
    }

    /// Of words as they lie in memory.
    #[inline(always)]
    const fn of_words(words: [u32; 4]) -> Self {
        // SAFETY: as many bytes, any of which are an address.
        unsafe { core::mem::transmute(words) }
    }

    /// Takes an IPv6 address as its sixteen bytes on the wire.
    #[inline(always)]
    pub const fn v6(a: [u8; 16]) -> Self {
        Self(a)
    }

    /// Whether it is of 127.0.0.0/8 (RFC 1122 §3.2.1.3) or `::1`.
    #[inline(always)]
    pub const fn is_loopback(&self) -> bool {
        match self.as_v4() {
            Some(v4) => v4[0] == 127,
            None => u128::from_be_bytes(self.0) == 1,
        }
    }

    /// Whether what is sent there stays on the link: link-local unicast or multicast of IPv6
    /// (RFC 4291 §2.4).
    #[inline(always)]
    pub const fn is_of_link(&self) -> bool {
        self.0[0] == 0xff || (self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80)
    }

    /// The remote end that stands for all in a mapping to this address outside: no packet that is to this one is from
    /// there. Of IPv4 it is no IPv4 address; of IPv6 a multicast one, which nobody sends from (RFC 4291 §2.7). It is above
    /// all that pods have.
    #[inline(always)]
    pub const fn any_remote(&self) -> Self {
        let mut any = *self;
        any.0[0] = 0xff;
        any
    }

    /// The IPv4 address inside, if it is a mapped one.
    #[inline(always)]
    pub const fn as_v4(&self) -> Option<[u8; 4]> {
        let a = &self.0;
        // By words, as which the compiler reads them: programs ask this of each packet.
        let zeros = u32::from_ne_bytes([a[0], a[1], a[2], a[3]])
            | u32::from_ne_bytes([a[4], a[5], a[6], a[7]]);
        let prefix = u32::from_be_bytes([a[8], a[9], a[10], a[11]]);
        if zeros == 0 && prefix == 0xffff {
            Some([a[12], a[13], a[14], a[15]])
        } else {
            None
        }
    }
}

#[cfg(feature = "std")]
impl From<std::net::IpAddr> for Addr {
    fn from(ip: std::net::IpAddr) -> Self {
        match ip {
            std::net::IpAddr::V4(a) => Self::v4(a.octets()),
            std::net::IpAddr::V6(a) => Self::v6(a.octets()),
        }
    }
}

#[cfg(feature = "std")]
impl From<Addr> for std::net::IpAddr {
    fn from(a: Addr) -> Self {
        match a.as_v4() {
            Some(v4) => v4.into(),
            None => a.0.into(),
        }
    }
}

/// Asserts a map type's size, marks it as plain old data for aya, and gives it a [`Layout`].
///
/// The size is spelt out by hand so that a change of layout is a change in the diff: it also
/// means that maps pinned by an older agent no longer fit. The number after it is the layout generation
/// that made it so (see [`layout::Place`]): another one for any change, also of what a field means.
macro_rules! map_type {
    ($type:ident, $size:literal, $number:literal, [$($field:tt),+ $(,)?]) => {
        const _: () = assert!(core::mem::size_of::<$type>() == $size);
        impl $crate::abi::layout::Layout for $type {
            const NUMBER: u32 = $number;
            const FIELDS: &'static [$crate::abi::layout::Field] = &[
                $($crate::abi::layout::Field::new(
                    stringify!($field),
                    core::mem::offset_of!($type, $field),
                )),+
            ];
            const LAYOUT: u64 = {
                // All of them: a pattern that lacks one does not compile.
                let _ = |value: $type| {
                    let $type { $($field: _),+ } = value;
                };
                let hash = $crate::abi::layout::start(stringify!($type), $size, $number);
                $(let hash = $crate::abi::layout::field(
                    hash,
                    stringify!($field),
                    core::mem::offset_of!($type, $field),
                );)+
                hash
            };
        }
        #[cfg(feature = "user")]
        // SAFETY: repr(C), Copy, no padding (asserted size equals the sum of its fields),
        // and every bit pattern of its integer fields is a value.
        unsafe impl aya::Pod for $type {}
    };
}
pub(crate) use map_type;

map_type!(Addr, 16, 1, [0]);

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;

    #[test]
    fn addresses_of_both_families_survive_the_round_trip() {
        for text in [
            "10.244.1.5",
            "0.0.0.0",
            "255.255.255.255",
            "fd00:10::5",
            "fe80::1",
        ] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Addr::from(ip)), ip);
        }
        assert_eq!(Addr::v4([10, 0, 0, 1]).as_v4(), Some([10, 0, 0, 1]));
        assert_eq!(Addr::UNSPECIFIED.as_v4(), None);
    }
}
