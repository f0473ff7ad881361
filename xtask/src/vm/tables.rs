//! What is printed at the end: kernel by program, kernel by check, what the agent chose on each
//! machine, what was left out, and why what failed did.

use super::outcome::Outcome;
use crate::ui;
use sinabro_common::api::VerifiedProgram;
use sinabro_guest::SELF_TEST;

/// Of a program that was refused before it was attached in any.
const NO_MODE: &str = "-";

pub fn print(outcomes: &[Outcome]) {
    let plain = outcomes
        .iter()
        .filter(|outcome| outcome.environment.is_empty());
    let plain: Vec<_> = plain.collect();
    let show = |title: &str, rows: &[Vec<String>]| {
        // With a heading alone it says nothing.
        if rows.len() > 1 {
            println!("\n{}", ui::bold(title));
            ui::table(rows);
        }
    };
    show(
        "Programs: instructions that the verifier walked through",
        &programs(&plain),
    );
    show("Checks", &checks(&plain));
    show("What the agent chose by itself", &choices(outcomes));
    let left_out = left_out(outcomes);
    if !left_out.is_empty() {
        println!("\n{}", ui::bold("Left out"));
        left_out.iter().for_each(|line| println!("  {line}"));
    }
    for outcome in outcomes {
        for check in outcome.failures() {
            let head = format!("{}: {}", outcome.title(), check.name);
            println!(
                "\n  {}  {}\n{}",
                ui::verdict(false),
                head,
                indented(&check.detail)
            );
        }
    }
}

/// A column for each kernel.
fn heading(first: &[&str], outcomes: &[&Outcome]) -> Vec<String> {
    let names = outcomes.iter().map(|outcome| outcome.name.clone());
    first
        .iter()
        .map(|text| (*text).to_owned())
        .chain(names)
        .collect()
}

fn programs(outcomes: &[&Outcome]) -> Vec<Vec<String>> {
    let mut rows = vec![heading(&["program", "mode"], outcomes)];
    let mut keys: Vec<(&str, &str)> = Vec::new();
    for row in outcomes.iter().flat_map(|outcome| &outcome.programs) {
        let key = (row.name.as_str(), row.mode.as_str());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    // One that was refused has no mode there, but may have one elsewhere.
    let has_mode = |name: &str| keys.iter().any(|key| key.0 == name && key.1 != NO_MODE);
    let keys: Vec<_> = keys
        .iter()
        .filter(|key| key.1 != NO_MODE || !has_mode(key.0))
        .collect();
    let mut keys: Vec<(&str, &str)> = keys.into_iter().copied().collect();
    // A program's modes beside one another, as they came first.
    let names: Vec<&str> = keys.iter().map(|(name, _)| *name).collect();
    keys.sort_by_key(|(name, _)| names.iter().position(|other| other == name));
    for (name, mode) in keys {
        let cells = outcomes.iter().map(|outcome| {
            let of = |row: &&VerifiedProgram| {
                row.name == name && (row.mode == mode || row.mode == NO_MODE)
            };
            let found = outcome.programs.iter().find(of);
            found.map_or_else(String::new, |row| match (row.ok, row.instructions) {
                (true, Some(count)) => count.to_string(),
                (true, None) => "ok".into(),
                (false, _) => "refused".into(),
            })
        });
        rows.push(
            [name.into(), mode.into()]
                .into_iter()
                .chain(cells)
                .collect(),
        );
    }
    rows
}

fn checks(outcomes: &[&Outcome]) -> Vec<Vec<String>> {
    let mut rows = vec![heading(&["check"], outcomes)];
    let mut names: Vec<&str> = Vec::new();
    for check in outcomes.iter().flat_map(|outcome| &outcome.checks) {
        if !names.contains(&check.name.as_str()) {
            names.push(&check.name);
        }
    }
    for name in names {
        let cells = outcomes.iter().map(|outcome| {
            let found = outcome.checks.iter().find(|check| check.name == name);
            found
                .map_or("", |check| if check.ok { "ok" } else { "FAIL" })
                .to_owned()
        });
        rows.push([name.to_owned()].into_iter().chain(cells).collect());
    }
    rows
}

/// What was not done, and where.
fn left_out(outcomes: &[Outcome]) -> Vec<String> {
    let mut found: Vec<(&str, Vec<String>)> = Vec::new();
    for outcome in outcomes {
        for what in &outcome.left_out {
            match found.iter_mut().find(|(other, _)| *other == what) {
                Some((_, titles)) => titles.push(outcome.title()),
                None => found.push((what.as_str(), vec![outcome.title()])),
            }
        }
    }
    let line = |(what, titles): (&str, Vec<String>)| format!("{}: {what}", titles.join("; "));
    found.into_iter().map(line).collect()
}

fn choices(outcomes: &[Outcome]) -> Vec<Vec<String>> {
    let heading = [
        "kernel",
        "machine",
        "result",
        "uplinks",
        "accelerated TCP",
        "its self-test",
    ];
    let mut rows = vec![heading.map(String::from).to_vec()];
    // Where no agent ran, nothing was chosen.
    for outcome in outcomes.iter().filter(|outcome| !outcome.modes.is_empty()) {
        // A verifier's log has lines; they are in the JSON.
        let mode = |key: &str| {
            let found = outcome
                .modes
                .get(key)
                .and_then(|value| value.lines().next());
            found.unwrap_or_default().to_owned()
        };
        let failed = outcome.failures().count();
        rows.push(vec![
            format!("Linux {}", outcome.name),
            outcome.environment.clone(),
            if failed == 0 {
                "ok".into()
            } else {
                format!("{failed} failed")
            },
            mode("attachUplinks"),
            mode("tcpAcceleration"),
            mode(SELF_TEST),
        ]);
    }
    rows
}

fn indented(text: &str) -> String {
    let lines = text.lines().map(|line| format!("        {line}"));
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_out_is_said_once_with_all_machines() {
        let of = |name: &str, left_out: &[&str]| Outcome {
            left_out: left_out.iter().map(|what| (*what).to_owned()).collect(),
            ..Outcome::new(name, "", "")
        };
        let all = [of("a", &["x", "y"]), of("b", &[]), of("c", &["x"])];
        assert_eq!(left_out(&all), ["a; c: x", "a: y"]);
    }

    #[test]
    fn a_program_that_one_kernel_refuses_is_in_its_column() {
        let row = |mode: &str, ok: bool| VerifiedProgram {
            name: "overlay_in".into(),
            mode: mode.into(),
            instructions: ok.then_some(7),
            ok,
            ..VerifiedProgram::default()
        };
        let of = |name: &str, rows: &[VerifiedProgram]| Outcome {
            programs: rows.to_vec(),
            ..Outcome::new(name, "", "")
        };
        let both = [
            of("a", &[row("clsact", true)]),
            of("b", &[row(NO_MODE, false)]),
        ];
        let shown = programs(&both.iter().collect::<Vec<_>>());
        assert_eq!(
            shown[1..],
            [["overlay_in", "clsact", "7", "refused"].map(String::from)]
        );
        let shown = programs(&[&both[1]]);
        assert_eq!(
            shown[1..],
            [["overlay_in", NO_MODE, "refused"].map(String::from)]
        );
    }
}
