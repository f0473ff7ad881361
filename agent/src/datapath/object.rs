//! Brings the embedded objects into the kernel beside whatever runs already.
//!
//! Pinned maps are used again if they have the expected shape. One that has not (an older
//! agent's, or something else under that name) is replaced, but only once every program has
//! been accepted: until then its successor is pinned under a name of its own, or in the directory of
//! the generation that changed its layout ([`sinabro_common::abi::layout::Place`]). What it takes over
//! is [`super::transition`]'s.

use super::{
    DatapathConfig, DatapathError, attach, btf,
    files::{self, ObjectFiles},
    level, log,
    maps::{
        self,
        fields::Moves,
        layouts::Recorded,
        migrations::Known,
        shape::{self, Expected, Shape},
    },
    probe,
    raw_map::RawMap,
    sys,
};
use crate::memory;
use aya::{
    Ebpf, EbpfLoader,
    programs::{Program, ProgramError},
    util::nr_cpus,
};
use sinabro_common::{
    abi::config::{FLAG_CARRYING, FLAG_MIXED},
    algo::flow,
    names,
};
use std::{
    borrow::Cow,
    fs, io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

/// The objects that a kernel may lack what it takes for.
pub const SOCK_OBJECT: &str = "sock";
pub const SERVICE_SOCK_OBJECT: &str = "service_sock";

/// Variables of the programs.
const KERNEL_OFFSETS: &str = "KERNEL_OFFSETS";
const WITHOUT_REDIRECT: &str = "WITHOUT_REDIRECT";
const FLOW_PLACES: &str = "FLOW_PLACES";
const HAS_SET_RETVAL: &str = "HAS_SET_RETVAL";

/// Suffix of a successor's pin. No map's name ends so, and a bpffs allows no dots.
pub const NEXT: &str = "_next";

/// Lines of the verifier's log worth showing: the refusal and what led to it.
const LOG_LINES: usize = 20;

/// What of the programs to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    Whole,
    /// Without redirection past the stack, of packets or of messages.
    Reduced,
    /// No program at all.
    Maps,
}

pub struct Objects {
    pub pod: Ebpf,
    pub uplink: Ebpf,
    pub overlay: Ebpf,
    /// TCP acceleration, or why there is none.
    pub sock: Option<Result<Ebpf, DatapathError>>,
    /// Services at sockets, if wanted.
    pub service_sock: Option<Result<Tried, DatapathError>>,
    /// Maps that were made, but in an empty place.
    pub successors: Vec<Successor>,
    /// The layout generation of the programs that run until others do.
    pub ran: u32,
    /// Whoever put them there was killed before everything was carried over that those before them wrote.
    pub was_carrying: bool,
}

/// A map that was made in the place of another.
pub struct Successor {
    pub map: Expected,
    /// Where it is pinned until its programs run.
    pub pin: PathBuf,
    pub instead_of: Before,
    /// One of its own layout, to which some programs still write: whoever swapped them was killed before all were.
    pub beside: Option<RawMap>,
}

/// What a map was made in the place of.
pub enum Before {
    /// One of an earlier layout, which is in another place, or none at all.
    Earlier,
    /// One of a later layout, in that place, and perhaps what was left in the map's own.
    Later(PathBuf, Moves),
    /// One in its own place, with which something is wrong.
    Misfit(Misfit),
}

/// How a pinned map is not what the programs expect.
pub struct Misfit {
    pub how: String,
    /// It has another size, and nothing else is wrong.
    pub is_other_size: bool,
}

