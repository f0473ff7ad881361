//! nginx in a pod: one process, its own configuration, nothing of the machine's.

use crate::setup;
use anyhow::{Context as _, Result, bail};
use sinabro_lab::{Node, Program, node::FILES, traffic::seat::Seat};
use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpStream},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Sizes of the bodies.
pub const BODIES: [usize; 4] = [36, 1 << 10, 16 << 10, 64 << 10];
/// How many connections they are asked for over.
pub const CONNECTIONS: [usize; 3] = [1, 50, 500];
/// With tcp_nopush off, which is nginx's default, and on, as distributions and ingress controllers
/// configure it: headers wait for the beginning of the file then.
const FIRST_PORTS: [u16; 2] = [8000, 8100];

const START: Duration = Duration::from_secs(10);

/// Each case has a port of its own: what the data path learns about an endpoint that sends large
/// answers says nothing about one that sends small ones.
pub fn port(body: usize, connections: usize, nopush: bool) -> u16 {
    let cases = BODIES.map(|body| CONNECTIONS.map(|connections| (body, connections)));
    let before = cases.as_flattened().iter();
    let number = before.take_while(|case| **case != (body, connections));
    FIRST_PORTS[usize::from(nopush)] + number.count() as u16
}

/// Ends with this value.
pub struct Nginx {
    _program: Program,
}

impl Nginx {
    /// Starts it and waits until it serves. Its files are on the node's tmpfs.
    pub fn start(node: &Node, seat: Seat<'_>, address: IpAddr) -> Result<Self> {
        let dir = format!("{FILES}/nginx-{address}");
        let outside = node.namespace().path(&dir);
        fs::create_dir(&outside)
            .and_then(|()| fs::write(outside.join("nginx.conf"), config(&dir, address)))
            .with_context(|| format!("cannot write into {}", outside.display()))?;
        for body in BODIES {
            fs::write(outside.join(body.to_string()), vec![b'x'; body])?;
        }
        let log = outside.join("log");
        let mut command = Command::new(setup::nginx().context("nginx is missing")?);
        command
            .env_clear()
            .args([
                "-e",
                "stderr",
                "-p",
                &dir,
                "-c",
                &format!("{dir}/nginx.conf"),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?);
        let mut program = Program::start(node, seat, command)?;
        let deadline = Instant::now() + START;
        let target = SocketAddr::new(address, FIRST_PORTS[0]);
        while seat.place.run(|| Ok(TcpStream::connect(target)?)).is_err() {
            if program.has_ended()?.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(&log).unwrap_or_default();
                bail!("nginx does not serve {target}; it says: {}", log.trim());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { _program: program })
    }
}

/// The smallest body comes from memory, as an application's answers do; the others are files,
/// sent by sendfile(2) after the headers.
fn config(dir: &str, address: IpAddr) -> String {
    let mut servers = String::new();
    let kinds = BODIES.map(|body| [(body, false), (body, true)]);
    for (body, nopush) in kinds.into_iter().flatten() {
        let answer = match body == BODIES[0] {
            true => format!("return 200 \"{}\";", "x".repeat(body)),
            false => format!("try_files /{body} =404;"),
        };
        servers += "  server {";
        for connections in CONNECTIONS {
            let listen = SocketAddr::new(address, port(body, connections, nopush));
            servers += &format!(" listen {listen} backlog=4096;");
        }
        let nopush = if nopush { "on" } else { "off" };
        servers += &format!(" tcp_nopush {nopush}; root {dir}; location / {{ {answer} }} }}\n");
    }
    let mut temporary = String::new();
    for name in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        temporary += &format!("  {name}_temp_path {dir}/{name};\n");
    }
    format!(
        "daemon off;\nmaster_process off;\npid {dir}/pid;\nerror_log stderr crit;\n\
         events {{ worker_connections 1000; }}\n\
         http {{\n{temporary}  access_log off;\n  sendfile on;\n  open_file_cache max=16;\n  \
         keepalive_timeout 1h;\n  keepalive_requests 1000000000;\n{servers}}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_port_of_its_own() {
        let config = config("/tmp", "fd00::1".parse().unwrap());
        for nopush in [false, true] {
            for (body, connections) in BODIES.into_iter().zip(CONNECTIONS) {
                let listen = format!("listen [fd00::1]:{} ", port(body, connections, nopush));
                assert_eq!(config.matches(&listen).count(), 1, "{listen}");
            }
        }
        assert_eq!(
            config.matches("listen").count(),
            2 * BODIES.len() * CONNECTIONS.len()
        );
        assert_eq!(config.matches("tcp_nopush on").count(), BODIES.len());
    }
}
