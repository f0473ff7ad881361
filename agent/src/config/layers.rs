//! Flags, environment, file and defaults, laid over each other.

use super::{
    ApiPlaces, ClusterAccess, ConfigError, FactsFrom, Origin,
    options::Options,
    value::{absolute_path, api_server, service_proxy},
};
use crate::cluster_api::servers::ApiServer;
use clap::{ArgMatches, CommandFactory, FromArgMatches, parser::ValueSource};
use serde_json::{Map, Value};
use sinabro_common::names;
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

/// The value of each key that wins, and where it came from.
pub struct Layers {
    values: Map<String, Value>,
    origins: BTreeMap<String, Origin>,
}

impl Layers {
    pub fn load<I, T>(args: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator<Item = T>,
        T: Into<OsString> + Clone,
    {
        let matches = Options::command().try_get_matches_from(args)?;
        let given = Options::from_arg_matches(&matches)?;
        let file = settings_file(given.config.as_deref(), Path::new(names::CONFIG_FILE))?;
        Ok(Self::new(&given, &matches, file))
    }

    pub fn new(given: &Options, matches: &ArgMatches, file: Option<(PathBuf, Options)>) -> Self {
        let mut layers = Self {
            values: Map::new(),
            origins: Default::default(),
        };
        let origins = origins_of_flags(matches);
        let (given, default): (Vec<_>, Vec<_>) = entries(given)
            .map(|(key, value)| {
                let origin = origins.get(&key).cloned().unwrap_or(Origin::Default);
                (key, value, origin)
            })
            .partition(|(_, _, origin)| *origin != Origin::Default);
        for (key, value, origin) in default {
            layers.set(key, value, origin);
        }
        if let Some((path, options)) = file {
            for (key, value) in entries(&options) {
                layers.set(key, value, Origin::File(path.clone()));
            }
        }
        for (key, value, origin) in given {
            layers.set(key, value, origin);
        }
        layers
    }

    fn set(&mut self, key: String, value: Value, origin: Origin) {
        self.origins.insert(key.clone(), origin);
        self.values.insert(key, value);
    }

    /// The text of a key, if it is set and not empty.
    pub fn found(&self, key: &str) -> Option<&str> {
        self.values
            .get(key)
            .and_then(Value::as_str)
            .filter(|text| !text.is_empty())
    }

    pub fn parse<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T, ConfigError> {
        match self.found(key) {
            Some(text) => parse(text).map_err(|reason| self.invalid(key, &reason)),
            None => Err(self.invalid(key, "must not be empty")),
        }
    }

    pub fn optional<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        self.found(key)
            .map(|text| parse(text).map_err(|reason| self.invalid(key, &reason)))
            .transpose()
    }

    /// Where a key was set, if it was.
    pub fn given(&self, key: &str) -> Option<&Origin> {
        let origin = self.origins.get(key);
        origin.filter(|origin| **origin != Origin::Default)
    }

    pub fn facts_from(&self) -> Result<FactsFrom, ConfigError> {
        let named = self.list("apiServers", api_server)?;
        let origin = |key| self.origins.get(key).cloned().unwrap_or(Origin::Default);
        match (self.found("nodes"), self.found("kubeconfig")) {
            (Some(_), Some(_)) => Err(ConfigError::TwoSources {
                nodes: origin("nodes"),
                kubeconfig: origin("kubeconfig"),
            }),
            (Some(path), None) => Ok(FactsFrom::NodesFile(path.into())),
            (None, Some(path)) => {
                let access = ClusterAccess::Kubeconfig(path.into());
                Ok(FactsFrom::Kubernetes(access))
            }
            // Set in every container by the kubelet.
            (None, None) if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() => {
                Ok(FactsFrom::Kubernetes(self.in_cluster(named)?))
            }
            (None, None) => Err(ConfigError::NoFacts),
        }
    }

