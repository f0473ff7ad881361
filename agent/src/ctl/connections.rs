//! `sinabroctl connections`: the table of connections, listed, counted, forgotten.
//!
//! What is listed is printed as it comes: a table may have half a million rows, and this runs beside the agent,
//! within what memory that may use.

use crate::ctl::{
    Common, Exit, Failure, Format, client, print,
    table::{Table, age, bytes, share},
};
use clap::{Args, Subcommand, ValueEnum};
use ipnet::IpNet;
use serde::Serialize;
use sinabro_common::api::{
    ConnectionFilter, ConnectionReport, ConnectionStats, ConnectionsPage, FlushReport, Mapped,
    Request, Response, RoomFrom, RoomReport, StateClass, protocol_number,
};
use std::{
    io::{self, Write},
    net::IpAddr,
};

/// Rows that are sorted and aligned together.
const CHUNK: usize = 1000;

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Connections of this node's pods that the node keeps track of: masqueraded ones, those that
    /// others began from outside, those that went through a Service.
    ///
    /// POD is the end on this node, AS what the client has outside, STATE a word of conntrack(8).
    /// Connections that need nothing remembered (plain pod to pod) are not in the table. A row
    /// with the state MAPPING is none: it is the port outside that a UDP port has towards all, *.
    List {
        #[command(flatten)]
        filter: FilterFlags,
        /// How many at most; 0: all.
        #[arg(long, value_name = "N", default_value_t = CHUNK)]
        limit: usize,
    },
    /// Forgets connections: their next packet begins a new one, under another port perhaps, which the
    /// other end may answer with a reset.
    Flush {
        #[command(flatten)]
        filter: FilterFlags,
        /// Every connection of the node.
        #[arg(long)]
        all: bool,
    },
    /// How many there are: by state, by protocol, by pod with its limits, and where most lead to.
    Stats,
}

#[derive(Debug, Args)]
pub struct FilterFlags {
    /// Of this pod.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod: Option<String>,

    /// Whose other end is there.
    #[arg(long, value_name = "ADDRESS|CIDR", value_parser = network)]
    remote: Option<IpNet>,

    /// tcp, udp, icmp, icmpv6, sctp and so on, or a number.
    #[arg(long, value_name = "PROTOCOL", value_parser = protocol)]
    proto: Option<u8>,

    /// With this port at either end, or outside; of an echo: its id.
    #[arg(long)]
    port: Option<u16>,

    /// How far they are.
    #[arg(long)]
    state: Option<State>,

    /// Only those that leave the node under its own address.
    #[arg(long)]
    masqueraded: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum State {
    /// Both ends have sent.
    Established,
    /// Nobody has answered yet.
    Unanswered,
    /// An end has closed or reset it.
    Closing,
}

fn network(text: &str) -> Result<IpNet, String> {
    let host = text.parse().map(|address: IpAddr| address.into());
    host.or_else(|_| text.parse())
        .map_err(|_| "neither an address nor a CIDR".into())
}

fn protocol(text: &str) -> Result<u8, String> {
    protocol_number(text).ok_or_else(|| "not the name or number of an IP protocol".into())
}

impl FilterFlags {
    fn filter(&self) -> ConnectionFilter {
        ConnectionFilter {
            pod: self.pod.clone(),
            remote: self.remote,
            protocol: self.proto,
            port: self.port,
            state: self.state.map(|state| match state {
                State::Established => StateClass::Established,
                State::Unanswered => StateClass::Unanswered,
                State::Closing => StateClass::Closing,
            }),
            masqueraded: self.masqueraded,
        }
    }
}

pub fn run(common: &Common, verb: &Verb) -> Result<Exit, Failure> {
    match verb {
        Verb::List { filter, limit } => list(common, &filter.filter(), *limit)?,
        Verb::Flush { filter, all } => flush(common, &filter.filter(), *all)?,
        Verb::Stats => stats(common)?,
    }
    Ok(Exit::Well)
}

fn list(common: &Common, filter: &ConnectionFilter, limit: usize) -> Result<(), client::Error> {
    let limit = if limit == 0 { usize::MAX } else { limit };
    let mut printer = Printer::new(common.format() == Some(Format::Json));
    let (mut chunk, mut shown) = (Vec::new(), 0);
    let mut from = None;
    let more = loop {
        let ConnectionsPage { connections, next } = page(common, filter, from)?;
        let room = limit - shown;
        let too_many = connections.len() > room;
        shown += connections.len().min(room);
        chunk.extend(connections.into_iter().take(room));
        from = next;
        let done = too_many || from.is_none();
        if (done || chunk.len() >= CHUNK) && !printer.rows(std::mem::take(&mut chunk))? {
            return Ok(());
        }
        // Whether there are more is not known where the limit was just reached; it is looked for.
        if done {
            break too_many;
        }
    };
    printer.end(more)?;
    if more && common.format() != Some(Format::Json) {
        // Not among the rows. Nowhere to say it if stderr is closed.
        let _ = writeln!(
            io::stderr(),
            "There are more than {limit}; --limit 0 shows all."
        );
    }
    Ok(())
}

fn page(
    common: &Common,
    filter: &ConnectionFilter,
    from: Option<u32>,
) -> Result<ConnectionsPage, client::Error> {
    let filter = filter.clone();
    let request = Request::Connections { filter, from };
    client::ask(common, request, |response| match response {
        Response::Connections(page) => Some(page),
        _ => None,
    })
}

/// Prints rows as they come.
struct Printer {
    json: bool,
    begun: bool,
    /// Of the columns, by what was printed so far.
    widths: Vec<usize>,
}

impl Printer {
    fn new(json: bool) -> Self {
        Self {
            json,
            begun: false,
            widths: Vec::new(),
        }
    }

