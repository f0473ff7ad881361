//! What is not masqueraded, as ip-masq-agent's users write it (YAML, and so also JSON):
//!
//! ```yaml
//! nonMasqueradeCIDRs: [10.0.0.0/8, 'fd00::/8']
//! masqLinkLocal: false
//! masqLinkLocalIPv6: false
//! resyncInterval: 60s
//! ```
//!
//! All keys are optional; `cidrLimit` of its later versions is heeded where it is written. Strict: nothing unknown,
//! nothing twice. An error names the line.

use super::nodes_parse::{cut, short};
use crate::{
    config::cidr,
    plan::masquerade::{Overrides, distinct},
};
use ipnet::IpNet;
use serde::Deserialize;
use serde_saphyr::Spanned;
use std::time::Duration;

/// As large as a ConfigMap can be.
pub const MAX_LEN: usize = 1 << 20;

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    pub overrides: Overrides,
    /// How long a change of the file may take.
    pub resync_interval: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    #[error("it is longer than {MAX_LEN} bytes")]
    TooLong,
    #[error("line {0}: it is not UTF-8 text")]
    Utf8(usize),
    #[error("{0}")]
    Syntax(String),
    #[error("line {line}: {key}: {reason}")]
    Value {
        line: u64,
        key: &'static str,
        reason: String,
    },
}

const CIDRS: &str = "nonMasqueradeCIDRs";

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Document {
    #[serde(rename = "nonMasqueradeCIDRs")]
    non_masquerade_cidrs: Option<Spanned<Vec<Spanned<String>>>>,
    cidr_limit: Option<usize>,
    masq_link_local: Option<bool>,
    #[serde(rename = "masqLinkLocalIPv6")]
    masq_link_local_ipv6: Option<bool>,
    resync_interval: Option<Spanned<String>>,
}

/// Parses the file's bytes.
///
/// # Errors
/// The first fault in the order of the text.
pub fn parse(bytes: &[u8]) -> Result<Parsed, ParseError> {
    if bytes.len() > MAX_LEN {
        return Err(ParseError::TooLong);
    }
    let text = str::from_utf8(bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        ParseError::Utf8(1 + before.iter().filter(|byte| **byte == b'\n').count())
    })?;
    let says_nothing = |line: &str| line.is_empty() || line.starts_with('#');
    if text.lines().map(str::trim).all(says_nothing) {
        return Ok(Parsed::default());
    }
    let document: Option<Document> =
        serde_saphyr::from_str(text).map_err(|error| ParseError::Syntax(short(&error)))?;
    let document = document.unwrap_or_default();
    let cidrs = document.non_masquerade_cidrs;
    let cidrs = cidrs.map(|list| destinations(&list, document.cidr_limit));
    let interval = document.resync_interval;
    let interval = interval.map(|text| {
        duration(&text.value).ok_or_else(|| {
            let reason = format!("`{}` is not a duration such as 60s", cut(&text.value));
            fault(&text, "resyncInterval", reason)
        })
    });
    Ok(Parsed {
        overrides: Overrides {
            non_masquerade_cidrs: cidrs.transpose()?,
            link_local: document.masq_link_local,
            link_local_ipv6: document.masq_link_local_ipv6,
        },
        resync_interval: interval.transpose()?,
    })
}

fn destinations(
    list: &Spanned<Vec<Spanned<String>>>,
    limit: Option<usize>,
) -> Result<Vec<IpNet>, ParseError> {
    let len = list.value.len();
    if let Some(limit) = limit.filter(|limit| len > *limit) {
        let reason = format!("{len} prefixes, cidrLimit is {limit}");
        return Err(fault(list, CIDRS, reason));
    }
    let parsed = list.value.iter().map(|text| {
        let value = text.value.trim();
        cidr(value).map_err(|why| fault(text, CIDRS, format!("`{}` {why}", cut(value))))
    });
    let cidrs = parsed.collect::<Result<_, _>>()?;
    distinct(cidrs).map_err(|reason| fault(list, CIDRS, reason))
}

fn fault<T>(at: &Spanned<T>, key: &'static str, reason: String) -> ParseError {
    ParseError::Value {
        line: at.referenced.line(),
        key,
        reason,
    }
}

