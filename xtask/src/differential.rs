//! `cargo xtask differential`: what Services lead to, compared with kube-proxy's own code (`agent/tests/kube_proxy`).

use crate::{
    cluster::components,
    setup,
    workspace::{cargo_with_ebpf, run as show},
};
use anyhow::{Context as _, Result};
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Options {
    /// How many random Services
    #[arg(long, value_name = "NUMBER", default_value_t = 5_000)]
    cases: u32,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure(setup::TEST)?;
    let program = components::ensure_proxied()?;
    show(
        // Of the workspace, as `cargo xtask test` builds it: of its package alone cargo would choose other features of what it
        // uses, and compile that twice.
        cargo_with_ebpf()
            .args(["test", "--workspace", "--exclude", "sinabro-ebpf"])
            .args(["--test", "kube_proxy"])
            .args(["--", "--nocapture"])
            .env("SINABRO_PROXIED", program)
            .env("SINABRO_PROXIED_CASES", options.cases.to_string()),
    )
    .context("a Service leads elsewhere than with kube-proxy")?;
    Ok(ExitCode::SUCCESS)
}