    /// False if nobody wants more.
    fn rows(&mut self, mut rows: Vec<ConnectionReport>) -> io::Result<bool> {
        let begun = std::mem::replace(&mut self.begun, true);
        let mut text = String::new();
        if self.json {
            text.push_str(if begun { "" } else { "{\"connections\":[" });
            for (n, row) in rows.iter().enumerate() {
                text.push_str(if begun || n > 0 { ",\n" } else { "\n" });
                text.push_str(&serde_json::to_string(row)?);
            }
        } else {
            rows.sort_by_cached_key(|row| (pod(row), row.protocol.clone(), ends(row)));
            let mut table = match begun {
                true => Table::plain(),
                false => Table::new([
                    "POD",
                    "PROTOCOL",
                    "CLIENT",
                    "SERVER",
                    "AS",
                    "STATE",
                    "IDLE",
                    "EXPIRES IN",
                ]),
            };
            rows.iter().for_each(|row| table.row(cells(row)));
            text = table.render_with(&mut self.widths);
        }
        write(&text)
    }

    fn end(&self, more: bool) -> io::Result<()> {
        match self.json {
            true => write(&format!("\n],\"more\":{more}}}\n")).map(drop),
            false => Ok(()),
        }
    }
}

/// False if the reader has seen enough (`| head`).
fn write(text: &str) -> io::Result<bool> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        other => other.map(|()| true),
    }
}

/// The end, or the ends, on this node.
fn pod(row: &ConnectionReport) -> String {
    let ends = [&row.client.pod, &row.server.pod];
    let names: Vec<&str> = ends.into_iter().flatten().map(String::as_str).collect();
    match (&names[..], &row.payer) {
        ([], Some(payer)) => payer.clone(),
        ([from, to], _) if from == to => (*from).to_owned(),
        _ => names.join(", "),
    }
}

fn ends(row: &ConnectionReport) -> (IpAddr, Option<u16>, IpAddr, Option<u16>) {
    let (client, server) = (&row.client, &row.server);
    (client.address, client.port, server.address, server.port)
}

fn cells(row: &ConnectionReport) -> [String; 8] {
    let server = match &row.frontend {
        _ if row.mapping == Some(Mapped::Mapping) => "*".into(),
        Some(frontend) => format!("{frontend} = {}", row.server),
        None => row.server.to_string(),
    };
    let outside = row.masqueraded_as.as_ref();
    [
        pod(row),
        row.protocol.clone(),
        row.client.to_string(),
        server,
        outside.map(ToString::to_string).unwrap_or_default(),
        row.state.clone(),
        age(row.idle_seconds),
        age(row.expires_seconds),
    ]
}

#[derive(Serialize)]
struct Flushed {
    flushed: u64,
}

