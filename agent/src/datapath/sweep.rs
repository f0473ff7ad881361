//! Ends masquerade flows.
//!
//! Order keeps the table sound while packets pass: the forward entry goes before the reverse
//! one, so a translated port is free only once nothing is translated to it any more. A reverse
//! entry that no forward entry leads to is one whose flow is being made at this moment, or one
//! that a killed agent left behind: it goes when it is so at two sweeps in a row.

use super::{
    DatapathError,
    maps::{Endpoints, Nat},
};
use sinabro_common::{
    abi::{
        Addr,
        nat::{KIND_FORWARD, KIND_INBOUND, KIND_REVERSE, NatEntry, NatKey},
    },
    algo::ct_state,
};
use std::collections::HashSet;

/// What a sweep needs beside the table.
pub struct Rules<'a> {
    pub now_ns: u64,
    /// The node's address; flows translated to another are over. None: not known.
    pub masquerade: Option<Addr>,
    /// Flows of addresses that are not in here are over. None: not known.
    pub endpoints: Option<&'a Endpoints>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    pub removed: u64,
    /// Flows left.
    pub flows: u64,
}

/// Removes what is over. `suspects` is kept by the caller from sweep to sweep.
pub fn sweep(
    nat: &Nat,
    rules: &Rules<'_>,
    suspects: &mut HashSet<NatKey>,
) -> Result<Swept, DatapathError> {
    let mut over = Vec::new();
    let mut orphans = HashSet::new();
    let mut flows = 0;
    let mut failed = None;
    nat.for_each(|key, entry| {
        if failed.is_some() {
            return;
        }
        let verdict = match entry.kind {
            KIND_FORWARD | KIND_INBOUND => {
                flows += 1;
                is_over(nat, rules, &key, &entry).map(|is| {
                    if is {
                        over.push(key);
                    }
                })
            }
            KIND_REVERSE => is_orphan(nat, &key, &entry).map(|is| {
                if is {
                    orphans.insert(key);
                }
            }),
            // No program writes such an entry.
            _ => nat.remove(&key),
        };
        failed = verdict.err();
    })?;
    if let Some(error) = failed {
        return Err(error);
    }

    let mut removed = 0;
    for key in over {
        // Once more, now: a packet may have passed since.
        let Some(entry) = nat.get(&key)? else {
            continue;
        };
        if !is_over(nat, rules, &key, &entry)? {
            continue;
        }
        end(nat, &key, &entry)?;
        removed += 1;
    }
    orphans.retain(|key| {
        let again = suspects.contains(key);
        let still = again
            && matches!(nat.get(key), Ok(Some(entry)) if is_orphan(nat, key, &entry).unwrap_or(false));
        if still && nat.remove(key).is_ok() {
            removed += 1;
            return false;
        }
        true
    });
    *suspects = orphans;
    Ok(Swept {
        removed,
        flows: flows - removed.min(flows),
    })
}

/// Removes every flow of these addresses.
pub fn end_flows_of(nat: &Nat, addresses: &HashSet<Addr>) -> Result<(), DatapathError> {
    let mut flows = Vec::new();
    nat.for_each(|key, entry| {
        if matches!(entry.kind, KIND_FORWARD | KIND_INBOUND) && addresses.contains(&key.src) {
            flows.push((key, entry));
        }
    })?;
    flows
        .iter()
        .try_for_each(|(key, entry)| end(nat, key, entry))
}

/// Removes a flow by its forward (or only) entry.
fn end(nat: &Nat, key: &NatKey, entry: &NatEntry) -> Result<(), DatapathError> {
    nat.remove(key)?;
    if entry.kind != KIND_FORWARD {
        return Ok(());
    }
    let reply = key.reply_to(entry.addr, entry.port);
    match nat.get(&reply)? {
        Some(reverse) if leads_to(&reply, &reverse, key) => nat.remove(&reply),
        _ => Ok(()),
    }
}

/// Whether a flow is over, by its forward (or only) entry.
fn is_over(
    nat: &Nat,
    rules: &Rules<'_>,
    key: &NatKey,
    entry: &NatEntry,
) -> Result<bool, DatapathError> {
    if let Some(endpoints) = rules.endpoints
        && !endpoints.contains(key.src)?
    {
        return Ok(true);
    }
    if entry.kind == KIND_INBOUND {
        // The outside began it: its direction is the one that went first.
        let lifetime = ct_state::lifetime_secs(key.proto, entry.peer_state, entry.state);
        return Ok(is_idle(rules.now_ns, entry.last_seen_ns, lifetime));
    }
    if rules.masquerade.is_some_and(|node| node != entry.addr) {
        return Ok(true);
    }
    let reply = key.reply_to(entry.addr, entry.port);
    let Some(reverse) = nat.get(&reply)? else {
        // Replies would not find back.
        return Ok(true);
    };
    let lifetime = ct_state::lifetime_secs(key.proto, entry.state, reverse.state);
    let last = entry.last_seen_ns.max(reverse.last_seen_ns);
    Ok(is_idle(rules.now_ns, last, lifetime))
}

fn is_orphan(nat: &Nat, key: &NatKey, entry: &NatEntry) -> Result<bool, DatapathError> {
    let forward = nat.get(&key.sent_by(entry.addr, entry.port))?;
    Ok(!forward.is_some_and(|forward| forward.addr == key.dst && forward.port == key.dst_port))
}

fn leads_to(reply: &NatKey, reverse: &NatEntry, flow: &NatKey) -> bool {
    reverse.kind == KIND_REVERSE && reply.sent_by(reverse.addr, reverse.port) == *flow
}

fn is_idle(now_ns: u64, last_seen_ns: u64, lifetime_secs: u64) -> bool {
    now_ns.saturating_sub(last_seen_ns) > lifetime_secs * 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_from_after_the_clock_was_read_is_no_idleness() {
        assert!(!is_idle(5, 6, 0));
        assert!(!is_idle(30_000_000_000, 0, 30));
        assert!(is_idle(30_000_000_001, 0, 30));
    }
}