/// Loads and verifies the programs. What is pinned stays: see [`super::transition`].
pub fn load(
    config: &DatapathConfig,
    known: &Known,
    files: &ObjectFiles,
    extent: Extent,
) -> Result<Objects, DatapathError> {
    make_directory(&config.bpf_dir)?;
    raise_memlock();

    let directory = &config.bpf_dir;
    let recorded = Recorded::read(directory);
    let (ran, was_carrying) = running(directory, known);
    let mut successors = Vec::new();
    for map in known.maps.iter().copied() {
        // Those of a later generation are of programs that did not come to run, or gave way to earlier ones.
        let path = map.path(directory);
        let (pin, instead_of) = if map.number > ran {
            (path, Before::Earlier)
        } else if let Some((later, moves)) = later(directory, &map, &recorded, ran) {
            (next_pin(&path), Before::Later(later, moves))
        } else if let Some(misfit) = misfit(directory, &map, &recorded) {
            (next_pin(&path), Before::Misfit(misfit))
        } else {
            continue;
        };
        let beside = match instead_of {
            Before::Earlier | Before::Later(..) if was_carrying => beside(directory, &map),
            _ => None,
        };
        successors.push(Successor {
            map,
            pin,
            instead_of,
            beside,
        });
    }

    let wanted = config.acceleration && extent == Extent::Whole;
    let (offsets, unknown) = match wanted.then(btf::kernel_offsets).transpose() {
        Ok(offsets) => (offsets, None),
        Err(error) => (None, Some(Err(DatapathError::KernelTypes(error)))),
    };
    let mut loader = loader(&config.bpf_dir);
    let services = &config.services;
    let (connections, aliases) = config.table_sizes();
    for (name, entries) in [
        ("CONNECTIONS", connections),
        ("ALIASES", aliases),
        ("FRONTENDS", services.frontends),
        ("SETS", services.sets),
        ("SLOTS", services.slots),
        ("BACKENDS", services.backends),
    ] {
        loader.map_max_entries(name, entries);
    }
    for map in known.maps.iter().filter(|map| map.number > 1) {
        let pin = map.path(directory);
        make_parent(&pin)?;
        loader.map_pin_path(map.shape.name, pin);
    }
    for Successor { map, pin, .. } in &successors {
        // Left by a process that was killed in the middle, or by an attempt before.
        remove_pin(pin)?;
        loader.map_pin_path(map.shape.name, pin);
    }
    // The kernel makes maps for all processors that there may ever be. One more is for what is not remembered.
    let places = flow::places(nr_cpus().map_or(0, |count| count as u32));
    loader.map_max_entries("FLOWS", places + 1);
    loader.override_global(FLOW_PLACES, &places, false);
    if extent == Extent::Reduced {
        loader.override_global(WITHOUT_REDIRECT, &1u8, false);
    }

    let mut load = |object, bytes| match extent {
        Extent::Maps => load_maps(&mut loader, object, bytes),
        _ => load_object(&mut loader, object, bytes),
    };
    let pod = load("pod", &files.pod)?;
    let uplink = load("uplink", &files.uplink)?;
    let overlay = load("overlay", &files.overlay)?;
    let wanted = config.service_sockets && extent != Extent::Maps;
    let service_sock = wanted.then(|| {
        say_what_there_is(&mut loader);
        try_programs(&mut loader, SERVICE_SOCK_OBJECT, files.service_sock.clone())
    });
    // Last: no other object has the variable.
    let sock = offsets.as_ref().map(|offsets| {
        loader.override_global(KERNEL_OFFSETS, offsets, true);
        load_object(&mut loader, SOCK_OBJECT, &files.sock)
    });
    drop(loader);
    memory::release();
    Ok(Objects {
        pod,
        uplink,
        overlay,
        sock: sock.or(unknown),
        service_sock,
        successors,
        ran,
        was_carrying,
    })
}

impl Objects {
    /// Leaves pinned what does not fit, with the programs that use it.
    pub fn leave_misfits(&mut self) -> Result<(), DatapathError> {
        for Successor { pin, .. } in self.successors.drain(..) {
            remove_pin(&pin)?;
            if let Some(directory) = pin.parent() {
                // Of a generation, if nothing else is in it.
                let _ = fs::remove_dir(directory);
            }
        }
        Ok(())
    }
}

/// The layout generation of the programs that run, this version's where none did (there is nothing to take over then), and
/// whether whoever put them there was killed before everything was carried over.
fn running(directory: &Path, known: &Known) -> (u32, bool) {
    if !level::has_run(directory) {
        return (known.generation(), false);
    }
    match maps::config::pinned(directory) {
        Some(Ok(config)) => {
            let was_carrying = config.flags & (FLAG_CARRYING | FLAG_MIXED) != 0;
            (config.generation(), was_carrying)
        }
        // Nothing ran, or something of which nothing is known.
        Some(Err(_)) | None => (1, false),
    }
}

