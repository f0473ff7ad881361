//! All Nodes in one answer, for servers that do not stream lists.
//!
//! The server is asked for what its cache has; then there are no pages, and the answer of a large
//! cluster has a hundred megabytes. It is parsed as it comes: beside what is kept of the Nodes,
//! one of them is in memory at a time.

use super::{ANSWER, LIST_SILENCE, NODES, Watcher, error::WatchError, known::Known};
use crate::watch::nodes::ApiNode;
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

impl Watcher {
    /// Reads all Nodes as the server has them at `from` or later; with the point they are of.
    pub(super) async fn list(&self, from: &str) -> Result<(Known, String), WatchError> {
        let params = ListParams::default()
            .at(from)
            .matching(VersionMatch::NotOlderThan);
        let request = Request::new(NODES).list(&params)?;
        let body = timeout(ANSWER, self.client.request_stream(request))
            .await
            .map_err(|_| WatchError::NoAnswer)??;
        let mut body = pin!(body);
        let (sender, pieces) = mpsc::channel(AHEAD);
        let own = self.node.clone();
        let parsing = spawn_blocking(move || parse(&own, Pieces::new(pieces)));
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
        let (known, version) = parsed.map_err(WatchError::Broken)?;
        match version.is_empty() {
            true => Err(WatchError::Missing("resourceVersion with its list")),
            false => Ok((known, version)),
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

/// A NodeList: what is kept of its Nodes, and its resourceVersion.
fn parse(own: &str, text: impl Read) -> serde_json::Result<(Known, String)> {
    let mut parser = serde_json::Deserializer::from_reader(io::BufReader::new(text));
    let mut known = Known::default();
    let version = List(own, &mut known).deserialize(&mut parser)?;
    parser.end()?;
    Ok((known, version))
}

#[derive(Deserialize)]
struct ListMeta {
    #[serde(default, rename = "resourceVersion")]
    resource_version: String,
}

struct List<'a>(&'a str, &'a mut Known);

impl<'de> DeserializeSeed<'de> for List<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<String, D::Error> {
        parser.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for List<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a NodeList")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<String, A::Error> {
        let mut version = String::new();
        let mut items = false;
        while let Some(field) = fields.next_key::<String>()? {
            match field.as_str() {
                "metadata" => version = fields.next_value::<ListMeta>()?.resource_version,
                "items" => {
                    fields.next_value_seed(Items(self.0, self.1))?;
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

struct Items<'a>(&'a str, &'a mut Known);

impl<'de> DeserializeSeed<'de> for Items<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<(), D::Error> {
        parser.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Items<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of Nodes")
    }

    /// A Go server writes an empty list so.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(node) = items.next_element::<ApiNode>()? {
            self.1.insert(self.0, &node);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIST: &str = r#"{"kind":"NodeList","items":[
        {"metadata":{"name":"a","resourceVersion":"3"},"spec":{"podCIDR":"10.0.1.0/24"}},
        {"metadata":{"name":"b","resourceVersion":"4"},"status":{"images":[{"names":["x"]}]}}],
        "metadata":{"resourceVersion":"9"}}"#;

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
