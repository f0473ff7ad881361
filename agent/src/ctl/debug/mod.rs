//! `sinabroctl debug`: one archive with what is needed to look at a node from afar.
//!
//! Each part is collected on its own: one that fails becomes a file that says why, named in the
//! summary, and the rest is there. Nothing on the node is changed, and nothing started but the CNI
//! plugins, which are asked for their versions.

mod files;
mod kernel;
mod network;
mod runtime;

use crate::ctl::{Common, Exit, client, drops, nodes, places::PlaceFlags, services};
use crate::{config::Places, datapath};
use anyhow::{Context as _, bail};
use sinabro_common::api::{ErrorCode, Request, Response};
use std::{
    ffi::OsStr,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

type Part = anyhow::Result<Vec<u8>>;

pub fn run(common: &Common, places: &PlaceFlags) -> anyhow::Result<Exit> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    let host = nix::unistd::gethostname().unwrap_or_default();
    let name = format!("sinabro-debug-{}-{now}", host.to_string_lossy());
    let output = common.output.as_deref();
    if output == Some(OsStr::new("-")) {
        let stdout = io::stdout().lock();
        write(stdout, &name, now, collect(common, places))
            .context("cannot write the archive to standard output")?;
        return Ok(Exit::Well);
    }
    let path = match output {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(format!("{name}.tar")),
    };
    // Before anything is collected, which would be for nothing if it cannot be written.
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path);
    let file = match file {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => bail!(
            "{} exists and is not overwritten, name another file with -o",
            path.display()
        ),
        other => other.with_context(|| format!("cannot make {}", path.display()))?,
    };
    let written = write(&file, &name, now, collect(common, places))
        .and_then(|()| file.sync_all())
        .with_context(|| format!("cannot write {}", path.display()));
    if written.is_err() {
        let _ = fs::remove_file(&path);
    }
    written?;
    // Nobody listens, perhaps; the archive is there.
    let _ = writeln!(io::stdout(), "wrote {}", path.display());
    Ok(Exit::Well)
}

/// All parts by the name of their file.
fn collect(common: &Common, places: &PlaceFlags) -> Vec<(String, Part)> {
    let mut parts = Vec::new();
    let requests = [
        ("status", Request::Status),
        ("endpoints", Request::Endpoints),
        ("ipam", Request::Ipam),
        ("metrics", Request::Metrics),
        ("acceleration", Request::Acceleration),
        ("connections", Request::ConnectionStats),
    ];
    parts.push(("agent/log.txt".into(), log(common)));
    for (name, request) in requests {
        parts.push((format!("agent/{name}.json"), ask(common, request)));
    }
    let nodes = nodes::all(common).map_err(anyhow::Error::from);
    let nodes = nodes.and_then(|nodes| Ok(serde_json::to_vec_pretty(&Response::Nodes(nodes))?));
    parts.push(("agent/nodes.json".into(), nodes));
    let drops = drops::kept(common).map_err(anyhow::Error::from);
    let drops = drops.and_then(|drops| Ok(serde_json::to_vec_pretty(&drops)?));
    parts.push(("agent/drops.json".into(), drops));
    parts.push(("agent/services.json".into(), of_services(common)));
    parts.extend(kernel::parts());
    parts.extend(network::parts());
    match places.resolve() {
        Ok(places) => parts.extend(of_places(&places)),
        Err(error) => parts.push(("places.txt".into(), Err(error.into()))),
    }
    let settings = places.settings_file();
    parts.push(("settings.yaml".into(), files::content(&settings)));
    parts
}

fn of_places(places: &Places) -> Vec<(String, Part)> {
    let pins = datapath::pins::describe(&places.bpf_dir)
        .map(text)
        .map_err(anyhow::Error::from);
    let mut parts = vec![
        (
            "places.txt".into(),
            Ok(format!("{places:#?}\n").into_bytes()),
        ),
        ("bpf/pins.txt".into(), pins),
        ("state/files.txt".into(), files::list(&places.state_dir)),
        ("cni/bin.txt".into(), files::list(&places.cni_bin_dir)),
        ("cni/conf.txt".into(), files::list(&places.cni_conf_dir)),
    ];
    parts.extend(files::state(&places.state_dir));
    parts.extend(files::configurations(&places.cni_conf_dir));
    parts.extend(runtime::parts(places));
    parts
}

/// What is published of Services; that nothing is, where somebody else translates them.
fn of_services(common: &Common) -> Part {
    match services::all(common, None) {
        Ok(services) => Ok(serde_json::to_vec_pretty(&services)?),
        Err(client::Error::Refused(refused)) if refused.code == ErrorCode::Invalid => {
            Ok(serde_json::to_vec_pretty(&refused)?)
        }
        Err(error) => Err(error.into()),
    }
}

fn ask(common: &Common, request: Request) -> Part {
    let answer = client::ask(common, request, Some)?;
    Ok(serde_json::to_vec_pretty(&answer)?)
}

/// The last lines of the agent's log, as it has them in memory.
fn log(common: &Common) -> Part {
    let text = client::ask(common, Request::Log, |response| match response {
        Response::Log(text) => Some(text),
        _ => None,
    })?;
    Ok(text.into_bytes())
}

/// Lines of a file.
fn text(lines: impl IntoIterator<Item = String>) -> Vec<u8> {
    let lines = lines.into_iter().map(|line| line + "\n");
    lines.collect::<String>().into_bytes()
}

/// Writes the archive, the summary first.
fn write(to: impl Write, name: &str, now: u64, parts: Vec<(String, Part)>) -> io::Result<()> {
    let mut archive = tar::Builder::new(to);
    let mut add = |path: &str, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(now);
        archive.append_data(&mut header, Path::new(name).join(path), content)
    };
    let mut summary = vec![
        format!("sinabroctl {}", env!("CARGO_PKG_VERSION")),
        format!("collected {now} seconds after 1970-01-01"),
    ];
    for (path, part) in &parts {
        summary.push(match part {
            Ok(content) => format!("{path}: {} bytes", content.len()),
            Err(error) => format!("{path}: missing: {error:#}"),
        });
    }
    add("summary.txt", &text(summary))?;
    for (path, part) in &parts {
        match part {
            Ok(content) => add(path, content)?,
            Err(error) => add(
                &format!("{path}.missing"),
                format!("{error:#}\n").as_bytes(),
            )?,
        }
    }
    archive.into_inner()?.flush()
}