fn flush(common: &Common, filter: &ConnectionFilter, all: bool) -> Result<(), Failure> {
    if filter.is_empty() != all {
        let text = match all {
            true => "--all and a filter contradict each other",
            false => "which ones? Give a filter (see --help), or --all for every connection",
        };
        return Err(Failure {
            text: text.into(),
            exit: Exit::Usage,
        });
    }
    let (mut flushed, mut from) = (0, None);
    loop {
        let request = Request::FlushConnections {
            filter: filter.clone(),
            all,
            from,
        };
        let step = client::ask(common, request, |response| match response {
            Response::Flushed(report) => Some(report),
            _ => None,
        });
        let FlushReport {
            flushed: more,
            next,
        } = step.map_err(|error| Failure {
            text: match flushed {
                0 => error.to_string(),
                _ => format!("{error}; {flushed} connections were forgotten before that"),
            },
            exit: error.exit(),
        })?;
        flushed += more;
        from = next;
        if from.is_none() {
            break;
        }
    }
    print(common, &Flushed { flushed }, |done| match done.flushed {
        1 => "1 connection forgotten\n".into(),
        n => format!("{n} connections forgotten\n"),
    })
    .map_err(client::Error::from)?;
    Ok(())
}

fn stats(common: &Common) -> Result<(), client::Error> {
    let report = client::ask(
        common,
        Request::ConnectionStats,
        |response| match response {
            Response::ConnectionStats(report) => Some(report),
            _ => None,
        },
    )?;
    Ok(print(common, &report, stats_table)?)
}

/// `262144, for 23.5 GiB of memory; takes 96.0 MiB`.
pub fn room_for(room: &RoomReport) -> String {
    let why = match room.from {
        RoomFrom::Setting => "as set".into(),
        RoomFrom::Memory(memory) => format!("for {} of memory", bytes(memory)),
        RoomFrom::Limit(limit) => format!("for the agent's limit of {}", bytes(limit)),
        RoomFrom::Earlier => "of an earlier version".into(),
    };
    format!("{}, {why}; takes {}", room.connections, bytes(room.bytes))
}

fn stats_table(stats: &ConnectionStats) -> String {
    let mut totals = Table::plain();
    let counts = |counts: &std::collections::BTreeMap<String, u64>| {
        let mut counts: Vec<_> = counts.iter().collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let words = counts.iter().map(|(word, count)| format!("{count} {word}"));
        words.collect::<Vec<_>>().join(", ")
    };
    totals.row([
        "Connections:".into(),
        share(stats.connections, stats.capacity),
    ]);
    if let Some(room) = &stats.room {
        totals.row(["Room:".into(), room_for(room)]);
    }
    let masqueraded = match stats.apart {
        0 => stats.masqueraded.to_string(),
        apart => format!(
            "{}, {apart} by another port than their mapping",
            stats.masqueraded
        ),
    };
    totals.row(["Masqueraded:".into(), masqueraded]);
    totals.row(["By state:".into(), counts(&stats.by_state)]);
    totals.row(["By protocol:".into(), counts(&stats.by_protocol)]);

    let mut pods = Table::new(["POD", "CONNECTIONS", "UNANSWERED", "REFUSED"]);
    let of = |count: u64, limit: u64| match limit {
        0 => count.to_string(),
        limit => format!("{count} of {limit}"),
    };
    let (busy, idle): (Vec<_>, Vec<_>) = stats
        .pods
        .iter()
        .partition(|pod| pod.connections + pod.refused > 0);
    for pod in &busy {
        pods.row([
            pod.pod.clone(),
            of(pod.connections, pod.limit),
            of(pod.unanswered, pod.unanswered_limit),
            pod.refused.to_string(),
        ]);
    }
    let mut remotes = Table::new(["REMOTE", "PROTOCOL", "CONNECTIONS"]);
    for remote in &stats.remotes {
        let end = match &remote.remote.pod {
            Some(pod) => format!("{} ({pod})", remote.remote),
            None => remote.remote.to_string(),
        };
        remotes.row([end, remote.protocol.clone(), remote.connections.to_string()]);
    }
    let idle = match idle.len() {
        0 => String::new(),
        n => format!("Pods without connections: {n}\n"),
    };
    format!(
        "{}\n{}{idle}\n{}",
        totals.render(),
        pods.render(),
        remotes.render()
    )
}
