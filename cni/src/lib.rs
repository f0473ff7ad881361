//! The CNI plugin `sinabro`: `/opt/cni/bin/sinabro`, started by the container runtime for every
//! verb, gone again in milliseconds.
//!
//! In reading order:
//! - [`env`], [`input`], [`conf`], [`spec`]: what the runtime asks, parsed strictly;
//! - [`verb`]: one file per verb; ADD is the line to follow;
//! - [`agent_client`]: the node agent leases addresses and runs the data path;
//! - [`pod_link`]: the veth pair, its addresses, neighbours and routes;
//! - [`undo`]: takes back what a failed ADD made;
//! - [`result`], [`error`]: what the runtime gets.
//!
//! One invariant holds for all of it: stdout gets exactly one JSON document or nothing, and the
//! exit code is not zero exactly if that document is an error.

pub mod agent_client;
pub mod conf;
pub mod env;
pub mod error;
pub mod input;
pub mod pod_link;
pub mod result;
pub mod spec;
pub mod undo;
pub mod unsent;
pub mod verb;

use crate::{
    conf::Conf,
    env::{Command, Lookup},
    error::{Code, Error},
    spec::SpecVersion,
};
use std::io::{Read, Write};

/// Runs the verb that the environment asks for. The return value is the exit code.
pub fn run(get: Lookup, input: impl Read, output: &mut impl Write) -> u8 {
    // The command comes first: without one there is nobody who would end stdin.
    let command = match env::command(get) {
        Ok(command) => command,
        Err(error) => return print_error(output, &error, SpecVersion::LATEST),
    };
    let input = match input::read(input) {
        Ok(input) => input,
        Err(error) => return print_error(output, &error, SpecVersion::LATEST),
    };
    match answer(command, get, &input) {
        Ok(document) => match write(output, &document) {
            Ok(()) => 0,
            Err(error) => {
                // A runtime that did not get the result does not know the pod: take it back.
                if command == Command::Add {
                    let _ = answer(Command::Del, get, &input);
                }
                eprintln!("sinabro: result cannot be written to stdout: {error}");
                1
            }
        },
        Err(error) => {
            // The version asked for, as far as it is one that has this error format.
            let version = input::peek_version(&input)
                .and_then(|text| SpecVersion::parse(&text))
                .unwrap_or(SpecVersion::LATEST);
            print_error(output, &error, version)
        }
    }
}

/// The document to print, empty if the verb prints none.
fn answer(command: Command, get: Lookup, input: &[u8]) -> Result<String, Error> {
    match command {
        Command::Version => Ok(verb::version::run(input)),
        Command::Add => {
            let target = env::target(get, true)?;
            let args = env::args(get)?;
            let conf = Conf::parse(input)?;
            verb::add::run(&conf, &target, args)
        }
        Command::Del => {
            let target = env::target(get, false)?;
            let conf = Conf::parse(input)?;
            verb::del::run(&conf, &target.owner).map(|()| String::new())
        }
        Command::Check => {
            let target = env::target(get, true)?;
            let conf = Conf::parse(input)?;
            knows(conf.version.has_check(), "CHECK", &conf)?;
            verb::check::run(&conf, &target).map(|()| String::new())
        }
        Command::Gc => {
            env::require_path(get)?;
            let conf = Conf::parse(input)?;
            knows(conf.version.has_gc_and_status(), "GC", &conf)?;
            verb::gc::run(&conf).map(|()| String::new())
        }
        Command::Status => {
            let conf = Conf::parse(input)?;
            knows(conf.version.has_gc_and_status(), "STATUS", &conf)?;
            verb::status::run(&conf).map(|()| String::new())
        }
    }
}

fn knows(known: bool, verb: &str, conf: &Conf) -> Result<(), Error> {
    if known {
        return Ok(());
    }
    Err(Error::new(
        Code::IncompatibleVersion,
        format!("cniVersion {} has no {verb}", conf.version),
    ))
}

fn print_error(output: &mut impl Write, error: &Error, version: SpecVersion) -> u8 {
    if let Err(broken) = write(output, &error.to_json(version)) {
        eprintln!("sinabro: {error} (and stdout cannot be written: {broken})");
    }
    1
}

fn write(output: &mut impl Write, document: &str) -> std::io::Result<()> {
    if document.is_empty() {
        return Ok(());
    }
    output.write_all(format!("{document}\n").as_bytes())?;
    output.flush()
}
