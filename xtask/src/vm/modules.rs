//! Kernel modules, in the order in which they can be loaded, by what each says of itself: packages
//! come without the lists that depmod(8) makes where they are installed.

use anyhow::{Context as _, Result, bail};
use object::{Object as _, ObjectSection as _};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A module as it is loaded, not compressed any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    pub name: String,
    pub bytes: Vec<u8>,
}

/// Every module of a kernel, by its name.
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

impl Modules {
    /// Those below a directory as /lib/modules/RELEASE.
    pub fn list(dir: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let mut open = vec![dir.join("kernel")];
        while let Some(dir) = open.pop() {
            let entries =
                fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
            for entry in entries {
                let entry = entry?;
                let path = entry.path();
                if entry.file_type()?.is_dir() {
                    open.push(path);
                } else if let Some(name) = name_of(&path) {
                    files.insert(name, path);
                }
            }
        }
        let builtin = fs::read_to_string(dir.join("modules.builtin")).unwrap_or_default();
        let builtin = builtin.lines().filter_map(|line| name_of(Path::new(line)));
        Ok(Self {
            files,
            builtin: builtin.collect(),
        })
    }

    /// These and what they need, each after what it needs. What the kernel has built in is left
    /// out; of what it does not have at all only `optional` may be.
    pub fn load_order(&self, required: &[&str], optional: &[&str]) -> Result<Vec<Module>> {
        let mut order = Order {
            all: self,
            done: Vec::new(),
            doing: Vec::new(),
        };
        for name in required {
            order.add(&normal(name))?;
        }
        for name in optional {
            let name = normal(name);
            if self.files.contains_key(&name) {
                order.add(&name)?;
            }
        }
        Ok(order.done)
    }
}

struct Order<'a> {
    all: &'a Modules,
    done: Vec<Module>,
    /// From what was wanted to what it needs.
    doing: Vec<String>,
}

impl Order<'_> {
    fn add(&mut self, name: &str) -> Result<()> {
        let is_done = self.done.iter().any(|module| module.name == name);
        if is_done || self.all.builtin.contains(name) {
            return Ok(());
        }
        if self.doing.iter().any(|doing| doing == name) {
            bail!("modules need each other: {}, {name}", self.doing.join(", "));
        }
        let Some(path) = self.all.files.get(name) else {
            let wanted: Vec<_> = self
                .doing
                .iter()
                .map(|name| format!(" for {name}"))
                .collect();
            bail!("the kernel has no module {name}{}", wanted.concat());
        };
        let bytes = read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let needs = needs(&bytes).with_context(|| format!("{} is damaged", path.display()))?;
        self.doing.push(name.to_owned());
        for need in needs {
            self.add(&need)?;
        }
        self.doing.pop();
        self.done.push(Module {
            name: name.to_owned(),
            bytes,
        });
        Ok(())
    }
}

/// The kernel writes a hyphen or an underscore, and means the same.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// The module in a file of that name, if it is one.
fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let file = [".xz", ".zst", ".gz"]
        .iter()
        .find_map(|end| file.strip_suffix(end))
        .unwrap_or(file);
    file.strip_suffix(".ko").map(normal)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(path)?;
    match path.extension().and_then(|end| end.to_str()) {
        Some("xz") => unpack("xz", &bytes),
        Some("zst") => unpack("zstd", &bytes),
        Some("gz") => unpack("gzip", &bytes),
        _ => Ok(bytes),
    }
}

fn unpack(program: &str, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new(program)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    let output = std::thread::scope(|scope| {
        // It may end before it has read all; what it says then is worth more.
        scope.spawn(move || drop(stdin.write_all(bytes)));
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!(
            "{program}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(output.stdout)
}

/// `depends=` in the section .modinfo (linux/moduleparam.h).
fn needs(module: &[u8]) -> Result<Vec<String>> {
    let file = object::File::parse(module)?;
    let section = file
        .section_by_name(".modinfo")
        .context("it has no .modinfo")?;
    Ok(needs_in(section.data()?))
}

/// Terminated strings.
fn needs_in(modinfo: &[u8]) -> Vec<String> {
    let lines = modinfo.split(|&byte| byte == 0);
    let depends = lines.filter_map(|line| line.strip_prefix(b"depends="));
    let text = depends.map(String::from_utf8_lossy).collect::<Vec<_>>();
    let names = text.iter().flat_map(|text| text.split(','));
    names.filter(|name| !name.is_empty()).map(normal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_is_its_modules() {
        for (file, name) in [
            ("a/veth.ko", Some("veth")),
            ("a/act-bpf.ko.xz", Some("act_bpf")),
            ("a/cls_bpf.ko.zst", Some("cls_bpf")),
            ("a/modules.order", None),
            ("a/veth.ko.debug", None),
            ("", None),
        ] {
            assert_eq!(name_of(Path::new(file)).as_deref(), name, "{file}");
        }
    }

    #[test]
    fn what_a_module_needs_is_read_and_garbage_needs_nothing() {
        let info = b"license=GPL\0depends=udp_tunnel,ip6-udp-tunnel\0retpoline=Y\0\0depends=\0";
        assert_eq!(needs_in(info), ["udp_tunnel", "ip6_udp_tunnel"]);
        assert_eq!(needs_in(b"depends=\0"), [""; 0]);
        assert_eq!(needs_in(b"xdepends=a\0"), [""; 0]);
        // Cut off in the middle.
        assert_eq!(needs_in(b"depends=a,b"), ["a", "b"]);
        assert!(needs(b"\x7fELF").is_err());
        assert!(needs(b"").is_err());
    }

    #[test]
    fn a_module_that_is_missing_is_named_with_who_wants_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("kernel")).unwrap();
        fs::write(
            dir.path().join("modules.builtin"),
            "kernel/net/bridge/bridge.ko\n",
        )
        .unwrap();
        let modules = Modules::list(dir.path()).unwrap();
        assert_eq!(modules.load_order(&["bridge"], &["sctp"]).unwrap(), []);
        let error = modules.load_order(&["veth"], &[]).unwrap_err();
        assert_eq!(error.to_string(), "the kernel has no module veth");
        // Neither xz nor a module.
        fs::write(dir.path().join("kernel/veth.ko.xz"), "garbage").unwrap();
        let modules = Modules::list(dir.path()).unwrap();
        let error = format!("{:#}", modules.load_order(&["veth"], &[]).unwrap_err());
        assert!(
            error.contains("veth.ko.xz") && error.contains("xz: "),
            "{error}"
        );
    }
}
