//! eBPF programs that the kernel refused, and what runs in their place.

use super::trouble;
use crate::{
    acceleration::self_test::SelfTest,
    datapath::{Choice, Datapath, Level},
};
use sinabro_common::api::{Trouble, Verdict};

/// What is wrong with the programs of the acceleration. A kernel that cannot accelerate is no
/// trouble.
pub fn acceleration(datapath: &Datapath, self_test: &SelfTest) -> Option<Trouble> {
    let found = self_test.found()?;
    if found.verdict != Verdict::Accelerate {
        return None;
    }
    let why = datapath.acceleration_refused()?;
    Some(trouble(
        "AccelerationRefused",
        format!(
            "TCP is not accelerated on this node, although the self-test found that it can be: {why}; pods' connections go through the kernel's TCP"
        ),
    ))
}

/// Of the programs of interfaces, if they are not this version's.
pub fn classifiers(choice: &Choice) -> Option<Trouble> {
    let why = choice.why();
    let next = "send what `sinabroctl debug` writes to Sinabro's developers, and go back to the version before or to the kernel before";
    Some(match choice.level {
        Level::Current => return None,
        Level::LastGood => trouble(
            "ProgramsRefused",
            format!(
                "the kernel refused this version's programs; those of version {}, which ran last, are used and do all they did: {why}; {next}",
                choice.version
            ),
        ),
        Level::Reduced => trouble(
            "ProgramsReduced",
            format!(
                "the kernel refused programs; pods are served without redirection between pods of this node and without acceleration of TCP: {why}; {next}"
            ),
        ),
        Level::None if choice.ran => trouble(
            "ProgramsMissing",
            format!(
                "the kernel refused this version's programs; those of before go on for the pods that there are, and no new pod can be started: {why}; {next}"
            ),
        ),
        Level::None => trouble(
            "ProgramsMissing",
            format!(
                "the kernel refused every program: nothing keeps pods from using others' addresses, nothing is masqueraded, tunnels are not checked: {why}; {next}"
            ),
        ),
    })
}
