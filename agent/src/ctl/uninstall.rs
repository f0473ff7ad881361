//! `sinabroctl uninstall`.

use crate::ctl::{Common, Exit, places::PlaceFlags, print};
use crate::uninstall::{self, Uninstalled};

pub fn run(common: &Common, places: &PlaceFlags) -> anyhow::Result<Exit> {
    let done = uninstall::uninstall(&places.resolve()?)?;
    print(common, &done, text)?;
    Ok(match done.problems.is_empty() {
        true => Exit::Well,
        false => Exit::Problem,
    })
}

fn text(done: &Uninstalled) -> String {
    let lines = |head: &'static str, texts: &[String]| -> String {
        texts.iter().map(|text| format!("{head}{text}\n")).collect()
    };
    let text = [
        lines("removed ", &done.removed),
        lines("left: ", &done.left),
        lines("failed: ", &done.problems),
    ]
    .concat();
    match text.is_empty() {
        true => "nothing to do: there is nothing of Sinabro on this node\n".into(),
        false => text,
    }
}
