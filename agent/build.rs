//! Builds the eBPF objects and lets the agent embed them.
//!
//! Where bpf-linker or rust-src is missing, the objects are left empty so that `cargo check` and
//! editors work without them; an agent built so says so when it starts. `cargo xtask` installs
//! both and sets SINABRO_EBPF=required, which makes their absence an error. SINABRO_EBPF=skip
//! leaves the objects empty in any case: lints need none.
//!
//! Every profile and feature set of the agent gets the same objects, so one directory below
//! cargo's target directory builds them once for all.

use anyhow::{Context as _, bail};
use aya_build::{Package, Toolchain};
use object::{
    build::elf::{Builder, SectionData},
    elf::SHT_STRTAB,
};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

#[path = "build/globals.rs"]
mod globals;
#[path = "build/line_info.rs"]
mod line_info;
#[path = "build/stack.rs"]
mod stack;

/// One object per hook family: an old kernel may refuse one and keep the others.
const OBJECTS: [&str; 5] = ["pod", "uplink", "overlay", "sock", "service_sock"];

fn main() -> anyhow::Result<()> {
    // aya-build names only the crate; its types come from here.
    println!("cargo:rerun-if-changed=../common/src");

    let wish = env::var("SINABRO_EBPF").unwrap_or_default();
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR")?);
    match missing_tool()? {
        _ if wish == "skip" => {
            // Watched in this case alone: lints without it share what a build with it has made.
            println!("cargo:rerun-if-env-changed=SINABRO_EBPF");
            leave_empty(&out)
        }
        None => build(&out),
        Some(tool) if wish == "required" => {
            bail!("{tool} is missing: run `cargo xtask setup`")
        }
        Some(tool) => {
            // A file that never is: cargo runs this again each time, which looks for the tool.
            println!("cargo:rerun-if-changed=no-such-file");
            println!(
                "cargo:warning=building without eBPF programs, {tool} is missing: run `cargo xtask setup`"
            );
            leave_empty(&out)
        }
    }
}

/// Builds the objects in the shared directory, and finishes copies of them in `out`.
fn build(out: &Path) -> anyhow::Result<()> {
    let shared = shared_dir(out)?;
    fs::create_dir_all(&shared).with_context(|| format!("cannot make {}", shared.display()))?;
    let lock = fs::File::create(shared.join("lock"))?;
    lock.lock().context("cannot lock the eBPF objects")?;
    // SAFETY: a build script is single-threaded here.
    unsafe {
        env::set_var("RUSTC_BOOTSTRAP", "1");
        // aya-build passes every line of the inner cargo on as a warning.
        env::set_var("CARGO_TERM_QUIET", "true");
        // aya-build builds below this directory.
        env::set_var("OUT_DIR", &shared);
    }
    aya_build::build_ebpf(
        [Package {
            name: "sinabro-ebpf",
            root_dir: "../agent-ebpf",
            ..Package::default()
        }],
        Toolchain::Custom(&env::var("RUSTUP_TOOLCHAIN").unwrap_or_else(|_| "1.95.0".into())),
    )?;
    OBJECTS.iter().try_for_each(|object| {
        let to = out.join(object);
        fs::copy(shared.join(object), &to)?;
        finish(&to).with_context(|| format!("cannot finish the object {object}"))
    })
}

fn leave_empty(out: &Path) -> anyhow::Result<()> {
    OBJECTS
        .iter()
        .try_for_each(|object| Ok(fs::write(out.join(object), b"")?))
}

/// `ebpf` in cargo's target directory. OUT_DIR is `[TARGET/]PROFILE/build/PACKAGE-HASH/out` there.
fn shared_dir(out: &Path) -> anyhow::Result<PathBuf> {
    let target = env::var_os("TARGET").context("TARGET")?;
    let above_profile = out.ancestors().nth(4).context("OUT_DIR is too short")?;
    let root = match above_profile.file_name() == Some(&target) {
        true => above_profile.parent().context("OUT_DIR is too short")?,
        false => above_profile,
    };
    Ok(root.join("ebpf"))
}

/// Takes the debug information out, which is nine tenths of an object: the linker has made BTF of
/// it, and nothing else here reads it. Nor does anything read BTF's relocations, of whose offsets
/// loaders keep account themselves: a fifth of what is left. Takes out line information, too. In BTF, says
/// which functions are global. Looks whether the stack is large enough.
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
        if let (b".BTF.ext", SectionData::Data(data)) = (&*section.name, &mut section.data) {
            *data = line_info::without(data)?.into();
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
