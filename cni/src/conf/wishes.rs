//! What runtime and user ask an ADD for.

use super::{
    Conf, host_ports,
    key::{invalid, object, text},
    sidecar, wish,
};
use crate::{
    env::{Args, parse_address},
    error::Error,
};
use serde::Deserialize as _;
use serde_json::{Map, Value};
use sinabro_common::{
    api::{HostPort, LocalMtuWish, Mac, ServiceTranslation, TcpAcceleration},
    names,
};
use std::{fmt, net::IpAddr, str::FromStr};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// At most one of each family.
    pub addresses: Vec<IpAddr>,
    pub mac: Option<Mac>,
    pub acceleration: Option<TcpAcceleration>,
    pub local_mtu: Option<LocalMtuWish>,
    pub service_translation: Option<ServiceTranslation>,
    /// Ports of the node that lead to the pod, if the runtime says so: another plugin's doing, but ours to keep free.
    pub host_ports: Option<Vec<HostPort>>,
    /// What was passed over: reported, but no reason to refuse a pod.
    pub warnings: Vec<String>,
}

impl Conf {
    /// What is asked for. Addresses and MAC: `runtimeConfig` (capabilities `ips` and `mac`), else
    /// `args.cni`, else CNI_ARGS, in the order of the CNI conventions. Acceleration, local MTU and how Services are
    /// translated: the pod's annotation, else CNI_ARGS, else the key `tcpAcceleration`, `localMTU` or
    /// `serviceTranslation`.
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
        let acceleration = wish::of_network(&self.keys, "tcpAcceleration")?;
        let local_mtu = wish::of_network(&self.keys, "localMTU")?;
        let service_translation = wish::of_network(&self.keys, "serviceTranslation")?;
        match host_ports::of(&self.keys, runtime) {
            Ok(ports) => wishes.host_ports = ports,
            Err(warning) => wishes.warnings.push(warning),
        }
        let annotations = wish::annotations(runtime).unwrap_or_else(|warning| {
            wishes.warnings.push(warning);
            None
        });
        let of_pod = of_pod(&mut wishes, annotations, names::ACCELERATION_ANNOTATION);
        wishes.acceleration = of_pod.or(args.acceleration).or(acceleration);
        let of_pod = self::of_pod(&mut wishes, annotations, names::LOCAL_MTU_ANNOTATION);
        wishes.local_mtu = of_pod.or(args.local_mtu).or(local_mtu);
        let of_pod = self::of_pod(
            &mut wishes,
            annotations,
            names::SERVICE_TRANSLATION_ANNOTATION,
        );
        let wished = of_pod.or(args.service_translation).or(service_translation);
        wishes.service_translation = sidecar::translation(wished, annotations);
        Ok(wishes)
    }
}

/// A wish in the pod's annotations; one that makes no sense is told and passed over.
fn of_pod<T>(wishes: &mut Wishes, annotations: Option<&Map<String, Value>>, name: &str) -> Option<T>
where
    T: FromStr<Err: fmt::Display>,
{
    let wish = annotations.map(|annotations| wish::of_pod(annotations, name));
    wish.transpose()
        .unwrap_or_else(|warning| {
            wishes.warnings.push(warning);
            None
        })
        .flatten()
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
    use crate::{
        conf::{tests::parse, wish::tests::annotations},
        error::Code,
    };
    use proptest::prelude::*;
    use serde_json::json;

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

    proptest! {
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
