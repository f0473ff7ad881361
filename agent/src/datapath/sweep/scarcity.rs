//! Where connections that are done with do not stay for the whole of their time, for there is little room left for those to come.
//!
//! A pod that opens and closes connections fast fills its share with closed ones, of which each would stay for two minutes. One that
//! asks many questions, such as a resolver, fills it with those that have their answer. They are ended, and the pod is not refused what
//! it asks for.

use super::{
    super::{DatapathError, maps::Connections},
    Count,
};
use sinabro_common::{
    abi::connection::{ALL_SHARES, Connection, FLAG_MAPPING, Limits, Share},
    algo::{
        lifetime::{LATE_NS, MAKES_WAY_AFTER_NS, Stage},
        room::Room,
    },
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Whether nothing is likely to come of a connection but what is late.
pub(super) fn is_done(connection: &Connection, stage: Stage) -> bool {
    stage.is_closed() || is_answered(connection, stage)
}

/// Whether it is a question that has its answer, most likely: datagrams both ways, for a moment only.
fn is_answered(connection: &Connection, stage: Stage) -> bool {
    stage.is_answered() && !connection.has(FLAG_MAPPING)
}

pub(super) struct Scarcity {
    of_all: bool,
    payers: HashSet<u32>,
}

impl Scarcity {
    /// Of those for whom room is scarce ([`Room`]).
    pub(super) fn of(shares: &BTreeMap<u32, Share>, capacity: u32, limits: &Limits) -> Self {
        let room = room(shares.get(&ALL_SHARES), capacity, limits);
        let is_scarce = |payer: &&u32| {
            **payer != ALL_SHARES && room.is_scarce_for(connections(shares.get(*payer)))
        };
        Self {
            of_all: room.is_scarce_for_all(),
            payers: shares.keys().filter(is_scarce).copied().collect(),
        }
    }

    /// How long a connection that is done with may be idle, if less than others. Of datagrams nobody knows for certain, so none
    /// make room for somebody else's.
    pub(super) fn lifetime(&self, connection: &Connection, stage: Stage) -> Option<u64> {
        let is_own = self.payers.contains(&connection.payer);
        match stage {
            _ if stage.is_closed() && (is_own || self.of_all) => Some(LATE_NS),
            _ if is_answered(connection, stage) && is_own => Some(MAKES_WAY_AFTER_NS),
            _ => None,
        }
    }

    fn is_of(&self, payer: u32) -> bool {
        match payer {
            ALL_SHARES => self.of_all,
            payer => self.payers.contains(&payer),
        }
    }
}

fn connections(share: Option<&Share>) -> u64 {
    share.map_or(0, |share| Share::counted(share.connections))
}

fn room(all: Option<&Share>, capacity: u32, limits: &Limits) -> Room {
    Room::of(connections(all), capacity, limits.per_pod)
}

/// Whether a sweep is due before its time, by what the last one left to each: of somebody whose room is scarce, connections have
/// become more by a sixteenth of what it may have, or that much is all that is left to it beside what is done with.
///
/// # Errors
/// If the kernel does not say what connections take.
pub(super) fn is_due(
    table: &Connections,
    left: &HashMap<u32, Count>,
) -> Result<bool, DatapathError> {
    let (capacity, limits) = (table.capacity(), table.limits()?);
    let room = room(table.share(ALL_SHARES)?.as_ref(), capacity, &limits);
    // Nobody has more than all have.
    if !room.is_scarce_for(room.taken) {
        return Ok(false);
    }
    let shares: BTreeMap<u32, Share> = table.shares()?.into_iter().collect();
    let scarcity = Scarcity::of(&shares, capacity, &limits);
    Ok(shares.iter().any(|(payer, share)| {
        let has = connections(Some(share));
        let had = left.get(payer).copied().unwrap_or_default();
        let most = match *payer {
            ALL_SHARES => capacity.into(),
            _ => room.each,
        };
        let part = most / 16;
        scarcity.is_of(*payer)
            && (has > had.connections + part || (has + part >= most && had.done != 0))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinabro_common::abi::connection::FLAG_MASQUERADED;

    fn of(payer: u32) -> Connection {
        Connection {
            flags: FLAG_MASQUERADED,
            payer,
            ..Connection::NONE
        }
    }

    #[test]
    fn others_lose_what_is_closed_for_certain() {
        let limits = Limits {
            capacity: 200,
            per_pod: 200,
            embryonic_per_pod: 200,
            pad: 0,
            lifetimes: [0; 16],
        };
        let scarcity = |greedy: [u64; 3]| {
            let all = greedy.iter().sum::<u64>() + 1;
            let counts = [greedy.as_slice(), &[1, all]].concat();
            let payers = [1, 2, 3, 4, ALL_SHARES];
            let share = |connections| Share {
                connections,
                ..Share::default()
            };
            let shares = payers.into_iter().zip(counts.into_iter().map(share));
            Scarcity::of(&shares.collect(), limits.capacity, &limits)
        };
        let stages = [
            Stage::TimeWait,
            Stage::Reset,
            Stage::Replied,
            Stage::Stream,
            Stage::Established,
        ];
        let lifetimes =
            |scarcity: &Scarcity, payer| stages.map(|stage| scarcity.lifetime(&of(payer), stage));
        let (late, answered) = (Some(LATE_NS), Some(MAKES_WAY_AFTER_NS));
        let few = scarcity([100, 20, 20]);
        assert_eq!(lifetimes(&few, 1), [late, late, answered, None, None]);
        assert_eq!(lifetimes(&few, 2), [None; 5]);
        let many = scarcity([60, 60, 40]);
        assert_eq!(lifetimes(&many, 1), [late, late, answered, None, None]);
        assert_eq!(lifetimes(&many, 4), [late, late, None, None, None]);
    }
}
