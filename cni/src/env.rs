//! The CNI_* variables: parsed once, strictly, each error naming its variable.
//!
//! Which verb needs which is the specification's section 2. Names are checked by the kernel's
//! own rules, so that nothing half made is left when the kernel would refuse.

use crate::error::{Code, Error};
use sinabro_common::{
    api::{LocalMtuWish, Mac, Owner, PodRef, ServiceTranslation, TcpAcceleration},
    names,
};
use std::{ffi::OsString, fmt, net::IpAddr, str::FromStr};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

/// Looks a variable up; the process's environment outside tests.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The argument of a pod's wish about the acceleration of its TCP connections.
const ACCELERATION: &str = "SINABRO_TCP_ACCELERATION";
/// The argument of its wish about the MTU of its link.
const LOCAL_MTU: &str = "SINABRO_LOCAL_MTU";
/// The argument of its wish how what it sends to Services is translated.
const SERVICE_TRANSLATION: &str = "SINABRO_SERVICE_TRANSLATION";

/// What an ADD, DEL or CHECK is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub owner: Owner,
    /// CNI_NETNS; empty if DEL did not get it.
    pub netns: String,
    /// Whether CNI_NETNS may be the plugin's own namespace (CNI_NETNS_OVERRIDE).
    pub netns_override: bool,
}

/// CNI_ARGS as far as the plugin knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args {
    pub pod: PodRef,
    /// `IP`, a prefix length dropped.
    pub ip: Option<IpAddr>,
    /// `MAC`.
    pub mac: Option<Mac>,
    /// [`ACCELERATION`].
    pub acceleration: Option<TcpAcceleration>,
    /// [`LOCAL_MTU`].
    pub local_mtu: Option<LocalMtuWish>,
    /// [`SERVICE_TRANSLATION`].
    pub service_translation: Option<ServiceTranslation>,
}

/// CNI_COMMAND.
///
/// # Errors
/// Code 4 if it is missing or no verb of the specification.
pub fn command(get: Lookup) -> Result<Command, Error> {
    let text = read(get, "CNI_COMMAND")?;
    Ok(match text.as_str() {
        "ADD" => Command::Add,
        "DEL" => Command::Del,
        "CHECK" => Command::Check,
        "GC" => Command::Gc,
        "STATUS" => Command::Status,
        "VERSION" => Command::Version,
        "" => {
            return Err(
                Error::new(Code::InvalidEnvironment, "CNI_COMMAND is not set")
                    .details(names::CNI_PLUGIN_SAYS),
            );
        }
        other => {
            return Err(invalid("CNI_COMMAND", other, "no CNI verb")
                .details("ADD, DEL, CHECK, GC, STATUS and VERSION are known"));
        }
    })
}

/// The variables of ADD, CHECK (`netns_needed`) and DEL.
///
/// # Errors
/// Code 4 with the names of all missing variables, or of the first wrong one.
pub fn target(get: Lookup, netns_needed: bool) -> Result<Target, Error> {
    let container_id = read(get, "CNI_CONTAINERID")?;
    let ifname = read(get, "CNI_IFNAME")?;
    let netns = read(get, "CNI_NETNS")?;
    require(&[
        ("CNI_CONTAINERID", !container_id.is_empty()),
        ("CNI_NETNS", !netns.is_empty() || !netns_needed),
        ("CNI_IFNAME", !ifname.is_empty()),
    ])?;
    check_container_id(&container_id)
        .map_err(|why| invalid("CNI_CONTAINERID", &container_id, why))?;
    check_ifname(&ifname).map_err(|why| invalid("CNI_IFNAME", &ifname, why))?;
    if !netns.is_empty() && !netns.starts_with('/') {
        return Err(invalid("CNI_NETNS", &netns, "not an absolute path"));
    }
    let netns_override = matches!(
        read(get, "CNI_NETNS_OVERRIDE")?
            .to_ascii_lowercase()
            .as_str(),
        "1" | "true"
    );
    Ok(Target {
        owner: Owner {
            container_id,
            ifname,
        },
        netns,
        netns_override,
    })
}

/// GC needs CNI_PATH, although this plugin delegates to no other.
///
/// # Errors
/// Code 4 if it is missing.
pub fn require_path(get: Lookup) -> Result<(), Error> {
    require(&[("CNI_PATH", !read(get, "CNI_PATH")?.is_empty())])
}

