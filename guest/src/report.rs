//! The serial port for messages.

use anyhow::{Context as _, Result};
use nix::sys::termios::{SetArg, cfmakeraw, tcdrain, tcgetattr, tcsetattr};
use sinabro_guest::{Check, MESSAGE_PORT, Message};
use std::{
    fs::{File, OpenOptions},
    io::Write as _,
};

pub struct Report {
    port: File,
}

impl Report {
    pub fn open() -> Result<Self> {
        let open = || -> Result<File> {
            let port = OpenOptions::new()
                .write(true)
                .read(true)
                .open(MESSAGE_PORT)?;
            let mut settings = tcgetattr(&port)?;
            cfmakeraw(&mut settings);
            tcsetattr(&port, SetArg::TCSANOW, &settings)?;
            Ok(port)
        };
        let port = open().with_context(|| format!("cannot open {MESSAGE_PORT}"))?;
        Ok(Self { port })
    }

    pub fn say(&mut self, message: &Message) -> Result<()> {
        self.port.write_all(message.to_line()?.as_bytes())?;
        // The machine may end at any moment.
        Ok(tcdrain(&self.port)?)
    }

    pub fn doing(&mut self, what: &str) -> Result<()> {
        self.say(&Message::Doing(what.into()))
    }

    /// Says what came of a check.
    pub fn check(&mut self, name: &str, outcome: Result<String>) -> Result<()> {
        self.say(&Message::Check(Check {
            name: name.into(),
            ok: outcome.is_ok(),
            detail: outcome.unwrap_or_else(|error| format!("{error:#}")),
        }))
    }
}
