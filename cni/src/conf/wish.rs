//! What a pod wishes by its annotations, and the network by its keys.

use super::key::{invalid, text};
use crate::{env::excerpt, error::Error};
use serde_json::{Map, Value};
use sinabro_common::names;
use std::{fmt, str::FromStr};

/// The network's own wish for its pods.
pub fn of_network<T>(keys: &Map<String, Value>, key: &str) -> Result<Option<T>, Error>
where
    T: FromStr<Err: fmt::Display>,
{
    match text(keys, key)? {
        None | Some("") => Ok(None),
        Some(text) => match text.parse() {
            Ok(wish) => Ok(Some(wish)),
            Err(error) => Err(invalid(key, format!("`{}` is {error}", excerpt(text)))),
        },
    }
}

/// The wish in the pod's annotations. Whoever writes a pod may write anything there, and learns
/// more from a warning than from a pod that does not start.
pub fn of_pod<T>(annotations: &Map<String, Value>, name: &str) -> Result<Option<T>, String>
where
    T: FromStr<Err: fmt::Display>,
{
    match annotations.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => text.parse().map(Some).map_err(|error| {
            let text = excerpt(text);
            format!("annotation {name} is {text:?}, {error}: it is passed over")
        }),
        Some(_) => Err(format!(
            "annotation {name} is not a string: it is passed over"
        )),
    }
}

/// The pod's annotations, if the runtime hands them on.
pub fn annotations(
    runtime: Option<&Map<String, Value>>,
) -> Result<Option<&Map<String, Value>>, String> {
    match runtime.and_then(|r| r.get(names::ANNOTATIONS_CAPABILITY)) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(annotations)) => Ok(Some(annotations)),
        Some(_) => Err("the runtime's annotations of the pod are not an object".into()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use crate::{conf::tests::parse, env::Args, error::Code};
    use serde_json::{Value, json};
    use sinabro_common::api::{LocalMtuWish, TcpAcceleration};

    pub fn annotations(annotations: Value) -> Value {
        json!({"io.kubernetes.cri.pod-annotations": annotations})
    }

    #[test]
    fn the_first_wish_for_acceleration_wins() {
        use TcpAcceleration::{Disabled, Enabled};
        let annotation = "sinabro.io/tcp-acceleration";
        for (annotated, argument, key, wish) in [
            (
                Some("enabled"),
                Some(Disabled),
                Some("disabled"),
                Some(Enabled),
            ),
            (None, Some(Disabled), Some("enabled"), Some(Disabled)),
            (None, None, Some("enabled"), Some(Enabled)),
            (None, None, Some(""), None),
            (None, None, None, None),
        ] {
            let args = Args {
                acceleration: argument,
                ..Args::default()
            };
            let mut more = json!({"runtimeConfig": annotations(json!({"other": "x"}))});
            if let Some(text) = annotated {
                more["runtimeConfig"] = annotations(json!({annotation: text, "other": "x"}));
            }
            if let Some(text) = key {
                more["tcpAcceleration"] = json!(text);
            }
            let wishes = parse(more).unwrap().wishes(&args).unwrap();
            assert_eq!((wishes.acceleration, wishes.warnings), (wish, vec![]));
        }
    }

    #[test]
    fn the_mtu_of_the_link_is_wished_for_in_the_same_ways() {
        use LocalMtuWish::{Auto, Off};
        for (annotated, argument, key, wish) in [
            (Some("auto"), Some(Off), Some("off"), Some(Auto)),
            (None, Some(Off), Some("auto"), Some(Off)),
            (None, None, Some("off"), Some(Off)),
            (None, None, None, None),
        ] {
            let args = Args {
                local_mtu: argument,
                ..Args::default()
            };
            let annotated = annotated.map(|text| json!({"sinabro.io/local-mtu": text}));
            let mut more =
                json!({"runtimeConfig": annotations(annotated.unwrap_or_else(|| json!({})))});
            if let Some(text) = key {
                more["localMTU"] = json!(text);
            }
            let wishes = parse(more).unwrap().wishes(&args).unwrap();
            assert_eq!((wishes.local_mtu, wishes.warnings), (wish, vec![]));
        }
        // Each that makes no sense is passed over for itself.
        let both = json!({"sinabro.io/local-mtu": "9000", "sinabro.io/tcp-acceleration": "?"});
        let conf = parse(json!({"localMTU": "off", "runtimeConfig": annotations(both)}));
        let wishes = conf.unwrap().wishes(&Args::default()).unwrap();
        assert_eq!((wishes.local_mtu, wishes.warnings.len()), (Some(Off), 2));
        let error = parse(json!({"localMTU": "on"})).unwrap();
        let error = error.wishes(&Args::default()).unwrap_err();
        assert!(error.msg.contains("localMTU"), "{error}");
    }

    #[test]
    fn a_network_that_wishes_nonsense_is_refused() {
        for value in [
            json!("on"),
            json!("Enabled"),
            json!(true),
            json!(["enabled"]),
        ] {
            let good = annotations(json!({"sinabro.io/tcp-acceleration": "enabled"}));
            let conf = parse(json!({"tcpAcceleration": value, "runtimeConfig": good})).unwrap();
            let error = conf.wishes(&Args::default()).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains("tcpAcceleration"), "{error}");
        }
    }

    #[test]
    fn an_annotation_that_makes_no_sense_is_passed_over_and_told() {
        let long = "x".repeat(100_000);
        for value in [
            annotations(json!({"sinabro.io/tcp-acceleration": "yes\nplease"})),
            annotations(json!({"sinabro.io/tcp-acceleration": ""})),
            annotations(json!({"sinabro.io/tcp-acceleration": long})),
            annotations(json!({"sinabro.io/tcp-acceleration": true})),
            annotations(json!(["sinabro.io/tcp-acceleration"])),
            annotations(json!("enabled")),
        ] {
            let conf = parse(json!({"tcpAcceleration": "disabled", "runtimeConfig": value}));
            let wishes = conf.unwrap().wishes(&Args::default()).unwrap();
            assert_eq!(wishes.acceleration, Some(TcpAcceleration::Disabled));
            let [warning] = &wishes.warnings[..] else {
                panic!("{wishes:?}");
            };
            assert!(warning.contains("annotation"), "{warning}");
            assert!(warning.len() < 256 && !warning.contains('\n'), "{warning}");
        }
    }
}
