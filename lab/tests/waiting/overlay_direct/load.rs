//! Pods of both nodes talk while ways change.

use super::*;

/// The underlay's router, which hands on what is sent to it.
pub const ROUTER: &str = "172.30.0.1";
pub const ROUTER_IPV6: &str = "fd00:172:30::1";
pub const BEFORE_EVENTS: Duration = Duration::from_secs(5);
pub const PHASE: Duration = Duration::from_secs(2);

/// Pods of both nodes talk to each other, and have for a while.
pub fn talk(world: &World) -> Traffic {
    let [one, two] = &world.pods;
    let paths: Vec<_> = [(one, two), (two, one)]
        .iter()
        .flat_map(|(from, to)| {
            to.addresses().map(|address| {
                let name = format!("{} to {address}", from.id());
                Path::new(&name, from.place(), to.place(), address)
            })
        })
        .collect();
    watched(&paths)
}

pub fn watched(paths: &[Path]) -> Traffic {
    let pace = Pace {
        pause: Duration::from_millis(10),
        clients: 1,
    };
    let traffic = Traffic::start(paths, pace).unwrap();
    traffic.watch(BEFORE_EVENTS);
    traffic
}

/// Ways change and agents go while pods of both nodes talk: nothing is lost, and nothing stands still.
#[test]
fn ways_are_followed_under_load() {
    let world = World::new([&[], &[]]);
    let traffic = talk(&world);
    let handed_on = || snmp::forwarded(world.lab.router().place()).unwrap();
    let during = |what: &str, act: &dyn Fn()| {
        traffic.event(what).unwrap();
        act();
        traffic.watch(PHASE);
        let (by_router, by_device) = (handed_on(), world.by_device());
        traffic.watch(PHASE);
        traffic.must_flow(what).unwrap();
        let after = world.by_device();
        let devices = [0, 1].map(|node| after[node][1] > by_device[node][1]);
        (handed_on() > by_router, devices)
    };
    let n1 = world.lab.node(1);
    let far: IpNet = IpNet::from(world.lab.node(2).addresses()[0]);
    let by_router = Route::to(far).via(ROUTER.parse().unwrap());
    let change = |request: Request| n1.netlink().unwrap().execute(request).unwrap();

    let direct = [false, false];
    assert_eq!(during("nothing happened", &|| {}), (false, direct));
    let act = || change(by_router.add());
    assert_eq!(during("a router came between", &act), (true, direct));
    let act = || change(by_router.delete());
    assert_eq!(during("it went again", &act), (false, direct));
    let act = || n1.stop_agent().unwrap();
    assert_eq!(during("an agent was stopped", &act).1, [true, false]);
    let act = || {
        start(n1, &[]);
        n1.wait_ready().unwrap();
    };
    assert_eq!(during("it was started", &act), (false, direct));
    let act = || n1.kill_agent().unwrap();
    assert_eq!(during("it was killed", &act), (false, direct));
    // The programs see by themselves that the way is another.
    let act = || change(by_router.add());
    let seen = during("a router came between meanwhile", &act);
    assert_eq!(seen, (true, [true, false]));
    let act = || change(by_router.delete());
    assert_eq!(during("and went", &act), (false, direct));
    let act = || {
        start(n1, &[KERNEL]);
        n1.wait_ready().unwrap();
    };
    assert_eq!(during("it was told to leave it", &act).1, [true, false]);
    println!("{}", traffic.finish().unwrap());
}
