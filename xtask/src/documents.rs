//! Tests of the documents: a link leads to a file, and to a heading that is in it.

use crate::workspace::root;
use std::{
    collections::BTreeMap,
    fs,
    path::{Component, Path, PathBuf},
};

/// The text of every document, by its path below the root.
fn documents() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    for directory in ["", "docs", "docs/adr"] {
        for entry in fs::read_dir(root().join(directory)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path.strip_prefix(root()).unwrap().to_owned(), text);
            }
        }
    }
    found
}

/// Where links lead, as they are written: `](target)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1);
    targets.filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

/// The anchors that forges make of headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || "-_".contains(c) => Some(c),
            _ => None,
        });
        kept.collect()
    };
    headings.map(anchor).collect()
}

/// `docs/../README.md` is `README.md`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            other => plain.push(other),
        }
    }
    plain
}

/// The links of a document that lead nowhere.
fn broken(documents: &BTreeMap<PathBuf, String>, path: &Path, text: &str) -> Vec<String> {
    let leads = |link: &str| {
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = match file {
            "" => path.to_owned(),
            file => plain(&path.parent().unwrap_or(Path::new("")).join(file)),
        };
        let has_anchor = || {
            documents
                .get(&target)
                .is_some_and(|text| anchors(text).iter().any(|found| found == anchor))
        };
        root().join(&target).exists() && (anchor.is_empty() || has_anchor())
    };
    links(text)
        .filter(|link| !link.contains("://") && !leads(link))
        .map(|link| format!("{}: {link}", path.display()))
        .collect()
}

#[test]
fn every_link_leads_somewhere() {
    let documents = documents();
    assert!(documents.len() > 15, "{:?}", documents.keys());
    let broken: Vec<_> = documents
        .iter()
        .flat_map(|(path, text)| broken(&documents, path, text))
        .collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let documents = documents();
    let found = |text: &str| broken(&documents, Path::new("docs/README.md"), text).len();
    assert_eq!(found("[a](settings.md) [b](../README.md#limits)"), 0);
    assert_eq!(found("[c](#by-symptom) [d](https://example.com/x#y)"), 0);
    assert_eq!(found("[a](missing.md)"), 1);
    assert_eq!(found("[a](../README.md#missing) [b](#missing)"), 2);
}
