//! Puts programs on interfaces, one file per way of doing it: [`tcx`] links and [`clsact`]
//! filters; and on sockets, [`sock`] and [`service_sock`].
//!
//! By default uplinks have tcx links where the kernel has them: others put programs there too,
//! and a link cannot be taken away by mistake. Pod links have filters on every kernel: each tcx
//! attachment waits for an RCU grace period under the RTNL lock (`tcx_entry_sync`, kernel commit
//! e420bed02507), some 12 ms, and again when the interface goes. A pod link is ours alone, has
//! two programs, and pods come in dozens at once.
//!
//! Each hook has one program and one name for its pin:
//!
//! | program | where | pin |
//! |-|-|-|
//! | `pod_out` | ingress of the pod's host-side interface | `<link>-out` |
//! | `pod_in` | egress of the same | `<link>-in` |
//! | `uplink_in` | ingress of an uplink | `host-<ifindex>-in` |
//! | `uplink_out` | egress of the same | `host-<ifindex>-out` |
//! | `overlay_in` | ingress of the VXLAN device | `sinabro_vxlan-in` |
//! | `overlay_out` | egress of the same | `sinabro_vxlan-out` |
//!
//! Pins keep the names that the first version gave them: an agent of any version finds those of
//! every other, and takes the link over in place, on the way up and on the way down. What the
//! first version does not know looks to it like the pin of a pod that is gone, which it removes.

mod clsact;
pub mod on_cgroup;
pub mod service_sock;
pub mod sock;
mod tcx;
pub mod tell_netns;

use super::{AttachMode, DatapathError, ProgramReport, object, probe};
use aya::{Ebpf, programs::SchedClassifier};
use sinabro_common::names;
use sinabro_netlink::tc::Direction;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Pins of uplinks begin with this, and no pod link's name does.
const UPLINK_PIN: &str = "host-";
/// Pins of the programs on the VXLAN device.
const OVERLAY_PINS: [(&str, Hook); 2] = [
    ("sinabro_vxlan-in", Hook::OverlayIn),
    ("sinabro_vxlan-out", Hook::OverlayOut),
];

/// A place that a program is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    PodOut,
    PodIn,
    UplinkOut,
    UplinkIn,
    OverlayIn,
    OverlayOut,
}

impl Hook {
    pub const POD: [Self; 2] = [Self::PodOut, Self::PodIn];
    pub const UPLINK: [Self; 2] = [Self::UplinkOut, Self::UplinkIn];
    pub const OVERLAY: [Self; 2] = [Self::OverlayIn, Self::OverlayOut];
    /// The order in which they take the place of others: first what waits for entries that are on
    /// their way (`FLAG_CARRYING`), then what makes new ones. Earlier programs do not wait.
    const SWAPPED: [Self; 2] = [Self::UplinkIn, Self::UplinkOut];

    pub fn program(self) -> &'static str {
        match self {
            Self::PodOut => "pod_out",
            Self::PodIn => "pod_in",
            Self::UplinkOut => "uplink_out",
            Self::UplinkIn => "uplink_in",
            Self::OverlayIn => "overlay_in",
            Self::OverlayOut => "overlay_out",
        }
    }

    /// What the first version called it: the name that a filter of its agent still has.
    fn earlier_program(self) -> Option<&'static str> {
        match self {
            Self::UplinkOut => Some("host_out"),
            Self::UplinkIn => Some("host_in"),
            Self::PodOut | Self::PodIn | Self::OverlayIn | Self::OverlayOut => None,
        }
    }

    /// As the interface has it: what leaves a pod comes in at the host side.
    fn direction(self) -> Direction {
        match self {
            Self::PodOut | Self::UplinkIn | Self::OverlayIn => Direction::Ingress,
            Self::PodIn | Self::UplinkOut | Self::OverlayOut => Direction::Egress,
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::PodOut | Self::UplinkOut | Self::OverlayOut => "-out",
            Self::PodIn | Self::UplinkIn | Self::OverlayIn => "-in",
        }
    }

    /// The pin of this hook at a pod link's name or an uplink's [`uplink`] name.
    fn pin(self, place: &str) -> String {
        format!("{place}{}", self.suffix())
    }

    /// The hook that a pin's name is of, and the place; none if it is no interface's.
    pub fn of_pin(pin: &str) -> Option<(Self, &str)> {
        if let Some((_, hook)) = OVERLAY_PINS.into_iter().find(|(name, _)| *name == pin) {
            return Some((hook, names::VXLAN_LINK));
        }
        let uplink = pin.starts_with(UPLINK_PIN);
        if let Some(place) = pin.strip_suffix("-out") {
            Some((
                if uplink {
                    Self::UplinkOut
                } else {
                    Self::PodOut
                },
                place,
            ))
        } else {
            let place = pin.strip_suffix("-in")?;
            Some((if uplink { Self::UplinkIn } else { Self::PodIn }, place))
        }
    }
}