/// CNI_ARGS: `KEY=VALUE;KEY=VALUE`.
///
/// Following the reference library, an unknown key is an error unless `IgnoreUnknown` is `1`
/// or `true`, and of a key that is there more than once the last counts: Multus adds its own to what it got.
///
/// # Errors
/// Code 4 naming CNI_ARGS and the key.
pub fn args(get: Lookup) -> Result<Args, Error> {
    parse_args(&read(get, "CNI_ARGS")?)
}

fn parse_args(text: &str) -> Result<Args, Error> {
    let bad = |what: String| Error::new(Code::InvalidEnvironment, format!("CNI_ARGS: {what}"));
    let mut args = Args::default();
    let mut ignore_unknown = false;
    let mut unknown = Vec::new();
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for pair in text.split(';').filter(|pair| !pair.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(bad(format!("`{}` is not KEY=VALUE", excerpt(pair))));
        };
        match pairs.iter_mut().find(|(known, _)| *known == key) {
            Some(known) => known.1 = value,
            None => pairs.push((key, value)),
        }
    }
    for (key, value) in pairs {
        match key {
            "IgnoreUnknown" => {
                ignore_unknown = match value.to_ascii_lowercase().as_str() {
                    "1" | "true" => true,
                    "0" | "false" => false,
                    _ => {
                        return Err(bad(format!(
                            "`IgnoreUnknown` is `{}`, neither true nor false",
                            excerpt(value)
                        )));
                    }
                }
            }
            "K8S_POD_NAMESPACE" => args.pod.namespace = value.to_owned(),
            "K8S_POD_NAME" => args.pod.name = value.to_owned(),
            "K8S_POD_UID" => args.pod.uid = value.to_owned(),
            // The sandbox's id, which CNI_CONTAINERID says already.
            "K8S_POD_INFRA_CONTAINER_ID" => {}
            "IP" if !value.is_empty() => {
                args.ip = Some(parse_address(value).map_err(|why| bad(format!("`IP` {why}")))?);
            }
            "MAC" if !value.is_empty() => {
                let mac = value.parse().map_err(|e| bad(format!("`MAC`: {e}")))?;
                args.mac = Some(mac);
            }
            ACCELERATION if !value.is_empty() => {
                args.acceleration = Some(wish(key, value).map_err(bad)?);
            }
            LOCAL_MTU if !value.is_empty() => {
                args.local_mtu = Some(wish(key, value).map_err(bad)?);
            }
            SERVICE_TRANSLATION if !value.is_empty() => {
                args.service_translation = Some(wish(key, value).map_err(bad)?);
            }
            "IP" | "MAC" | ACCELERATION | LOCAL_MTU | SERVICE_TRANSLATION => {}
            _ => unknown.push(excerpt(key)),
        }
    }
    if !unknown.is_empty() && !ignore_unknown {
        return Err(bad(format!("unknown: {}", unknown.join(", "))).details(
            "leave them out, or add IgnoreUnknown=1 to have what this plugin does not know ignored",
        ));
    }
    Ok(args)
}

/// A pod's wish, or why the value is none.
fn wish<T: FromStr<Err: fmt::Display>>(key: &str, value: &str) -> Result<T, String> {
    let wish = value.parse();
    wish.map_err(|error| format!("`{key}` is `{}`, {error}", excerpt(value)))
}

/// An address asked for, with or without a prefix length: pods have host prefixes anyway.
pub fn parse_address(text: &str) -> Result<IpAddr, String> {
    let address = match text.split_once('/') {
        Some(_) => text.parse::<ipnet::IpNet>().ok().map(|net| net.addr()),
        None => text.parse().ok(),
    };
    address.ok_or_else(|| format!("`{}` is not an IP address", excerpt(text)))
}

/// The specification's rule for container ids and network names.
pub fn is_cni_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

fn check_container_id(text: &str) -> Result<(), &'static str> {
    if is_cni_name(text) {
        Ok(())
    } else {
        Err("not a letter or digit followed by letters, digits, `_`, `.` and `-`")
    }
}

