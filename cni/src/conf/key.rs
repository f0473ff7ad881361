//! A key of the network configuration: absent, null and empty are the same, a wrong type is an
//! error that names the key.

use crate::{
    env::excerpt,
    error::{Code, Error},
};
use serde_json::{Map, Value};
use std::path::PathBuf;

pub fn invalid(key: &str, why: String) -> Error {
    Error::new(
        Code::InvalidConfig,
        format!("network configuration: {key}: {why}"),
    )
}

pub fn missing(key: &str) -> Error {
    invalid(key, "missing".into())
}

pub fn text<'a>(keys: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>, Error> {
    match keys.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(invalid(key, "not a string".into())),
    }
}

pub fn path(keys: &Map<String, Value>, key: &str) -> Result<Option<PathBuf>, Error> {
    match text(keys, key)? {
        None | Some("") => Ok(None),
        Some(path) if path.starts_with('/') && !path.contains('\0') => Ok(Some(path.into())),
        Some(path) => Err(invalid(
            key,
            format!("`{}` is not an absolute path", excerpt(path)),
        )),
    }
}

pub fn object<'a>(
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