/// The name of an uplink in pins.
fn uplink(ifindex: u32) -> String {
    format!("{UPLINK_PIN}{ifindex}")
}

/// How programs are attached, once decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Tcx,
    Clsact,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}

/// A verified program.
pub struct Classifier {
    fd: Arc<OwnedFd>,
    id: u32,
    /// Instructions that the verifier walked through (Linux 5.16).
    instructions: Option<u32>,
}

/// The programs of interfaces, ready to be attached.
pub struct Classifiers {
    links: PathBuf,
    /// None if there are no programs: nothing is attached then, and what others have attached stays.
    loaded: Option<Loaded>,
    /// By interface index: what this process has attached, and is to stay.
    places: Mutex<BTreeMap<u32, Attached>>,
}

/// What is attached to an interface.
#[derive(Default)]
struct Attached {
    hooks: Vec<Hook>,
    /// The name in pins.
    place: String,
}

struct Loaded {
    pods: Mode,
    uplinks: Mode,
    programs: Vec<(Hook, Classifier)>,
}

impl Loaded {
    fn mode(&self, hook: Hook) -> Mode {
        match hook {
            Hook::PodOut | Hook::PodIn => self.pods,
            Hook::UplinkOut | Hook::UplinkIn | Hook::OverlayIn | Hook::OverlayOut => self.uplinks,
        }
    }

    fn program(&self, hook: Hook) -> &Classifier {
        // `new` made one of each.
        let at = self.programs.iter().position(|(of, _)| *of == hook);
        &self.programs[at.unwrap_or_default()].1
    }
}

/// Which programs are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    All,
    /// Those on these interfaces, by index.
    Interfaces(BTreeSet<u32>),
    /// Those that tcx links hold: nobody tells when one is detached, and to ask costs little.
    Links,
}

impl Classifiers {
    /// Takes the programs out of their objects.
    pub fn new(
        mut pod: Ebpf,
        mut uplink: Ebpf,
        mut overlay: Ebpf,
        links: PathBuf,
        wanted: AttachMode,
    ) -> Result<Self, DatapathError> {
        let mut programs = Vec::new();
        for hook in Hook::POD {
            programs.push((hook, classifier(&mut pod, hook)?));
        }
        for hook in Hook::UPLINK {
            programs.push((hook, classifier(&mut uplink, hook)?));
        }
        for hook in Hook::OVERLAY {
            programs.push((hook, classifier(&mut overlay, hook)?));
        }
        let has_tcx = || probe::has_tcx(programs[0].1.fd.as_fd()).map_err(DatapathError::Probe);
        let (pods, uplinks) = match wanted {
            AttachMode::Clsact => (Mode::Clsact, Mode::Clsact),
            AttachMode::Auto if has_tcx()? => (Mode::Clsact, Mode::Tcx),
            AttachMode::Auto => (Mode::Clsact, Mode::Clsact),
            AttachMode::Tcx if has_tcx()? => (Mode::Tcx, Mode::Tcx),
            AttachMode::Tcx => return Err(DatapathError::Unsupported("tcx links (Linux 6.6)")),
        };
        let loaded = Loaded {
            pods,
            uplinks,
            programs,
        };
        Ok(Self {
            links,
            loaded: Some(loaded),
            places: Mutex::default(),
        })
    }

