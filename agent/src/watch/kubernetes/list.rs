//! All objects in one answer, for servers that do not stream lists.
//!
//! The server is asked for what its cache has; then there are no pages, and the answer of a large
//! cluster has a hundred megabytes. It is parsed as it comes: beside what is kept of the objects,
//! one of them is in memory at a time.

use super::{ANSWER, Keep, LIST_SILENCE, Watcher, error::WatchError};
use futures::AsyncBufReadExt as _;
use kube::{
    api::{ListParams, VersionMatch},
    core::Request,
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{
    fmt,
    io::{self, Read},
    pin::pin,
};
use tokio::{sync::mpsc, task::spawn_blocking, time::timeout};

/// Pieces of the answer that may wait to be parsed.
const AHEAD: usize = 8;

impl<K: Keep> Watcher<K> {
    /// Reads all objects as the server has them at `from` or later; with the point they are of.
    pub(super) async fn list(&mut self, from: &str) -> Result<(K::List, String), WatchError> {
        let mut params = ListParams::default()
            .at(from)
            .matching(VersionMatch::NotOlderThan);
        params.label_selector = K::SELECTOR.map(Into::into);
        let request = Request::new(K::PATH).list(&params)?;
        let body = timeout(ANSWER, self.client.request_stream(request))
            .await
            .map_err(|_| WatchError::NoAnswer)??;
        let mut body = pin!(body);
        let (sender, pieces) = mpsc::channel(AHEAD);
        let list = self.keeper.begin_list();
        let parsing = spawn_blocking(move || parse::<K>(list, Pieces::new(pieces)));
        loop {
            let piece = timeout(LIST_SILENCE, body.fill_buf())
                .await
                .map_err(|_| WatchError::Silent)?
                .map_err(WatchError::Broken)?
                .to_vec();
            body.as_mut().consume_unpin(piece.len());
            // A parser that is gone has given up, and says why.
            if piece.is_empty() || sender.send(piece).await.is_err() {
                break;
            }
        }
        drop(sender);
        let parsed = parsing.await.map_err(io::Error::other);
        let parsed = parsed.and_then(|parsed| parsed.map_err(io::Error::from));
        let (listed, version) = parsed.map_err(WatchError::Broken)?;
        match version.is_empty() {
            true => Err(WatchError::Missing("resourceVersion with its list")),
            false => Ok((listed, version)),
        }
    }
}

/// The pieces of an answer, for a parser that blocks. They end early if the answer broke off.
struct Pieces {
    pieces: mpsc::Receiver<Vec<u8>>,
    piece: io::Cursor<Vec<u8>>,
}

impl Pieces {
    fn new(pieces: mpsc::Receiver<Vec<u8>>) -> Self {
        let piece = io::Cursor::default();
        Self { pieces, piece }
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.piece.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = io::Cursor::new(piece),
                None => return Ok(0),
            }
        }
    }
}

/// A list: what is kept of its objects, and its resourceVersion.
fn parse<K: Keep>(mut list: K::List, text: impl Read) -> serde_json::Result<(K::List, String)> {
    let mut parser = serde_json::Deserializer::from_reader(io::BufReader::new(text));
    let version = List::<K>(&mut list).deserialize(&mut parser)?;
    parser.end()?;
    Ok((list, version))
}

#[derive(Deserialize)]
struct ListMeta {
    #[serde(default, rename = "resourceVersion")]
    resource_version: String,
}

struct List<'a, K: Keep>(&'a mut K::List);

impl<'de, K: Keep> DeserializeSeed<'de> for List<'_, K> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<String, D::Error> {
        parser.deserialize_map(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for List<'_, K> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {}", K::NAMES[1])
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<String, A::Error> {
        let mut version = String::new();
        let mut items = false;
        while let Some(field) = fields.next_key::<String>()? {
            match field.as_str() {
                "metadata" => version = fields.next_value::<ListMeta>()?.resource_version,
                "items" => {
                    fields.next_value_seed(Items::<K>(self.0))?;
                    items = true;
                }
                _ => {
                    fields.next_value::<IgnoredAny>()?;
                }
            }
        }
        match items {
            true => Ok(version),
            false => Err(serde::de::Error::missing_field("items")),
        }
    }
}

struct Items<'a, K: Keep>(&'a mut K::List);

impl<'de, K: Keep> DeserializeSeed<'de> for Items<'_, K> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<(), D::Error> {
        parser.deserialize_any(self)
    }
}

impl<'de, K: Keep> Visitor<'de> for Items<'_, K> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(K::NAMES[1])
    }

    /// A Go server writes an empty list so.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(object) = items.next_element::<K::Object>()? {
            K::listed(self.0, &object);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::watch::kubernetes::{known::Known, publish::Nodes};
    use proptest::prelude::*;

    const LIST: &str = r#"{"kind":"NodeList","items":[
        {"metadata":{"name":"a","resourceVersion":"3"},"spec":{"podCIDR":"10.0.1.0/24"}},
        {"metadata":{"name":"b","resourceVersion":"4"},"status":{"images":[{"names":["x"]}]}}],
        "metadata":{"resourceVersion":"9"}}"#;

    fn parse(own: &str, text: &[u8]) -> serde_json::Result<(Known, String)> {
        super::parse::<Nodes>(Known::of(own), text)
    }

    #[test]
    fn a_list_is_parsed_whatever_the_order_of_its_fields() {
        let (known, version) = parse("a", LIST.as_bytes()).unwrap();
        assert_eq!(version, "9");
        assert!(known.facts.nodes.keys().eq(["a", "b"]));
        assert!(known.own.is_some());
        let empty = r#"{"metadata":{"resourceVersion":"9"},"items":null}"#;
        let (known, _) = parse("a", empty.as_bytes()).unwrap();
        assert!(known.facts.nodes.is_empty());
        for bad in [r#"{"metadata":{}}"#, "[]", "{}", "", r#"{"items":[]} x"#] {
            assert!(parse("a", bad.as_bytes()).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn half_a_list_is_none(cut in 0..LIST.len()) {
            prop_assert!(parse("a", &LIST.as_bytes()[..cut]).is_err());
        }

        #[test]
        fn garbage_never_panics(text in "\\PC{0,80}") {
            let _ = parse("a", text.as_bytes());
        }
    }
}
