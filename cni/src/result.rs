//! The result of ADD: one model, the newest specification's, read from and written as any
//! version that is spoken.
//!
//! What other plugins of a chain put into `prevResult` goes through untouched, also keys that
//! are not known here, as long as the version stays the same; a change of version drops what
//! the older one does not know.

use crate::{
    env::excerpt,
    error::{Code, Error},
    spec::SpecVersion,
};
use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::net::IpAddr;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CniResult {
    /// Set on the way out; on the way in it says how to read the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cni_version: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ips: Vec<IpConfig>,
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub dns: Map<String, Value>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    /// As text: other plugins have links with longer addresses than Ethernet's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The network namespace; none on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IpConfig {
    /// `4` or `6`, in results up to 0.4.0 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    pub address: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Index into the interfaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Route {
    pub dst: IpNet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

/// Keys that 1.1.0 added to routes and interfaces, beside an interface's `mtu`.
const ROUTE_DETAILS: [&str; 5] = ["mtu", "advmss", "priority", "table", "scope"];
const INTERFACE_DETAILS: [&str; 2] = ["socketPath", "pciID"];

impl Interface {
    pub fn new(name: &str, mac: String, mtu: u32, sandbox: Option<&str>) -> Self {
        Self {
            name: name.to_owned(),
            mac: Some(mac),
            mtu: Some(mtu),
            sandbox: sandbox.map(str::to_owned),
            extra: Map::new(),
        }
    }
}

impl IpConfig {
    pub fn new(address: IpAddr, gateway: IpAddr, interface: usize) -> Self {
        Self {
            version: None,
            address: IpNet::from(address),
            gateway: Some(gateway),
            interface: Some(interface),
            extra: Map::new(),
        }
    }
}

impl Route {
    pub fn new(dst: IpNet, gw: IpAddr, mtu: Option<u32>) -> Self {
        let mtu = mtu.map(|mtu| ("mtu".to_owned(), mtu.into()));
        Self {
            dst,
            gw: Some(gw),
            extra: mtu.into_iter().collect(),
        }
    }

    /// Since 1.1.0.
    pub fn mtu(&self) -> Option<u32> {
        let mtu = self.extra.get("mtu")?.as_u64()?;
        mtu.try_into().ok()
    }
}

impl CniResult {
    /// Reads a `prevResult` for a configuration of version `wanted`.
    ///
    /// # Errors
    /// Code 7 naming what is wrong with it.
    pub fn parse(value: &Value, wanted: SpecVersion) -> Result<Self, Error> {
        let bad = |what: String| Error::new(Code::InvalidConfig, format!("prevResult: {what}"));
        let mut result = Self::deserialize(value).map_err(|e| bad(e.to_string()))?;
        let version = match result.cni_version.take() {
            None => wanted,
            Some(text) => SpecVersion::parse(&text).ok_or_else(|| {
                bad(format!("cniVersion `{}` is not supported", excerpt(&text)))
                    .details(format!("supported are {}", SpecVersion::list()))
            })?,
        };
        for (i, ip) in result.ips.iter_mut().enumerate() {
            if let Some(index) = ip.interface
                && index >= result.interfaces.len()
            {
                let count = result.interfaces.len();
                return Err(bad(format!(
                    "ips[{i}] is on interface {index}, but there are {count}"
                )));
            }
            if let Some(text) = ip.version.take()
                && text != family(ip.address)
            {
                return Err(bad(format!(
                    "ips[{i}] has version `{}`, but its address is {}",
                    excerpt(&text),
                    ip.address
                )));
            }
        }
        if version.has_details() != wanted.has_details() {
            result.drop_details();
        }
        Ok(result)
    }

    /// Adds `later`'s interfaces, addresses and routes behind the ones already here.
    pub fn append(&mut self, mut later: Self) {
        let shift = self.interfaces.len();
        for ip in &mut later.ips {
            ip.interface = ip.interface.map(|index| index + shift);
        }
        self.interfaces.append(&mut later.interfaces);
        self.ips.append(&mut later.ips);
        self.routes.append(&mut later.routes);
        if self.dns.is_empty() {
            self.dns = later.dns;
        }
    }

    /// The JSON for stdout.
    ///
    /// # Errors
    /// Code 6; in practice none, as every key is a string.
    pub fn to_json(mut self, version: SpecVersion) -> Result<String, Error> {
        self.cni_version = Some(version.as_str().to_owned());
        for ip in &mut self.ips {
            ip.version = version
                .has_ip_version()
                .then(|| family(ip.address).to_owned());
        }
        if !version.has_details() {
            for interface in &mut self.interfaces {
                interface.mtu = None;
            }
        }
        serde_json::to_string(&self)
            .map_err(|e| Error::new(Code::Decode, "result cannot be written as JSON").details(e))
    }

    fn drop_details(&mut self) {
        for interface in &mut self.interfaces {
            interface.mtu = None;
            for key in INTERFACE_DETAILS {
                interface.extra.remove(key);
            }
        }
        for route in &mut self.routes {
            for key in ROUTE_DETAILS {
                route.extra.remove(key);
            }
        }
    }
}

fn family(net: IpNet) -> &'static str {
    match net {
        IpNet::V4(_) => "4",
        IpNet::V6(_) => "6",
    }
}

