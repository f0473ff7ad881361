//! Aligned plain text.

use std::fmt::Display;

/// Rows under a heading, each column as wide as its widest cell.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<const N: usize>(heading: [&str; N]) -> Self {
        let heading = heading.map(str::to_owned).into();
        Self {
            rows: vec![heading],
        }
    }

    /// A table without a heading.
    pub fn plain() -> Self {
        Self { rows: Vec::new() }
    }

    /// Control characters, which could move the cursor, become `?`; an empty cell becomes `-`.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        let shown = |cell: String| match cell.is_empty() {
            true => "-".to_owned(),
            false => clean(cell),
        };
        self.rows.push(cells.map(shown).into());
    }

    pub fn render(&self) -> String {
        self.render_with(&mut Vec::new())
    }

    /// The same with columns at least that wide; says how wide they are. So what is printed in parts is
    /// aligned, as far as can be known.
    pub fn render_with(&self, widths: &mut Vec<usize>) -> String {
        for row in &self.rows {
            widths.resize(widths.len().max(row.len()), 0);
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for row in &self.rows {
            let cells = row.iter().zip(&*widths);
            let line: String = cells
                .map(|(cell, width)| format!("{cell:width$}  "))
                .collect();
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Control characters, which could move the cursor, become `?`.
pub fn clean(text: String) -> String {
    text.replace(|c: char| c.is_control(), "?")
}

/// Items with commas between them.
pub fn join<T: Display>(items: &[T]) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    items.join(", ")
}

pub fn yes_no(value: bool) -> String {
    if value { "yes" } else { "no" }.into()
}

/// `1.5 MiB`; bytes below 1024 as they are.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be printed as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `3h12m`: the two largest units of a time span.
pub fn age(seconds: u64) -> String {
    let (m, h, d) = (60, 3600, 86400);
    match seconds {
        s if s < m => format!("{s}s"),
        s if s < h => format!("{}m{}s", s / m, s % m),
        s if s < d => format!("{}h{}m", s / h, s % h / m),
        s => format!("{}d{}h", s / d, s % d / h),
    }
}

/// `12 of 253 (5%)`.
pub fn share(part: u64, whole: u64) -> String {
    match whole {
        0 => format!("{part} of 0"),
        _ => format!(
            "{part} of {whole} ({:.0}%)",
            part as f64 / whole as f64 * 100.0
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_harmless() {
        let mut table = Table::new(["NAME", "X"]);
        table.row(["länger".into(), "1".into()]);
        table.row([String::new(), "\x1b[2J\n".into()]);
        assert_eq!(table.render(), "NAME    X\nlänger  1\n-       ?[2J?\n");
        assert_eq!(Table::plain().render(), "");
    }

    #[test]
    fn units_are_human() {
        let sizes = [0, 1023, 1024, 1536, (1 << 20) - 1, u64::MAX].map(bytes);
        assert_eq!(
            sizes,
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "16.0 EiB"]
        );
        let ages = [0, 59, 60, 3599, 3600, 86_400 + 3600].map(age);
        assert_eq!(ages, ["0s", "59s", "1m0s", "59m59s", "1h0m", "1d1h"]);
        assert_eq!(share(1, 4), "1 of 4 (25%)");
        assert_eq!(share(0, 0), "0 of 0");
    }
}
