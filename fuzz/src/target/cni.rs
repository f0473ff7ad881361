//! What a runtime hands to the plugin: variables, one `KEY=VALUE` a line up to an empty line, and
//! behind it the network configuration of stdin.

use crate::is_planted;
use serde_json::Value;
use sinabro_cni::{
    conf::Conf,
    env::{self, Args},
    error::Error,
    input,
    result::{CniResult, Interface},
    spec::SpecVersion,
    verb,
};
use std::ffi::OsString;

pub fn run(bytes: &[u8]) -> bool {
    let middle = bytes.windows(2).position(|pair| pair == b"\n\n");
    let (variables, stdin) = match middle {
        Some(middle) => (&bytes[..middle], &bytes[middle + 2..]),
        None => (&b""[..], bytes),
    };
    let variables = String::from_utf8_lossy(variables);
    let get = |name: &str| {
        let mut lines = variables.lines().filter_map(|line| line.split_once('='));
        lines
            .find(|(key, _)| *key == name)
            .map(|(_, value)| OsString::from(value))
    };

    checked(env::command(&get));
    for netns_needed in [false, true] {
        if let Some(target) = checked(env::target(&get, netns_needed)) {
            // It names a link that the kernel takes.
            assert!(sinabro_common::names::is_pod_link(&target.owner.link()));
        }
    }
    checked(env::require_path(&get));
    let args = checked(env::args(&get)).unwrap_or_default();

    let Some(stdin) = checked(input::read(stdin)) else {
        return false;
    };
    json(&verb::version::run(&stdin));
    match checked(Conf::parse(&stdin)) {
        Some(conf) => configuration(&conf, &args),
        None => false,
    }
}

fn configuration(conf: &Conf, args: &Args) -> bool {
    assert!(conf.state_dir.is_absolute() && conf.socket.is_absolute());
    if let Some(wishes) = checked(conf.wishes(args)) {
        let v4 = wishes.addresses.iter().filter(|a| a.is_ipv4()).count();
        assert!(v4 <= 1 && wishes.addresses.len() - v4 <= 1);
    }
    checked(conf.dns());
    checked(conf.valid_attachments());
    let Some(Some(earlier)) = checked(conf.prev_result()) else {
        return false;
    };
    // Whatever came before us goes on, in every version.
    for version in SpecVersion::ALL {
        let text = earlier.clone().to_json(version);
        let value = json(&text.expect("a result that was read is written"));
        CniResult::parse(&value, version).expect("what was written is read");
    }
    let mut both = earlier.clone();
    both.append(earlier.clone());
    let value = json(&both.to_json(SpecVersion::LATEST).expect("two are a result"));
    CniResult::parse(&value, SpecVersion::LATEST).expect("two are a result");

    let of_link = |link: &Interface| {
        [
            Some(link.name.clone()),
            link.mac.clone(),
            link.sandbox.clone(),
        ]
    };
    let mut texts = earlier.interfaces.iter().flat_map(of_link).flatten();
    texts.any(|text| is_planted(&text))
}

/// An error is a document for stdout in every version.
fn checked<T>(result: Result<T, Error>) -> Option<T> {
    result
        .inspect_err(|error| {
            for version in SpecVersion::ALL {
                json(&error.to_json(version));
            }
        })
        .ok()
}

fn json(text: &str) -> Value {
    let value: Value = serde_json::from_str(text).expect("stdout gets JSON");
    assert!(value.is_object());
    value
}
