//! On the real kernel, each in a network namespace of its own; only the programs are imagined.

use super::*;
use crate::ipam::LeaseRequest;
use sinabro_common::api::PodRef;
use sinabro_netlink::{Link, NetNs, netns::in_fresh, veth::Veth};
use std::collections::HashSet;
use std::{fs, slice::from_ref};

/// Programs that note what is asked of them and refuse on demand.
#[derive(Default)]
struct Programs {
    state_dir: PathBuf,
    attached: Mutex<BTreeMap<String, EndpointRecord>>,
    refuse_attach: Mutex<bool>,
    refuse_detach: Mutex<bool>,
    retained: Mutex<Option<HashSet<String>>>,
    reserved: Mutex<BTreeSet<HostPort>>,
}

fn refused() -> DatapathError {
    DatapathError::Probe(io::Error::from_raw_os_error(libc::ENOSPC))
}

impl PodPrograms for Programs {
    fn attach(&self, record: &EndpointRecord) -> Result<(), DatapathError> {
        let file = self
            .state_dir
            .join(format!("endpoints/{}.json", record.link));
        assert!(file.exists(), "attached before the record was written");
        if *self.refuse_attach.lock().unwrap() {
            return Err(refused());
        }
        self.attached
            .lock()
            .unwrap()
            .insert(record.link.clone(), record.clone());
        Ok(())
    }

    fn detach(&self, record: &EndpointRecord) -> Result<(), DatapathError> {
        for address in &record.addresses {
            let lease = self.state_dir.join(format!("leases/{address}"));
            assert!(
                lease.exists(),
                "{address} was free before it was out of the data path"
            );
        }
        if *self.refuse_detach.lock().unwrap() {
            return Err(refused());
        }
        self.attached.lock().unwrap().remove(&record.link);
        Ok(())
    }

    fn retain(&self, live: &HashSet<String>) -> Result<Vec<String>, DatapathError> {
        *self.retained.lock().unwrap() = Some(live.clone());
        Ok(Vec::new())
    }

    fn reserve(&self, ports: &BTreeSet<HostPort>) -> Result<(), DatapathError> {
        if *self.refuse_attach.lock().unwrap() {
            return Err(refused());
        }
        *self.reserved.lock().unwrap() = ports.clone();
        Ok(())
    }
}

/// Of the pod of a number: one that all have, and one of its own.
fn host_ports(n: usize) -> Vec<HostPort> {
    let own = format!("tcp/{}", 8000 + n);
    ["udp/53", own.as_str()]
        .map(|port| port.parse().unwrap())
        .into()
}

/// A node with its state directory, and the pods' namespace.
struct Node {
    dir: tempfile::TempDir,
    programs: Arc<Programs>,
    endpoints: Endpoints,
    pods: NetNs,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let programs = Arc::new(Programs {
            state_dir: dir.path().to_owned(),
            ..Programs::default()
        });
        let endpoints = open(dir.path(), &programs);
        Self {
            dir,
            programs,
            endpoints,
            pods: NetNs::create().unwrap(),
        }
    }

    /// As a new agent finds it.
    fn restart(self) -> Self {
        let endpoints = open(self.dir.path(), &self.programs);
        endpoints.restore().unwrap();
        Self { endpoints, ..self }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What the plugin does between Allocate and Activate.
    fn add_link(&self, owner: &Owner) -> Link {
        let veth = Veth {
            name: &owner.link(),
            mac: names::HOST_MAC,
            mtu: 1400,
            peer_name: &format!("p{}", &owner.container_id),
            peer_mac: [2, 0, 0, 0, 0, 9],
            peer_netns: Some(&self.pods),
        };
        Conn::new().unwrap().create_veth(&veth).unwrap()
    }

    /// A pod by the whole way.
    fn add(&self, n: usize) -> EndpointRecord {
        let request = request(n);
        let addresses = self.endpoints.ipam.allocate(&request).unwrap();
        let link = self.add_link(&request.owner);
        let record = EndpointRecord {
            link: request.owner.link(),
            owner: request.owner,
            network: request.network,
            netns: request.netns,
            pod: request.pod,
            ifindex: link.index,
            mac: mac_of(None, &addresses).unwrap(),
            host_mac: Mac(names::HOST_MAC),
            addresses,
            mtu: 1400,
            local: None,
            acceleration: None,
            netns_cookie: None,
            host_ports: Some(host_ports(n)),
            service_translation: None,
        };
        self.endpoints.activate(record.clone()).unwrap();
        record
    }

    fn has_link(&self, owner: &Owner) -> bool {
        let link = Conn::new().unwrap().link_by_name(&owner.link());
        link.ignore_not_found().unwrap().is_some()
    }

    /// Nothing of the pod is left anywhere.
    fn assert_gone(&self, record: &EndpointRecord) {
        assert!(!self.has_link(&record.owner));
        assert!(self.endpoints.get(&record.owner).is_none());
        assert!(!self.endpoints.ipam.has(&record.owner));
        assert!(
            !self
                .path(&format!("endpoints/{}.json", record.link))
                .exists()
        );
        assert!(
            !self
                .programs
                .attached
                .lock()
                .unwrap()
                .contains_key(&record.link)
        );
        let routes = self.endpoints.routes();
        assert!(routes.borrow().iter().all(|r| r.ifindex != record.ifindex));
    }
}

