//! From the maps of the programs that run to those of the programs that are about to, and back.
//!
//! 1. [`Transition::begin`]: the new maps are there, beside the old ones. What is in those is carried
//!    over once, and then what changed meanwhile, until hardly anything does or it is no less than before;
//! 2. [`Transition::swap`]: the programs are swapped, and what was written since is carried;
//! 3. [`Transition::finish`]: nobody uses the old maps any more, and their pins go.
//!
//! Which maps are used at a moment is said by `CONFIG`, where the generation of the programs that run
//! is written as they are swapped. Whoever is killed is followed by one that begins with the maps that
//! are used, and removes the others.
//!
//! An agent of an earlier generation knows no function for later maps. It takes the fields that it knows
//! by name, where they are written down (`LAYOUT_FIELDS`).

use super::{
    DatapathConfig, DatapathError,
    attach::list,
    carry::{Carry, Convert},
    mapped::Mapped,
    maps::{
        self, Layouts,
        fields::Moves,
        layouts::Recorded,
        migrations::{self, Known, same},
        shape::{self, Expected},
    },
    object::{self, Before, Objects, Successor},
    raw_map::RawMap,
};
use crate::chain::Chain;
use sinabro_common::{abi::layout::Place, fail_point::fail_point};
use std::{collections::BTreeSet, fs, path::Path};

/// Passes before programs are swapped, at most: where so much changes, more would not help.
const PASSES: usize = 8;

pub struct Transition {
    carries: Vec<Carry>,
    known: Known,
}

impl Transition {
    /// Takes over what there is for the objects' maps; also whether those hold what the maps of
    /// before did, so that their programs can run at once.
    pub fn begin(
        objects: &mut Objects,
        config: &DatapathConfig,
        known: Known,
    ) -> Result<(Self, bool), DatapathError> {
        let directory = &config.bpf_dir;
        let recorded = Recorded::read(directory);
        let mut carries = Vec::new();
        let mut whole = true;
        for successor in objects.successors.drain(..) {
            // The acceleration's maps are there only where its object was loaded.
            if !object::exists(&successor.pin) {
                continue;
            }
            let (before, mut is_copied) = (carries.len(), false);
            let Successor {
                map,
                pin,
                instead_of,
                beside,
            } = successor;
            let (name, path) = (map.shape.name, map.path(directory));
            let beside = beside.and_then(|beside| carry(name, beside, &pin, Box::new(same)));
            match instead_of {
                Before::Earlier => {
                    carries.extend(from_earlier(directory, &known, &map, &recorded));
                }
                Before::Later(later, moves) => {
                    carries.extend(from_later(name, &later, moves, &pin));
                    replace(&pin, &path)?;
                }
                Before::Misfit(misfit) => {
                    if misfit.is_other_size {
                        carries.extend(carry_pinned(name, &path, &pin, Box::new(same)));
                        is_copied = copy(name, &path, &pin);
                    }
                    // A kill from here on leaves a map that has what was in the one before.
                    for begun in &mut carries[before..] {
                        if let Err(error) = begun.pass() {
                            tracing::debug!(map = name, "to be carried again: {error}");
                        }
                    }
                    let by = match is_copied || carries.len() > before {
                        true => "another that takes over what is in it",
                        false => "an empty one",
                    };
                    let how = misfit.how;
                    tracing::warn!(
                        path = %path.display(),
                        "pinned map does not fit and is replaced by {by}: {how}"
                    );
                    replace(&pin, &path)?;
                    // Without a note of which map it is, the next agent would take it for a misfit, too.
                    let noted = Layouts::pinned(directory)
                        .and_then(|layouts| layouts.note(directory, &[map]));
                    if let Err(error) = noted {
                        tracing::debug!(map = name, "to be noted again: {}", Chain(&error));
                    }
                }
            }
            whole &= is_copied || carries.len() > before;
            carries.extend(beside);
        }
        // Left by one that was killed before it had carried everything.
        if objects.ran == known.generation() && objects.was_carrying {
            let carried: BTreeSet<_> = carries.iter().map(|carry: &Carry| carry.name).collect();
            let others = known.maps.iter();
            for map in others.filter(|map| !carried.contains(map.shape.name)) {
                carries.extend(from_earlier(directory, &known, map, &recorded));
                if let Some((later, moves)) = object::later_left(directory, map, &recorded) {
                    let (name, path) = (map.shape.name, map.path(directory));
                    carries.extend(from_later(name, &later, moves, &path));
                }
            }
        }
        let begun = carries.len();
        let mut transition = Self { carries, known };
        transition.settle();
        whole &= transition.carries.len() == begun;
        Ok((transition, whole))
    }

    /// Whether anything is to be carried.
    pub fn carries(&self) -> bool {
        !self.carries.is_empty()
    }

    /// Puts the programs of interfaces in the place of others, which use other maps, and carries what those
    /// write until then. `put` says whether any of an uplink was replaced.
    pub fn swap(
        &mut self,
        config: &maps::Config,
        put: impl FnOnce() -> Result<bool, DatapathError>,
    ) -> Result<(), DatapathError> {
        self.settle();
        if self.carries() {
            config.carrying(true)?;
        }
        let put = put();
        fail_point("swapped");
        if let Ok(true) = put {
            config.runs(self.known.generation())?;
        }
        fail_point("swapped-noted");
        self.carry();
        config.carrying(false)?;
        put.map(drop)
    }

