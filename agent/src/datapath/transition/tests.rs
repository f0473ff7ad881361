//! Also with an agent of a made-up next version, whose `CONNECTIONS` has its first field last: it takes the place
//! of the present one and gives way to it again, and either is killed between any two steps. No packet travels, so
//! that it does not matter that the programs of both are the same ones.

use super::{super::sys::MapInfo, *};
use crate::datapath::{Datapath, lock, maps::migrations::Migration, raw_map::Put};
use aya::maps::{Map, MapData};
use proptest::{collection::vec, prelude::*};
use sinabro_common::{
    abi::{
        Addr,
        config::{FLAG_CARRYING, FLAG_MIXED, NodeConfig},
        connection::{Connection, ConnectionKey},
        layout::{Field, Layout as _, OF_KEY, OF_VALUE, both},
        uplink::Uplink,
    },
    fail_point, names,
};
use sinabro_lab::{Lifetime, Namespace};
use std::{
    collections::BTreeMap,
    env,
    os::unix::process::ExitStatusExt as _,
    process::{Command, Stdio},
};

fn map(map_type: u32, value_size: u32) -> RawMap {
    RawMap::create(&MapInfo {
        map_type,
        id: 0,
        key_size: 4,
        value_size,
        max_entries: 1,
        map_flags: 0,
    })
    .unwrap()
}

#[test]
fn passes_are_made_while_each_finds_much_less() {
    // What each finds; what programs write during one is found by the next.
    for (found, passes) in [
        (&[0][..], 1),
        (&[100, 0], 2),
        (&[100, 30, 10, 3, 1, 0], 6),
        // A flood, from before and since.
        (&[130_000, 20_000, 19_000, 18_000], 3),
        (&[100, 100], 2),
        (
            &[
                1 << 20,
                1 << 18,
                1 << 16,
                1 << 14,
                1 << 12,
                1 << 10,
                1 << 8,
                1 << 6,
                1 << 4,
            ],
            PASSES,
        ),
    ] {
        let mut made = 0;
        until_settled(|| {
            made += 1;
            found[made - 1]
        });
        assert_eq!(made, passes, "{found:?}");
    }
}

#[test]
fn what_is_written_while_programs_are_swapped_arrives() {
    let array = map(2, size_of::<NodeConfig>() as u32);
    let array = MapData::from_fd(array.fd().try_clone_to_owned().unwrap()).unwrap();
    let config = maps::Config::new(Map::Array(array)).unwrap();
    let (from, to) = (map(1, 1), map(1, 1));
    let carry = Carry::new(
        "TABLE",
        from.again().unwrap(),
        to.again().unwrap(),
        Box::new(same),
    );
    let mut transition = Transition {
        carries: vec![carry],
        known: Known::by(&DatapathConfig::default()),
    };
    let flags = || config.get().unwrap().flags & FLAG_CARRYING;
    let swap = || {
        assert_eq!(
            flags(),
            FLAG_CARRYING,
            "programs wait for what is on its way"
        );
        from.put(&[1; 4], &[7], Put::Any).unwrap();
        Ok(true)
    };
    transition.swap(&config, swap).unwrap();
    assert_eq!(to.get(&[1; 4]).unwrap(), Some(vec![7]));
    assert_eq!(flags(), 0);
    assert_eq!(config.get().unwrap().flags >> 24, PRESENT);

    // What fails leaves nobody waiting, and does not say that others run.
    config.runs(9).unwrap();
    let failed = || Err(DatapathError::NotBuilt);
    assert!(transition.swap(&config, failed).is_err());
    assert_eq!((flags(), config.get().unwrap().generation()), (0, 9));
}

/// The layout generation of this version, in which the table of connections has changed last,
const PRESENT: u32 = 3;
/// and that of the next.
const NEXT: u32 = 4;

const KEY: usize = size_of::<ConnectionKey>();
const SIZE: usize = size_of::<Connection>();
/// The field that moves.
const TIME: usize = size_of::<u64>();

const CONNECTIONS: Migration = Migration {
    map: "CONNECTIONS",
    earlier: |next| Expected {
        layout: both(ConnectionKey::LAYOUT, Connection::LAYOUT),
        number: PRESENT,
        fields: [ConnectionKey::FIELDS, Connection::FIELDS],
        ..next
    },
    up,
};