/// The kernel's rules: dev_valid_name in net/core/dev.c, and what it would read as a pattern
/// (`%`) or cannot have settings for (`all` and `default` are directories of its sysctls).
fn check_ifname(text: &str) -> Result<(), &'static str> {
    // 0xa0 is white space to the kernel's Latin-1 table, also inside a UTF-8 character.
    let forbidden = |b: u8| matches!(b, b'/' | b':' | b'%' | b' ' | 0x09..=0x0d | 0xa0);
    if text.len() > 15 {
        Err("longer than the 15 bytes that the kernel allows")
    } else if matches!(text, "." | ".." | "all" | "default") {
        Err("a name that the kernel reserves")
    } else if text.bytes().any(forbidden) || text.contains(char::is_whitespace) {
        Err("a name with white space, `/`, `:` or `%`, which the kernel refuses")
    } else {
        Ok(())
    }
}

fn read(get: Lookup, name: &str) -> Result<String, Error> {
    match get(name) {
        None => Ok(String::new()),
        Some(value) => value
            .into_string()
            .map_err(|value| invalid(name, &value.to_string_lossy(), "not UTF-8")),
    }
}

fn require(present: &[(&str, bool)]) -> Result<(), Error> {
    let missing: Vec<_> = present
        .iter()
        .filter(|(_, present)| !present)
        .map(|(name, _)| *name)
        .collect();
    match missing.as_slice() {
        [] => Ok(()),
        [one] => Err(Error::new(
            Code::InvalidEnvironment,
            format!("{one} is not set"),
        )),
        more => Err(Error::new(
            Code::InvalidEnvironment,
            format!("{} are not set", more.join(", ")),
        )),
    }
}

/// Code 4 for one variable.
pub fn invalid(name: &str, value: &str, why: &str) -> Error {
    Error::new(
        Code::InvalidEnvironment,
        format!("{name} is `{}`, {why}", excerpt(value)),
    )
}

