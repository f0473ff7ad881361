//! The network configuration on stdin.
//!
//! Only the keys a verb needs are looked at, so that a DEL is not refused for what only an ADD
//! uses. Keys that are not known are the business of others and pass.

mod host_ports;
mod key;
mod sidecar;
mod wish;
mod wishes;

use crate::{
    env::{excerpt, is_cni_name},
    error::{Code, Error},
    result::CniResult,
    spec::SpecVersion,
};
use key::{invalid, missing, path, text};
use serde::Deserialize;
use serde_json::{Map, Value};
use sinabro_common::{api::Owner, names};
use std::path::PathBuf;
pub use wishes::Wishes;

/// A configuration whose common keys are valid.
#[derive(Clone, Debug, PartialEq)]
pub struct Conf {
    pub version: SpecVersion,
    /// The network's name.
    pub name: String,
    /// Where the agent and the plugin keep files.
    pub state_dir: PathBuf,
    /// The agent's socket.
    pub socket: PathBuf,
    keys: Map<String, Value>,
}

impl Conf {
    /// Parses what every verb but VERSION needs.
    ///
    /// # Errors
    /// Code 6 if the input is not a JSON object, 1 if its version is not spoken, 7 if a key
    /// cannot be used.
    pub fn parse(input: &[u8]) -> Result<Self, Error> {
        let keys: Map<String, Value> = serde_json::from_slice(input).map_err(|e| {
            Error::new(
                Code::Decode,
                "network configuration on stdin is not a JSON object",
            )
            .details(e)
        })?;
        let version = match text(&keys, "cniVersion")? {
            // The default of the specification's first versions.
            None | Some("") => "0.1.0",
            Some(text) => text,
        };
        let version = SpecVersion::parse(version).ok_or_else(|| {
            Error::new(
                Code::IncompatibleVersion,
                format!("cniVersion `{}` is not supported", excerpt(version)),
            )
            .details(format!("supported are {}", SpecVersion::list()))
        })?;
        let name = match text(&keys, "name")? {
            None | Some("") => return Err(missing("name")),
            Some(name) if is_cni_name(name) => name.to_owned(),
            Some(name) => {
                return Err(invalid(
                    "name",
                    format!(
                        "`{}` is not a letter or digit followed by letters, digits, `_`, `.` and `-`",
                        excerpt(name)
                    ),
                ));
            }
        };
        if matches!(text(&keys, "type")?, None | Some("")) {
            return Err(missing("type"));
        }
        let state_dir = path(&keys, "stateDir")?.unwrap_or_else(|| names::STATE_DIR.into());
        let socket = path(&keys, "socket")?.unwrap_or_else(|| state_dir.join(names::SOCKET));
        Ok(Self {
            version,
            name,
            state_dir,
            socket,
            keys,
        })
    }

    /// `prevResult`, none if there was no earlier plugin.
    ///
    /// # Errors
    /// Code 7 as [`CniResult::parse`].
    pub fn prev_result(&self) -> Result<Option<CniResult>, Error> {
        match self.keys.get("prevResult") {
            None | Some(Value::Null) => Ok(None),
            Some(value) => CniResult::parse(value, self.version).map(Some),
        }
    }