fn open(dir: &Path, programs: &Arc<Programs>) -> Endpoints {
    let ipam = Allocator::open(dir).unwrap();
    let nets = ["10.0.0.0/28", "fd00::/64"].map(|net| net.parse().unwrap());
    ipam.set_ranges(&nets).unwrap();
    Endpoints::open(dir, ipam, programs.clone()).unwrap()
}

fn request(n: usize) -> LeaseRequest {
    LeaseRequest {
        owner: Owner {
            container_id: format!("c{n}"),
            ifname: "eth0".into(),
        },
        network: "pods".into(),
        netns: format!("/run/netns/c{n}"),
        pod: PodRef::default(),
        mac: None,
        addresses: Vec::new(),
    }
}

#[test]
fn a_pod_goes_up_and_down_without_a_trace() {
    in_fresh(|| {
        let node = Node::new();
        let (a, b) = (node.add(1), node.add(2));
        assert_eq!(node.endpoints.get(&a.owner), Some(a.clone()));
        assert_eq!(node.programs.attached.lock().unwrap().len(), 2);
        assert_eq!(node.endpoints.routes().borrow().len(), 2);
        assert!(node.endpoints.release(&a.owner).unwrap());
        node.assert_gone(&a);
        // Again, and of somebody who never was.
        assert!(!node.endpoints.release(&a.owner).unwrap());
        assert!(!node.endpoints.release(&request(9).owner).unwrap());
        assert!(node.has_link(&b.owner) && node.endpoints.get(&b.owner).is_some());
    });
}

#[test]
fn begun_deletes_are_finished_together_and_spare_the_others() {
    in_fresh(|| {
        let node = Node::new();
        let (a, b, c) = (node.add(1), node.add(2), node.add(3));
        // One has lost its link already.
        delete_links(from_ref(&b.link)).unwrap();
        for record in [&a, &b] {
            assert!(node.endpoints.begin_release(&record.owner).unwrap());
            // Out of the data path at once; the address is nobody's before the link is gone.
            assert!(
                !node
                    .programs
                    .attached
                    .lock()
                    .unwrap()
                    .contains_key(&record.link)
            );
            assert!(node.endpoints.ipam.has(&record.owner));
        }
        assert!(node.has_link(&a.owner));
        node.endpoints.finish_releases(&[&a.owner, &b.owner]);
        node.assert_gone(&a);
        node.assert_gone(&b);
        assert!(node.has_link(&c.owner) && node.endpoints.get(&c.owner).is_some());
        assert_eq!(fs::read_dir(node.path("deletes")).unwrap().count(), 0);
        // Of somebody who never was: nothing to finish.
        assert!(!node.endpoints.begin_release(&request(9).owner).unwrap());
    });
}

