//! The file that says what is not masqueraded.

use crate::is_planted;
use serde_json::json;
use sinabro_agent::{
    plan::{Facts, Masquerading, masquerade::distinct, non_masquerade},
    watch::masquerade_parse::parse,
};

pub fn run(bytes: &[u8]) -> bool {
    let Ok(parsed) = parse(bytes) else {
        return false;
    };
    let overrides = &parsed.overrides;
    let cidrs = overrides.non_masquerade_cidrs.clone().unwrap_or_default();
    // It is as short as it can be, and says the same when it is written down.
    assert_eq!(distinct(cidrs.clone()).as_ref(), Ok(&cidrs));
    let mut document = json!({"nonMasqueradeCIDRs": cidrs});
    let said = [
        ("masqLinkLocal", overrides.link_local),
        ("masqLinkLocalIPv6", overrides.link_local_ipv6),
    ];
    for (key, said) in said {
        if let Some(said) = said {
            document[key] = said.into();
        }
    }
    let again = parse(document.to_string().as_bytes()).expect("what was written is read");
    assert_eq!(again.overrides.non_masquerade_cidrs, Some(cidrs.clone()));
    assert_eq!(again.overrides.link_local, overrides.link_local);
    assert_eq!(again.overrides.link_local_ipv6, overrides.link_local_ipv6);

    // Whatever it says, each destination that it names is spared.
    let choice = Masquerading::default().with(overrides);
    let (spared, left_out) = non_masquerade(&Facts::default(), &choice);
    assert_eq!(left_out, 0);
    let is_spared = |cidr| spared.iter().any(|net: &ipnet::IpNet| net.contains(cidr));
    assert!(cidrs.iter().all(is_spared));
    let texts: Vec<_> = cidrs.iter().map(ToString::to_string).collect();
    is_planted(&texts.join(" "))
}
