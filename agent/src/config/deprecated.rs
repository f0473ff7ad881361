//! Settings and values that the next release refuses. They work until then, with a warning.

use super::{ConfigError, Origin, Settings, layers::Layers};
use crate::{
    acceleration::choice::Mode,
    plan::{ForwardingMode, OverlayMode},
};
use std::fmt;

/// A value of a setting that the next release refuses.
#[derive(Debug)]
pub struct Deprecated {
    pub key: &'static str,
    pub value: &'static str,
    /// Key and value to write instead.
    pub new: (&'static str, &'static str),
    /// How the new one differs, if it does, or what else may be written.
    difference: &'static str,
    /// What the old one does.
    apply: fn(&mut Settings),
}

const DATA_PATH: &str = "dataPath";
const DEFAULT: &str = "or leave it out, as this is the default";
const ALL_BY_THE_STACK: &str =
    "dataPath is for packets between nodes and for packets to and from the outside";

/// Those with the same key stand together.
pub static DEPRECATED: [Deprecated; 6] = [
    Deprecated {
        key: "overlay",
        value: "auto",
        new: (DATA_PATH, "auto"),
        difference: DEFAULT,
        apply: |settings| settings.overlay = OverlayMode::Auto,
    },
    Deprecated {
        key: "overlay",
        value: "kernel",
        new: (DATA_PATH, "kernel"),
        difference: ALL_BY_THE_STACK,
        apply: |settings| settings.overlay = OverlayMode::Kernel,
    },
    Deprecated {
        key: "forwarding",
        value: "auto",
        new: (DATA_PATH, "auto"),
        difference: DEFAULT,
        apply: |settings| settings.forwarding = ForwardingMode::Auto,
    },
    Deprecated {
        key: "forwarding",
        value: "direct",
        new: (DATA_PATH, "auto"),
        difference: "it takes the fast path unless there are rules for forwarded traffic, and \
                     no other value passes over such rules",
        apply: |settings| settings.forwarding = ForwardingMode::Direct,
    },
    Deprecated {
        key: "forwarding",
        value: "kernel",
        new: (DATA_PATH, "kernel"),
        difference: ALL_BY_THE_STACK,
        apply: |settings| settings.forwarding = ForwardingMode::Kernel,
    },
    Deprecated {
        key: "tcpAcceleration",
        value: "auto",
        new: ("tcpAcceleration", "opt-in"),
        difference: "",
        apply: |settings| settings.tcp_acceleration = Mode::OptIn,
    },
];

/// Gives old values their effect, and says what to write instead of each.
///
/// # Errors
/// If an old setting has a value that it never had.
pub fn apply(layers: &Layers, settings: &mut Settings) -> Result<(), ConfigError> {
    for of_key in DEPRECATED.chunk_by(|a, b| a.key == b.key) {
        let Deprecated { key, new, .. } = of_key[0];
        let Some(origin) = layers.given(key) else {
            continue;
        };
        let is_gone = key != new.0;
        let found = layers.parse(key, |text| {
            let old = of_key.iter().find(|old| old.value == text);
            if old.is_none() && is_gone {
                let values: Vec<_> = of_key.iter().map(|old| old.value).collect();
                let values = values.join(", ");
                return Err(format!(
                    "expected one of {values}; its new name is {}",
                    new.0
                ));
            }
            Ok(old)
        })?;
        let Some(old) = found else { continue };
        let is_ignored = is_gone && layers.given(new.0).is_some();
        if !is_ignored {
            (old.apply)(settings);
        }
        settings.deprecated.push(old.warning(origin, is_ignored));
    }
    Ok(())
}

impl Deprecated {
    fn warning(&self, origin: &Origin, is_ignored: bool) -> String {
        let spelled = |key, value| Spelled { key, value, origin };
        let (old, new) = (spelled(self.key, self.value), self.new);
        let goes = format!("`{old}` ({origin}) is refused by the next release");
        if is_ignored {
            return format!("{goes}, and is ignored because {} is set: remove it", new.0);
        }
        let mut text = format!("{goes}: write `{}` instead", spelled(new.0, new.1));
        if !self.difference.is_empty() {
            text += "; ";
            text += self.difference;
        }
        text
    }
}

/// A setting as it is written where its value came from.
struct Spelled<'a> {
    key: &'a str,
    value: &'a str,
    origin: &'a Origin,
}

impl fmt::Display for Spelled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, origin } = self;
        match origin {
            Origin::Flag => write!(f, "--{}={value}", apart(key, '-')),
            Origin::Environment => {
                let variable = apart(key, '_').to_uppercase();
                write!(f, "SINABRO_{variable}={value}")
            }
            Origin::File(_) | Origin::Default => write!(f, "{key}: {value}"),
        }
    }
}

/// The words of a key in camelCase.
fn apart(key: &str, separator: char) -> String {
    let mut words = String::new();
    for letter in key.chars() {
        if letter.is_ascii_uppercase() {
            words.push(separator);
        }
        words.push(letter.to_ascii_lowercase());
    }
    words
}
