//! `sinabroctl` as a program of its own: [`sinabro_agent::ctl`].

use std::process::ExitCode;

fn main() -> ExitCode {
    sinabro_agent::ctl::main()
}
