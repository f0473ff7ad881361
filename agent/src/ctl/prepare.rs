//! `sinabroctl prepare`.

use crate::ctl::{Common, Exit, places::PlaceFlags, print};
use crate::prepare::{self, Prepared};

pub fn run(common: &Common, places: &PlaceFlags) -> anyhow::Result<Exit> {
    let places = places.resolve()?;
    let mut prepared = prepare::bpffs(&places.bpf_dir)?;
    let sysctls = prepare::sysctls(&places.uplinks);
    let done = sysctls.map(|sysctls| {
        prepared.add(sysctls);
        prepared.add(prepare::self_test(&places));
    });
    // What was mounted stays, also if no more could be done.
    if done.is_ok() || prepared != Prepared::default() {
        print(common, &prepared, text)?;
    }
    done?;
    Ok(Exit::Well)
}

fn text(prepared: &Prepared) -> String {
    let warnings = prepared
        .warnings
        .iter()
        .map(|text| format!("warning: {text}\n"));
    let changes = prepared.changes.iter().map(|text| format!("{text}\n"));
    let text: String = changes.chain(warnings).collect();
    match text.is_empty() {
        true => "nothing to do: the node is prepared\n".into(),
        false => text,
    }
}