#[test]
fn a_delete_that_was_only_begun_is_finished_by_the_next_agent() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        node.endpoints.begin_release(&record.owner).unwrap();
        let node = node.restart();
        let collected = node.endpoints.collect();
        assert_eq!(collected.deletes, from_ref(&record.owner));
        node.assert_gone(&record);
    });
}

#[test]
fn a_delete_that_cannot_be_written_down_is_done_at_once() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        fs::write(node.path("deletes"), "in the way").unwrap();
        assert!(!node.endpoints.begin_release(&record.owner).unwrap());
        node.assert_gone(&record);
    });
}

#[test]
fn nothing_is_added_on_top_of_a_queued_delete_that_fails() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        *node.programs.refuse_detach.lock().unwrap() = true;
        node.endpoints.begin_release(&record.owner).unwrap_err();
        // The next round would take down what an ADD made now.
        node.endpoints.drain_delete(&record.owner).unwrap_err();
        *node.programs.refuse_detach.lock().unwrap() = false;
        node.endpoints.drain_delete(&record.owner).unwrap();
        node.assert_gone(&record);
        let again = node.add(1);
        assert!(node.endpoints.drain_deletes().is_empty());
        assert!(node.endpoints.get(&again.owner).is_some());
    });
}

#[test]
fn a_link_that_is_not_the_pods_is_refused() {
    in_fresh(|| {
        let node = Node::new();
        let good = node.add(1);
        let lo = Conn::new().unwrap().link_by_name("lo").unwrap().index;
        for (ifindex, part) in [
            (lo, "its name is lo"),
            (9999, "no such link"),
            (good.ifindex, "its name is"),
        ] {
            let owner = request(2).owner;
            let bad = EndpointRecord {
                link: owner.link(),
                owner,
                ifindex,
                ..good.clone()
            };
            let error = node.endpoints.activate(bad).unwrap_err();
            assert!(matches!(error, EndpointError::WrongLink { .. }));
            assert!(error.to_string().contains(part), "{error}");
        }
        let other_mac = EndpointRecord {
            host_mac: Mac([2; 6]),
            ..good.clone()
        };
        let error = node.endpoints.activate(other_mac).unwrap_err();
        assert!(error.to_string().contains("MAC address"), "{error}");
        assert_eq!(node.endpoints.all(), [good]);
    });
}

#[test]
fn a_refused_attachment_leaves_no_record() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        node.endpoints.release(&record.owner).unwrap();
        let addresses = node.endpoints.ipam.allocate(&request(1)).unwrap();
        let ifindex = node.add_link(&record.owner).index;
        *node.programs.refuse_attach.lock().unwrap() = true;
        let record = EndpointRecord {
            ifindex,
            addresses,
            ..record
        };
        assert!(node.endpoints.activate(record.clone()).is_err());
        assert!(node.endpoints.get(&record.owner).is_none());
        assert!(
            !node
                .path(&format!("endpoints/{}.json", record.link))
                .exists()
        );
        // The session's undo does the rest.
        node.endpoints.release(&record.owner).unwrap();
        node.assert_gone(&record);
    });
}

#[test]
fn an_address_stays_leased_while_it_is_in_the_data_path() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        *node.programs.refuse_detach.lock().unwrap() = true;
        assert!(node.endpoints.begin_release(&record.owner).is_err());
        assert!(node.endpoints.ipam.has(&record.owner));
        // It is written down, so the next round tries again and gets through.
        *node.programs.refuse_detach.lock().unwrap() = false;
        assert_eq!(node.endpoints.collect().deletes, from_ref(&record.owner));
        node.assert_gone(&record);
    });
}

#[test]
fn a_restart_keeps_live_pods_and_frees_dead_ones() {
    in_fresh(|| {
        let node = Node::new();
        let (live, dead) = (node.add(1), node.add(2));
        let routes = node.endpoints.routes().borrow().len();
        assert_eq!(routes, 2);
        delete_links(from_ref(&dead.link)).unwrap();
        node.programs.attached.lock().unwrap().remove(&live.link);
        let node = node.restart();
        assert_eq!(node.endpoints.all(), from_ref(&live));
        assert!(
            node.programs
                .attached
                .lock()
                .unwrap()
                .contains_key(&live.link)
        );
        assert_eq!(
            *node.programs.retained.lock().unwrap(),
            Some(HashSet::from([live.link]))
        );
        assert_eq!(node.endpoints.routes().borrow().len(), 1);
        node.assert_gone(&dead);
    });
}

