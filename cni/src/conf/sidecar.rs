//! Proxies beside a pod's containers, to which the pod's connections are led by rules in its own namespace: they ask for
//! the destination of before (SO_ORIGINAL_DST), and know what to do by the Service's address.

use serde_json::{Map, Value};
use sinabro_common::api::ServiceTranslation;

/// What injectors write on the pods that they give a proxy: of Istio, Linkerd, Kuma and Consul.
const ANNOTATIONS: [&str; 4] = [
    "sidecar.istio.io/status",
    "linkerd.io/proxy-version",
    "kuma.io/sidecar-injected",
    "consul.hashicorp.com/connect-inject-status",
];

/// How a pod with these annotations wishes Services to be translated, if it leaves that to us.
pub fn translation(
    wished: Option<ServiceTranslation>,
    annotations: Option<&Map<String, Value>>,
) -> Option<ServiceTranslation> {
    match wished {
        Some(ServiceTranslation::Socket | ServiceTranslation::Packet) => wished,
        None | Some(ServiceTranslation::Auto) if has(annotations) => {
            Some(ServiceTranslation::Packet)
        }
        None | Some(ServiceTranslation::Auto) => wished,
    }
}

fn has(annotations: Option<&Map<String, Value>>) -> bool {
    // Kuma's is there to say no, too.
    let says_yes = |value: &Value| {
        value
            .as_str()
            .is_some_and(|text| !matches!(text, "" | "false"))
    };
    annotations.is_some_and(|found| {
        let mut known = ANNOTATIONS.iter();
        known.any(|name| found.get(*name).is_some_and(says_yes))
    })
}

#[cfg(test)]
mod tests {
    use crate::{
        conf::{tests::parse, wish::tests::annotations},
        env::Args,
    };
    use serde_json::{Value, json};
    use sinabro_common::api::ServiceTranslation::{self, Auto, Packet, Socket};

    fn translation(
        annotated: Value,
        argument: Option<ServiceTranslation>,
        key: Option<&str>,
    ) -> Option<ServiceTranslation> {
        let mut more = json!({"runtimeConfig": annotations(annotated)});
        if let Some(key) = key {
            more["serviceTranslation"] = json!(key);
        }
        let args = Args {
            service_translation: argument,
            ..Args::default()
        };
        let wishes = parse(more).unwrap().wishes(&args).unwrap();
        assert!(wishes.warnings.is_empty(), "{:?}", wishes.warnings);
        wishes.service_translation
    }

    #[test]
    fn the_first_wish_wins() {
        let own = |text: &str| json!({"sinabro.io/service-translation": text});
        for (annotated, argument, key, wish) in [
            (own("packet"), Some(Socket), Some("socket"), Some(Packet)),
            (own("auto"), Some(Packet), Some("packet"), Some(Auto)),
            (json!({}), Some(Packet), Some("socket"), Some(Packet)),
            (json!({}), None, Some("packet"), Some(Packet)),
            (json!({}), None, None, None),
        ] {
            assert_eq!(translation(annotated, argument, key), wish);
        }
    }

    #[test]
    fn a_pod_with_a_proxy_of_a_mesh_goes_by_packets_unless_it_says_otherwise() {
        for mesh in super::ANNOTATIONS {
            let is = |more: &str| json!({mesh: "x", "sinabro.io/service-translation": more});
            assert_eq!(translation(json!({mesh: "x"}), None, None), Some(Packet));
            assert_eq!(
                translation(json!({mesh: "x"}), None, Some("auto")),
                Some(Packet)
            );
            assert_eq!(translation(is("auto"), None, None), Some(Packet));
            assert_eq!(translation(is("socket"), None, None), Some(Socket));
            assert_eq!(translation(json!({mesh: "false"}), None, None), None);
            assert_eq!(translation(json!({mesh: ["x"]}), None, None), None);
        }
        assert_eq!(translation(json!({"istio": "x"}), None, None), None);
    }
}