/// An entry that begins with an odd byte is garbage.
fn up(key: &[u8], value: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    if (key.len(), value.len()) != (KEY, SIZE) || key[0] % 2 == 1 {
        return None;
    }
    let (time, rest) = value.split_at(TIME);
    Some((key.to_vec(), [rest, time].concat()))
}

fn config(connections: Option<u32>) -> DatapathConfig {
    DatapathConfig {
        connections,
        ..DatapathConfig::default()
    }
}

/// What an agent of a generation knows.
fn known(generation: u32, config: &DatapathConfig) -> Known {
    let mut known = Known::by(config);
    if generation == NEXT {
        let maps = &mut known.maps;
        let map = maps.iter_mut().find(|map| map.shape.name == "CONNECTIONS");
        let map = map.unwrap();
        let moved = |field: &Field| {
            let time = TIME as u32;
            let offset = field.offset.checked_sub(time);
            let offset = offset.unwrap_or(SIZE as u32 - time);
            Field { offset, ..*field }
        };
        let fields: Vec<_> = Connection::FIELDS.iter().map(moved).collect();
        (map.layout, map.number) = (map.layout + 1, generation);
        map.fields[1] = fields.leak();
        known.migrations = &[CONNECTIONS];
    }
    known
}

/// An agent of a generation, whose uplink is the loopback interface.
fn start(generation: u32, config: &DatapathConfig) -> Datapath {
    Datapath::load_knowing(config, known(generation, config)).unwrap()
}

fn settle(datapath: &Datapath) {
    let uplink = Uplink {
        v4: Addr::v4([192, 0, 2, 1]),
        v6: Addr::UNSPECIFIED,
        header_len: 14,
        pad: 0,
    };
    datapath.retain_pods(&Default::default()).unwrap();
    datapath.set_uplinks(&[(1, uplink)]).unwrap();
}

/// What a generation has in the table's place.
fn expected(generation: u32) -> Expected {
    let known = known(generation, &config(None));
    let mut maps = known.maps.into_iter();
    maps.find(|map| map.shape.name == "CONNECTIONS").unwrap()
}

fn directory() -> &'static Path {
    Path::new(names::BPF_DIR)
}

fn table(generation: u32) -> RawMap {
    let path = directory().join(format!("v{generation}/CONNECTIONS"));
    RawMap::open(&path).unwrap()
}

type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// Entries as the present version has them.
fn entry(number: u32) -> (Vec<u8>, Vec<u8>) {
    let mut key = vec![0; KEY];
    key[4..8].copy_from_slice(&number.to_ne_bytes());
    let value = (0..SIZE).map(|at| at as u8 ^ number as u8);
    (key, value.collect())
}

/// What is in a generation's table, as the present version has it.
fn entries(generation: u32) -> Entries {
    let mut all = Entries::new();
    let collect = |key: &[u8], value: &[u8]| {
        let (rest, time) = match generation {
            NEXT => value.split_at(SIZE - TIME),
            _ => (value, &[][..]),
        };
        all.insert(key.to_vec(), [time, rest].concat());
    };
    table(generation).for_each(collect).unwrap();
    all
}

fn put(generation: u32, (key, value): &(Vec<u8>, Vec<u8>)) {
    let (key, value) = match generation {
        NEXT => up(key, value).unwrap(),
        _ => (key.clone(), value.clone()),
    };
    table(generation).put(&key, &value, Put::Any).unwrap();
}

/// Programs of this generation run, and nothing is left of the other, nor of what is done in between.
fn only_of(generation: u32, when: &str) {
    for other in [PRESENT, NEXT] {
        let path = directory().join(format!("v{other}/CONNECTIONS"));
        assert_eq!(path.exists(), other == generation, "{when}");
        assert!(!path.with_file_name("CONNECTIONS_next").exists(), "{when}");
        let id = table(generation).info().id;
        let recorded = Recorded::read(directory());
        let moves = recorded.moves(expected(other).place(), id, &expected(PRESENT));
        let is_noted = moves.is_some();
        assert_eq!(is_noted, other == generation, "{when}");
    }
    for other in [PRESENT, NEXT] {
        let directory = directory().join(format!("v{other}"));
        assert_eq!(directory.exists(), generation == other, "{when}");
    }
    let config = maps::config::pinned(directory()).unwrap().unwrap();
    assert_eq!(config.generation(), generation, "{when}");
    assert_eq!(config.flags & (FLAG_CARRYING | FLAG_MIXED), 0, "{when}");
}

