//! The images that pods of tests run, made of the built programs and of this machine's own.
//!
//! They bear the names under which Kubernetes' tests ask for them; nothing is pulled.

use super::{components, layout};
use crate::{
    archive::{self, Entry, Image, Tree, put},
    ui,
    workspace::{output, which},
};
use anyhow::{Context as _, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

pub const PAUSE: &str = "registry.k8s.io/pause:3.10.1";
pub const COREDNS: &str = "registry.k8s.io/coredns/coredns:v1.13.1";
pub const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.56";
const BUSYBOX: &str = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1";
/// The DNS tests ask for it; agnhost has all they use.
pub const DNS_UTILS: &str = "registry.k8s.io/e2e-test-images/jessie-dnsutils:1.7";

const BOOM_SERVER: &str = "registry.k8s.io/e2e-test-images/regression-issue-74839:1.2";

/// Programs of this machine that agnhost's image has besides busybox.
const TOOLS: [&str; 16] = [
    "bash", "curl", "dash", "dig", "ethtool", "getent", "ip", "iperf", "iperf3", "nc", "ping",
    "socat", "ss", "tcpdump", "wget", "nslookup",
];

/// Each with the program whose change makes it again.
type Make = fn() -> Result<(Image, Tree)>;
const ALL: [(&str, &str, Make); 5] = [
    ("pause", "pause", pause),
    ("busybox", "pause", busybox),
    ("agnhost", "agnhost", agnhost),
    ("coredns", "coredns", coredns),
    ("boom-server", "boom-server", boom_server),
];

fn path(name: &str) -> Result<PathBuf> {
    Ok(layout::images()?.join(format!("{name}.tar")))
}

pub fn paths() -> Result<Vec<PathBuf>> {
    ALL.iter().map(|(name, ..)| path(name)).collect()
}

/// Writes the archives that are missing or older than their programs.
pub fn ensure() -> Result<()> {
    for (name, program, make) in ALL {
        let path = path(name)?;
        let built = fs::metadata(components::path(program)?)?.modified()?;
        let current = fs::metadata(&path)
            .and_then(|meta| meta.modified())
            .is_ok_and(|time| time > built);
        if !current {
            let step = ui::step(format!("writing image {name}"));
            let (image, tree) = make().with_context(|| format!("cannot make image {name}"))?;
            archive::write(&image, &tree, &path)?;
            step.done_in_time();
        }
    }
    Ok(())
}

fn image(name: &str, entrypoint: &[&str], command: &[&str], user: &str) -> Image {
    let own = |words: &[&str]| words.iter().map(ToString::to_string).collect();
    Image {
        name: name.into(),
        architecture: match std::env::consts::ARCH {
            "aarch64" => "arm64",
            _ => "amd64",
        },
        entrypoint: own(entrypoint),
        command: own(command),
        user: user.into(),
    }
}

fn pause() -> Result<(Image, Tree)> {
    let mut tree = Tree::new();
    put(
        &mut tree,
        "pause",
        Entry::File(components::path("pause")?, Some(0o755)),
    );
    Ok((image(PAUSE, &["/pause"], &[], "65535:65535"), tree))
}

fn busybox() -> Result<(Image, Tree)> {
    Ok((image(BUSYBOX, &[], &["/bin/sh"], ""), base()?))
}

fn coredns() -> Result<(Image, Tree)> {
    let mut tree = Tree::new();
    put(
        &mut tree,
        "coredns",
        Entry::File(components::path("coredns")?, Some(0o755)),
    );
    put(&mut tree, "tmp", Entry::Directory(0o1777));
    Ok((image(COREDNS, &["/coredns"], &[], ""), tree))
}

fn boom_server() -> Result<(Image, Tree)> {
    let mut tree = Tree::new();
    let program = components::path("boom-server")?;
    put(&mut tree, "boom-server", Entry::File(program, Some(0o755)));
    Ok((image(BOOM_SERVER, &["/boom-server"], &[], ""), tree))
}

fn agnhost() -> Result<(Image, Tree)> {
    let mut tree = base()?;
    for tool in TOOLS {
        add_program(&mut tree, tool)?;
    }
    // Debian's busybox prefers its own applets to programs in the path, and its wget crashes in
    // pods of the host's network: the shell is another one.
    put(&mut tree, "bin/sh", Entry::Link("dash".into()));
    put(&mut tree, "usr/bin/curl", Entry::Link("/bin/curl".into()));
    put(
        &mut tree,
        "usr/local/bin/iperf",
        Entry::Link("/bin/iperf".into()),
    );
    let program = components::path("agnhost")?;
    put(&mut tree, "agnhost", Entry::File(program, Some(0o755)));
    put(&mut tree, "agnhost-2", Entry::Link("agnhost".into()));
    // The certificate that its TLS server takes by default.
    let module = output(
        Command::new(components::go()?)
            .args([
                "list",
                "-mod=mod",
                "-m",
                "-f",
                "{{.Dir}}",
                "k8s.io/kubernetes",
            ])
            .current_dir(layout::sources().join("components")),
    )?;
    for file in ["localhost.crt", "localhost.key"] {
        let path = Path::new(&module)
            .join("test/images/agnhost/porter")
            .join(file);
        put(&mut tree, file, Entry::File(path, Some(0o644)));
    }
    Ok((image(AGNHOST, &["/agnhost"], &["pause"], ""), tree))
}

/// A shell and the usual directories and users.
fn base() -> Result<Tree> {
    let mut tree = Tree::new();
    for dir in [
        "sbin", "usr/sbin", "root", "proc", "sys", "dev", "run", "var/run", "home", "lib64",
        "usr/bin",
    ] {
        put(&mut tree, dir, Entry::Directory(0o755));
    }
    put(&mut tree, "tmp", Entry::Directory(0o1777));
    put(&mut tree, "uploads", Entry::Directory(0o777));
    let busybox = which("busybox").context("there is no busybox: run `cargo xtask setup`")?;
    let applets = output(Command::new(&busybox).arg("--list"))?;
    put(&mut tree, "bin/busybox", Entry::File(busybox, Some(0o755)));
    for applet in applets
        .split_whitespace()
        .filter(|applet| *applet != "busybox")
    {
        put(
            &mut tree,
            format!("bin/{applet}"),
            Entry::Link("busybox".into()),
        );
    }
    let text = |lines: &[&str]| Entry::Bytes((lines.join("\n") + "\n").into_bytes(), 0o644);
    put(
        &mut tree,
        "etc/passwd",
        text(&[
            "root:x:0:0:root:/root:/bin/sh",
            "nobody:x:65534:65534:nobody:/:/bin/false",
            "user-defined-in-image:x:1000:1000::/home:/bin/sh",
        ]),
    );
    put(
        &mut tree,
        "etc/group",
        text(&[
            "root:x:0:",
            "nogroup:x:65534:",
            "user-defined-in-image:x:1000:",
            "group-defined-in-image:x:50000:user-defined-in-image",
        ]),
    );
    put(&mut tree, "etc/nsswitch.conf", text(&["hosts: files dns"]));
    Ok(tree)
}

/// A program of this machine, and the libraries that it is linked with.
fn add_program(tree: &mut Tree, name: &str) -> Result<()> {
    let path =
        which(name).with_context(|| format!("there is no {name}: run `cargo xtask setup`"))?;
    let path = path.canonicalize()?;
    put(
        tree,
        format!("bin/{name}"),
        Entry::File(path.clone(), Some(0o755)),
    );
    // Fails for static programs, which need nothing.
    let libraries = output(Command::new("ldd").arg(&path)).unwrap_or_default();
    for library in libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        let inside = Path::new(library).strip_prefix("/")?.to_owned();
        tree.entry(inside.clone())
            .or_insert(Entry::Directory(0o755));
        put(
            tree,
            inside,
            Entry::File(Path::new(library).canonicalize()?, Some(0o755)),
        );
    }
    Ok(())
}
