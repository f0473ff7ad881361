//! Whether a pod's TCP connections are to be accelerated: its annotation, and the network's key.

use super::key::{invalid, text};
use crate::{env::excerpt, error::Error};
use serde_json::{Map, Value};
use sinabro_common::{api::TcpAcceleration, names};

/// The network's own wish for its pods.
pub fn of_network(keys: &Map<String, Value>) -> Result<Option<TcpAcceleration>, Error> {
    const KEY: &str = "tcpAcceleration";
    match text(keys, KEY)? {
        None | Some("") => Ok(None),
        Some(text) => match text.parse() {
            Ok(wish) => Ok(Some(wish)),
            Err(error) => Err(invalid(KEY, format!("`{}` is {error}", excerpt(text)))),
        },
    }
}

/// The wish in the pod's annotations. Whoever writes a pod may write anything there, and learns
/// more from a warning than from a pod that does not start.
pub fn of_pod(runtime: Option<&Map<String, Value>>) -> Result<Option<TcpAcceleration>, String> {
    const ANNOTATION: &str = names::ACCELERATION_ANNOTATION;
    let annotations = match runtime.and_then(|r| r.get(names::ANNOTATIONS_CAPABILITY)) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Object(annotations)) => annotations,
        Some(_) => return Err("the runtime's annotations of the pod are not an object".into()),
    };
    match annotations.get(ANNOTATION) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => text.parse().map(Some).map_err(|error| {
            let text = excerpt(text);
            format!("annotation {ANNOTATION} is {text:?}, {error}: it is passed over")
        }),
        Some(_) => Err(format!(
            "annotation {ANNOTATION} is not a string: it is passed over"
        )),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use crate::{conf::tests::parse, env::Args, error::Code};
    use serde_json::{Value, json};
    use sinabro_common::api::TcpAcceleration;

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
