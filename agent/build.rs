//! Builds the eBPF objects and lets the agent embed them.
//!
//! Where bpf-linker or rust-src is missing, the objects are left empty so that `cargo check` and
//! editors work without them; an agent built so says so when it starts. `cargo xtask` installs
//! both and sets SINABRO_EBPF=required, which makes their absence an error.

use anyhow::{Context as _, bail};
use aya_build::{Package, Toolchain};
use object::{
    build::elf::{Builder, SectionData},
    elf::SHT_STRTAB,
};
use std::{env, fs, path::Path, process::Command};

#[path = "build/globals.rs"]
mod globals;
#[path = "build/stack.rs"]
mod stack;

/// One object per hook family: an old kernel may refuse one and keep the others.
const OBJECTS: [&str; 5] = ["pod", "uplink", "overlay", "sock", "service_sock"];

fn main() -> anyhow::Result<()> {
    // aya-build names only the crate; its types come from here.
    println!("cargo:rerun-if-changed=../common/src");

    match missing_tool()? {
        None => {
            // SAFETY: a build script is single-threaded here.
            unsafe {
                env::set_var("RUSTC_BOOTSTRAP", "1");
                // aya-build passes every line of the inner cargo on as a warning.
                env::set_var("CARGO_TERM_QUIET", "true");
            }
            let next = env::var_os("CARGO_FEATURE_LAYOUT_NEXT").is_some();
            aya_build::build_ebpf(
                [Package {
                    name: "sinabro-ebpf",
                    root_dir: "../agent-ebpf",
                    features: if next { &["layout-next"] } else { &[] },
                    ..Package::default()
                }],
                Toolchain::Custom(
                    &env::var("RUSTUP_TOOLCHAIN").unwrap_or_else(|_| "1.95.0".into()),
                ),
            )?;
            let out = env::var("OUT_DIR").context("OUT_DIR")?;
            OBJECTS.iter().try_for_each(|object| {
                finish(&Path::new(&out).join(object))
                    .with_context(|| format!("cannot finish the object {object}"))
            })
        }
        Some(tool) if env::var("SINABRO_EBPF").is_ok_and(|v| v == "required") => {
            bail!("{tool} is missing: run `cargo xtask setup`")
        }
        Some(tool) => {
            // A file that never is: looks for the tool again each time. So the variable need not
            // be watched, and `cargo clippy` without it shares what a build with it has made.
            println!("cargo:rerun-if-changed=no-such-file");
            println!(
                "cargo:warning=building without eBPF programs, {tool} is missing: run `cargo xtask setup`"
            );
            let out = env::var("OUT_DIR").context("OUT_DIR")?;
            for object in OBJECTS {
                fs::write(Path::new(&out).join(object), b"")?;
            }
            Ok(())
        }
    }
}

/// Takes the debug information out, which is nine tenths of an object: the linker has made BTF of
/// it, and nothing else here reads it. Nor does anything read BTF's relocations, of whose offsets
/// loaders keep account themselves: a fifth of what is left. In BTF, says which functions are global. Looks
/// whether the stack is large enough.
fn finish(path: &Path) -> anyhow::Result<()> {
    let whole = fs::read(path)?;
    let mut elf = Builder::read(whole.as_slice())?;
    stack::check(&elf)?;
    for section in &mut elf.sections {
        let name = &*section.name;
        section.delete = [&b".debug_"[..], b".rel.debug_", b".rel.BTF"]
            .iter()
            .any(|unread| name.starts_with(unread));
    }
    for section in &mut elf.sections {
        if let (b".BTF", SectionData::Data(data)) = (&*section.name, &mut section.data) {
            let mut types = data.to_vec();
            globals::make(&mut types)?;
            *data = types.into();
        }
    }
    // LLVM keeps the names of sections and of symbols in one table, the writer in two.
    let names = elf.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = SHT_STRTAB;
    names.data = SectionData::SectionString;
    elf.delete_orphan_symbols();
    elf.delete_orphan_relocations();
    let mut stripped = Vec::new();
    elf.write(&mut stripped)?;
    Ok(fs::write(path, stripped)?)
}

fn missing_tool() -> anyhow::Result<Option<&'static str>> {
    let linker = Command::new("bpf-linker").arg("--version").output();
    if !linker.is_ok_and(|output| output.status.success()) {
        return Ok(Some("bpf-linker"));
    }
    let rustc = env::var("RUSTC").context("RUSTC")?;
    let sysroot = Command::new(rustc).args(["--print", "sysroot"]).output()?;
    let sysroot = String::from_utf8(sysroot.stdout)?;
    let core = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core");
    Ok((!core.is_dir()).then_some("rust-src"))
}
