use super::*;

fn theirs(rules: Option<&'static str>, listens: bool) -> Theirs {
    Theirs { rules, listens }
}

const RULES: Option<&str> = Some("nftables");

#[test]
fn what_is_to_be_on_begins_whatever_there_is() {
    for (rules, listens) in [(None, false), (RULES, false), (RULES, true), (None, true)] {
        let decided = decide(
            ServiceProxy::On,
            &theirs(rules, listens),
            true,
            &mut None,
            Instant::now(),
        );
        assert_eq!(decided, Decision::Begin);
    }
}

#[test]
fn auto_begins_where_kube_proxy_was_not() {
    let (mut absent, now) = (None, Instant::now());
    let decided = decide(
        ServiceProxy::Auto,
        &theirs(None, false),
        false,
        &mut absent,
        now,
    );
    assert_eq!(decided, Decision::Begin);
}

#[test]
fn auto_waits_for_a_kube_proxy_that_was_there() {
    let (mut absent, start) = (None, Instant::now());
    let mut at = |seconds, rules, listens| {
        let now = start + Duration::from_secs(seconds);
        let theirs = theirs(rules, listens);
        let decided = decide(ServiceProxy::Auto, &theirs, true, &mut absent, now);
        decided == Decision::Begin
    };
    // After a boot it comes three minutes late.
    assert!(!at(0, None, false) && !at(180, None, false));
    assert!(!at(181, RULES, false) && !at(185, RULES, true));
    // It is replaced, twice, and the second time it is away for longer.
    assert!(!at(1000, RULES, false) && !at(1299, RULES, false));
    assert!(!at(1300, RULES, true) && !at(1400, None, true));
    assert!(!at(1401, RULES, false) && !at(1700, None, false));
    assert!(at(1701, None, false) && at(1701, RULES, false));
}
