//! Which endpoint a new connection to a frontend gets.

use aya_ebpf::{
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    maps::lpm_trie::Key,
};
use sinabro_common::abi::{
    Addr,
    service::{
        Affinity, AffinityKey, BACKEND_DRAINING, BACKEND_SERVING, FRONTEND_EXTERNAL,
        FRONTEND_GUARDED, FRONTEND_OF_NODE, Frontend, FrontendKey, Kind, Set, SourceKey,
    },
};
use sinabro_ebpf::{
    maps::{AFFINITY, BACKENDS, FRONTENDS, SETS, SLOTS, SOURCE_RANGES},
    stage::tunnel,
};

/// The address is no Service's.
pub const NOT_OURS: i32 = 0;
/// There is one.
pub const CHOSEN: i32 = 1;
/// The client is told that nobody is there.
pub const REFUSED: i32 = 2;
/// It is told nothing.
pub const DROPPED: i32 = 3;

/// An endpoint, and which of those that had its number.
pub struct Endpoint {
    pub addr: Addr,
    pub port: [u8; 2],
    pub backend: u32,
    pub generation: u32,
}

impl Endpoint {
    pub const NONE: Self = Self {
        addr: Addr::UNSPECIFIED,
        port: [0; 2],
        backend: 0,
        generation: 0,
    };
}

/// Fills in the endpoint of that number and generation; says whether it is there, and has of the flags in `of` exactly
/// those in `flags`.
#[inline(always)]
pub fn endpoint(
    backend: u32,
    generation: u32,
    of: u16,
    flags: u16,
    endpoint: &mut Endpoint,
) -> bool {
    let Some(found) = BACKENDS.get_ptr(backend) else {
        return false;
    };
    // SAFETY: a value that the map gave. The agent writes another generation before it writes another address, so what
    // is read here is one endpoint's if the generation is the same before and after.
    unsafe {
        if (&raw const (*found).generation).read_volatile() != generation
            || (*found).flags & of != flags
        {
            return false;
        }
        endpoint.addr = Addr::at(&raw const (*found).addr);
        endpoint.port = (*found).port;
        endpoint.backend = backend;
        endpoint.generation = generation;
        (&raw const (*found).generation).read_volatile() == generation
    }
}

/// One of a frontend's endpoints for a client: a pod, or the node itself.
#[inline(never)]
pub fn choose(key: &FrontendKey, client: &Addr, is_node: bool, to: &mut Endpoint) -> i32 {
    // SAFETY: entries are replaced, not changed.
    let Some(frontend) = (unsafe { FRONTENDS.get(key) }) else {
        let address = FrontendKey::address(key.addr);
        return match FRONTENDS.get_ptr(address) {
            Some(_) => REFUSED,
            None => NOT_OURS,
        };
    };
    // To a pod the address is one of its own.
    if frontend.flags & FRONTEND_OF_NODE != 0 && !is_node {
        return NOT_OURS;
    }
    // Packets to a pod are to no Service either.
    if frontend.flags & FRONTEND_EXTERNAL != 0 && tunnel::is_a_pods(&key.addr) {
        return NOT_OURS;
    }
    // Its packets are dropped, and counted, where they leave the pod.
    if frontend.flags & FRONTEND_GUARDED != 0 && !may_use(frontend, client) {
        return DROPPED;
    }
    // What a set says is read once: another may be there the next moment.
    let Some(set) = SETS.get_ptr(frontend.inside) else {
        return DROPPED;
    };
    // SAFETY: a value that the map gave, which is written by one store.
    let set = Set(unsafe { set.cast::<u64>().read_volatile() });
    match set.kind() {
        Kind::Balance => {}
        Kind::Refuse => return REFUSED,
        Kind::Drop => return DROPPED,
    }
    if frontend.affinity_seconds != 0 {
        return affine(frontend, set, client, to);
    }
    draw(set, to)
}

/// Whether the client is in a range of the Service's.
#[inline(always)]
fn may_use(frontend: &Frontend, client: &Addr) -> bool {
    let source = SourceKey {
        service: frontend.service,
        client: *client,
    };
    let bits = SourceKey::bits_of(8 * size_of::<Addr>() as u32);
    SOURCE_RANGES.get(Key::new(bits, source)).is_some()
}

#[inline(always)]
fn draw(set: Set, to: &mut Endpoint) -> i32 {
    // SAFETY: no arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    let index = set.base() + (random * u64::from(set.count()) >> 32) as u32;
    let Some(slot) = SLOTS.get(index) else {
        return DROPPED;
    };
    match endpoint(slot.backend, slot.generation, 0, 0, to) {
        true => CHOSEN,
        // Of a set that was replaced longer ago than slots rest: cannot be.
        false => DROPPED,
    }
}

/// The endpoint that the client had last, while it is in the set.
#[inline(always)]
fn affine(frontend: &Frontend, set: Set, client: &Addr, to: &mut Endpoint) -> i32 {
    let key = AffinityKey {
        client: *client,
        service: frontend.service,
    };
    // SAFETY: no arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let kept = match AFFINITY.get_ptr(key) {
        // SAFETY: a value that the map gave.
        Some(last) => unsafe {
            let idle = now.wrapping_sub((*last).last_ns);
            idle < u64::from(frontend.affinity_seconds) * 1_000_000_000
                && endpoint(
                    (*last).backend,
                    (*last).generation,
                    BACKEND_SERVING | BACKEND_DRAINING,
                    BACKEND_SERVING,
                    to,
                )
        },
        None => false,
    };
    if !kept {
        let drawn = draw(set, to);
        if drawn != CHOSEN {
            return drawn;
        }
    }
    let last = Affinity {
        last_ns: now,
        backend: to.backend,
        generation: to.generation,
    };
    // A table without room cannot be: the kernel forgets another client.
    let _ = AFFINITY.insert(key, last, 0);
    CHOSEN
}