    fn settle(&mut self) {
        until_settled(|| self.carry());
    }

    /// Carries what was written since the last time, and returns how many entries that were. What
    /// cannot be carried is no reason to have no programs.
    fn carry(&mut self) -> u64 {
        let mut carried = 0;
        self.carries.retain_mut(|carry| match carry.pass() {
            Ok(count) => {
                carried += count;
                true
            }
            Err(error) => {
                tracing::warn!(
                    map = carry.name,
                    "its content cannot be carried over, and begins again: {error}"
                );
                false
            }
        });
        carried
    }

    /// Removes what nobody uses any more.
    pub fn finish(self, directory: &Path, layouts: &Layouts) -> Result<(), DatapathError> {
        for carry in &self.carries {
            let Carry {
                name: map,
                carried,
                lost,
                garbage,
                ..
            } = *carry;
            tracing::info!(
                map,
                carried,
                lost,
                garbage,
                "carried over to a map of this version"
            );
        }
        let maps = &self.known.maps;
        let places: BTreeSet<_> = maps.iter().map(|map| map.path(directory)).collect();
        let remove = |place: Place<'_>, path: &Path| {
            if places.contains(path) || path.is_dir() {
                return Ok(());
            }
            object::remove_pin(path)?;
            layouts.forget(place)
        };
        let earlier = maps.iter().flat_map(|map| self.known.earlier(map));
        let names = maps.iter().copied().chain(earlier.map(|(map, _)| map));
        let names = names.map(|map| map.shape.name);
        for name in names.chain(migrations::RETIRED) {
            remove(Place { name, number: 1 }, &directory.join(name))?;
        }
        for name in list(directory)? {
            let Some(number) = shape::generation_of(&name) else {
                continue;
            };
            let of_generation = directory.join(&name);
            for name in &list(&of_generation)? {
                remove(Place { name, number }, &of_generation.join(name))?;
            }
            // It has maps of this version, or what others put there.
            let _ = fs::remove_dir(&of_generation);
        }
        Ok(())
    }
}

/// Puts a map that was made in the place of another.
fn replace(pin: &Path, path: &Path) -> Result<(), DatapathError> {
    if path.is_dir() {
        object::remove_pin(path)?;
    }
    fs::rename(pin, path).map_err(|source| DatapathError::File {
        what: "replacing pinned map",
        path: path.to_owned(),
        source,
    })
}

/// Carries from the earlier maps of one, as far as they are there and what they are thought to be.
fn from_earlier(
    directory: &Path,
    known: &Known,
    map: &Expected,
    recorded: &Recorded,
) -> Vec<Carry> {
    let carry = |(earlier, up): (Expected, migrations::Convert)| {
        let misfit = object::misfit(directory, &earlier, recorded);
        if misfit.is_some_and(|misfit| !misfit.is_other_size) {
            return None;
        }
        let (from, to) = (earlier.path(directory), map.path(directory));
        carry_pinned(map.shape.name, &from, &to, Box::new(up))
    };
    known.earlier(map).filter_map(carry).collect()
}

/// Carries from a map of a later layout, by the names of its fields.
fn from_later(name: &'static str, later: &Path, moves: Moves, to: &Path) -> Option<Carry> {
    let convert = move |key: &[u8], value: &[u8]| moves.entry(key, value);
    carry_pinned(name, later, to, Box::new(convert))
}

fn carry_pinned(
    name: &'static str,
    from: &Path,
    to: &Path,
    convert: Box<Convert>,
) -> Option<Carry> {
    carry(name, RawMap::open(from).ok()?, to, convert)
}

fn carry(name: &'static str, from: RawMap, to: &Path, convert: Box<Convert>) -> Option<Carry> {
    let to = RawMap::open(to).ok()?;
    (from.is_table() && to.is_table()).then(|| Carry::new(name, from, to, convert))
}

/// Copies an array of Services, if it is one: the agent alone writes these, and the one before has ended. False if it is
/// none, or has more than there is room for.
fn copy(name: &str, from: &Path, to: &Path) -> bool {
    let copied = || -> std::io::Result<bool> {
        let (from, to) = (RawMap::open(from)?, RawMap::open(to)?);
        match from.is_mapped_array() && to.is_mapped_array() {
            true => Mapped::new(to)?.copy(&Mapped::new(from)?),
            false => Ok(false),
        }
    };
    copied().unwrap_or_else(|error| {
        tracing::warn!(map = name, "its content cannot be carried over: {error}");
        false
    })
}

/// Makes passes, each of which says how much it found, until hardly anything changes meanwhile, or about as much as before: no flood
/// ends by being waited for.
fn until_settled(mut pass: impl FnMut() -> u64) {
    let mut before = u64::MAX;
    for _ in 0..PASSES {
        let found = pass();
        if found == 0 || found > before / 2 {
            break;
        }
        before = found;
    }
}

#[cfg(test)]
mod tests;
