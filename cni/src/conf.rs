//! The network configuration on stdin.
//!
//! Only the keys a verb needs are looked at, so that a DEL is not refused for what only an ADD
//! uses. Keys that are not known are the business of others and pass.

use crate::{
    env::{Args, excerpt, is_cni_name, parse_address},
    error::{Code, Error},
    result::CniResult,
    spec::SpecVersion,
};
use serde::Deserialize;
use serde_json::{Map, Value};
use sinabro_common::{
    api::{Mac, Owner, TcpAcceleration},
    names,
};
use std::{
    io::{self, Read},
    net::IpAddr,
    path::PathBuf,
};

/// Longest input read: more than twice what a pod's annotations may take, which is 256 KiB
/// (TotalAnnotationSizeLimitB of Kubernetes) of bytes that Go writes as six (`\u003c`), and more
/// than a GC of 10,000 attachments. An ADD refused for its length could not be deleted either: the
/// runtime says the same to DEL.
pub const MAX_INPUT: usize = 4 << 20;

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

/// What runtime and user ask an ADD for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// At most one of each family.
    pub addresses: Vec<IpAddr>,
    pub mac: Option<Mac>,
    pub acceleration: Option<TcpAcceleration>,
    /// What was passed over: told, but no reason to refuse a pod.
    pub warnings: Vec<String>,
}

/// Reads stdin to its end.
///
/// # Errors
/// Code 5 if reading fails or there is more than [`MAX_INPUT`].
pub fn read_input(input: impl Read) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let limit = MAX_INPUT as u64 + 1;
    input
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(|e: io::Error| {
            Error::new(Code::Io, "network configuration cannot be read from stdin").details(e)
        })?;
    if bytes.len() > MAX_INPUT {
        return Err(Error::new(
            Code::Io,
            format!("network configuration on stdin is longer than {MAX_INPUT} bytes"),
        ));
    }
    Ok(bytes)
}

/// The `cniVersion` of an input, if it has a readable one.
pub fn peek_version(input: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Peek {
        cni_version: String,
    }
    let peek: Peek = serde_json::from_slice(input).ok()?;
    Some(peek.cni_version)
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

    /// What is asked for. Addresses and MAC: `runtimeConfig` (capabilities `ips` and `mac`), else
    /// `args.cni`, else CNI_ARGS, in the order of the CNI conventions. Acceleration: the pod's
    /// annotation, else CNI_ARGS, else the key `tcpAcceleration`.
    ///
    /// # Errors
    /// Code 7 naming the key.
    pub fn wishes(&self, args: &Args) -> Result<Wishes, Error> {
        let runtime = object(&self.keys, "runtimeConfig", "runtimeConfig")?;
        let cni = match object(&self.keys, "args", "args")? {
            Some(args) => object(args, "cni", "args.cni")?,
            None => None,
        };
        let mut wishes = Wishes::default();
        for (from, name) in [(runtime, "runtimeConfig"), (cni, "args.cni")] {
            let Some(from) = from else { continue };
            if wishes.addresses.is_empty() {
                wishes.addresses = addresses(from, &format!("{name}.ips"))?;
            }
            if wishes.mac.is_none() {
                wishes.mac = mac(from, &format!("{name}.mac"))?;
            }
        }
        if wishes.addresses.is_empty() {
            wishes.addresses.extend(args.ip);
        }
        if wishes.mac.is_none()
            && let Some(mac) = args.mac
        {
            wishes.mac = Some(usable(mac, "MAC of CNI_ARGS")?);
        }
        // Wrong keys are refused even where they do not count, so that they are found.
        let of_network = acceleration(&self.keys)?;
        let of_pod = annotated(runtime).unwrap_or_else(|warning| {
            wishes.warnings.push(warning);
            None
        });
        wishes.acceleration = of_pod.or(args.acceleration).or(of_network);
        Ok(wishes)
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

fn invalid(key: &str, why: String) -> Error {
    Error::new(
        Code::InvalidConfig,
        format!("network configuration: {key}: {why}"),
    )
}

fn missing(key: &str) -> Error {
    invalid(key, "missing".into())
}

fn text<'a>(keys: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>, Error> {
    match keys.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(invalid(key, "not a string".into())),
    }
}

fn path(keys: &Map<String, Value>, key: &str) -> Result<Option<PathBuf>, Error> {
    match text(keys, key)? {
        None | Some("") => Ok(None),
        Some(path) if path.starts_with('/') && !path.contains('\0') => Ok(Some(path.into())),
        Some(path) => Err(invalid(
            key,
            format!("`{}` is not an absolute path", excerpt(path)),
        )),
    }
}

fn object<'a>(
    keys: &'a Map<String, Value>,
    key: &str,
    name: &str,
) -> Result<Option<&'a Map<String, Value>>, Error> {
    match keys.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(object)) => Ok(Some(object)),
        Some(_) => Err(invalid(name, "not an object".into())),
    }
}