fn node() -> Namespace {
    Namespace::new("node", Lifetime::Process).unwrap()
}

fn inside(node: &Namespace, run: &(dyn Fn() + Sync)) {
    let whole = || {
        run();
        Ok(())
    };
    node.run(whole).unwrap();
}

/// What was carried to a map, what was lost and what was garbage.
fn counts(datapath: &Datapath) -> (u64, u64, u64) {
    let transition = lock(&datapath.transition);
    let carries = &transition.as_ref().unwrap().carries;
    let of_table = |carry: &&Carry| carry.name == "CONNECTIONS";
    let carry = carries.iter().find(of_table).unwrap();
    let others = carries.iter().filter(|carry| !of_table(carry));
    assert!(
        others
            .map(|other| other.carried)
            .all(|carried| carried == 0)
    );
    (carry.carried, carry.lost, carry.garbage)
}

#[test]
fn entries_go_up_by_a_function_and_down_by_the_names_of_their_fields() {
    let there_and_back = || {
        let config = config(None);
        settle(&start(PRESENT, &config));
        let all: Entries = (0..1000).map(entry).collect();
        all.clone()
            .into_iter()
            .for_each(|entry| put(PRESENT, &entry));
        let (mut odd, value) = entry(7);
        odd[0] = 1;
        put(PRESENT, &(odd, value));
        for (generation, before, garbage) in
            [(NEXT, PRESENT, 1), (PRESENT, NEXT, 0), (NEXT, PRESENT, 0)]
        {
            let when = format!("towards {generation}");
            let datapath = start(generation, &config);
            assert_eq!(counts(&datapath), (1000, 0, garbage), "{when}");
            assert_eq!(entries(generation), all, "{when}");
            // Programs of pods may still use it.
            assert_eq!(
                entries(before).len(),
                1000 + usize::from(garbage == 1),
                "{when}"
            );
            let flags = maps::config::pinned(directory()).unwrap().unwrap().flags;
            assert_eq!(flags & (FLAG_CARRYING | FLAG_MIXED), FLAG_MIXED, "{when}");
            put(before, &entry(5000));
            put(generation, &entry(5001));
            settle(&datapath);
            let mut more = all.clone();
            more.extend([5000, 5001].map(entry));
            assert_eq!(entries(generation), more, "{when}");
            only_of(generation, &when);
            for late in [5000, 5001] {
                table(generation).remove(&entry(late).0).unwrap();
            }
        }
        Ok(())
    };
    node().run(there_and_back).unwrap();
}

#[test]
fn a_smaller_table_of_another_layout_takes_what_fits() {
    let run = || {
        settle(&start(PRESENT, &config(None)));
        (0..5000).for_each(|number| put(PRESENT, &entry(number)));
        let mut before = 5000;
        for (generation, size) in [(NEXT, 1000), (PRESENT, 100)] {
            let datapath = start(generation, &config(Some(size)));
            let (carried, lost, garbage) = counts(&datapath);
            // The kernel may give some more than it was asked for, one for each processor.
            let sizes = u64::from(size)..u64::from(size) + 100;
            assert!(sizes.contains(&carried), "{carried}");
            assert_eq!((carried + lost, garbage), (before, 0));
            before = entries(generation).len() as u64;
            assert_eq!(before, carried);
            settle(&datapath);
            only_of(generation, "another size");
        }
        Ok(())
    };
    node().run(run).unwrap();
}

/// Which generation the process is of that is killed.
const TOWARDS: &str = "SINABRO_TEST_TOWARDS";
/// And for how many connections it has room, if not as many as by itself.
const SIZED: &str = "SINABRO_TEST_SIZE";

