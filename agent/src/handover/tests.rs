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
            &mut None,
            Instant::now(),
        );
        assert_eq!(decided, Decision::Begin);
    }
}

#[test]
fn auto_begins_where_kube_proxy_is_not() {
    let (mut alone, start) = (None, Instant::now());
    let mut at = |seconds, rules, listens| {
        let now = start + Duration::from_secs(seconds);
        let decided = decide(ServiceProxy::Auto, &theirs(rules, listens), &mut alone, now);
        decided == Decision::Begin
    };
    assert!(at(0, None, false));
    // It serves, it begins to.
    assert!(!at(0, RULES, true) && !at(100, None, true));
    // It is replaced, and is away for longer the second time.
    assert!(!at(200, RULES, false) && !at(259, RULES, false));
    assert!(!at(260, RULES, true));
    assert!(!at(270, RULES, false) && !at(329, RULES, false));
    assert!(at(330, RULES, false));
}