#[test]
fn a_link_made_anew_under_the_name_is_not_the_pod_of_before() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        delete_links(from_ref(&record.link)).unwrap();
        assert_ne!(node.add_link(&record.owner).index, record.ifindex);
        let node = node.restart();
        node.assert_gone(&record);
    });
}

#[test]
fn a_corrupt_record_is_rebuilt_from_the_leases() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        let file = node.path(&format!("endpoints/{}.json", record.link));
        fs::write(&file, &fs::read(&file).unwrap()[..40]).unwrap();
        let node = node.restart();
        let rebuilt = EndpointRecord {
            // Nothing else has them.
            host_ports: None,
            ..record.clone()
        };
        assert_eq!(node.endpoints.all(), from_ref(&rebuilt));
        assert!(
            node.path(&format!("endpoints/{}.json.bad", record.link))
                .exists()
        );
        let node = node.restart();
        assert_eq!(node.endpoints.all(), [rebuilt]);
    });
}

#[test]
fn a_live_pod_gets_its_missing_lease_back() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        fs::remove_file(node.path("leases/10.0.0.2")).unwrap();
        let node = node.restart();
        let addresses = node.endpoints.ipam.allocate(&request(2)).unwrap();
        assert!(!addresses.contains(&record.addresses[0]));
    });
}

#[test]
fn a_pod_that_cannot_be_attached_at_start_is_kept_and_mended() {
    in_fresh(|| {
        let node = Node::new();
        let record = node.add(1);
        *node.programs.refuse_attach.lock().unwrap() = true;
        let node = node.restart();
        assert_eq!(node.endpoints.count(), 1);
        let problems = node.endpoints.problems();
        assert!(
            problems.len() == 1
                && problems[0].contains("c1/eth0")
                && problems[0].contains("No space left"),
            "{problems:?}"
        );
        *node.programs.refuse_attach.lock().unwrap() = false;
        node.endpoints.collect();
        assert!(node.endpoints.problems().is_empty());
        assert!(
            node.programs
                .attached
                .lock()
                .unwrap()
                .contains_key(&record.link)
        );
    });
}

#[test]
fn collection_takes_what_belongs_to_nobody_and_nothing_else() {
    in_fresh(|| {
        let node = Node::new();
        let (live, dead) = (node.add(1), node.add(2));
        delete_links(from_ref(&dead.link)).unwrap();
        // An ADD that was never finished, with and without its link; a link without a lease.
        node.endpoints.ipam.allocate(&request(3)).unwrap();
        node.endpoints.ipam.allocate(&request(4)).unwrap();
        node.add_link(&request(4).owner);
        node.add_link(&request(5).owner);
        // ADDs under way.
        node.endpoints.ipam.allocate(&request(6)).unwrap();
        node.add_link(&request(6).owner);
        node.add_link(&request(7).owner);
        let guards = [6, 7].map(|n| node.endpoints.locks.try_lock(&request(n).owner.link()));

        let collected = node.endpoints.collect();
        assert_eq!(collected.endpoints, from_ref(&dead.owner));
        assert_eq!(collected.leases, [request(3).owner, request(4).owner]);
        assert_eq!(collected.links, [request(5).owner.link()]);
        node.assert_gone(&dead);
        assert!(!node.has_link(&request(4).owner) && !node.has_link(&request(5).owner));
        assert!(node.has_link(&request(6).owner) && node.has_link(&request(7).owner));
        assert!(node.endpoints.ipam.has(&request(6).owner));
        assert_eq!(node.endpoints.all(), from_ref(&live));
        assert!(node.has_link(&live.owner));

        drop(guards);
        let collected = node.endpoints.collect();
        assert_eq!(collected.leases, [request(6).owner]);
        assert_eq!(collected.links, [request(7).owner.link()]);
        assert_eq!(node.endpoints.collect(), gc::Collected::default());
    });
}