/// Either follows it, and what either's programs wrote meanwhile is there.
#[test]
fn killed_between_two_steps_all_of_it_arrives_with_either_version() {
    let node = node();
    let run = |run: &(dyn Fn() + Sync)| inside(&node, run);
    let config = config(None);
    let mut all: Entries = (0..100).map(entry).collect();
    run(&|| {
        settle(&start(PRESENT, &config));
        all.clone()
            .into_iter()
            .for_each(|entry| put(PRESENT, &entry));
    });
    // From where to where, and to where it goes after that.
    let rounds = [
        (PRESENT, NEXT, PRESENT),
        (PRESENT, NEXT, NEXT),
        (NEXT, PRESENT, NEXT),
        (NEXT, PRESENT, PRESENT),
    ];
    let mut late = 1000;
    for point in fail_point::CARRYING {
        for (from, to, left) in rounds {
            let when = format!("killed at {point} towards {to}, then {left}");
            dies(&node, point, to, None, &when);
            // No program that ran when it was killed uses what was only made.
            let tables = if *point == "carried" {
                &[from][..]
            } else {
                &[from, to]
            };
            for table in tables {
                late += 1;
                run(&|| put(*table, &entry(late)));
                all.extend([entry(late)]);
            }
            run(&|| {
                settle(&start(left, &config));
                assert!(entries(left) == all, "{when}");
                only_of(left, &when);
            });
        }
    }
}

/// The same where tables differ in their size: the one that is made has the pin of the other before programs use it.
#[test]
fn killed_between_two_steps_a_table_of_another_size_has_what_was_in_the_one_before() {
    let node = node();
    let run = |run: &(dyn Fn() + Sync)| inside(&node, run);
    let [small, large] = [1000, 2000].map(|size| config(Some(size)));
    let mut all: Entries = (0..100).map(entry).collect();
    run(&|| {
        settle(&start(PRESENT, &small));
        all.clone()
            .into_iter()
            .for_each(|entry| put(PRESENT, &entry));
    });
    let mut late = 1000;
    for point in fail_point::CARRYING {
        for follows in [&small, &large] {
            let size = follows.connections.unwrap();
            let when = format!("killed at {point}, then {size}");
            dies(&node, point, PRESENT, large.connections, &when);
            if *point != "carried" {
                late += 1;
                run(&|| put(PRESENT, &entry(late)));
                all.extend([entry(late)]);
            }
            run(&|| {
                settle(&start(PRESENT, follows));
                assert!(entries(PRESENT) == all, "{when}");
                only_of(PRESENT, &when);
                assert_eq!(table(PRESENT).info().max_entries, size, "{when}");
                settle(&start(PRESENT, &small));
            });
        }
    }
}

/// An agent that comes to a point.
fn dies(node: &Namespace, point: &str, towards: u32, size: Option<u32>, when: &str) {
    let mut dies = Command::new(env::current_exe().unwrap());
    dies.args(["--exact", "datapath::transition::tests::child_dies"])
        .args(["--ignored", "--nocapture"])
        .env(fail_point::VARIABLE, point)
        .env(TOWARDS, towards.to_string())
        .stdout(Stdio::null());
    if let Some(size) = size {
        dies.env(SIZED, size.to_string());
    }
    let end = node.spawn(dies).unwrap().wait().unwrap();
    assert_eq!(end.signal(), Some(9), "{when}: {end}");
}

#[test]
#[ignore = "run by killed_between_two_steps_* in a process of its own"]
fn child_dies() {
    let towards = env::var(TOWARDS).unwrap().parse().unwrap();
    let size = env::var(SIZED).ok().map(|size| size.parse().unwrap());
    settle(&start(towards, &config(size)));
}

proptest! {
    #[test]
    fn what_a_function_made_comes_back_by_names(
        key in vec(any::<u8>(), KEY), value in vec(any::<u8>(), SIZE),
    ) {
        let fields = [OF_KEY, OF_VALUE].map(|part| expected(NEXT).spans(part).into_iter().collect());
        let moves = Moves::new(fields, &expected(PRESENT)).unwrap();
        if let Some((up_key, up_value)) = up(&key, &value) {
            prop_assert_eq!(&up_value[SIZE - TIME..], &value[..TIME]);
            prop_assert_eq!(moves.entry(&up_key, &up_value), Some((key, value)));
        }
    }
}