    /// Without programs.
    pub fn none(links: PathBuf) -> Self {
        Self {
            links,
            loaded: None,
            places: Mutex::default(),
        }
    }

    /// Whether programs on pod links are filters of a clsact qdisc.
    pub fn pods_have_filters(&self) -> bool {
        let loaded = self.loaded.as_ref();
        loaded.is_some_and(|loaded| loaded.pods == Mode::Clsact)
    }

    /// How programs are on pod links and on uplinks.
    pub fn modes(&self) -> [(&'static str, String); 2] {
        let modes = match &self.loaded {
            Some(loaded) => [loaded.pods.to_string(), loaded.uplinks.to_string()],
            None => ["none".to_owned(), "none".to_owned()],
        };
        let [pods, uplinks] = modes;
        [("attachPods", pods), ("attachUplinks", uplinks)]
    }

    pub fn programs(&self) -> impl Iterator<Item = ProgramReport> {
        let programs = self.loaded.iter().flat_map(|loaded| &loaded.programs);
        programs.map(|(hook, program)| ProgramReport {
            name: hook.program(),
            id: program.id,
            instructions: program.instructions,
        })
    }

    pub fn attach_pod(&self, ifindex: u32, link: &str) -> Result<(), DatapathError> {
        self.attach(&Hook::POD, ifindex, link)
    }

    /// Removes a pod's pins. Filters go with the interface.
    pub fn detach_pod(&self, link: &str) -> Result<(), DatapathError> {
        self.places().retain(|_, attached| attached.place != link);
        Hook::POD
            .into_iter()
            .try_for_each(|hook| object::remove_link(&self.links.join(hook.pin(link))))
    }

    /// The places of pods that have pins.
    pub fn pinned_pods(&self) -> Result<BTreeSet<String>, DatapathError> {
        Ok(self
            .pins()?
            .iter()
            .filter_map(|pin| Hook::of_pin(pin))
            .filter(|(hook, _)| Hook::POD.contains(hook))
            .map(|(_, place)| place.to_owned())
            .collect())
    }

    /// Attaches to these uplinks and to no other.
    pub fn set_uplinks(&self, ifindexes: &[u32]) -> Result<(), DatapathError> {
        for hook in Hook::SWAPPED {
            for &ifindex in ifindexes {
                self.attach(&[hook], ifindex, &uplink(ifindex))?;
            }
        }
        let wanted: BTreeSet<String> = ifindexes.iter().map(|&index| uplink(index)).collect();
        let is_former = |place: &str| place.starts_with(UPLINK_PIN) && !wanted.contains(place);
        self.places()
            .retain(|_, attached| !is_former(&attached.place));
        for pin in self.pins()? {
            if let Some((Hook::UplinkIn | Hook::UplinkOut, place)) = Hook::of_pin(&pin)
                && !wanted.contains(place)
            {
                object::remove_link(&self.links.join(&pin))?;
            }
        }
        let filters = |loaded: &Loaded| loaded.uplinks == Mode::Clsact;
        if self.loaded.as_ref().is_some_and(filters) {
            clsact::detach_others(&Hook::UPLINK, ifindexes)?;
        }
        Ok(())
    }

    /// Attaches to the VXLAN device.
    pub fn attach_overlay(&self, ifindex: u32) -> Result<(), DatapathError> {
        // Another device has taken its place.
        let is_former = |index: u32, place: &str| index != ifindex && place == names::VXLAN_LINK;
        self.places()
            .retain(|index, attached| !is_former(*index, &attached.place));
        self.attach(&Hook::OVERLAY, ifindex, names::VXLAN_LINK)
    }

    /// Updates every pinned link of an interface that still exists; whether one of an uplink was.
    pub fn swap(&self) -> Result<bool, DatapathError> {
        let Some(loaded) = &self.loaded else {
            return Ok(false);
        };
        let of_pin =
            |pin: String| Hook::of_pin(&pin).map(|(hook, _)| (hook, self.links.join(&pin)));
        let mut pins: Vec<_> = self.pins()?.into_iter().filter_map(of_pin).collect();
        // Of a pod first what finds records (`FLAG_MIXED`), then what makes them.
        let position = |of: [Hook; 2], hook| of.into_iter().position(|of| of == hook);
        pins.sort_by_key(|&(hook, _)| (position(Hook::SWAPPED, hook), position(Hook::POD, hook)));
        let mut uplink = false;
        for (hook, path) in pins {
            match tcx::update(&path, loaded.program(hook)) {
                Ok(()) => uplink |= Hook::UPLINK.contains(&hook),
                // Its interface is gone, or will be attached again.
                Err(error) => {
                    tracing::debug!(path = %path.display(), %error, "pinned link not updated");
                }
            }
        }
        Ok(uplink)
    }

    /// Whether a filter of that name is one of ours.
    pub fn is_ours(name: &str) -> bool {
        let hooks = [Hook::POD, Hook::UPLINK, Hook::OVERLAY].concat();
        hooks.iter().any(|hook| hook.program() == name)
    }

    /// Puts back what somebody has taken off, and says what that was, by the link's name and the program's.
    pub fn mend(&self, which: &Which) -> Result<Vec<(String, &'static str)>, DatapathError> {
        let Some(loaded) = &self.loaded else {
            return Ok(Vec::new());
        };
        let indexes: Vec<u32> = self.places().keys().copied().collect();
        let mut mended = Vec::new();
        for ifindex in indexes {
            if matches!(which, Which::Interfaces(only) if !only.contains(&ifindex)) {
                continue;
            }
            // Whoever detaches it waits: what is not to be there any more is not put back.
            let places = self.places();
            let Some(Attached { hooks, place }) = places.get(&ifindex) else {
                continue;
            };
            let tcx_alone = |hook: &&Hook| loaded.mode(**hook) == Mode::Tcx;
            let tcx: Vec<Hook>;
            let looked_at = match which {
                Which::Links => {
                    tcx = hooks.iter().filter(tcx_alone).copied().collect();
                    &tcx
                }
                _ => hooks,
            };
            let lacking = self.lacking(loaded, looked_at, ifindex, place)?;
            if !lacking.is_empty() {
                self.put(loaded, &lacking, ifindex, place)?;
                let lacked = lacking.iter().map(|hook| hook.program());
                mended.extend(lacked.map(|program| (place.clone(), program)));
            }
        }
        Ok(mended)
    }

    /// Which of these hooks of an interface have not the program that they should have; none if the interface is gone.
    fn lacking(
        &self,
        loaded: &Loaded,
        hooks: &[Hook],
        ifindex: u32,
        place: &str,
    ) -> Result<Vec<Hook>, DatapathError> {
        let filters = match hooks.iter().any(|hook| loaded.mode(*hook) == Mode::Clsact) {
            true => clsact::filters(ifindex)?,
            false => Some(Vec::new()),
        };
        let Some(filters) = filters else {
            return Ok(Vec::new());
        };
        let has = |hook: &Hook| {
            let program = loaded.program(*hook);
            match loaded.mode(*hook) {
                Mode::Clsact => clsact::has(&filters, *hook, program),
                Mode::Tcx => tcx::has(&self.links.join(hook.pin(place)), program, ifindex),
            }
        };
        Ok(hooks.iter().filter(|hook| !has(hook)).copied().collect())
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<u32, Attached>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attach(&self, hooks: &[Hook], ifindex: u32, place: &str) -> Result<(), DatapathError> {
        let Some(loaded) = &self.loaded else {
            return Ok(());
        };
        self.put(loaded, hooks, ifindex, place)?;
        let mut places = self.places();
        let attached = places.entry(ifindex).or_default();
        if attached.place != place {
            // The index was another's.
            *attached = Attached {
                place: place.to_owned(),
                ..Attached::default()
            };
        }
        attached.hooks.retain(|hook| !hooks.contains(hook));
        attached.hooks.extend(hooks);
        Ok(())
    }

    fn put(
        &self,
        loaded: &Loaded,
        hooks: &[Hook],
        ifindex: u32,
        place: &str,
    ) -> Result<(), DatapathError> {
        let mut filters = Vec::with_capacity(hooks.len());
        for &hook in hooks {
            let program = loaded.program(hook);
            match loaded.mode(hook) {
                Mode::Clsact => filters.push((hook, program)),
                Mode::Tcx => {
                    let path = self.links.join(hook.pin(place));
                    if tcx::attach(&path, hook, program, ifindex)? {
                        // Left by an agent that had to use filters, or was configured to.
                        clsact::detach(hook, ifindex);
                    }
                }
            }
        }
        clsact::attach(&filters, ifindex)?;
        filters
            .iter()
            .try_for_each(|(hook, _)| object::remove_link(&self.links.join(hook.pin(place))))
    }

    fn pins(&self) -> Result<Vec<String>, DatapathError> {
        list(&self.links)
    }
}

/// The ways in which this kernel attaches a program that it has verified.
pub fn modes(ebpf: &mut Ebpf, hook: Hook) -> Result<Vec<Mode>, DatapathError> {
    let classifier = classifier(ebpf, hook)?;
    Ok(
        match probe::has_tcx(classifier.fd.as_fd()).map_err(DatapathError::Probe)? {
            true => vec![Mode::Clsact, Mode::Tcx],
            false => vec![Mode::Clsact],
        },
    )
}

/// The index of `lo` in every network namespace (`LOOPBACK_IFINDEX` in linux/net/net_namespace.h).
const LOOPBACK: u32 = 1;

/// Attaches a program to the loopback device of the calling thread's network namespace, which is one
/// to be thrown away: a filter stays there.
pub fn try_on_loopback(ebpf: &mut Ebpf, hook: Hook, mode: Mode) -> Result<(), DatapathError> {
    match mode {
        Mode::Tcx => tcx::try_on(hook, &classifier(ebpf, hook)?, LOOPBACK),
        Mode::Clsact => clsact::attach(&[(hook, &classifier(ebpf, hook)?)], LOOPBACK),
    }
}

/// Removes the filters of every interface; what there was, in words.
pub fn detach_filters() -> Result<Vec<String>, DatapathError> {
    clsact::detach_others(&[Hook::POD, Hook::UPLINK, Hook::OVERLAY].concat(), &[])
}

/// The names in a directory.
pub fn list(path: &Path) -> Result<Vec<String>, DatapathError> {
    let read = || -> std::io::Result<Vec<String>> {
        fs::read_dir(path)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    };
    read().map_err(|source| DatapathError::File {
        what: "reading directory",
        path: path.to_owned(),
        source,
    })
}

fn find(ebpf: &mut Ebpf, hook: Hook) -> Result<&mut SchedClassifier, DatapathError> {
    ebpf.program_mut(hook.program())
        .and_then(|program| program.try_into().ok())
        .ok_or(DatapathError::Missing {
            what: "classifier",
            name: hook.program(),
        })
}

fn classifier(ebpf: &mut Ebpf, hook: Hook) -> Result<Classifier, DatapathError> {
    let attach = |source: Box<dyn std::error::Error + Send + Sync>| DatapathError::Attach {
        program: hook.program(),
        target: "nothing yet".into(),
        source,
    };
    let program = find(ebpf, hook)?;
    let info = program.info().map_err(|error| attach(error.into()))?;
    let fd = program
        .fd()
        .map_err(|error| attach(error.into()))?
        .as_fd()
        .try_clone_to_owned()
        .map_err(|error| attach(error.into()))?;
    Ok(Classifier {
        fd: Arc::new(fd),
        id: info.id(),
        instructions: info.verified_instruction_count(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_names_its_hook_and_place() {
        for hook in Hook::POD {
            let pin = hook.pin("snb0123456789ab");
            assert_eq!(Hook::of_pin(&pin), Some((hook, "snb0123456789ab")));
        }
        for hook in Hook::UPLINK {
            assert_eq!(Hook::of_pin(&hook.pin(&uplink(7))), Some((hook, "host-7")));
        }
        let place = names::VXLAN_LINK;
        for (pin, hook) in OVERLAY_PINS {
            assert_eq!(hook.pin(place), pin);
            assert_eq!(Hook::of_pin(pin), Some((hook, place)));
        }
        assert_eq!(Hook::of_pin(sock::PIN), None);
        assert_eq!(Hook::of_pin(""), None);
    }
}
