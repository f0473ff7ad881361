//! What the next agent makes of connections that it finds.

use super::*;

impl World {
    /// Its agent is done with whatever was before it, and pods keep their ports.
    fn settle(&self) {
        let mut config = kit::node_config();
        (config.nat_port_min, config.nat_port_max) = (1024, 65535);
        self.datapath.set_uplinks(&[]).unwrap();
        self.datapath.set_node_config(config).unwrap();
        set_source(self.a.ifindex, NODE_IP, NODE_IP6.parse().unwrap());
    }

    /// Another agent in the place of the one that there is.
    fn next(self) -> Self {
        let Self { datapath, a, b, .. } = self;
        drop(datapath);
        let datapath = kit::load_with(&kit::config());
        let next = Self {
            programs: Programs::of(&datapath),
            datapath,
            a,
            b,
        };
        next.settle();
        next
    }
}

/// As whoever is killed between two steps may leave it.
#[test]
fn a_record_without_its_alias_has_its_way_back_with_the_next_agent() {
    world(|w| {
        w.settle();
        let own = make(TCP, (w.a.v4, 2000), (FAR, 80));
        let seen = w.sent(&own);
        let answer = reply_to(&seen);
        let lose = |w: &World| {
            for alias in aliases().into_keys() {
                w.datapath.connections().remove_alias(&alias).unwrap();
            }
            assert_eq!(w.come(&answer), (PASS, World::frame(&answer)));
        };
        lose(&w);
        let w = w.next();
        w.sweep_at(0);
        assert_eq!(w.received(&answer).dst, w.a.v4);
        // By now another pod has the port: the first begins again, by another one.
        lose(&w);
        let theirs = w.sent(&make(TCP, (w.b.v4, 2000), (FAR, 80)));
        assert_eq!(theirs.ports, seen.ports);
        let w = w.next();
        w.sweep_at(0);
        check_table();
        assert_eq!(w.received(&answer).dst, w.b.v4);
        let again = w.sent(&own);
        assert_ne!(again.ports, seen.ports);
        assert_eq!(w.received(&reply_to(&again)).dst, w.a.v4);
    });
}
