//! Old values of settings do what they did, and say what to write instead.

use super::{child, load, load_file, refused};
use crate::{
    acceleration::choice::Mode,
    config::{ConfigError, DEPRECATED, Settings},
    plan::{ForwardingMode, OverlayMode},
};
use std::collections::BTreeMap;

type Ways = (OverlayMode, ForwardingMode);

fn ways(settings: &Settings) -> Ways {
    (settings.overlay, settings.forwarding)
}

fn in_file(settings: &str) -> Result<Settings, ConfigError> {
    load_file(&format!("nodes: /n\n{settings}"), &[])
}

/// The only warning, which must have all of `parts`.
fn warns(settings: &Settings, parts: &[&str]) {
    let [text] = &settings.deprecated[..] else {
        panic!("{:?}", settings.deprecated);
    };
    for part in parts {
        assert!(text.contains(part), "no {part} in: {text}");
    }
}

/// What each did in the release before, whatever the table says.
const AUTO: Ways = (OverlayMode::Auto, ForwardingMode::Auto);
const BEFORE: [(&str, &str, Ways, &str); 5] = [
    ("overlay", "auto", AUTO, "dataPath: auto"),
    (
        "overlay",
        "kernel",
        (OverlayMode::Kernel, ForwardingMode::Auto),
        "dataPath: kernel",
    ),
    ("forwarding", "auto", AUTO, "dataPath: auto"),
    (
        "forwarding",
        "direct",
        (OverlayMode::Auto, ForwardingMode::Direct),
        "dataPath: auto",
    ),
    (
        "forwarding",
        "kernel",
        (OverlayMode::Auto, ForwardingMode::Kernel),
        "dataPath: kernel",
    ),
];

#[test]
fn each_old_value_in_a_file_has_its_old_effect_and_a_warning() {
    for (key, value, effect, new) in BEFORE {
        let old = format!("{key}: {value}");
        let settings = in_file(&old).unwrap();
        assert_eq!(ways(&settings), effect, "{old}");
        warns(&settings, &[&old, "agent.yaml", new, "next release"]);
    }
    let settings = in_file("tcpAcceleration: auto").unwrap();
    assert_eq!(settings.tcp_acceleration, Mode::OptIn);
    let parts = [
        "tcpAcceleration: auto",
        "agent.yaml",
        "tcpAcceleration: opt-in",
    ];
    warns(&settings, &parts);
    // Of the table none was left out.
    let of_table: Vec<_> = DEPRECATED.iter().map(|old| (old.key, old.value)).collect();
    let tried = BEFORE.map(|(key, value, ..)| (key, value));
    assert_eq!(
        of_table,
        [&tried[..], &[("tcpAcceleration", "auto")]].concat()
    );
}

#[test]
fn a_flag_is_answered_with_a_flag() {
    for (key, value, effect, new) in BEFORE {
        let old = format!("--{key}={value}");
        let settings = load(&["--nodes=/n", &old]).unwrap();
        assert_eq!(ways(&settings), effect, "{old}");
        let new = new.replace("dataPath: ", "--data-path=");
        warns(&settings, &[&old, "from a flag", &new]);
    }
    let settings = load(&["--nodes=/n", "--tcp-acceleration=auto"]).unwrap();
    assert_eq!(settings.tcp_acceleration, Mode::OptIn);
    warns(
        &settings,
        &["--tcp-acceleration=auto", "--tcp-acceleration=opt-in"],
    );
}

#[test]
fn a_variable_is_answered_with_a_variable() {
    let of = |variable: &str, value: &str| {
        // The process's own environment is shared by all tests: a child's is not.
        let mut command = child("deprecated::child_prints_ways");
        let output = command.env(variable, value).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for (key, value, effect, new) in BEFORE {
        let variable = format!("SINABRO_{}", key.to_uppercase());
        let text = of(&variable, value);
        let new = new.replace("dataPath: ", "SINABRO_DATA_PATH=");
        let old = format!("{variable}={value}");
        for part in [&format!("{effect:?}"), &old, "from the environment", &new] {
            assert!(text.contains(part), "no {part} in: {text}");
        }
    }
    let text = of("SINABRO_TCP_ACCELERATION", "auto");
    assert!(text.contains("SINABRO_TCP_ACCELERATION=opt-in"), "{text}");
}

#[test]
#[ignore = "run by a_variable_is_answered_with_a_variable with an environment of its own"]
fn child_prints_ways() {
    let settings = load(&["--nodes=/n"]).unwrap();
    println!("{:?} {:?}", ways(&settings), settings.deprecated);
}

#[test]
fn the_new_name_wins_wherever_each_was_given() {
    let both = (OverlayMode::Kernel, ForwardingMode::Kernel);
    for (key, value, ..) in BEFORE {
        let old = format!("{key}: {value}");
        for (new, flag) in [(AUTO, "auto"), (both, "kernel")] {
            let in_file = in_file(&format!("{old}\ndataPath: {flag}")).unwrap();
            let old_by_flag = format!("--{key}={value}");
            let new_in_file = format!("{{nodes: /n, dataPath: {flag}}}");
            let by_flag = load_file(&new_in_file, &[&old_by_flag]).unwrap();
            for (settings, old) in [(in_file, &old), (by_flag, &old_by_flag)] {
                assert_eq!(ways(&settings), new, "{old}");
                warns(&settings, &[old, "ignored", "dataPath"]);
            }
        }
    }
}

#[test]
fn what_is_not_old_is_not_warned_of() {
    let settings = in_file("dataPath: kernel\ntcpAcceleration: opt-in").unwrap();
    let both = (OverlayMode::Kernel, ForwardingMode::Kernel);
    assert_eq!(ways(&settings), both);
    assert_eq!(settings.deprecated, [""; 0]);
}

#[test]
fn both_old_names_have_their_effects_beside_each_other() {
    let settings = in_file("overlay: kernel\nforwarding: direct").unwrap();
    let both = (OverlayMode::Kernel, ForwardingMode::Direct);
    assert_eq!(ways(&settings), both);
    assert_eq!(settings.deprecated.len(), 2);
}

#[test]
fn a_value_that_there_never_was_is_refused_with_those_that_there_were() {
    let mut values: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (key, value, ..) in BEFORE {
        values.entry(key).or_default().push(value);
    }
    for (key, values) in values {
        // As in the release before, also where the value would be ignored.
        for more in ["", "\ndataPath: auto"] {
            let text = refused(in_file(&format!("{key}: native{more}")), key, "native");
            for part in values.iter().chain(&["agent.yaml", "dataPath"]) {
                assert!(text.contains(part), "{text}");
            }
        }
        let flag = format!("--{key}=");
        refused(load(&["--nodes=/n", &flag]), key, "must not be empty");
    }
    refused(in_file("dataPath: direct"), "dataPath", "auto or kernel");
}