/// A duration as Go's `time.ParseDuration` takes it, if it is one and not negative.
fn duration(text: &str) -> Option<Duration> {
    const UNITS: [(&str, f64); 8] = [
        ("ns", 1e-9),
        ("us", 1e-6),
        ("\u{b5}s", 1e-6),
        ("\u{3bc}s", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
    ];
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut seconds = 0.0;
    loop {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let from_unit = &rest[digits..];
        // A unit ends where the next number begins.
        let end = from_unit.find(|c: char| c.is_ascii_digit() || c == '.');
        let (unit, after) = from_unit.split_at(end.unwrap_or(from_unit.len()));
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit)?;
        seconds += number * factor;
        rest = after;
        if rest.is_empty() {
            return Duration::try_from_secs_f64(seconds).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    /// As its documentation has it.
    const GOOD: &str = "nonMasqueradeCIDRs:
  - 10.0.0.0/8
  - 'fd00:1::/32'
masqLinkLocal: false
masqLinkLocalIPv6: true
resyncInterval: 60s
";

    fn good() -> Parsed {
        let cidrs = ["10.0.0.0/8", "fd00:1::/32"].map(|cidr| cidr.parse().unwrap());
        Parsed {
            overrides: Overrides {
                non_masquerade_cidrs: Some(cidrs.into()),
                link_local: Some(false),
                link_local_ipv6: Some(true),
            },
            resync_interval: Some(Duration::from_secs(60)),
        }
    }

    fn cidrs(text: &str) -> Option<Vec<String>> {
        let parsed = parse(text.as_bytes()).unwrap();
        let cidrs = parsed.overrides.non_masquerade_cidrs;
        cidrs.map(|cidrs| cidrs.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn what_its_users_have_is_read() {
        assert_eq!(parse(GOOD.as_bytes()).unwrap(), good());
        let json = "{\n\t\"nonMasqueradeCIDRs\": [\"10.0.0.0/8\", \"fd00:1::/32\"],\n\t\"masqLinkLocal\": false,\r\n\t\
                    \"masqLinkLocalIPv6\": true,\n\t\"resyncInterval\": \"1m0s\"\n}\n";
        assert_eq!(parse(json.as_bytes()).unwrap(), good());
        // Each key by itself, and the limit of later versions.
        for (line, only) in GOOD.lines().skip(3).zip(0..) {
            let parsed = parse(line.as_bytes()).unwrap();
            assert_eq!(parsed.overrides.non_masquerade_cidrs, None);
            assert_eq!(
                [
                    parsed.overrides.link_local.is_some(),
                    parsed.overrides.link_local_ipv6.is_some(),
                    parsed.resync_interval.is_some()
                ],
                [0, 1, 2].map(|n| n == only)
            );
        }
        assert_eq!(cidrs("nonMasqueradeCIDRs: []"), Some(vec![]));
        assert_eq!(
            cidrs("cidrLimit: 64\nnonMasqueradeCIDRs: [0.0.0.0/0]"),
            Some(vec!["0.0.0.0/0".into()])
        );
        // Twice, and the one in the other.
        let more = "nonMasqueradeCIDRs: [10.1.0.0/16, 10.0.0.0/8, 10.0.0.0/8, ' ::/0 ']";
        assert_eq!(cidrs(more), Some(vec!["10.0.0.0/8".into(), "::/0".into()]));
    }

    #[test]
    fn nothing_is_said_by_nothing() {
        for text in [
            "",
            " \n\n",
            "# nonMasqueradeCIDRs: [x]\n  # more",
            "{}",
            "---\n",
            "null",
            "nonMasqueradeCIDRs:\n",
        ] {
            assert_eq!(parse(text.as_bytes()), Ok(Parsed::default()), "{text:?}");
        }
    }

    #[test]
    fn an_error_names_the_line() {
        for (text, line, part) in [
            ("a: b\n", "1", "a"),
            (
                "masqLinkLocal: true\nnonMasqueradeCidrs: []",
                "2",
                "nonMasqueradeCidrs",
            ),
            (
                "\nnonMasqueradeCIDRs:\n  - 10.0.0.0/8\n  - 10.0.0.1/8\n",
                "4",
                "did you mean 10.0.0.0/8",
            ),
            (
                "nonMasqueradeCIDRs: [10.0.0.0]",
                "1",
                "`10.0.0.0` expected an address and a prefix",
            ),
            ("nonMasqueradeCIDRs: [10.0.0.0/33]", "1", "`10.0.0.0/33`"),
            (
                "nonMasqueradeCIDRs: ['::ffff:10.0.0.0/104']",
                "1",
                "write 10.0.0.0/8",
            ),
            ("nonMasqueradeCIDRs: 10.0.0.0/8", "1", "sequence"),
            ("nonMasqueradeCIDRs: {a: b}", "1", ""),
            ("masqLinkLocal: true\nmasqLinkLocal: true", "2", "duplicate"),
            ("masqLinkLocal: perhaps", "1", "bool"),
            ("masqLinkLocalIPv6: [true]", "1", ""),
            ("\n\nresyncInterval: 60", "3", "`60` is not a duration"),
            ("resyncInterval: -1s", "1", "`-1s`"),
            (
                "cidrLimit: 1\nnonMasqueradeCIDRs: [10.0.0.0/8, 11.0.0.0/8]",
                "2",
                "2 prefixes, cidrLimit is 1",
            ),
            ("cidrLimit: -1", "1", ""),
            ("- 10.0.0.0/8", "1", ""),
            ("nonMasqueradeCIDRs: [", "1", ""),
            ("masqLinkLocal: true\n---\nmasqLinkLocal: false", "", ""),
        ] {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(
                error.contains(&format!("line {line}")) || line.is_empty(),
                "{text:?}: {error}"
            );
            assert!(
                error.contains(part) && !error.contains('\n'),
                "{text:?}: {error}"
            );
        }
        let error = parse(b"masqLinkLocal: true\n\xff").unwrap_err();
        assert_eq!(error, ParseError::Utf8(2));
        assert_eq!(parse(&vec![b'#'; MAX_LEN + 1]), Err(ParseError::TooLong));
    }

    #[test]
    fn a_list_that_the_data_path_has_no_room_for_is_refused_whole() {
        let list = |len: u32| {
            let lines = (0..len).map(|n| format!("- {}/32\n", std::net::Ipv4Addr::from(n * 2)));
            format!("nonMasqueradeCIDRs:\n{}", lines.collect::<String>())
        };
        assert_eq!(cidrs(&list(4096)).unwrap().len(), 4096);
        let error = parse(list(4097).as_bytes()).unwrap_err().to_string();
        assert!(
            error.contains("4097 prefixes, there is room for 4096"),
            "{error}"
        );
    }

    #[test]
    fn durations_are_gos() {
        for (text, milliseconds) in [
            ("0", Some(0)),
            ("0s", Some(0)),
            ("60s", Some(60_000)),
            ("+1m30s", Some(90_000)),
            ("1.5h", Some(5_400_000)),
            (".5s", Some(500)),
            ("1h2m3s4ms5000us6000000ns", Some(3_723_015)),
            ("5\u{b5}s", Some(0)),
            ("", None),
            ("60", None),
            ("s", None),
            (".s", None),
            ("1.2.3s", None),
            ("-1s", None),
            ("1 s", None),
            ("1d", None),
            ("1s2", None),
            ("99999999999999999999999h", None),
        ] {
            let expected = milliseconds.map(Duration::from_millis);
            let rounded = duration(text).map(|d| Duration::from_millis(d.as_millis() as u64));
            assert_eq!(rounded, expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn near_misses_never_panic(at in 0..GOOD.len(), with in "[-:\\[\\]{}&*!|>'\"%@` \na0]{0,3}", drop in 0usize..6) {
            let end = (at + drop).min(GOOD.len());
            let _ = parse(format!("{}{with}{}", &GOOD[..at], &GOOD[end..]).as_bytes());
        }

        #[test]
        fn a_duration_of_any_text_never_panics(text in "\\PC{0,40}") {
            let _ = duration(&text);
        }

        #[test]
        fn what_was_meant_is_what_is_read(
            nets in vec((any::<[u8; 4]>(), 0u8..=32), 0..30), v6 in vec((any::<u128>(), 0u8..=95), 0..9),
            link_local in any::<Option<bool>>(), seconds in any::<Option<u16>>(),
        ) {
            let nets = nets.into_iter().map(|(a, len)| IpNet::new(a.into(), len).unwrap().trunc());
            let v6 = v6.into_iter().map(|(a, len)| IpNet::new(std::net::Ipv6Addr::from(a).into(), len).unwrap().trunc());
            let nets: Vec<IpNet> = nets.chain(v6).collect();
            let mut document = serde_json::json!({"nonMasqueradeCIDRs": nets});
            if let Some(is) = link_local {
                document["masqLinkLocal"] = is.into();
            }
            if let Some(seconds) = seconds {
                document["resyncInterval"] = format!("{seconds}s").into();
            }
            let read = parse(document.to_string().as_bytes()).unwrap();
            prop_assert_eq!(read.overrides.non_masquerade_cidrs, Some(distinct(nets).unwrap()));
            prop_assert_eq!(read.overrides.link_local, link_local);
            prop_assert_eq!(read.resync_interval, seconds.map(|s| Duration::from_secs(s.into())));
        }
    }
}
