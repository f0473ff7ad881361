//! `sinabroctl drops`.

use crate::ctl::{
    Common, Exit, Failure, Format, client,
    pause::end_when_asked,
    print,
    table::{Table, clean},
};
use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use sinabro_common::api::{
    DropEventsReport, DropReport, DroppedPacket, MAX_DROP_WAIT_MS, MetricsReport, PacketEnd,
    Request, Response,
};
use std::io::{self, Write};

/// Packets that are shown without being asked for.
const LAST: usize = 10;

#[derive(Debug, Args)]
pub struct DropFlags {
    /// A line for each packet as it is dropped, until it is ended by Ctrl-C.
    ///
    /// Of each reason the programs tell of ten packets a second and CPU, and how many they left out. With
    /// -o json each line is an object.
    #[arg(short, long)]
    follow: bool,

    /// Only what was dropped for this reason, as the table names it.
    #[arg(long)]
    reason: Option<String>,

    /// Only packets from, to or at the link of this pod.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod: Option<String>,
}

impl DropFlags {
    fn wants(&self, packet: &DroppedPacket) -> bool {
        let of_pod = |end: &Option<PacketEnd>| match end {
            Some(end) => end.pod == self.pod,
            None => false,
        };
        self.reason.as_ref().is_none_or(|r| *r == packet.reason)
            && (self.pod.is_none()
                || packet.pod == self.pod
                || of_pod(&packet.source)
                || of_pod(&packet.destination))
    }
}

/// What is printed without --follow.
#[derive(Serialize)]
struct Shown {
    drops: Vec<DropReport>,
    packets: Vec<DroppedPacket>,
}

pub fn run(common: &Common, flags: &DropFlags) -> Result<Exit, Failure> {
    if flags.follow {
        return follow(common, flags);
    }
    let metrics: MetricsReport =
        client::ask(common, Request::Metrics, |response| match response {
            Response::Metrics(report) => Some(*report),
            _ => None,
        })?;
    let wanted = |drop: &DropReport| flags.reason.as_ref().is_none_or(|r| *r == drop.reason);
    let drops: Vec<_> = metrics.drops.into_iter().filter(wanted).collect();
    if let Some(reason) = &flags.reason
        && drops.is_empty()
    {
        return Err(Failure {
            text: format!("there is no reason {reason}; `sinabroctl drops` lists them"),
            exit: Exit::Usage,
        });
    }
    let mut packets = kept(common)?.packets;
    packets.retain(|packet| flags.wants(packet));
    let shown = Shown { drops, packets };
    print(common, &shown, table).map_err(client::Error::from)?;
    Ok(Exit::Well)
}

/// All packets that the agent keeps, asked for page by page.
pub fn kept(common: &Common) -> Result<DropEventsReport, client::Error> {
    let mut all = ask(common, 0, 0)?;
    while let Some(last) = all.packets.last() {
        let more = ask(common, last.number, 0)?;
        if more.packets.is_empty() {
            break;
        }
        all.packets.extend(more.packets);
    }
    Ok(all)
}

fn ask(common: &Common, after: u64, wait: u64) -> Result<DropEventsReport, client::Error> {
    let request = Request::DropEvents {
        after,
        wait_milliseconds: wait,
    };
    let seconds = common.timeout + wait.div_ceil(1000);
    client::ask_within(common, seconds, request, |response| match response {
        Response::DropEvents(report) => Some(report),
        _ => None,
    })
}

fn table(shown: &Shown) -> String {
    let mut drops = Table::new(["DROPPED", "REASON", "MEANING"]);
    for drop in &shown.drops {
        drops.row([
            drop.packets.to_string(),
            drop.reason.clone(),
            drop.text.clone(),
        ]);
    }
    let mut text = drops.render();
    let skip = shown.packets.len().saturating_sub(LAST);
    if !shown.packets.is_empty() {
        text.push_str("\nThe last packets (more with --follow or -o json):\n");
    }
    for packet in &shown.packets[skip..] {
        text.push_str(&line(packet));
        text.push('\n');
    }
    text
}

/// `2026-11-22T20:11:46.123Z source_address: udp 10.244.1.7:9 (shop/cart) > 192.0.2.1:53, 64 bytes, …`.
fn line(packet: &DroppedPacket) -> String {
    let time = i64::try_from(packet.unix_milliseconds).unwrap_or(i64::MAX);
    let time = Timestamp::from_millisecond(time).unwrap_or_default();
    let end = |end: &PacketEnd| match &end.pod {
        Some(pod) => format!("{end} ({pod})"),
        None => end.to_string(),
    };
    let mut text = format!("{time:.3} {}: {}", packet.reason, packet.protocol);
    if let (Some(from), Some(to)) = (&packet.source, &packet.destination) {
        text += &format!(" {} > {}", end(from), end(to));
    }
    if let Some(detail) = &packet.detail {
        text += &format!(", {detail}");
    }
    text += &format!(", {} bytes", packet.bytes);
    let link = match &packet.pod {
        Some(pod) => pod.clone(),
        None => format!("interface {}", packet.ifindex),
    };
    text += &match packet.program.as_str() {
        "pod_out" => format!(", sent by {link}"),
        "pod_in" => format!(", for {link}"),
        "uplink_out" => format!(", on its way out by {link}"),
        "uplink_in" => format!(", came in by {link}"),
        "overlay_in" => ", out of a tunnel".to_owned(),
        "overlay_out" => ", into a tunnel".to_owned(),
        other => format!(", {other} at {link}"),
    };
    if let (Some(mac), "source_mac") = (&packet.source_mac, packet.reason.as_str()) {
        text += &format!(", from {mac}");
    }
    if packet.left_out > 0 {
        text += &format!(" (and {} more before)", packet.left_out);
    }
    clean(text)
}

fn follow(common: &Common, flags: &DropFlags) -> Result<Exit, Failure> {
    end_when_asked()?;
    let before = kept(common)?;
    let agent = before.agent;
    let mut after = before.packets.last().map_or(0, |last| last.number);
    loop {
        let report = ask(common, after, MAX_DROP_WAIT_MS).map_err(|error| Failure {
            text: format!("the agent went away: {error}"),
            exit: error.exit(),
        })?;
        if report.agent != agent {
            return Err(Failure {
                text: "the agent was started again, what was dropped meanwhile is not known; \
                       follow again"
                    .into(),
                exit: Exit::Unreachable,
            });
        }
        let mut lines = String::new();
        if report.lost > 0 && common.format() != Some(Format::Json) {
            lines = format!("{} packets were missed here\n", report.lost);
        }
        for packet in report.packets.iter().filter(|packet| flags.wants(packet)) {
            lines += &match common.format() {
                Some(Format::Json) => serde_json::to_string(packet)
                    .map_err(io::Error::from)
                    .map_err(client::Error::from)?,
                _ => line(packet),
            };
            lines.push('\n');
        }
        let mut stdout = io::stdout().lock();
        let written = stdout
            .write_all(lines.as_bytes())
            .and_then(|()| stdout.flush());
        match written {
            // The reader has seen enough (`| head`).
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(Exit::Well),
            other => other.map_err(client::Error::from)?,
        }
        after = report.packets.last().map_or(after, |last| last.number);
    }
}