    /// `dns`, which the result passes on.
    ///
    /// # Errors
    /// Code 7 if it is not what the specification says.
    pub fn dns(&self) -> Result<Map<String, Value>, Error> {
        #[derive(Deserialize)]
        struct Shape {
            #[serde(default, rename = "nameservers")]
            _nameservers: Option<Vec<String>>,
            #[serde(default, rename = "domain")]
            _domain: Option<String>,
            #[serde(default, rename = "search")]
            _search: Option<Vec<String>>,
            #[serde(default, rename = "options")]
            _options: Option<Vec<String>>,
        }
        match self.keys.get("dns") {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(dns)) => {
                Shape::deserialize(dns).map_err(|e| invalid("dns", e.to_string()))?;
                Ok(dns.clone())
            }
            Some(_) => Err(invalid("dns", "not an object".into())),
        }
    }

    /// `cni.dev/valid-attachments`.
    ///
    /// # Errors
    /// Code 7 if it is missing, for then it is unknown what may go, or not a list.
    pub fn valid_attachments(&self) -> Result<Vec<Owner>, Error> {
        const KEY: &str = "cni.dev/valid-attachments";
        match self.keys.get(KEY) {
            None => Err(missing(KEY)),
            // An empty Go slice.
            Some(Value::Null) => Ok(Vec::new()),
            Some(value) => Vec::deserialize(value).map_err(|e| invalid(KEY, e.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn conf(more: Value) -> Value {
        let mut conf = json!({"cniVersion": "1.1.0", "name": "pods", "type": "sinabro"});
        for (key, value) in more.as_object().unwrap() {
            conf[key] = value.clone();
        }
        conf
    }

    pub(super) fn parse(more: Value) -> Result<Conf, Error> {
        Conf::parse(conf(more).to_string().as_bytes())
    }

    #[test]
    fn paths_have_defaults() {
        let conf = parse(json!({"unknown": {"key": 1}})).unwrap();
        assert_eq!(conf.socket, PathBuf::from("/run/sinabro/agent.sock"));
        let conf = parse(json!({"stateDir": "/a"})).unwrap();
        assert_eq!(conf.socket, PathBuf::from("/a/agent.sock"));
        let conf = parse(json!({"stateDir": "/a", "socket": "/b"})).unwrap();
        assert_eq!((conf.state_dir, conf.socket), ("/a".into(), "/b".into()));
    }

    #[test]
    fn every_fault_has_its_code_and_names_its_key() {
        for (more, code, word) in [
            (
                json!({"cniVersion": null}),
                Code::IncompatibleVersion,
                "0.1.0",
            ),
            (
                json!({"cniVersion": "0.2.0"}),
                Code::IncompatibleVersion,
                "0.2.0",
            ),
            (json!({"cniVersion": 1}), Code::InvalidConfig, "cniVersion"),
            (json!({"name": null}), Code::InvalidConfig, "name"),
            (json!({"name": "a/b"}), Code::InvalidConfig, "name"),
            (json!({"type": ""}), Code::InvalidConfig, "type"),
            (json!({"stateDir": "run"}), Code::InvalidConfig, "stateDir"),
            (json!({"socket": 7}), Code::InvalidConfig, "socket"),
        ] {
            let error = parse(more.clone()).unwrap_err();
            assert_eq!(error.code, code, "{more}");
            assert!(error.msg.contains(word), "{more}: {error}");
        }
        for input in ["", "{", "[]", "null", "nonsense", "{\"name\":\"pods\"} {"] {
            assert_eq!(
                Conf::parse(input.as_bytes()).unwrap_err().code,
                Code::Decode,
                "{input}"
            );
        }
        let error = parse(json!({"cniVersion": "3.0.0"})).unwrap_err();
        assert!(error.details.contains("0.3.1") && error.details.contains("1.1.0"));
    }

    #[test]
    fn a_missing_attachment_list_is_not_an_empty_one() {
        let list = |more| parse(more).unwrap().valid_attachments();
        assert_eq!(list(json!({})).unwrap_err().code, Code::InvalidConfig);
        assert_eq!(list(json!({"cni.dev/valid-attachments": null})), Ok(vec![]));
        let one = json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]});
        assert_eq!(list(one).unwrap()[0].container_id, "c1");
        let bad = json!({"cni.dev/valid-attachments": [{"containerID": "c1"}]});
        assert!(list(bad).unwrap_err().msg.contains("ifname"));
    }

    #[test]
    fn dns_passes_if_it_is_one() {
        let dns = json!({"nameservers": ["10.96.0.10"], "search": ["svc"], "more": 1});
        let passed = parse(json!({"dns": dns})).unwrap().dns().unwrap();
        assert_eq!(Value::Object(passed), dns);
        for dns in [json!([]), json!({"nameservers": "10.0.0.1"})] {
            assert!(parse(json!({"dns": dns})).unwrap().dns().is_err());
        }
    }

    #[test]
    fn a_delete_is_not_stopped_by_what_it_does_not_need() {
        let conf = parse(json!({"prevResult": 7, "runtimeConfig": 7, "dns": 7})).unwrap();
        assert!(conf.prev_result().is_err());
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = Conf::parse(&bytes);
        }

        #[test]
        fn truncation_is_an_error(len in 0usize..64) {
            let whole = conf(json!({"runtimeConfig": {"ips": ["10.0.0.1"]}})).to_string();
            let error = Conf::parse(&whole.as_bytes()[..len]).unwrap_err();
            prop_assert_eq!(error.code, Code::Decode);
        }

    }
}
