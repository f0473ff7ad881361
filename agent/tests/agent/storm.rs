//! kill -9 in a storm of ADDs and DELs.

use crate::support::{Node, Plugin, eventually, owner};
use nix::sys::signal::Signal;
use sinabro_common::{atomic_file::AtomicFile, names};
use sinabro_netlink::link;
use std::{
    collections::{BTreeSet, HashMap},
    fs,
    net::IpAddr,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// kill -9 at any moment of a storm of ADDs and DELs: no address is given twice, none is lost,
/// and every pod whose ADD succeeded is there.
#[test]
fn kills_in_a_storm_neither_double_nor_leak_addresses() {
    const ROUNDS: usize = 6;
    const WORKERS: usize = 8;
    let mut node = Node::new();
    node.start();
    let live = Mutex::new(HashMap::<String, Vec<IpAddr>>::new());
    for round in 0..ROUNDS {
        let stop = AtomicBool::new(false);
        let (shared, live, stop) = (&node, &live, &stop);
        std::thread::scope(|scope| {
            for worker in 0..WORKERS {
                scope.spawn(move || storm(shared, &format!("{round}-{worker}"), live, stop));
            }
            // Not a wait for anything: the kill is to come at a moment that nobody chose.
            std::thread::sleep(Duration::from_millis(40 + 37 * round as u64));
            shared.signal(Signal::SIGKILL);
            stop.store(true, Ordering::Relaxed);
        });
        node.kill();
        node.start();
    }
    let live = live.into_inner().unwrap();
    assert!(!live.is_empty());
    let expected: BTreeSet<_> = live.values().flatten().map(ToString::to_string).collect();
    // What the ADDs cut off last had is freed with their connections.
    eventually("only live pods have leases", || {
        node.leases().into_iter().collect::<BTreeSet<_>>() == expected
    });
    assert_eq!(node.links().len(), live.len());
    for (id, addresses) in &live {
        assert_eq!(node.check(id).unwrap().addresses, *addresses);
    }
}

/// One plugin after another, until the agent is gone.
fn storm(node: &Node, name: &str, live: &Mutex<HashMap<String, Vec<IpAddr>>>, stop: &AtomicBool) {
    for n in 0.. {
        let id = format!("{name}-{n}");
        let Some(mut plugin) = Plugin::try_connect(node.state(names::SOCKET)) else {
            return;
        };
        let Ok(attachment) = plugin.allocate(&id) else {
            return;
        };
        let ifindex = node.add_link(&attachment);
        if plugin.activate(&id, ifindex).is_err() {
            // As the plugin undoes itself.
            let _ = node.conn().execute(link::delete_by_name(&attachment.link));
            return;
        }
        {
            let mut live = live.lock().unwrap();
            for (other, addresses) in live.iter() {
                let double = addresses.iter().find(|a| attachment.addresses.contains(a));
                assert_eq!(double, None, "of {other} and {id}");
            }
            live.insert(id.clone(), attachment.addresses.clone());
        }
        if n % 3 != 0 {
            live.lock().unwrap().remove(&id);
            node.delete_link(&attachment.link);
            let released =
                Plugin::try_connect(node.state(names::SOCKET)).map(|mut p| p.release(&id));
            if !matches!(released, Some(Ok(_))) {
                let queue = node.state(names::DELETES_DIR);
                fs::create_dir_all(&queue).unwrap();
                let file = queue.join(format!("{}.json", attachment.link));
                let delete = serde_json::to_vec(&owner(&id)).unwrap();
                AtomicFile::new(&file).replace(&delete).unwrap();
            }
        }
        if stop.load(Ordering::Relaxed) {
            return;
        }
    }
}
