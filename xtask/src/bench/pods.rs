//! From `kubectl apply` until pods run, beside the reference plugin bridge, on the same node of
//! the same cluster, in turns.
//!
//! What changes between turns is one file: with a configuration that sorts before Sinabro's, the
//! runtime takes that one. Everything else that starting a pod costs (scheduler, kubelet,
//! containerd, runc) is in both figures, so the ratio says what a user notices, not what a plugin
//! does; `bench cni` measures that.

use super::{Output, Report, Row, stats};
use crate::{
    cluster::{self, Cluster},
    e2e::pods::{PAUSE, manifest},
    interrupt, setup, ui,
};
use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, ExitCode, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

const NAMESPACE: &str = "sinabro-bench";
const NODE: &str = "n1";
const PATIENCE: Duration = Duration::from_secs(240);
/// Sorts before Sinabro's.
const OTHER: &str = "/etc/cni/net.d/00-bridge.conflist";

#[derive(clap::Args)]
pub struct Options {
    /// Rounds, each of both subjects; at least 5
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,

    /// Pods at once
    #[arg(long, default_value_t = 30)]
    pods: usize,

    #[command(flatten)]
    output: Output,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    cluster::as_root([&cluster::Options::default()])?;
    let ran = Cluster::open().is_ok();
    interrupt::on_interrupt(move || {
        if !ran && let Err(error) = cluster::end() {
            ui::error(&format!("{error:#}"));
        }
    })?;
    let cluster = Cluster::up(&cluster::Options::default())?;
    let measured = measure(&cluster, options);
    // A cluster that was there is left as it was.
    let _ = fs::remove_file(cluster.node_path(NODE, OTHER)?);
    let _ = cluster.ask(&["delete", "namespace", NAMESPACE, "--wait=true"]);
    if !ran {
        cluster.down(false)?;
    }
    let rows = measured?;
    print(&rows);
    options.output.report("pods", &Report::of(rows)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Milliseconds from the request until each pod runs.
type Sample = Vec<f64>;

fn measure(cluster: &Cluster, options: &Options) -> Result<Vec<Row>> {
    let plugins = setup::reference_plugins().context("there are no reference plugins")?;
    for plugin in ["bridge", "host-local", "portmap"] {
        fs::copy(
            plugins.join(plugin),
            cluster.node_path(NODE, "/opt/cni/bin")?.join(plugin),
        )?;
    }
    cluster.apply(
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
            .to_string(),
    )?;
    println!(
        "\n  {} pods at once on {NODE}, from `kubectl apply` to Running, Sinabro and the plugin bridge in turns, each with portmap chained, {} rounds",
        options.pods, options.rounds
    );
    let other = cluster.node_path(NODE, OTHER)?;
    let mut step = ui::step("warming up");
    for bridge in [false, true] {
        choose(&other, bridge)?;
        round(cluster, options.pods.min(3))?;
    }
    let mut rounds: Vec<[Sample; 2]> = Vec::new();
    for number in 1..=options.rounds {
        step.now(format!("round {number} of {}", options.rounds));
        // Each goes first as often as the other.
        let mut samples = [Vec::new(), Vec::new()];
        let order = if number % 2 == 0 { [1, 0] } else { [0, 1] };
        for subject in order {
            choose(&other, subject == 1)?;
            samples[subject] = round(cluster, options.pods)?;
        }
        rounds.push(samples);
    }
    step.clear();
    let row = |metric: &str, figure: fn(&Sample) -> f64| {
        let of = |subject: usize| {
            rounds
                .iter()
                .map(|round| figure(&round[subject]))
                .collect::<Vec<_>>()
        };
        let case = format!("{} pods at once", options.pods);
        Row::new(&case, metric, "ms", ("sinabro", &of(0)), ("bridge", &of(1)))
    };
    let rows = [
        row("p50", |sample| stats::percentile(sample, 50.0)),
        row(stats::tail_name(options.pods), |sample| stats::tail(sample)),
    ];
    Ok(rows.into_iter().flatten().collect())
}

/// Puts the other network's configuration in place, or takes it away. The runtime watches the
/// directory; it is given a moment.
fn choose(other: &Path, bridge: bool) -> Result<()> {
    match bridge {
        true => {
            let conflist = json!({
                "cniVersion": "0.4.0",
                "name": "bench",
                "plugins": [
                    {
                        "type": "bridge", "bridge": "bench0", "isGateway": true,
                        "ipam": {"type": "host-local",
                                 "ranges": [[{"subnet": "10.99.0.0/24"}], [{"subnet": "fd00:99::/64"}]],
                                 "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]},
                    },
                    // As Sinabro's own conflist chains it: both call two plugins for a pod.
                    {"type": "portmap", "capabilities": {"portMappings": true}},
                ],
            });
            let temporary = other.with_extension("new");
            fs::write(&temporary, conflist.to_string())?;
            fs::rename(&temporary, other)?;
        }
        false => match fs::remove_file(other) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        },
    }
    thread::sleep(Duration::from_secs(1));
    Ok(())
}

fn round(cluster: &Cluster, pods: usize) -> Result<Sample> {
    let names: Vec<String> = (0..pods).map(|number| format!("p{number}")).collect();
    let items: Vec<Value> = names
        .iter()
        .map(|name| {
            let mut pod = manifest(name, NODE, PAUSE);
            pod["metadata"]["namespace"] = NAMESPACE.into();
            pod
        })
        .collect();
    let watch = Watch::start(cluster)?;
    let start = Instant::now();
    cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    let mut ran: BTreeMap<String, f64> = BTreeMap::new();
    while ran.len() < pods {
        let left = PATIENCE.checked_sub(start.elapsed()).unwrap_or_default();
        let Ok((when, line)) = watch.lines.recv_timeout(left) else {
            bail!("{} of {pods} pods ran within {PATIENCE:?}", ran.len());
        };
        if let Some((name, "Running")) = line.split_once(' ') {
            ran.entry(name.into())
                .or_insert((when - start).as_secs_f64() * 1e3);
        }
    }
    drop(watch);
    cluster.ask(&["-n", NAMESPACE, "delete", "pods", "--all", "--wait=true"])?;
    Ok(ran.into_values().collect())
}

/// Each pod's phase, whenever it changes.
struct Watch {
    child: Child,
    lines: Receiver<(Instant, String)>,
}

impl Watch {
    fn start(cluster: &Cluster) -> Result<Self> {
        let mut child = cluster
            .kubectl()
            .args(["-n", NAMESPACE, "get", "pods", "--watch-only", "-o"])
            .arg("jsonpath={.metadata.name} {.status.phase}{\"\\n\"}")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let output = child.stdout.take().context("no output")?;
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send((Instant::now(), line)).is_err() {
                    return;
                }
            }
        });
        // It must have begun before the first pod is there.
        thread::sleep(Duration::from_millis(700));
        Ok(Self { child, lines })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn print(rows: &[Row]) {
    let mut table = vec![vec![
        String::new(),
        "sinabro ms".into(),
        "bridge ms".into(),
        "ratio".into(),
        "spread".into(),
    ]];
    for row in rows {
        table.push(vec![
            row.metric.clone(),
            format!("{:.0}", row.value),
            format!("{:.0}", row.against_value),
            format!("{:.2}x", row.ratio),
            format!("{:.2}-{:.2}", row.spread[0], row.spread[1]),
        ]);
    }
    ui::table(&table);
}
