//! Whether runtimes and the cluster took the nodes for ready all the time.
//!
//! Two looks: each node's plugin is asked for STATUS every 100 ms, as a runtime that knows the
//! verb does every few seconds; and every change of the condition Ready, as the API server
//! streams it. The first sees what the second would have seen at another moment.

use super::world::World;
use anyhow::{Context as _, Result, ensure};
use sinabro_lab::wait::wait_for;
use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

/// Asks once; a line that says [`READY`], or what the refusal says.
const ASK: &str = r#"
    said=$(printf '{"cniVersion":"1.1.0","name":"sinabro","type":"sinabro"}' |
        CNI_COMMAND=STATUS CNI_PATH=/opt/cni/bin /opt/cni/bin/sinabro 2>&1)
    if [ $? = 0 ]; then echo ready; else echo "refused $said" | tr '\n' ' '; echo; fi
"#;
pub const READY: &str = "ready";
/// Ends the watch of a node once it is there.
const STOP: &str = "/run/sinabro-e2e-stop";

/// Asks a node's plugin for STATUS once: [`READY`], or what it says.
pub fn ask(world: &World, node: &str) -> Result<String> {
    world.on_node(node, "sh", &["-c", ASK])
}

pub struct Availability {
    stops: Vec<PathBuf>,
    files: tempfile::TempDir,
    programs: Vec<(String, Child)>,
}

impl Availability {
    pub fn watch(world: &World) -> Result<Self> {
        let mut watch = Self {
            stops: Vec::new(),
            files: tempfile::tempdir()?,
            programs: Vec::new(),
        };
        for node in world.nodes() {
            let stop = world.path(&node, STOP)?;
            let _ = fs::remove_file(&stop);
            watch.stops.push(stop);
            let mut ask = world.cluster.in_node(&node, "sh")?;
            let watch_it = format!("while [ ! -e {STOP} ]; do {ASK} sleep 0.1; done");
            ask.args(["-c", &watch_it]);
            watch.start(&format!("STATUS of {node}"), ask)?;
        }
        let mut conditions = world.cluster.kubectl();
        let columns =
            r#"jsonpath={.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}"#;
        conditions.args(["get", "nodes", "--watch", "-o", columns]);
        watch.start("condition Ready", conditions)?;
        for (name, _) in &watch.programs {
            wait_for(&format!("{name} to be seen"), || {
                Ok((!watch.lines(name)?.is_empty()).then_some(()))
            })?;
        }
        Ok(watch)
    }

    fn start(&mut self, name: &str, mut command: Command) -> Result<()> {
        let output = File::create(self.files.path().join(name))?;
        let child = command
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(output)
            .spawn();
        self.programs
            .push((name.into(), child.context("cannot start it")?));
        Ok(())
    }

    fn lines(&self, name: &str) -> Result<Vec<String>> {
        let file = BufReader::new(File::open(self.files.path().join(name))?);
        Ok(file.lines().collect::<Result<_, _>>()?)
    }

    /// Ends the watch: an error if a node was not ready at any look.
    pub fn finish(mut self) -> Result<String> {
        self.stop();
        let (mut looks, mut changes) = (0, 0);
        for (name, _) in &self.programs {
            let lines = self.lines(name)?;
            let is_status = name.starts_with("STATUS");
            let ready = |line: &&String| match is_status {
                true => *line == READY,
                false => line.ends_with(" True"),
            };
            let refused: Vec<&String> = lines.iter().filter(|line| !ready(line)).collect();
            ensure!(
                refused.is_empty(),
                "{name}: {} of {} looks: {}",
                refused.len(),
                lines.len(),
                refused[0]
            );
            match is_status {
                true => looks += lines.len(),
                false => changes += lines.len(),
            }
        }
        ensure!(looks > 0 && changes > 0, "nothing was watched");
        Ok(format!("ready at each of {looks} looks"))
    }

    fn stop(&mut self) {
        for stop in &self.stops {
            let _ = File::create(stop);
        }
        for (name, child) in &mut self.programs {
            // The loops end by themselves; the stream of changes does not.
            if !name.starts_with("STATUS") {
                let _ = child.kill();
            }
            let _ = child.wait();
        }
        for stop in &self.stops {
            let _ = fs::remove_file(stop);
        }
    }
}

impl Drop for Availability {
    fn drop(&mut self) {
        self.stop();
    }
}
