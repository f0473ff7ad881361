//! `sinabroctl verify`.

use crate::{
    ctl::{Common, Exit, places::PlaceFlags, print, table::Table},
    datapath,
};
use sinabro_common::api::VerifyReport;

pub fn run(common: &Common, places: &PlaceFlags) -> anyhow::Result<Exit> {
    let places = places.resolve()?;
    let report = datapath::verify(&places.bpf_dir, places.cgroup_dir.as_deref())?;
    print(common, &report, text)?;
    let is_refused = report.programs.iter().any(|row| row.required && !row.ok);
    Ok(match is_refused {
        false => Exit::Well,
        true => Exit::Problem,
    })
}

fn text(report: &VerifyReport) -> String {
    let number = |count: Option<u32>| count.map(|count| count.to_string()).unwrap_or_default();
    let mut table = Table::new(["PROGRAM", "MODE", "INSTRUCTIONS", "BYTES", "RESULT"]);
    for row in &report.programs {
        let result = match (row.ok, row.required) {
            (true, _) => "ok",
            (false, true) => "refused",
            (false, false) => "refused, the node does without",
        };
        table.row([
            row.name.clone(),
            row.mode.clone(),
            number(row.instructions),
            number(row.jited),
            result.into(),
        ]);
    }
    let mut text = format!("Linux {}\n\n{}", report.kernel, table.render());
    for row in report.programs.iter().filter(|row| !row.detail.is_empty()) {
        text += &format!("\n{} ({}): {}\n", row.name, row.mode, row.detail.trim_end());
    }
    text
}