fn addresses(from: &Map<String, Value>, name: &str) -> Result<Vec<IpAddr>, Error> {
    let texts: Vec<String> = match from.get("ips") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(value) => Vec::deserialize(value).map_err(|e| invalid(name, e.to_string()))?,
    };
    let mut addresses: Vec<IpAddr> = Vec::with_capacity(2);
    for (i, text) in texts.iter().enumerate() {
        let address = parse_address(text).map_err(|why| invalid(&format!("{name}[{i}]"), why))?;
        if let Some(other) = addresses.iter().find(|a| a.is_ipv4() == address.is_ipv4()) {
            return Err(invalid(
                name,
                format!("{other} and {address} are of one family, of which a pod gets one address"),
            ));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

fn mac(from: &Map<String, Value>, name: &str) -> Result<Option<Mac>, Error> {
    match text(from, "mac").map_err(|_| invalid(name, "not a string".into()))? {
        None | Some("") => Ok(None),
        Some(text) => {
            let mac = text
                .parse::<Mac>()
                .map_err(|e| invalid(name, e.to_string()))?;
            usable(mac, name).map(Some)
        }
    }
}

/// The network's own wish for its pods.
fn acceleration(keys: &Map<String, Value>) -> Result<Option<TcpAcceleration>, Error> {
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
fn annotated(runtime: Option<&Map<String, Value>>) -> Result<Option<TcpAcceleration>, String> {
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

fn usable(mac: Mac, name: &str) -> Result<Mac, Error> {
    if !mac.is_usable() {
        Err(invalid(
            name,
            format!("{mac} is a group address or zero, which no interface can have"),
        ))
    } else if mac.0 == names::HOST_MAC {
        Err(invalid(name, format!("{mac} is the host side's own")))
    } else {
        Ok(mac)
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

    fn parse(more: Value) -> Result<Conf, Error> {
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
    fn wishes_follow_the_conventions_order() {
        let all = json!({
            "runtimeConfig": {"ips": ["10.0.0.5/24", "fd00::5"], "mac": "0a:58:0a:00:00:05", "portMappings": []},
            "args": {"cni": {"ips": ["10.0.0.6"], "mac": "0a:58:0a:00:00:06"}},
        });
        let args = Args {
            ip: Some("10.0.0.7".parse().unwrap()),
            mac: Some("0a:58:0a:00:00:07".parse().unwrap()),
            ..Args::default()
        };
        let wishes = |more: Value| parse(more).unwrap().wishes(&args).unwrap();
        let last = |w: &Wishes| w.mac.unwrap().0[5];

        let first = wishes(all.clone());
        assert_eq!(
            first.addresses,
            [
                "10.0.0.5".parse::<IpAddr>().unwrap(),
                "fd00::5".parse().unwrap()
            ]
        );
        assert_eq!(last(&first), 5);
        let second = wishes(json!({"runtimeConfig": null, "args": all["args"]}));
        assert_eq!(second.addresses, ["10.0.0.6".parse::<IpAddr>().unwrap()]);
        assert_eq!(last(&second), 6);
        let third = wishes(json!({"runtimeConfig": {"ips": [], "mac": ""}}));
        assert_eq!(third.addresses, ["10.0.0.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(last(&third), 7);
    }

    #[test]
    fn wishes_nobody_can_grant_are_refused() {
        for (more, word) in [
            (json!({"runtimeConfig": []}), "runtimeConfig"),
            (
                json!({"runtimeConfig": {"ips": "10.0.0.1"}}),
                "runtimeConfig.ips",
            ),
            (
                json!({"runtimeConfig": {"ips": ["10.0.0.1", "x"]}}),
                "runtimeConfig.ips[1]",
            ),
            (
                json!({"runtimeConfig": {"ips": ["10.0.0.1", "10.0.0.2"]}}),
                "one family",
            ),
            (json!({"runtimeConfig": {"mac": 7}}), "runtimeConfig.mac"),
            (
                json!({"runtimeConfig": {"mac": "01:00:5e:00:00:01"}}),
                "group",
            ),
            (
                json!({"runtimeConfig": {"mac": "00:00:00:00:00:00"}}),
                "zero",
            ),
            (
                json!({"runtimeConfig": {"mac": "02:53:4e:42:00:01"}}),
                "host",
            ),
            (json!({"args": {"cni": 7}}), "args.cni"),
            (json!({"args": {"cni": {"ips": [7]}}}), "args.cni.ips"),
        ] {
            let error = parse(more.clone())
                .unwrap()
                .wishes(&Args::default())
                .unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains(word), "{more}: {error}");
        }
    }

    fn annotations(annotations: Value) -> Value {
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

    #[test]
    fn input_is_limited() {
        assert_eq!(read_input(io::repeat(b' ')).unwrap_err().code, Code::Io);
        assert_eq!(read_input(&b"{}"[..]).unwrap(), b"{}");
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = Conf::parse(&bytes);
            let _ = peek_version(&bytes);
        }

        #[test]
        fn truncation_is_an_error(len in 0usize..64) {
            let whole = conf(json!({"runtimeConfig": {"ips": ["10.0.0.1"]}})).to_string();
            let error = Conf::parse(&whole.as_bytes()[..len]).unwrap_err();
            prop_assert_eq!(error.code, Code::Decode);
        }

        #[test]
        fn odd_values_never_panic(text in "\\PC{0,40}", key in "(ips|mac|cni|io\\.kubernetes\\.cri\\.pod-annotations)") {
            let annotations = annotations(json!({"sinabro.io/tcp-acceleration": text}));
            for value in [json!(text), json!([text]), json!({&*key: text}), json!({&*key: [text]}), annotations] {
                if let Ok(conf) = parse(json!({"runtimeConfig": value, "args": value, "dns": value, "prevResult": value})) {
                    let _ = conf.wishes(&Args::default());
                    let _ = conf.dns();
                    let _ = conf.prev_result();
                }
                if let Ok(conf) = parse(json!({"tcpAcceleration": value})) {
                    let _ = conf.wishes(&Args::default());
                }
            }
        }
    }
}