#[test]
fn foreign_links_are_left_alone() {
    in_fresh(|| {
        let node = Node::new();
        let foreign = Veth {
            name: "snb-not-ours",
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            peer_name: "veth0",
            peer_mac: [2, 0, 0, 0, 0, 2],
            peer_netns: None,
        };
        Conn::new().unwrap().create_veth(&foreign).unwrap();
        assert_eq!(node.endpoints.collect(), gc::Collected::default());
        Conn::new().unwrap().link_by_name("snb-not-ours").unwrap();
    });
}

#[test]
fn the_runtimes_list_decides_within_its_network_alone() {
    in_fresh(|| {
        let node = Node::new();
        let records = [1, 2, 3].map(|n| node.add(n));
        let [valid, stale, busy] = &records;
        let _guard = node.endpoints.locks.try_lock(&busy.link).unwrap();
        let other = LeaseRequest {
            network: "other".into(),
            ..request(4)
        };
        node.endpoints.ipam.allocate(&other).unwrap();
        let removed = node.endpoints.retain("pods", from_ref(&valid.owner));
        assert_eq!(removed, from_ref(&stale.owner));
        node.assert_gone(stale);
        assert!(node.endpoints.ipam.has(&other.owner));
        assert_eq!(node.endpoints.count(), 2);
    });
}

#[test]
fn queued_deletes_are_carried_out_and_bad_ones_set_aside() {
    in_fresh(|| {
        let node = Node::new();
        let records = [1, 2].map(|n| node.add(n));
        let [deleted, kept] = &records;
        let queue = node.path("deletes");
        fs::create_dir(&queue).unwrap();
        let put =
            |link: &str, text: &[u8]| fs::write(queue.join(format!("{link}.json")), text).unwrap();
        put(&deleted.link, &serde_json::to_vec(&deleted.owner).unwrap());
        // Of a pod that is long gone, garbage, and one that names another pod.
        let gone = request(8).owner;
        put(&gone.link(), &serde_json::to_vec(&gone).unwrap());
        put("snb000000000001", b"{\"containerID\":");
        put("snb000000000002", &serde_json::to_vec(&kept.owner).unwrap());
        // Of agents and plugins that were killed while they wrote, this release's and earlier ones'.
        for unfinished in [
            format!(".{}.json.tmp-0123456789abcdef", kept.link),
            format!(".{}", kept.link),
            format!("{}.tmp-4711", kept.link),
        ] {
            fs::write(queue.join(unfinished), "{").unwrap();
        }

        let mut drained = node.endpoints.drain_deletes();
        drained.sort_unstable();
        assert_eq!(drained, [deleted.owner.clone(), gone]);
        node.assert_gone(deleted);
        assert!(node.endpoints.get(&kept.owner).is_some());
        let mut left: Vec<_> = fs::read_dir(&queue)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        left.sort_unstable();
        assert_eq!(
            left,
            ["snb000000000001.json.bad", "snb000000000002.json.bad"]
        );
        assert!(node.endpoints.drain_deletes().is_empty());
    });
}

#[test]
fn ports_of_the_node_that_lead_to_pods_are_reserved_as_long_as_one_has_them() {
    in_fresh(|| {
        let node = Node::new().restart();
        let reserved = |node: &Node| -> Vec<String> {
            let ports = node.programs.reserved.lock().unwrap();
            ports.iter().map(ToString::to_string).collect()
        };
        let (one, two) = (node.add(1), node.add(2));
        assert_eq!(reserved(&node), ["tcp/8001", "tcp/8002", "udp/53"]);
        node.endpoints.release(&one.owner).unwrap();
        assert_eq!(reserved(&node), ["tcp/8002", "udp/53"]);
        // As the next agent finds it: the pod of a link that is gone has none.
        node.programs.reserved.lock().unwrap().clear();
        let node = node.restart();
        assert_eq!(reserved(&node), ["tcp/8002", "udp/53"]);
        delete_links(std::slice::from_ref(&two.link)).unwrap();
        let node = node.restart();
        assert_eq!(reserved(&node), [""; 0]);
    });
}