/// An object whose programs were loaded each by itself: what one is refused for says nothing of
/// another.
pub struct Tried {
    pub bytes: Cow<'static, [u8]>,
    pub programs: Vec<(String, Result<(), DatapathError>)>,
    pub ebpf: Ebpf,
}

impl Tried {
    /// The object, if the kernel took all of it.
    pub fn whole(self) -> Result<Ebpf, DatapathError> {
        self.programs
            .into_iter()
            .try_for_each(|(_, result)| result)?;
        Ok(self.ebpf)
    }
}

/// Tries every program of an object, with maps of its own in a directory of its own.
///
/// # Errors
/// If not even the maps can be made, or if it is not known where this kernel keeps what the programs
/// look at.
pub fn try_each(directory: &Path, object: &'static str) -> Result<Tried, DatapathError> {
    make_directory(directory)?;
    raise_memlock();
    let offsets = (object == SOCK_OBJECT).then(btf::kernel_offsets);
    let offsets = offsets.transpose().map_err(DatapathError::KernelTypes)?;
    let mut loader = loader(directory);
    if let Some(offsets) = &offsets {
        loader.override_global(KERNEL_OFFSETS, offsets, true);
    }
    say_what_there_is(&mut loader);
    let tried = try_programs(&mut loader, object, files::object(object)?.into());
    drop(loader);
    memory::release();
    tried
}

fn try_programs(
    loader: &mut EbpfLoader<'_>,
    object: &'static str,
    bytes: Cow<'static, [u8]>,
) -> Result<Tried, DatapathError> {
    let mut ebpf = load_maps(loader, object, &bytes)?;
    let programs = ebpf
        .programs_mut()
        .map(|(name, program)| (name.to_owned(), load_program(name, program)))
        .collect();
    Ok(Tried {
        bytes,
        programs,
        ebpf,
    })
}

/// Has the programs use what not every kernel has.
fn say_what_there_is(loader: &mut EbpfLoader<'_>) {
    if probe::has_set_retval() {
        loader.override_global(HAS_SET_RETVAL, &1u8, false);
    }
}

/// A number that changes with the programs of the TCP acceleration.
pub fn fingerprint() -> u64 {
    use std::hash::{DefaultHasher, Hasher as _};
    let mut hasher = DefaultHasher::new();
    if let Ok(files) = ObjectFiles::current() {
        hasher.write(&files.sock);
    }
    hasher.finish()
}

fn loader<'a>(directory: &Path) -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    loader.default_map_pin_directory(directory);
    for name in [shape::SOCKET_STATES, shape::SERVICE_SOCKETS] {
        loader.map_pin_path(name, directory.join(name));
    }
    log::configure(&mut loader);
    loader
}

/// Loads one object: its maps first, then each of its programs.
fn load_object(
    loader: &mut EbpfLoader<'_>,
    object: &'static str,
    bytes: &[u8],
) -> Result<Ebpf, DatapathError> {
    let mut ebpf = load_maps(loader, object, bytes)?;
    ebpf.programs_mut()
        .try_for_each(|(name, program)| load_program(name, program))?;
    Ok(ebpf)
}

