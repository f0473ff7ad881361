//! What the demo shows, one test each: real agents, the real plugin, real traffic.

use sinabro_lab::{
    Binaries, Lab, Lifetime,
    checks::{CHECKS, Check, Scene, service},
    for_each_check,
};
use std::sync::LazyLock;

/// Two nodes with pods, shared by all tests; the kernel removes them with this process.
static SCENE: LazyLock<Result<Scene, String>> = LazyLock::new(|| {
    let scene = || {
        let lab = Lab::new(Binaries::find()?, 2, Lifetime::Process)?;
        service::start(&lab)?;
        Scene::new(lab)
    };
    scene().map_err(|error| format!("{error:#}"))
});

fn check(name: &str) {
    let scene = SCENE
        .as_ref()
        .unwrap_or_else(|error| panic!("no scene: {error}"));
    match Check::by_name(name).unwrap().run(scene) {
        Ok(detail) => println!("{detail}"),
        Err(error) => panic!(
            "{error:#}\n--- log of n1:\n{}\n--- log of n2:\n{}",
            scene.node(1).log(),
            scene.node(2).log()
        ),
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*
    };
}

for_each_check!(tests);

#[test]
fn names_are_unique() {
    for (number, check) in CHECKS.iter().enumerate() {
        assert!(
            CHECKS[number + 1..]
                .iter()
                .all(|other| other.name != check.name)
        );
    }
}
