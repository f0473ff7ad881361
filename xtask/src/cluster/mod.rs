//! `cargo xtask cluster`: a real Kubernetes cluster on one Linux machine, without Docker.
//!
//! Every node is a set of namespaces with its own containerd and kubelet, and kube-proxy unless the agents
//! translate Services; and so is the control plane; all of it is built from Kubernetes' own sources. What is deployed is what
//! users get: deploy/sinabro.yaml and the image archive.
//!
//! - [`layout`]: files and addresses; [`components`], [`images`], [`pki`]: made once;
//! - [`machine`], [`cgroup`], [`init`]: a machine out of namespaces;
//! - [`control`], [`worker`]: what runs on them; [`network`]: the cluster's pod network;
//! - [`conformance`]: Kubernetes' own tests; [`balancer`]: a load balancer for those that need one.

mod balancer;
mod cgroup;
pub mod components;
pub mod conformance;
pub mod control;
mod images;
mod init;
pub mod layout;
mod machine;
mod network;
mod pki;
mod worker;

use crate::{image, interrupt, root, setup, ui, workspace::output};
use anyhow::{Context as _, Result, bail, ensure};
use cgroup::Cgroup;
use clap::ValueEnum;
pub use components::Containerd;
pub use layout::{Families, Family};
use machine::Machine;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sinabro_lab::Place;
use std::{
    fmt, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(240);

#[derive(clap::Subcommand)]
pub enum Action {
    /// Bring the cluster up, or what runs already up to date
    Up(Options),
    /// Take it down; its disks stay for the next time
    Down {
        /// Forget disks, certificates and all objects, too
        #[arg(long)]
        forget: bool,
    },
    /// Tell what runs
    Status {
        /// text or json
        #[arg(short, long, default_value = "text")]
        output: Format,
    },
    /// Run kubectl as the cluster's administrator
    #[command(disable_help_flag = true)]
    Kubectl {
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "ARGUMENTS"
        )]
        arguments: Vec<String>,
    },
    /// Run a program on a node, a shell if none is named
    Node {
        /// n1, n2, … or control
        name: String,
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "PROGRAM"
        )]
        arguments: Vec<String>,
    },
    /// Run Kubernetes' own end-to-end tests on it
    E2e(conformance::Options),
    /// The first process of a machine; nothing for people
    #[command(hide = true, name = machine::INIT)]
    MachineInit { name: String, dir: PathBuf },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// What a cluster is like; kept with its state.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
pub struct Options {
    /// Nodes besides the control plane
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=20))]
    pub nodes: u8,

    /// Zones that nodes are in, by turns; 0 is none
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=20))]
    #[serde(default)]
    pub zones: u8,

    #[command(flatten)]
    #[serde(flatten)]
    pub variant: Variant,

    /// Pod network: sinabro, bridge (the reference plugin and static routes, to compare with) or
    /// none
    #[arg(long, default_value = "sinabro")]
    pub cni: Cni,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: 2,
            zones: 0,
            variant: Variant::default(),
            cni: Cni::Sinabro,
        }
    }
}

/// What Sinabro meets in one cluster and not in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
pub struct Variant {
    /// How kube-proxy translates Services, or none: then Sinabro's agents do
    #[arg(long, default_value = "none")]
    pub proxy: Proxy,

    /// Version of containerd, which runs the containers
    #[arg(long, default_value = "2")]
    pub containerd: Containerd,

    /// Addresses of nodes, pods and Services
    #[arg(long, default_value = "dual")]
    pub families: Families,
}

impl Default for Variant {
    fn default() -> Self {
        Self {
            proxy: Proxy::None,
            containerd: Containerd::V2,
            families: Families::Dual,
        }
    }
}

