//! The page is well-formed, shows what it is given, and needs nothing else.

use super::*;
use crate::{
    bench::output::{Of, Report},
    report::Machine,
};

const HOSTILE: &str = r#"</style><script src="http://x/">&'"]]>"#;

fn row(case: &str, against: &str, values: &[f64], others: &[f64]) -> Row {
    Row::new(case, "p50", "µs", ("sinabro", values), (against, others)).unwrap()
}

fn whole() -> Whole {
    let mut whole = Whole {
        made: "2026-11-22 13:00 UTC".into(),
        version: Some(HOSTILE.into()),
        machine: Machine {
            kernel: HOSTILE.into(),
            cpu: HOSTILE.into(),
            cpus: 2,
            memory_bytes: 25_000_000_000,
        },
        benches: Vec::new(),
        rows: Vec::new(),
        curves: Vec::new(),
    };
    let rows = [
        row(
            "same node, IPv4: one stream",
            "bridge",
            &[1.0, 2.0],
            &[2.0, 4.5],
        ),
        row(
            "same node, IPv4: one stream",
            HOSTILE,
            &[1.0, 2.0],
            &[0.5, 0.7],
        ),
        row(
            "across nodes: one stream",
            "flannel's way",
            &[1.0, 2.0],
            &[1.0, 1.9],
        ),
        row(HOSTILE, HOSTILE, &[0.0], &[3.0]),
    ];
    let curve = |subject: &str, factor: f64| Curve {
        case: "same node, IPv4".into(),
        unit: "µs".into(),
        subject: subject.into(),
        points: [1.0, 50.0, 99.0, 99.9].map(|p| [p, factor * p]).into(),
    };
    let empty = Curve {
        points: Vec::new(),
        ..curve("bridge", 1.0)
    };
    let zero = Curve {
        points: vec![[50.0, 0.0], [100.0, 0.0]],
        ..curve("bridge", 1.0)
    };
    let ran = |bench: &str, failure: Option<&str>| Ran {
        bench: bench.into(),
        command: format!("cargo xtask bench {bench}"),
        seconds: 100,
        failure: failure.map(str::to_owned),
    };
    let curves = [curve("sinabro", 0.3), curve(HOSTILE, 0.5), empty, zero];
    whole.add(ran("pod", None), &rows, &curves);
    whole.add(ran("pods", Some(HOSTILE)), &[], &[]);
    whole
}

#[test]
fn a_page_is_well_formed_and_escapes_what_it_shows() {
    let text = page(&whole());
    let options = roxmltree::ParsingOptions {
        allow_dtd: true,
        ..Default::default()
    };
    let document = roxmltree::Document::parse_with_options(&text, options).unwrap();
    let elements = || document.descendants().filter(roxmltree::Node::is_element);
    assert!(
        !elements().any(|element| ["script", "link", "img"].contains(&element.tag_name().name()))
    );
    let shown: String = document
        .descendants()
        .filter_map(|node| node.text())
        .collect();
    // Of the case that has no place in its name.
    assert!(shown.contains("by the MTU of the pods' links"), "{shown}");
    // The commit, the kernel, the processor, the failure, a case, a subject.
    assert!(shown.matches(HOSTILE).count() >= 6, "{shown}");
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    // Every bar and whisker is inside its picture.
    for element in elements() {
        for name in ["width", "x1", "x2"] {
            let share = element
                .attribute(name)
                .and_then(|value| value.strip_suffix('%'));
            let share = share.map(|value| value.parse::<f64>().unwrap());
            assert!(
                share.is_none_or(|share| (0.0..=100.0).contains(&share)),
                "{share:?}"
            );
        }
    }
    let count = |name: &str| elements().filter(|e| e.tag_name().name() == name).count();
    // Ours and two others, ours and one, ours and one.
    assert_eq!(count("rect"), 7);
    assert_eq!(count("polyline"), 4);
    assert_eq!(count("section"), 2);
}

#[test]
fn a_page_asks_for_nothing_from_elsewhere() {
    let text = page(&whole());
    for asking in ["src=", "@import", "url(", "<link", "javascript:"] {
        let escaped = HOSTILE.contains(asking);
        assert!(escaped || !text.contains(asking), "{asking}");
    }
    assert!(STYLE.contains("prefers-color-scheme: dark"));
    // In XML, too, a style is text.
    assert!(!STYLE.contains(['<', '&']));
}

#[test]
fn an_empty_report_is_a_page() {
    let mut whole = whole();
    whole.benches.clear();
    assert!(page(&whole).contains("</html>"));
}

#[test]
fn a_report_is_the_same_after_it_was_written_and_read() {
    let whole = whole();
    let text = serde_json::to_string(&whole).unwrap();
    let read: Whole = serde_json::from_str(&text).unwrap();
    assert_eq!(page(&read), page(&whole));
}

#[test]
fn a_row_of_the_report_has_all_that_it_promises() {
    let whole = serde_json::to_value(whole()).unwrap();
    let Of { bench, item } = serde_json::from_value::<Of<Row>>(whole["rows"][0].clone()).unwrap();
    assert_eq!((&*bench, &*item.subject), ("pod", "sinabro"));
    let fields = [
        "bench",
        "case",
        "metric",
        "unit",
        "subject",
        "value",
        "against",
        "against_value",
        "ratio",
        "spread",
    ];
    for row in whole["rows"].as_array().unwrap() {
        for field in fields {
            assert!(!row[field].is_null(), "{field} of {row}");
        }
        assert_eq!(row["spread"].as_array().unwrap().len(), 2);
    }
    // What one bench writes is read as well, whatever else it says.
    let one = serde_json::json!({"machine": whole["machine"], "rows": whole["rows"], "rounds": 5});
    assert_eq!(serde_json::from_value::<Report>(one).unwrap().rows.len(), 4);
}

#[test]
fn judgements_have_a_direction() {
    let judge = |unit: &str, ratios: [f64; 2]| {
        let row = Row::new("c", "m", unit, ("a", &ratios), ("b", &[1.0, 1.0])).unwrap();
        matrix::judgement(&row)
    };
    assert_eq!(judge("1/s", [1.1, 1.2]), "better");
    assert_eq!(judge("1/s", [0.8, 0.9]), "worse");
    assert_eq!(judge("1/s", [0.9, 1.2]), "even");
    assert_eq!(judge("µs", [1.1, 1.2]), "worse");
    assert_eq!(judge("µs", [0.8, 0.9]), "better");
}

#[test]
fn numbers_have_three_digits_or_a_unit() {
    let shown = [
        0.5,
        12.34,
        123.4,
        4321.0,
        43_210.0,
        432_100.0,
        4_321_000.0,
        43_210_000.0,
    ];
    let expected = [
        "0.50", "12.3", "123", "4321", "43.2 k", "432 k", "4.32 M", "43.2 M",
    ];
    assert_eq!(shown.map(number), expected);
}