    fn in_cluster(&self, named: Vec<ApiServer>) -> Result<ClusterAccess, ConfigError> {
        // Who translates the Service that leads to the API cannot reach it that way.
        let is_ours = self.parse("serviceProxy", service_proxy)?.may_be_on();
        if named.is_empty() && !is_ours {
            return Ok(ClusterAccess::InCluster);
        }
        let state = self.directory("stateDir")?;
        let seen = state.join(names::API_SERVERS_FILE);
        let kubelets = state.join(names::KUBELETS_SERVER_FILE);
        Ok(ClusterAccess::Servers(ApiPlaces {
            named,
            seen,
            kubelets,
        }))
    }

    pub fn directory(&self, key: &str) -> Result<PathBuf, ConfigError> {
        self.parse(key, absolute_path)
    }

    pub fn list<T>(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, ConfigError> {
        let items = self.values.get(key).and_then(Value::as_array);
        items
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .map(|text| parse(text).map_err(|reason| self.invalid_value(key, text, &reason)))
            .collect()
    }

    pub fn invalid(&self, key: &str, reason: &str) -> ConfigError {
        let value = self.values.get(key).and_then(Value::as_str);
        self.invalid_value(key, value.unwrap_or_default(), reason)
    }

    fn invalid_value(&self, key: &str, value: &str, reason: &str) -> ConfigError {
        ConfigError::Invalid {
            key: key.to_owned(),
            value: value.to_owned(),
            origin: self.origins.get(key).cloned().unwrap_or(Origin::Default),
            reason: reason.to_owned(),
        }
    }
}

/// The options that are set, by their key in the settings file.
fn entries(options: &Options) -> impl Iterator<Item = (String, Value)> + use<> {
    let map = match serde_json::to_value(options) {
        Ok(Value::Object(map)) => map,
        // Text and lists of text under fixed names: always an object.
        _ => Map::new(),
    };
    map.into_iter().filter(|(_, value)| !value.is_null())
}

/// Where clap took each value from, by its key in the settings file.
fn origins_of_flags(matches: &ArgMatches) -> BTreeMap<String, Origin> {
    matches
        .ids()
        .filter_map(|id| {
            let origin = match matches.value_source(id.as_str())? {
                ValueSource::CommandLine => Origin::Flag,
                ValueSource::EnvVariable => Origin::Environment,
                _ => Origin::Default,
            };
            Some((file_key(id.as_str()), origin))
        })
        .collect()
}

/// `state_dir` → `stateDir`, as serde's `camelCase` does.
pub fn file_key(id: &str) -> String {
    match id {
        "local_mtu" => return "localMTU".into(),
        "masquerade_ipv6" => return "masqueradeIPv6".into(),
        "masquerade_link_local_ipv6" => return "masqueradeLinkLocalIPv6".into(),
        "masquerade_udp_mapping" => return "masqueradeUDPMapping".into(),
        "service_cidrs" => return "serviceCIDRs".into(),
        "service_external_ips" => return "serviceExternalIPs".into(),
        "non_masquerade_cidrs" => return "nonMasqueradeCIDRs".into(),
        _ => {}
    }
    let mut words = id.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |mut key, word| {
        let mut letters = word.chars();
        key.extend(letters.next().map(|c| c.to_ascii_uppercase()));
        key.push_str(letters.as_str());
        key
    })
}

/// The settings file: the one that was asked for must be there, the default one may be.
pub fn settings_file(
    given: Option<&Path>,
    default: &Path,
) -> Result<Option<(PathBuf, Options)>, ConfigError> {
    let path = given.unwrap_or(default);
    match read_file(path) {
        Err(ConfigError::Read { source, .. })
            if given.is_none() && source.kind() == io::ErrorKind::NotFound =>
        {
            Ok(None)
        }
        read => Ok(Some((path.to_owned(), read?))),
    }
}

fn read_file(path: &Path) -> Result<Options, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })?;
    parse_file(&text).map_err(|reason| ConfigError::Parse {
        path: path.to_owned(),
        reason,
    })
}

pub fn parse_file(text: &str) -> Result<Options, String> {
    // A file of nothing but comments sets nothing.
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
    {
        return Ok(Options::default());
    }
    serde_saphyr::from_str(text).map_err(|error| error.to_string())
}