impl fmt::Display for Variant {
    /// As the options that choose it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |value: Option<clap::builder::PossibleValue>| {
            value.map_or_else(String::new, |value| value.get_name().to_owned())
        };
        write!(
            f,
            "--containerd {} --proxy {} --families {}",
            name(self.containerd.to_possible_value()),
            name(self.proxy.to_possible_value()),
            name(self.families.to_possible_value()),
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Proxy {
    Nftables,
    Iptables,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Cni {
    Sinabro,
    Bridge,
    None,
}

/// A cluster that runs.
pub struct Cluster {
    options: Options,
    nodes: Vec<String>,
}

pub fn run(action: &Action) -> Result<ExitCode> {
    if let Action::MachineInit { name, dir } = action {
        match init::run(name, dir)? {}
    }
    as_root(match action {
        Action::Up(options) => Some(options),
        _ => None,
    })?;
    match action {
        Action::Up(options) => up(options),
        Action::Down { forget } => {
            match Cluster::open() {
                Ok(cluster) => cluster.down(*forget)?,
                Err(_) => remains(*forget)?,
            }
            println!("  the cluster is down");
            Ok(ExitCode::SUCCESS)
        }
        Action::Status { output } => status(*output),
        Action::Kubectl { arguments } => pass(Cluster::open()?.kubectl().args(arguments)),
        Action::Node { name, arguments } => {
            let (program, arguments) = match arguments.split_first() {
                Some((program, arguments)) => (program.as_str(), arguments),
                None => ("sh", &[][..]),
            };
            pass(Cluster::open()?.in_node(name, program)?.args(arguments))
        }
        Action::E2e(options) => conformance::command(&Cluster::open()?, options),
        Action::MachineInit { .. } => Ok(ExitCode::SUCCESS),
    }
}

/// Set in the process that sudo starts: it builds nothing as root for somebody else.
const PREPARED: &str = "SINABRO_CLUSTER_PREPARED";

/// Prepares what clusters with these options need, if any are meant to come up, and goes on as
/// root with the arguments that this process was given.
pub fn as_root<'a>(options: impl IntoIterator<Item = &'a Options>) -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    as_root_with(options, &arguments)
}

/// The same with other arguments.
pub fn as_root_with<'a>(
    options: impl IntoIterator<Item = &'a Options>,
    arguments: &[String],
) -> Result<()> {
    if std::env::var_os(PREPARED).is_none() {
        for options in options {
            prepare(options)?;
        }
    }
    if !root::is_root() {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        // Root's home is another.
        let cache = layout::cache()?.display().to_string();
        let environment = [(layout::CACHE, cache), (PREPARED, "1".to_string())];
        root::become_root_with("making network namespaces", &arguments, &environment)?;
    }
    Ok(())
}

/// Everything that needs no root: tools, the cluster's programs, and what is deployed.
fn prepare(options: &Options) -> Result<()> {
    setup::ensure(setup::CLUSTER)?;
    if options.cni == Cni::Sinabro {
        image::write()?;
    }
    build(options.variant)
}

/// What machines of such a cluster run besides Sinabro.
pub fn build(variant: Variant) -> Result<()> {
    components::ensure(variant.containerd)?;
    images::ensure()
}

fn pass(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().context("cannot start it")?;
    Ok(ExitCode::from(
        u8::try_from(status.code().unwrap_or(1)).unwrap_or(1),
    ))
}

fn up(options: &Options) -> Result<ExitCode> {
    // An interrupted start leaves nothing; a cluster that ran before stays.
    let ran = Cluster::open().is_ok();
    interrupt::on_interrupt(move || {
        println!("\n  interrupted");
        if !ran && let Err(error) = end() {
            ui::error(&format!("{error:#}"));
        }
    })?;
    let start = Instant::now();
    let cluster = match Cluster::up(options) {
        Ok(cluster) => cluster,
        Err(error) => {
            println!("  logs are in {}", layout::state()?.display());
            return Err(error);
        }
    };
    println!("\n  up after {:.0} s\n", start.elapsed().as_secs_f64());
    pass(cluster.kubectl().args(["get", "nodes", "-o", "wide"]))?;
    println!("\n  go on with: cargo xtask cluster kubectl get pods -A");
    println!("              cargo xtask cluster node n1 ip route");
    println!("              cargo xtask cluster down");
    Ok(ExitCode::SUCCESS)
}

