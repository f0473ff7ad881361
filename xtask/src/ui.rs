//! What the commands print: plain lines, colour and live progress on terminals only.

use std::{
    io::{IsTerminal as _, Write as _, stderr, stdout},
    time::{Duration, Instant},
};

const GREEN: &str = "32";
const RED: &str = "31";
const BOLD: &str = "1";
const DIM: &str = "2";

fn paint(text: &str, code: &str) -> String {
    if stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_string()
    }
}

pub fn bold(text: &str) -> String {
    paint(text, BOLD)
}

pub fn dim(text: &str) -> String {
    paint(text, DIM)
}

/// `ok` or `FAIL`, of equal width.
pub fn verdict(ok: bool) -> String {
    match ok {
        true => paint("ok  ", GREEN),
        false => paint("FAIL", RED),
    }
}

pub fn error(text: &str) {
    let code = if stderr().is_terminal() { RED } else { "" };
    match code {
        "" => eprintln!("error: {text}"),
        code => eprintln!("\x1b[{code}merror:\x1b[0m {text}"),
    }
}

/// A line that says what is being done; on terminals it is replaced by what came of it.
pub struct Step {
    what: String,
    started: Instant,
    spoke: Instant,
    live: bool,
}

/// How often a long step says in a log what it is doing.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Announces something that may take a while.
pub fn step(what: impl Into<String>) -> Step {
    let what = what.into();
    let live = stdout().is_terminal();
    if live {
        print!("{}", dim(&format!("  … {what}")));
        let _ = stdout().flush();
    }
    Step {
        what,
        started: Instant::now(),
        spoke: Instant::now(),
        live,
    }
}

impl Step {
    /// What it is doing now, within the same step.
    pub fn now(&mut self, what: impl Into<String>) {
        if self.live {
            print!("\r\x1b[K{}", dim(&format!("  … {}", what.into())));
            let _ = stdout().flush();
        } else if self.spoke.elapsed() > HEARTBEAT {
            println!("  … {}", what.into());
            self.spoke = Instant::now();
        }
    }

    /// Replaces the line; `text` may have several.
    pub fn done(self, text: &str) {
        if self.live {
            print!("\r\x1b[K");
        }
        println!("{text}");
    }

    /// Takes the line away.
    pub fn clear(self) {
        if self.live {
            print!("\r\x1b[K");
        }
    }

    /// Replaces the line by the announcement and the time it took.
    pub fn done_in_time(self) {
        let text = format!(
            "  {}, {:.1} s",
            self.what,
            self.started.elapsed().as_secs_f64()
        );
        self.done(&text);
    }
}

/// Prints rows in columns; the first row is the heading, numbers go to the right.
pub fn table(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let right: Vec<bool> = (0..columns)
        .map(|column| {
            rows.iter()
                .skip(1)
                .filter_map(|row| row.get(column))
                .all(|cell| {
                    cell.is_empty() || cell.starts_with(|c: char| c.is_ascii_digit() || c == '-')
                })
        })
        .collect();
    for (number, row) in rows.iter().enumerate() {
        let mut line = String::from(" ");
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            line.push(' ');
            line += &if right[column] {
                pad + cell
            } else {
                format!("{cell}{pad}")
            };
            line.push(' ');
        }
        let line = line.trim_end();
        println!(
            "{}",
            if number == 0 {
                dim(line)
            } else {
                line.to_string()
            }
        );
    }
}
