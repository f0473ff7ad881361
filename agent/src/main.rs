//! `sinabro-agent`: arguments → settings → log → runtime → [`sinabro_agent::run`].
//!
//! Called `sinabroctl`, it is that: in the image the second is a link to the first, because they
//! have most of their code in common.

use anyhow::Context as _;
use sinabro_agent::{
    config::{ConfigError, LogFormat, Settings},
    ctl, memory, run,
    telemetry::recent_log::RECENT,
};
use std::{
    ffi::OsStr,
    io::{IsTerminal as _, stderr},
    path::Path,
    process::ExitCode,
};
use tracing_subscriber::{EnvFilter, fmt::writer::MakeWriterExt as _};

/// Exit status for settings that are wrong, as of clap and of the shell's own usage errors.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let called = std::env::args_os().next();
    let name = called.as_deref().map(Path::new).and_then(Path::file_name);
    if name == Some(OsStr::new(ctl::NAME)) {
        return ctl::main();
    }
    let settings = match Settings::load(std::env::args_os()) {
        Ok(settings) => settings,
        // Help, version, or wrong flags: clap knows where to print and how to exit.
        Err(ConfigError::Flags(error)) => error.exit(),
        Err(error) => {
            eprintln!("error: {:#}", anyhow::Error::from(error));
            return ExitCode::from(USAGE);
        }
    };
    match start(settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(settings: Settings) -> anyhow::Result<()> {
    start_log(&settings)?;
    memory::bound();
    // Almost all work is short; what blocks runs on the pool, a thread for each of a burst of
    // pods, and threads end when the burst is over.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .thread_name("sinabro")
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let outcome = runtime.block_on(run::run(settings));
    // Blocking work that hangs in the kernel must not hold up the exit.
    runtime.shutdown_background();
    outcome
}

fn start_log(settings: &Settings) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&settings.log_level)
        .with_context(|| format!("log level {}", settings.log_level))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr.and(&RECENT))
        .with_ansi(stderr().is_terminal());
    match settings.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    Ok(())
}
