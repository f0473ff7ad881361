//! Each setting is in docs/settings.md, and those that few need apart from the others.

use crate::config::Options;
use clap::CommandFactory as _;
use std::{collections::BTreeSet, fs};

/// The flags that lines of a document begin with.
fn flags<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let of_line = |line: &'a str| {
        let cell = line.trim_start_matches("| ");
        let first = cell.split(" | ").next().unwrap_or_default();
        let words = first.split('`').skip(1).step_by(2);
        words.filter_map(|word| word.strip_prefix("--"))
    };
    lines.flat_map(of_line).map(str::to_owned).collect()
}

#[test]
fn every_setting_is_documented_and_the_hidden_ones_are_those_that_help_leaves_out() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/settings.md");
    let text = fs::read_to_string(path).unwrap();
    let (shown, rest) = text.split_once("\n## Hidden settings\n").unwrap();
    let hidden = rest.split("\n## ").next().unwrap();
    let shown = flags(shown.lines().filter(|line| line.starts_with("| `--")));
    let hidden = flags(hidden.lines().filter(|line| line.starts_with("| `--")));

    let mut command = Options::command();
    command.build();
    let all: BTreeSet<_> = command
        .get_arguments()
        .filter_map(|arg| arg.get_long().map(str::to_owned))
        .filter(|flag| !["config", "help", "version"].contains(&flag.as_str()))
        .collect();
    let help = command.render_long_help().to_string();
    let in_help: BTreeSet<_> = help
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("--"))
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect();
    let (seen, unseen): (BTreeSet<_>, BTreeSet<_>) =
        all.into_iter().partition(|flag| in_help.contains(flag));
    assert_eq!(shown, seen, "the table of docs/settings.md and --help");
    assert_eq!(hidden, unseen, "the hidden settings of docs/settings.md");
}