fn status(format: Format) -> Result<ExitCode> {
    let cluster = Cluster::open();
    let machines: Vec<(String, Option<i32>)> = match &cluster {
        Ok(cluster) => cluster
            .machines()
            .into_iter()
            .map(|m| (m.name.clone(), m.init()))
            .collect(),
        Err(_) => Vec::new(),
    };
    match format {
        Format::Json => {
            let rows: Vec<Value> = machines
                .iter()
                .map(|(name, pid)| json!({"name": name, "init": pid}))
                .collect();
            println!(
                "{:#}",
                json!({"up": cluster.is_ok(), "machines": rows, "directory": layout::cache()?})
            );
        }
        Format::Text => match &cluster {
            Ok(cluster) => {
                for (name, pid) in &machines {
                    let state = pid.map_or("down".into(), |pid| format!("up, nsenter -t {pid} -a"));
                    println!("  {name:<8} {state}");
                }
                println!();
                pass(cluster.kubectl().args(["get", "nodes", "-o", "wide"]))?;
            }
            Err(_) => println!("  no cluster runs: cargo xtask cluster up"),
        },
    }
    Ok(match cluster {
        Ok(_) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    })
}

/// Takes everything down because this process is about to end.
pub fn end() -> Result<()> {
    machine::start_no_more();
    remains(false)
}

/// Takes down whatever runs, and forgets what it kept.
pub fn forget() -> Result<()> {
    remains(true)
}

/// Forgets what a cluster with other options kept, unless it runs.
pub fn forget_other(options: &Options) -> Result<()> {
    if Cluster::open().is_ok() || !are_anothers(options)? {
        return Ok(());
    }
    println!("  forgetting the disks of a cluster with other options");
    forget()
}

/// Whether the disks that there are belong to a cluster with other options.
fn are_anothers(options: &Options) -> Result<bool> {
    let text = fs::read_to_string(options_file()?);
    Ok(
        text.is_ok_and(|text| {
            serde_json::from_str::<Options>(&text).ok().as_ref() != Some(options)
        }),
    )
}

