//! Entry point of the CNI plugin; everything is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(sinabro_cni::run(
        &|name| std::env::var_os(name),
        std::io::stdin().lock(),
        &mut std::io::stdout(),
    ))
}
