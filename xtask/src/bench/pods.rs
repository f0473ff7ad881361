//! From `kubectl apply` until pods run, beside the reference plugin bridge, on the same node of
//! the same cluster, in turns.
//!
//! What changes between turns is one file: with a configuration that sorts before Sinabro's, the
//! runtime takes that one. Everything else that starting a pod costs (scheduler, kubelet,
//! containerd, runc) is in both figures, so the ratio says what a user notices, not what a plugin
//! does; `bench cni` measures that. What part of it is the network is a row of its own, by the
//! runtime's own timer ([`runtime`]).
//!
//! Both have two address families and a second plugin chained behind, in the same version of CNI.
//! Before each round the kernel has taken apart what the one before left, and after it the pods'
//! addresses tell that they had the network that they were to have.

mod runtime;

use super::{Output, Report, Row, both, cni::settle, row, stats};
use crate::{
    cluster::{self, Cluster},
    e2e::pods::{PAUSE, manifest},
    interrupt, setup, ui,
};
use anyhow::{Context as _, Result, bail, ensure};
use runtime::Timer;
use serde_json::{Value, json};
use sinabro_lab::{Place, wait::wait_for};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
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
/// How addresses begin that bridge gives.
const BRIDGE_RANGE: &str = "10.99.0.";

#[derive(clap::Args)]
pub struct Options {
    /// Rounds, each of both subjects; at least 5
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,

    /// Pods at once; a list is measured one number after the other
    #[arg(long, value_delimiter = ',', default_values_t = [30, 110], value_name = "PODS")]
    pods: Vec<usize>,

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
    row::print(&rows, ["case", ""], 0);
    options.output.report("pods", &Report::of(rows)?)?;
    Ok(ExitCode::SUCCESS)
}

/// What one round of one subject took.
struct Sample {
    /// Milliseconds from the request until each pod runs.
    running: Vec<f64>,
    /// Milliseconds that the runtime's calls of the plugins took, each pod's on the average.
    network: f64,
}

/// The subjects, in the order of a round's samples.
const SINABRO: usize = 0;
const BRIDGE: usize = 1;

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
        "\n  Pods at once on {NODE}, from `kubectl apply` to Running, Sinabro and the plugin bridge in turns, each with portmap chained, {} rounds",
        options.rounds
    );
    let bench = Bench {
        cluster,
        node: cluster.place(NODE)?,
        other: cluster.node_path(NODE, OTHER)?,
    };
    let mut step = ui::step("warming up");
    let mut rows = Vec::new();
    for &pods in &options.pods {
        let mut rounds: Vec<[Sample; 2]> = Vec::new();
        // The first round warms caches up and does not count.
        for number in 0..=options.rounds {
            step.now(format!("{pods} pods, round {number} of {}", options.rounds));
            let pair = both(number, |subject| bench.round(subject, pods))?;
            if number > 0 {
                rounds.push(pair);
            }
        }
        rows.extend(self::rows(pods, &rounds));
    }
    step.clear();
    Ok(rows)
}

fn rows(pods: usize, rounds: &[[Sample; 2]]) -> Vec<Row> {
    type Figure = fn(&Sample) -> f64;
    let figures: [(&str, Figure); 3] = [
        ("p50", |sample| stats::percentile(&sample.running, 50.0)),
        (stats::tail_name(pods), |sample| {
            stats::tail(&sample.running)
        }),
        ("network, mean", |sample| sample.network),
    ];
    let row = |(metric, figure): (&str, Figure)| {
        let of = |subject: usize| -> Vec<f64> {
            let samples = rounds.iter().map(|round| &round[subject]);
            samples.map(figure).collect()
        };
        let case = format!("{pods} pods at once");
        let (ours, theirs) = (of(SINABRO), of(BRIDGE));
        Row::new(&case, metric, "ms", ("sinabro", &ours), ("bridge", &theirs))
    };
    figures.into_iter().filter_map(row).collect()
}

/// Puts the other network's configuration in place, or takes it away. The runtime watches the
/// directory; it is given a moment.
fn choose(other: &Path, bridge: bool) -> Result<()> {
    match bridge {
        true => {
            let conflist = json!({
                // The newest that the plugins beside it know.
                "cniVersion": "1.0.0",
                "name": "bench",
                "plugins": [
                    {
                        "type": "bridge", "bridge": "bench0", "isGateway": true,
                        "ipam": {"type": "host-local",
                                 "ranges": [[{"subnet": format!("{BRIDGE_RANGE}0/24")}], [{"subnet": "fd00:99::/64"}]],
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

struct Bench<'a> {
    cluster: &'a Cluster,
    /// The network of the node.
    node: Place,
    /// Where the other network's configuration goes.
    other: PathBuf,
}

impl Bench<'_> {
    /// Starts pods with one of the networks and removes them again.
    fn round(&self, subject: usize, pods: usize) -> Result<Sample> {
        choose(&self.other, subject == BRIDGE)?;
        let veths = self.veths()?;
        settle(&self.node)?;
        let timer = Timer::read(&self.node)?;
        let running = self.start(pods)?;
        let network = timer.mean_since(&self.node)?;
        self.check(subject, pods)?;
        let delete = ["-n", NAMESPACE, "delete", "pods", "--all", "--wait=true"];
        self.cluster.ask(&delete)?;
        wait_for("the pods' links to go", || {
            Ok((self.veths()? == veths).then_some(()))
        })?;
        Ok(Sample { running, network })
    }

    fn veths(&self) -> Result<usize> {
        let links = self.node.conn()?.links()?;
        let veths = links.iter().filter(|l| l.kind.as_deref() == Some("veth"));
        Ok(veths.count())
    }

    fn start(&self, pods: usize) -> Result<Vec<f64>> {
        let pod = |number| {
            let mut pod = manifest(&format!("p{number}"), NODE, PAUSE);
            pod["metadata"]["namespace"] = NAMESPACE.into();
            pod
        };
        let items: Vec<Value> = (0..pods).map(pod).collect();
        let watch = Watch::start(self.cluster)?;
        let start = Instant::now();
        self.cluster
            .apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
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
        Ok(ran.into_values().collect())
    }

    /// The runtime may not have seen the change of configuration: then the figures mean nothing.
    fn check(&self, subject: usize, pods: usize) -> Result<()> {
        let addresses = "jsonpath={.items[*].status.podIP}";
        let addresses = self
            .cluster
            .ask(&["-n", NAMESPACE, "get", "pods", "-o", addresses])?;
        let of_bridge = addresses.split_whitespace();
        let of_bridge = of_bridge.filter(|a| a.starts_with(BRIDGE_RANGE)).count();
        let wanted = if subject == BRIDGE { pods } else { 0 };
        ensure!(
            of_bridge == wanted,
            "{of_bridge} of {pods} pods got their network of bridge instead of {wanted}"
        );
        Ok(())
    }
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
