//! IP protocols by the words that conntrack(8) has for them.

use std::borrow::Cow;

const NAMES: [(u8, &str); 11] = [
    (1, "icmp"),
    (4, "ipip"),
    (6, "tcp"),
    (17, "udp"),
    (41, "ipv6"),
    (47, "gre"),
    (50, "esp"),
    (51, "ah"),
    (58, "icmpv6"),
    (132, "sctp"),
    (136, "udplite"),
];

/// A protocol's word, or its number.
pub fn protocol_name(number: u8) -> Cow<'static, str> {
    let known = NAMES.iter().find(|(n, _)| *n == number);
    known.map_or_else(|| number.to_string().into(), |(_, name)| (*name).into())
}

/// The protocol of a word, in whatever case, or of a number.
pub fn protocol_number(text: &str) -> Option<u8> {
    let known = NAMES
        .iter()
        .find(|(_, name)| name.eq_ignore_ascii_case(text));
    known.map_or_else(|| text.parse().ok(), |(number, _)| Some(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_protocol_has_one_name() {
        for number in 0..=u8::MAX {
            let name = protocol_name(number);
            assert_eq!(protocol_number(&name), Some(number));
            assert_eq!(protocol_number(&name.to_uppercase()), Some(number));
        }
        for text in ["", "tcp ", "256", "-1", "http"] {
            assert_eq!(protocol_number(text), None, "{text}");
        }
    }
}