/// At most the first 64 characters, for an error's text.
pub fn excerpt(text: &str) -> String {
    let mut short: String = text.chars().take(64).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lookup(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        let pairs: Vec<(String, OsString)> = pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), v.into()))
            .collect();
        move |name| {
            pairs
                .iter()
                .find(|(k, _)| k == name)
                .map(|(_, v)| v.clone())
        }
    }

    fn add() -> Vec<(&'static str, &'static str)> {
        vec![
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/c1"),
            ("CNI_IFNAME", "eth0"),
        ]
    }

    #[test]
    fn every_verb_is_known() {
        for (text, command) in [
            ("ADD", Command::Add),
            ("DEL", Command::Del),
            ("CHECK", Command::Check),
            ("GC", Command::Gc),
            ("STATUS", Command::Status),
            ("VERSION", Command::Version),
        ] {
            assert_eq!(
                super::command(&lookup(&[("CNI_COMMAND", text)])),
                Ok(command)
            );
        }
        for text in ["", "add", "ADD ", "UPDATE"] {
            let error = super::command(&lookup(&[("CNI_COMMAND", text)])).unwrap_err();
            assert_eq!(error.code, Code::InvalidEnvironment);
            assert!(error.msg.contains("CNI_COMMAND"), "{error}");
        }
    }

    #[test]
    fn all_missing_variables_are_named_at_once() {
        let error = target(&lookup(&[]), true).unwrap_err();
        for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"] {
            assert!(error.msg.contains(name), "{error}");
        }
    }

    #[test]
    fn only_del_does_without_a_namespace() {
        let get = lookup(&[("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0")]);
        assert_eq!(target(&get, false).unwrap().netns, "");
        let error = target(&get, true).unwrap_err();
        assert_eq!(error.msg, "CNI_NETNS is not set");
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        for (name, value) in [
            ("CNI_CONTAINERID", "-c1"),
            ("CNI_CONTAINERID", "c/1"),
            ("CNI_CONTAINERID", "c 1"),
            ("CNI_CONTAINERID", "ç"),
            ("CNI_IFNAME", "."),
            ("CNI_IFNAME", ".."),
            ("CNI_IFNAME", "all"),
            ("CNI_IFNAME", "default"),
            ("CNI_IFNAME", "a/b"),
            ("CNI_IFNAME", "a:b"),
            ("CNI_IFNAME", "a b"),
            ("CNI_IFNAME", "a\tb"),
            ("CNI_IFNAME", "eth%d"),
            ("CNI_IFNAME", "à"),
            ("CNI_IFNAME", "sixteencharacter"),
            ("CNI_NETNS", "run/netns/c1"),
        ] {
            let mut vars = add();
            vars.retain(|(k, _)| *k != name);
            vars.push((name, value));
            let error = target(&lookup(&vars), true).unwrap_err();
            assert_eq!(error.code, Code::InvalidEnvironment);
            assert!(error.msg.starts_with(name), "{name}={value}: {error}");
        }
    }

    #[test]
    fn values_that_are_not_utf8_are_refused() {
        use std::os::unix::ffi::OsStringExt;
        let get = |name: &str| (name == "CNI_ARGS").then(|| OsString::from_vec(vec![0xff]));
        assert!(args(&get).unwrap_err().msg.contains("CNI_ARGS"));
    }

    #[test]
    fn fifteen_bytes_are_a_name() {
        let mut vars = add();
        vars.retain(|(k, _)| *k != "CNI_IFNAME");
        vars.push(("CNI_IFNAME", "fifteen-charact"));
        assert_eq!(
            target(&lookup(&vars), true).unwrap().owner.ifname,
            "fifteen-charact"
        );
    }

    #[test]
    fn arguments_of_kubernetes_are_understood() {
        let args = parse_args(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=77;IP=10.0.0.5/24;MAC=0a:58:0a:00:00:05;SINABRO_TCP_ACCELERATION=disabled;SINABRO_LOCAL_MTU=off;SINABRO_SERVICE_TRANSLATION=packet;X=Y",
        )
        .unwrap();
        assert_eq!(args.pod.namespace, "shop");
        assert_eq!(args.pod.name, "cart-0");
        assert_eq!(args.pod.uid, "77");
        assert_eq!(args.ip, Some("10.0.0.5".parse().unwrap()));
        assert_eq!(args.mac, Some("0a:58:0a:00:00:05".parse().unwrap()));
        assert_eq!(args.acceleration, Some(TcpAcceleration::Disabled));
        assert_eq!(args.local_mtu, Some(LocalMtuWish::Off));
        assert_eq!(args.service_translation, Some(ServiceTranslation::Packet));
        let empty = parse_args("SINABRO_TCP_ACCELERATION=;IP=;MAC=").unwrap();
        assert_eq!(empty, Args::default());
    }

    #[test]
    fn an_unknown_argument_needs_leave() {
        for text in ["X=Y", "X=Y;IgnoreUnknown=0", "IgnoreUnknown=false;X=Y"] {
            assert!(parse_args(text).unwrap_err().msg.contains('X'), "{text}");
        }
        for text in ["X=Y;IgnoreUnknown=1", "IgnoreUnknown=True;X=Y", "", ";;"] {
            assert_eq!(parse_args(text), Ok(Args::default()), "{text}");
        }
    }

    #[test]
    fn arguments_that_make_no_sense_are_refused() {
        for text in [
            "K8S_POD_NAME",
            "IP=10.0.0",
            "IP=10.0.0.1/33",
            "MAC=1",
            "IgnoreUnknown=maybe",
            "SINABRO_TCP_ACCELERATION=on",
            "SINABRO_TCP_ACCELERATION=enabled;SINABRO_TCP_ACCELERATION=on",
        ] {
            let error = parse_args(text).unwrap_err();
            assert_eq!(error.code, Code::InvalidEnvironment);
            assert!(error.msg.starts_with("CNI_ARGS"), "{text}: {error}");
        }
    }

    #[test]
    fn the_last_of_several_counts() {
        let args = parse_args("IP=none;IgnoreUnknown=0;X=1;IP=10.0.0.2;IgnoreUnknown=1").unwrap();
        assert_eq!(args.ip, Some("10.0.0.2".parse().unwrap()));
    }

    proptest! {
        #[test]
        fn no_argument_panics(text in "\\PC{0,80}", keyed in "(IP|MAC|IgnoreUnknown|K8S_POD_NAME|SINABRO_TCP_ACCELERATION)=\\PC{0,40};?") {
            let _ = parse_args(&text);
            let _ = parse_args(&keyed);
        }

        #[test]
        fn accepted_names_are_ones_the_kernel_takes(text in "\\PC{1,20}") {
            if check_ifname(&text).is_ok() {
                prop_assert!(text.len() <= 15);
                prop_assert!(!text.contains(['/', ':', '%']) && !text.contains(char::is_whitespace));
            }
            if is_cni_name(&text) {
                prop_assert!(text.is_ascii() && !text.starts_with(['_', '.', '-']));
            }
        }

        #[test]
        fn addresses_survive(address: std::net::IpAddr, len in 0u8..=32) {
            prop_assert_eq!(parse_address(&address.to_string()), Ok(address));
            prop_assert_eq!(parse_address(&format!("{address}/{len}")), Ok(address));
        }
    }
}