/// Takes down whatever machines there are, also of a start that failed.
fn remains(forget: bool) -> Result<()> {
    let state = layout::state()?;
    for entry in fs::read_dir(&state).into_iter().flatten() {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name == layout::CONTROL || layout::node_number(&name).is_some() {
            Machine::new(&name).stop()?;
        }
    }
    if forget {
        match fs::remove_dir_all(&state) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", state.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn options_file() -> Result<PathBuf> {
    Ok(layout::state()?.join("options.json"))
}

impl Cluster {
    /// The cluster that runs.
    pub fn open() -> Result<Self> {
        let none = "no cluster runs: cargo xtask cluster up";
        control::machine().init().context(none)?;
        let text = fs::read_to_string(options_file()?).context(none)?;
        let options: Options =
            serde_json::from_str(&text).context("the cluster's options are broken")?;
        let mut numbers: Vec<u8> = fs::read_dir(layout::state()?)?
            .filter_map(|entry| layout::node_number(&entry.ok()?.file_name().to_string_lossy()))
            .collect();
        numbers.sort_unstable();
        let nodes = numbers.into_iter().map(layout::node_name).collect();
        Ok(Self { options, nodes })
    }

    /// Brings a cluster up with what was prepared, or brings the one that runs up to date.
    pub fn up(options: &Options) -> Result<Self> {
        if let Ok(cluster) = Self::open() {
            ensure!(
                cluster.options == *options,
                "a cluster with other options runs: cargo xtask cluster down --forget"
            );
            println!("  the cluster is up already");
            network::deploy(&cluster)?;
            cluster.wait_ready()?;
            return Ok(cluster);
        }
        // What is left of one that was killed.
        remains(false)?;
        let state = layout::state()?;
        ensure!(
            !are_anothers(options)?,
            "the disks are those of a cluster with other options: cargo xtask cluster down --forget"
        );
        fs::create_dir_all(&state).with_context(|| format!("cannot make {}", state.display()))?;
        fs::write(options_file()?, serde_json::to_vec(options)?)?;
        let cluster = Self {
            options: options.clone(),
            nodes: (1..=options.nodes).map(layout::node_name).collect(),
        };
        cluster.start()?;
        Ok(cluster)
    }

    fn start(&self) -> Result<()> {
        let step = ui::step("making certificates and machines");
        pki::ensure(&self.nodes, self.options.variant.families)?;
        let mut archives = images::paths()?;
        if self.options.cni == Cni::Sinabro {
            archives.push(image::archive()?);
        }
        let control = control::machine();
        let families = self.options.variant.families;
        let hosts = control::hosts(&self.nodes, families);
        control.start(&hosts)?;
        control::network(&control, families)?;
        for node in &self.nodes {
            let machine = Machine::new(node);
            machine.start(&hosts)?;
            control::connect(&control, &machine, families)?;
        }
        step.done_in_time();

        let step = ui::step("starting etcd, the API server and each node's containerd");
        control::start_etcd(&control)?;
        control::start_api(&control, families)?;
        thread::scope(|scope| {
            let starting: Vec<_> = self
                .nodes
                .iter()
                .map(|node| {
                    scope.spawn(|| {
                        let machine = Machine::new(node);
                        worker::start_containerd(
                            &machine,
                            self.options.variant.containerd,
                            &archives,
                        )
                    })
                })
                .collect();
            starting
                .into_iter()
                .try_for_each(|thread| match thread.join() {
                    Ok(outcome) => outcome,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
        })?;
        control::wait_ready(&control)?;
        step.done_in_time();

        let step = ui::step("starting controllers, scheduler and each node's programs");
        control::start_controllers(&control, families)?;
        for node in &self.nodes {
            self.start_node_programs(node)?;
        }
        self.registered(&self.nodes)?;
        step.done_in_time();

        network::deploy(self)?;
        self.wait_ready()
    }

    fn start_node_programs(&self, node: &str) -> Result<()> {
        let machine = Machine::new(node);
        worker::start_kubelet(&machine, &self.options)?;
        worker::start_proxy(&machine, &self.options)
    }

    /// Waits until nodes have registered and got their pod ranges.
    fn registered(&self, nodes: &[String]) -> Result<()> {
        for node in nodes {
            self.wait(&format!("{node} to get its pod ranges"), || {
                let ranges = self.ask(&["get", "node", node, "-o", "jsonpath={.spec.podCIDRs}"])?;
                Ok(!ranges.is_empty())
            })?;
        }
        network::route(self)
    }

    fn wait_ready(&self) -> Result<()> {
        if self.options.cni == Cni::None {
            return Ok(());
        }
        let step = ui::step("waiting for nodes and DNS to be ready");
        let nodes: Vec<&str> = self.nodes.iter().map(String::as_str).collect();
        let wait = [
            &["wait", "--for=condition=Ready", "--timeout=240s", "node"],
            &nodes[..],
        ]
        .concat();
        self.ask(&wait)?;
        self.ask(&[
            "apply",
            "-f",
            &network::write_dns(self.options.variant.families)?
                .display()
                .to_string(),
        ])?;
        self.ask(&[
            "-n",
            "kube-system",
            "rollout",
            "status",
            "deployment/coredns",
            "--timeout=240s",
        ])?;
        step.done_in_time();
        Ok(())
    }

    fn wait(&self, what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !done().unwrap_or(false) {
            if Instant::now() > deadline {
                bail!(
                    "waited without success for {what}; logs are in {}",
                    layout::state()?.display()
                );
            }
            thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// What kubectl prints.
    pub fn ask(&self, arguments: &[&str]) -> Result<String> {
        output(self.kubectl().args(arguments))
            .with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    /// Applies a manifest, YAML or JSON.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        let mut child = self
            .kubectl()
            .args(["apply", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start kubectl")?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(manifest.as_bytes())?;
        }
        let output = child.wait_with_output()?;
        ensure!(
            output.status.success(),
            "kubectl apply: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// kubectl as administrator; if the cluster has gone it fails when it is started.
    pub fn kubectl(&self) -> Command {
        control::kubectl().unwrap_or_else(|_| Command::new("false"))
    }

    /// kubectl with the cluster's address but no user.
    pub fn kubectl_as_nobody(&self) -> Result<Command> {
        let mut command = control::kubectl()?;
        command.env("KUBECONFIG", "/dev/null").args([
            &format!("--server=https://{}", self.options.variant.families.api()),
            &format!(
                "--certificate-authority={}",
                layout::pki()?.join("ca.crt").display()
            ),
        ]);
        Ok(command)
    }

    /// A program of this machine where the API server is reached.
    pub fn in_control_network(&self, program: &str) -> Result<Command> {
        control::machine().network_command(program)
    }

    pub fn nodes(&self) -> Vec<String> {
        self.nodes.clone()
    }

    fn machines(&self) -> Vec<Machine> {
        let nodes = self.nodes.iter().map(|node| Machine::new(node));
        std::iter::once(control::machine()).chain(nodes).collect()
    }

    /// A program in all of a node's namespaces; the runtime's own are those of its version.
    pub fn in_node(&self, node: &str, program: &str) -> Result<Command> {
        let machine = Machine::new(node);
        match components::CONTAINERD.contains(&program) {
            true => machine.command(self.options.variant.containerd.program(program)?),
            false => machine.command(program),
        }
    }

    pub fn variant(&self) -> Variant {
        self.options.variant
    }

    /// A path of a node, as this process reaches it.
    pub fn node_path(&self, node: &str, inside: &str) -> Result<PathBuf> {
        Machine::new(node).path(inside)
    }

    /// A node's own root in each hierarchy of cgroups.
    pub fn cgroups(&self, node: &str) -> Result<Vec<PathBuf>> {
        Ok(Cgroup::of(node)?.machines())
    }

    /// A node's network, for traffic of this process.
    pub fn place(&self, node: &str) -> Result<Place> {
        Machine::new(node).place()
    }

    pub fn down(&self, forget: bool) -> Result<()> {
        let step = ui::step("taking the cluster down");
        remains(forget)?;
        step.done_in_time();
        Ok(())
    }

    /// Power loss: everything of the node ends at once, its disk stays.
    pub fn node_stop(&self, node: &str) -> Result<()> {
        Machine::new(node).stop()
    }

    pub fn node_start(&self, node: &str) -> Result<()> {
        let (control, machine) = (control::machine(), Machine::new(node));
        let families = self.options.variant.families;
        machine.start(&control::hosts(&self.nodes, families))?;
        control::connect(&control, &machine, families)?;
        let mut archives = images::paths()?;
        if self.options.cni == Cni::Sinabro {
            archives.push(image::archive()?);
        }
        worker::start_containerd(&machine, self.options.variant.containerd, &archives)?;
        self.start_node_programs(node)?;
        if self.options.cni == Cni::Bridge {
            network::deploy(self)?;
        }
        Ok(())
    }

    /// Adds a node with the next free number; its name.
    pub fn node_add(&mut self) -> Result<String> {
        let number = self
            .nodes
            .iter()
            .filter_map(|node| layout::node_number(node))
            .max()
            .unwrap_or(0)
            + 1;
        let name = layout::node_name(number);
        self.nodes.push(name.clone());
        pki::ensure(&self.nodes, self.options.variant.families)?;
        self.node_start(&name)?;
        self.registered(std::slice::from_ref(&name))?;
        Ok(name)
    }

    /// Gives agents that start from now on these settings.
    pub fn configure(&self, settings: &str) -> Result<()> {
        network::configure(self, settings)
    }

    /// Takes a node out of the cluster, with its disk.
    pub fn node_remove(&mut self, node: &str) -> Result<()> {
        let machine = Machine::new(node);
        machine.stop()?;
        self.ask(&["delete", "node", node])?;
        self.nodes.retain(|name| name != node);
        let dir = machine.dir()?;
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))
    }

    pub fn kubelet_restart(&self, node: &str) -> Result<()> {
        let machine = Machine::new(node);
        machine.kill("kubelet")?;
        worker::start_kubelet(&machine, &self.options)
    }

    pub fn api_stop(&self) -> Result<()> {
        control::stop_api(&control::machine())
    }

    pub fn api_start(&self) -> Result<()> {
        let control = control::machine();
        control::start_api(&control, self.options.variant.families)?;
        control::wait_ready(&control)?;
        // They end when they lose it for long.
        for program in ["kube-controller-manager", "kube-scheduler"] {
            let _ = control.kill(program);
        }
        control::start_controllers(&control, self.options.variant.families)
    }

    /// Imports an image archive on all nodes.
    pub fn import_image(&self, archive: &Path) -> Result<()> {
        for node in &self.nodes {
            let machine = Machine::new(node);
            let marks = machine.dir()?.join("imported");
            worker::import(&machine, self.options.variant.containerd, archive, &marks)?;
        }
        Ok(())
    }
}