/// The reference library writes an empty Go slice as null.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn ours() -> CniResult {
        let gw4: IpAddr = "169.254.1.1".parse().unwrap();
        let gw6: IpAddr = "fe80::5342:1".parse().unwrap();
        CniResult {
            interfaces: vec![
                Interface::new("snb000000000000", "02:53:4e:42:00:01".into(), 1450, None),
                Interface::new(
                    "eth0",
                    "0a:58:0a:00:00:05".into(),
                    1450,
                    Some("/run/netns/c1"),
                ),
            ],
            ips: vec![
                IpConfig::new("10.0.0.5".parse().unwrap(), gw4, 1),
                IpConfig::new("fd00::5".parse().unwrap(), gw6, 1),
            ],
            routes: vec![
                Route::new("0.0.0.0/0".parse().unwrap(), gw4, None),
                Route::new("::/0".parse().unwrap(), gw6, None),
            ],
            ..CniResult::default()
        }
    }

    fn json_of(result: CniResult, version: SpecVersion) -> Value {
        serde_json::from_str(&result.to_json(version).unwrap()).unwrap()
    }

    #[test]
    fn each_version_has_its_own_fields() {
        for version in SpecVersion::ALL {
            let json = json_of(ours(), version);
            assert_eq!(json["cniVersion"], version.as_str());
            let ip_version = version.has_ip_version();
            assert_eq!(
                json["ips"][0].get("version") == Some(&json!("4")),
                ip_version
            );
            assert_eq!(
                json["ips"][1].get("version") == Some(&json!("6")),
                ip_version
            );
            assert_eq!(
                json["interfaces"][1].get("mtu") == Some(&json!(1450)),
                version.has_details()
            );
            assert_eq!(json["ips"][1]["address"], "fd00::5/128");
            assert_eq!(json["ips"][0]["interface"], 1);
            assert_eq!(json["interfaces"][1]["sandbox"], "/run/netns/c1");
            assert!(json["interfaces"][0].get("sandbox").is_none());
            assert!(json.get("dns").is_none());
        }
    }

    #[test]
    fn a_result_survives_every_version() {
        for version in SpecVersion::ALL {
            let back = CniResult::parse(&json_of(ours(), version), version).unwrap();
            let mut expected = ours();
            if !version.has_details() {
                expected.drop_details();
            }
            assert_eq!(back, expected, "{version}");
        }
    }

    #[test]
    fn an_earlier_plugins_result_stays_as_it_came() {
        let came = json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "net1", "mac": "00:11:22:33:44:55", "pciID": "0000:01:00.0", "new": {"key": 1}}],
            "ips": [{"address": "192.168.0.9/24", "gateway": "192.168.0.1", "interface": 0, "odd": true}],
            "routes": [{"dst": "192.168.9.0/24", "priority": 7}],
            "dns": {"nameservers": ["192.168.0.53"]},
            "future": [1, 2]
        });
        let mut result = CniResult::parse(&came, SpecVersion::V1_1_0).unwrap();
        assert_eq!(json_of(result.clone(), SpecVersion::V1_1_0), came);

        result.append(ours());
        let json = json_of(result, SpecVersion::V1_1_0);
        assert_eq!(json["interfaces"][0], came["interfaces"][0]);
        assert_eq!(json["ips"][0], came["ips"][0]);
        assert_eq!(json["routes"][0], came["routes"][0]);
        assert_eq!(json["dns"], came["dns"]);
        assert_eq!(json["future"], came["future"]);
        assert_eq!(json["interfaces"][2]["name"], "eth0");
        assert_eq!(json["ips"][1]["interface"], 2);
        assert_eq!(json["ips"][2]["interface"], 2);
    }

    #[test]
    fn a_change_of_version_drops_what_the_older_one_lacks() {
        let newer = json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "net1", "mtu": 9000, "socketPath": "/s"}],
            "ips": [{"address": "10.0.0.1/8"}],
            "routes": [{"dst": "0.0.0.0/0", "table": 7}],
        });
        let result = CniResult::parse(&newer, SpecVersion::V0_4_0).unwrap();
        assert_eq!(
            json_of(result, SpecVersion::V0_4_0),
            json!({
                "cniVersion": "0.4.0",
                "interfaces": [{"name": "net1"}],
                "ips": [{"version": "4", "address": "10.0.0.1/8"}],
                "routes": [{"dst": "0.0.0.0/0"}],
            })
        );
    }

    #[test]
    fn go_writes_null_for_nothing() {
        let value = json!({"interfaces": null, "ips": null, "routes": null, "dns": null});
        let result = CniResult::parse(&value, SpecVersion::V0_4_0).unwrap();
        assert_eq!(result, CniResult::default());
    }

    #[test]
    fn contradictions_are_refused() {
        for (value, word) in [
            (json!({"cniVersion": "9.0.0"}), "cniVersion"),
            (
                json!({"ips": [{"address": "10.0.0.1/8", "interface": 0}]}),
                "interface",
            ),
            (
                json!({"ips": [{"address": "10.0.0.1/8", "version": "6"}]}),
                "version",
            ),
            (json!({"ips": [{"address": "10.0.0.1"}]}), "prevResult"),
            (
                json!({"ips": [{"address": "10.0.0.1/8", "interface": -1}]}),
                "prevResult",
            ),
            (json!({"routes": [{}]}), "dst"),
            (json!({"interfaces": [{}]}), "name"),
            (json!([]), "prevResult"),
            (json!("text"), "prevResult"),
        ] {
            let error = CniResult::parse(&value, SpecVersion::V1_0_0).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains(word), "{value}: {error}");
        }
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "(10\\.0\\.0\\.1/8|fd00::1/64|4|1\\.1\\.0|eth0|\\PC{0,8})".prop_map(Value::from),
        ];
        let key = "(interfaces|ips|routes|dns|cniVersion|name|mac|mtu|sandbox|address|gateway|interface|version|dst|gw|x)";
        leaf.prop_recursive(4, 48, 5, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::vec((key, inner), 0..5)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn garbage_never_panics_and_what_parses_is_stable(value in json_value(), i in 0..5usize) {
            let version = SpecVersion::ALL[i];
            if let Ok(result) = CniResult::parse(&value, version) {
                let json = json_of(result, version);
                let again = CniResult::parse(&json, version).unwrap();
                prop_assert_eq!(json_of(again, version), json);
            }
        }
    }
}