fn load_program(name: &str, program: &mut Program) -> Result<(), DatapathError> {
    let mut load = || match program {
        Program::SchedClassifier(program) => program.load(),
        Program::SockOps(program) => program.load(),
        Program::SkMsg(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    };
    let interrupted = |result: &Result<(), ProgramError>| match result {
        Err(ProgramError::LoadError { io_error, .. }) => sys::is_interrupted(io_error),
        _ => false,
    };
    let mut result = load();
    for _ in 0..sys::ATTEMPTS {
        if !interrupted(&result) {
            break;
        }
        result = load();
    }
    result.map_err(|error| refused(name, error))
}

/// Makes an object's maps, or takes those that are pinned.
fn load_maps(
    loader: &mut EbpfLoader<'_>,
    object: &'static str,
    bytes: &[u8],
) -> Result<Ebpf, DatapathError> {
    loader.load(bytes).map_err(|source| DatapathError::Object {
        object,
        source: Box::new(source),
    })
}

fn refused(program: &str, error: ProgramError) -> DatapathError {
    let program = program.to_owned();
    match error {
        ProgramError::LoadError {
            io_error,
            verifier_log,
        } => DatapathError::Refused {
            program,
            log: end_of_log(&verifier_log.to_string()),
            source: Box::new(io_error.into()),
        },
        error => DatapathError::Refused {
            program,
            log: String::new(),
            source: Box::new(error),
        },
    }
}

/// What a verifier's log says last before its statistics.
pub fn end_of_log(log: &str) -> String {
    let lines: Vec<&str> = before_statistics(log).trim_end().lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

/// What the verifier says before its statistics (`print_verification_stats`), of which newer kernels have more lines:
/// Linux 7.3 has one for each function of a program.
fn before_statistics(log: &str) -> &str {
    let is_statistics = |line: &str| {
        let first = ["verification time ", "stack depth ", "processed "];
        first.iter().any(|word| line.trim_start().starts_with(word))
    };
    let mut end = 0;
    for line in log.split_inclusive('\n') {
        if is_statistics(line) {
            break;
        }
        end += line.len();
    }
    &log[..end]
}

/// Makes the directories of maps and links, on a bpffs.
pub fn make_directory(path: &Path) -> Result<(), DatapathError> {
    let links = path.join(names::BPF_LINKS_DIR);
    // The nearest directory that exists decides: nothing is made elsewhere.
    let there = links.ancestors().find(|path| path.exists());
    let on_bpffs = there.is_some_and(|there| {
        nix::sys::statfs::statfs(there)
            .is_ok_and(|stat| stat.filesystem_type() == nix::sys::statfs::BPF_FS_MAGIC)
    });
    if !on_bpffs {
        return Err(DatapathError::NotBpffs {
            path: path.to_owned(),
        });
    }
    fs::create_dir_all(&links).map_err(|source| DatapathError::File {
        what: "making directory",
        path: links,
        source,
    })
}

/// The same as [`later`], of whichever generation: to which some programs still write.
pub fn later_left(
    directory: &Path,
    map: &Expected,
    recorded: &Recorded,
) -> Option<(PathBuf, Moves)> {
    let names = attach::list(directory).ok()?;
    let newest = names.iter().filter_map(|name| shape::generation_of(name));
    later(directory, map, recorded, newest.max()?)
}

/// The map of a later layout that the programs use, if they do and the agent that put it there said how
/// it becomes one of this layout.
fn later(
    directory: &Path,
    map: &Expected,
    recorded: &Recorded,
    ran: u32,
) -> Option<(PathBuf, Moves)> {
    let place = |number| Expected { number, ..*map };
    let mut places = (map.number + 1..=ran).rev().map(place);
    let (later, pinned) =
        places.find_map(|later| Some((later, RawMap::open(&later.path(directory)).ok()?)))?;
    let moves = recorded.moves(later.place(), pinned.info().id, map)?;
    Some((later.path(directory), moves))
}

/// The map in a map's own place, if it is one of its layout.
fn beside(directory: &Path, map: &Expected) -> Option<RawMap> {
    let pinned = RawMap::open(&map.path(directory)).ok()?;
    let found = Shape::of(map.shape.name, pinned.info());
    (found == map.shape || found.is_other_size_of(&map.shape)).then_some(pinned)
}

/// What is wrong with a pinned map, if there is one and it does not fit.
pub fn misfit(directory: &Path, map: &Expected, recorded: &Recorded) -> Option<Misfit> {
    let shape = &map.shape;
    let path = map.path(directory);
    if !exists(&path) {
        return None;
    }
    let whole = |how| Misfit {
        how,
        is_other_size: false,
    };
    // What cannot even be opened (a directory, for example) does not fit either.
    let pinned = match RawMap::open(&path) {
        Ok(pinned) => pinned,
        Err(error) => return Some(whole(format!("it cannot be used: {error}"))),
    };
    let found = Shape::of(shape.name, pinned.info());
    let layout = recorded.misfit(map, pinned.info().id);
    match (found == *shape, layout) {
        (true, layout) => layout.map(whole),
        (false, layout) => Some(Misfit {
            how: format!("expected {shape}, found {found}"),
            is_other_size: layout.is_none() && found.is_other_size_of(shape),
        }),
    }
}

fn next_pin(path: &Path) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(NEXT);
    path.into()
}

pub fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Makes the directory that something is to be pinned in.
pub fn make_parent(path: &Path) -> Result<(), DatapathError> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory).map_err(|source| DatapathError::File {
        what: "making directory",
        path: directory.to_owned(),
        source,
    })
}

