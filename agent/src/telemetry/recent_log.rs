//! The last lines of the agent's log, kept in memory: `sinabroctl debug` puts them into its archive,
//! where the runtime's own files of the log cannot be reached.

use std::{
    collections::VecDeque,
    io,
    sync::{Mutex, PoisonError},
};
use tracing_subscriber::fmt::MakeWriter;

/// Some two thousand lines. As JSON on the socket they stay far below a frame's limit, even if each
/// byte has to be escaped.
const MAX: usize = 128 * 1024;

/// The log of this process.
pub static RECENT: RecentLog = RecentLog::new();

/// Whole lines, the oldest ones go.
#[derive(Debug)]
pub struct RecentLog {
    lines: Mutex<Lines>,
}

#[derive(Debug)]
struct Lines {
    kept: VecDeque<String>,
    size: usize,
}

impl RecentLog {
    const fn new() -> Self {
        Self {
            lines: Mutex::new(Lines {
                kept: VecDeque::new(),
                size: 0,
            }),
        }
    }

    /// What is kept, the oldest line first.
    pub fn text(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.kept.iter().map(String::as_str).collect()
    }

    fn keep(&self, line: &[u8]) {
        // One that alone is longer than all that is kept tells by its beginning what it is.
        let line = &line[..line.len().min(MAX)];
        let line = String::from_utf8_lossy(line).into_owned();
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.size += line.len();
        lines.kept.push_back(line);
        while lines.size > MAX {
            let Some(oldest) = lines.kept.pop_front() else {
                return;
            };
            lines.size -= oldest.len();
        }
    }
}

/// Takes what the log's formatter writes: one line at a time.
#[derive(Debug)]
pub struct Keep(&'static RecentLog);

impl io::Write for Keep {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.keep(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for &'static RecentLog {
    type Writer = Keep;

    fn make_writer(&'a self) -> Keep {
        Keep(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_whole() {
        let log = RecentLog::new();
        assert_eq!(log.text(), "");
        for number in 0..10_000 {
            log.keep(format!("line {number:08} with some words behind it\n").as_bytes());
        }
        let text = log.text();
        assert!(text.len() <= MAX && text.len() > MAX - 100);
        assert!(
            text.starts_with("line ")
                && text.ends_with("line 00009999 with some words behind it\n")
        );
        // Neither what is no text nor what is too long does harm.
        log.keep(b"\xff\xfe\n");
        assert!(log.text().ends_with("\u{fffd}\u{fffd}\n"));
        log.keep(&vec![b'x'; MAX * 2]);
        assert_eq!(log.text().len(), MAX);
        log.keep(b"after\n");
        assert_eq!(log.text(), "after\n");
    }
}
