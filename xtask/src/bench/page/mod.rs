//! The report as one page: no scripts, nothing from elsewhere, light and dark, on paper-wide and
//! phone-wide screens. Well-formed as XML, too.
//!
//! Bars, whiskers and curves are SVG whose coordinates are percentages, so that they stretch with the
//! page while text keeps its size. Values are escaped where they are put in.

mod bars;
mod curves;
mod matrix;
#[cfg(test)]
mod tests;

use super::{
    output::{Ran, Whole},
    row::{Curve, Row},
};
use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("style.css");

pub fn page(whole: &Whole) -> String {
    let machine = &whole.machine;
    let sections: Vec<Section<'_>> = whole
        .benches
        .iter()
        .map(|ran| Section::of(whole, ran))
        .collect();
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                // Closed, as XML wants it.
                (PreEscaped(r#"<meta charset="utf-8"/>"#))
                (PreEscaped(r#"<meta name="viewport" content="width=device-width, initial-scale=1"/>"#))
                (PreEscaped(r#"<meta name="color-scheme" content="light dark"/>"#))
                title { "Sinabro: benchmarks of " (whole.made) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "Sinabro: benchmarks" }
                    p.facts {
                        span { (whole.made) }
                        @if let Some(version) = &whole.version {
                            span { "commit " (version) }
                        }
                        span { "Linux " (machine.kernel) }
                        span { (machine.cpus) " × " (machine.cpu) }
                        span { (gigabytes(machine.memory_bytes)) " GB" }
                    }
                    (how_to_read())
                    @if sections.len() > 1 {
                        nav {
                            @for section in &sections {
                                a href={ "#" (section.ran.bench) } { (section.title()) }
                            }
                        }
                    }
                }
                main {
                    @for section in &sections { (section.draw()) }
                }
            }
        }
    };
    markup.into_string()
}

fn how_to_read() -> Markup {
    html! {
        p {
            "All subjects of a bench were measured in turns, round by round. A value is the median over the \
             rounds; a whisker goes from the smallest to the largest. A ratio is the median of the rounds' own \
             ratios of Sinabro to the other, so what slowed a whole round cancels out; from the smallest to the \
             largest stands beside it."
        }
        p.key {
            span.cell.better { "better in every round" }
            span.cell.even { "now better, now worse" }
            span.cell.worse { "worse in every round" }
        }
    }
}

fn gigabytes(bytes: u64) -> u64 {
    bytes.div_ceil(1_000_000_000)
}

/// One bench.
struct Section<'a> {
    ran: &'a Ran,
    rows: Vec<&'a Row>,
    curves: Vec<&'a Curve>,
    /// Ours first; their colours go by this order.
    subjects: Vec<&'a str>,
}

impl<'a> Section<'a> {
    fn of(whole: &'a Whole, ran: &'a Ran) -> Self {
        let of_this = |bench: &str| bench == ran.bench;
        let rows = whole.rows.iter().filter(|of| of_this(&of.bench));
        let rows: Vec<&Row> = rows.map(|of| &of.item).collect();
        let curves = whole.curves.iter().filter(|of| of_this(&of.bench));
        let curves: Vec<&Curve> = curves.map(|of| &of.item).collect();
        let names = rows.iter().map(|row| &*row.subject);
        let names = names.chain(rows.iter().map(|row| &*row.against));
        let names = names.chain(curves.iter().map(|curve| &*curve.subject));
        let subjects = in_order(names);
        Self {
            ran,
            rows,
            curves,
            subjects,
        }
    }

    fn title(&self) -> &str {
        match &*self.ran.bench {
            "cni" => "ADD and DEL",
            "tcp" => "Accelerated TCP on one node",
            "pod" => "Traffic between pods",
            "pods" => "Pods from request to Running",
            other => other,
        }
    }

    /// What is compared.
    fn lead(&self) -> Option<&'static str> {
        Some(match &*self.ran.bench {
            "cni" => {
                "Whole CNI plugins from exec to exit, for pods one after the other and all at once, on one node, with \
                 IPv4 and IPv6. “All done”: from the first exec until the kernel has made, or removed, every link."
            }
            "tcp" => {
                "TCP between two accelerated pods of one node, beside two plain pods of the same node and beside \
                 127.0.0.1 in one pod; clients on one CPU, servers on another. HTTP is nginx and wrk."
            }
            "pod" => {
                "Nothing is accelerated here. “Without redirect_peer” is Sinabro with packets through the node's stack; \
                 bridge and ptp are the reference plugins with host-local; “flannel's way” is its VXLAN devices, entries \
                 and masquerade, made by this bench; the bare ones are the limit: two networks and a veth pair, and the \
                 nodes themselves. “Local-mtu off” are pods whose links have one MTU for everything, “loopback” is one pod \
                 with itself. CPU is what the threads of both ends did per request, packet or gigabyte."
            }
            "pods" => {
                "From kubectl apply until each pod of a real cluster is Running, beside the plugin bridge on the same \
                 node: mostly scheduler, kubelet, containerd and runc, which are in both figures."
            }
            _ => return None,
        })
    }

    fn draw(&self) -> Markup {
        let ran = self.ran;
        // What precedes a colon is common to several cases.
        let groups = in_order(self.rows.iter().map(|row| split(&row.case).0));
        html! {
            section id=(ran.bench) {
                h2 { (self.title()) }
                @if let Some(lead) = self.lead() { p { (lead) } }
                p.facts {
                    code { (ran.command) }
                    @if ran.seconds > 0 { span { (duration(ran.seconds)) } }
                }
                @if let Some(failure) = &ran.failure {
                    p.failure { "No figures: " (failure) }
                }
                @for group in groups {
                    @let rows = self.rows.iter().filter(|row| split(&row.case).0 == group);
                    @let rows: Vec<&Row> = rows.copied().collect();
                    @let heading = self.heading(group);
                    @if !heading.is_empty() { h3 { (heading) } }
                    (matrix::draw(&rows))
                    (self.curves(group))
                    details open="open" {
                        summary { "All values" }
                        (bars::draw(&rows, &self.subjects))
                    }
                }
            }
        }
    }

    /// Of a group of cases.
    fn heading(&self, group: &'a str) -> &'a str {
        match (&*self.ran.bench, group) {
            // Their names are without a place: they are all of one node.
            ("pod", "") => "same node, by the MTU of the pods' links",
            _ => group,
        }
    }

    fn curves(&self, group: &str) -> Markup {
        let curves = self.curves.iter().filter(|curve| curve.case == group);
        let mut curves: Vec<&Curve> = curves.copied().collect();
        // Turns rotate: which came first says nothing.
        curves.sort_by_key(|curve| self.subjects.iter().position(|name| *name == curve.subject));
        curves::draw(&curves, &self.subjects)
    }
}

/// A group of cases, and a case within it.
fn split(case: &str) -> (&str, &str) {
    case.split_once(": ").unwrap_or(("", case))
}

/// Each once, where it first was.
fn in_order<'a>(items: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}

/// The class that gives a subject its colour.
fn colour(subjects: &[&str], subject: &str) -> String {
    let number = subjects.iter().position(|other| *other == subject);
    format!("s{}", number.unwrap_or(0) % 6)
}

/// A share of the width.
fn percent(part: f64, whole: f64) -> String {
    let share = if whole > 0.0 { part / whole } else { 0.0 };
    format!("{:.2}%", share.clamp(0.0, 1.0) * 100.0)
}

/// Three digits, and a k or an M where there would be more than five.
fn number(value: f64) -> String {
    match value {
        1e7.. => format!("{:.1} M", value / 1e6),
        1e6..1e7 => format!("{:.2} M", value / 1e6),
        1e5..1e6 => format!("{:.0} k", value / 1e3),
        1e4..1e5 => format!("{:.1} k", value / 1e3),
        100.0..1e4 => format!("{value:.0}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn ratio(ratio: f64) -> String {
    match ratio {
        10.0.. => format!("{ratio:.1}×"),
        _ => format!("{ratio:.2}×"),
    }
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..90 => format!("{seconds} s"),
        _ => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}