/// Removes a pin; none is fine.
pub fn remove_pin(path: &Path) -> Result<(), DatapathError> {
    let result = if path.is_dir() {
        fs::remove_dir(path)
    } else {
        fs::remove_file(path)
    };
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(DatapathError::File {
            what: "removing pin",
            path: path.to_owned(),
            source: error,
        }),
        _ => Ok(()),
    }
}

/// Takes the program of a pinned link off, now, and removes the pin; none is fine, and what is
/// pinned there may be something else. If only the pin goes, the kernel frees the link after an
/// RCU grace period (`bpf_free_inode`): until then the program runs on, and attaching it to the
/// same interface again fails with EEXIST.
pub fn remove_link(path: &Path) -> Result<(), DatapathError> {
    if let Ok(link) = sys::obj_get(path)
        && sys::kind(link.as_fd()).is_ok_and(|kind| kind == sys::Kind::Link)
        && let Err(error) = sys::link_detach(link.as_fd())
    {
        tracing::debug!(path = %path.display(), %error, "link not detached, its pin is removed");
    }
    remove_pin(path)
}

/// Until Linux 5.11 maps count against RLIMIT_MEMLOCK. Where raising it is not allowed, the
/// kernel either does not count or says so when a map is made.
fn raise_memlock() {
    let limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: reads one structure.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_lab::{Lifetime, Namespace};
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };

    #[test]
    fn keeps_the_end_of_a_verifier_log() {
        let log: String = (0..100).map(|line| format!("{line}\n")).collect();
        let tail = end_of_log(&log);
        assert!(tail.starts_with("80\n") && tail.ends_with("\n99"));
        assert_eq!(super::end_of_log("one"), "one");
    }

    /// Of programs with more functions than lines are shown.
    #[test]
    fn statistics_do_not_take_the_place_of_the_refusal() {
        let functions = (0..40).map(|n| format!("subprog {n} (f) static insns_self 0\n"));
        let statistics: String = functions.collect();
        let log = format!(
            "1: (0f) r0 += r9\nR9 !read_ok\nverification time 41 usec\nstack depth 0+0\n{statistics}processed 2 insns\n"
        );
        assert_eq!(super::end_of_log(&log), "1: (0f) r0 += r9\nR9 !read_ok");
        assert_eq!(super::end_of_log("processed 2 insns (limit 1000000)\n"), "");
    }

    extern "C" fn nothing(_: libc::c_int) {}

    /// Several, as aya tries a second time by itself.
    #[test]
    fn signals_that_come_meanwhile_refuse_no_program() {
        use nix::sys::signal;
        let handler = signal::SigHandler::Handler(nothing);
        let flags = signal::SaFlags::SA_RESTART;
        let action = signal::SigAction::new(handler, flags, signal::SigSet::empty());
        // SAFETY: the handler does nothing.
        unsafe { signal::sigaction(signal::SIGUSR2, &action) }.unwrap();
        let node = Namespace::new("node", Lifetime::Process).unwrap();
        let load = || {
            let directory = Path::new(names::BPF_DIR);
            make_directory(directory)?;
            let mut loader = loader(directory);
            let mut ebpf = load_maps(&mut loader, "pod", files::object("pod")?)?;
            // SAFETY: it has no conditions.
            let verified = unsafe { libc::pthread_self() };
            let is_over = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..sys::ATTEMPTS / 2 {
                        if is_over.load(Ordering::Acquire) {
                            break;
                        }
                        // SAFETY: that thread waits for the end of this one.
                        let sent = unsafe { libc::pthread_kill(verified, libc::SIGUSR2) };
                        assert_eq!(sent, 0);
                        thread::sleep(Duration::from_millis(1));
                    }
                });
                let mut programs = ebpf.programs_mut();
                let loaded = programs.try_for_each(|(name, program)| load_program(name, program));
                is_over.store(true, Ordering::Release);
                loaded
            })?;
            Ok(())
        };
        node.run(load).unwrap();
    }

    #[test]
    fn refuses_a_directory_that_is_not_on_a_bpffs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b");
        let error = make_directory(&path).unwrap_err();
        assert!(matches!(error, DatapathError::NotBpffs { path: p } if p == path));
        assert!(!path.exists());
    }
}
