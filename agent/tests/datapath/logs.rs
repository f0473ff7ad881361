//! What programs say in words, from the kernel to `tracing`.

use crate::kit;
use sinabro_agent::datapath::{Datapath, DatapathConfig};
use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
    time::Instant,
};

/// Where lines are written to.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines that the agent logs when it passes on what programs said since the last time.
fn forwarded(datapath: &Datapath) -> Vec<String> {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .without_time()
        .with_ansi(false)
        .with_target(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || datapath.forward_logs());
    let bytes = lines.0.lock().unwrap().clone();
    let text = String::from_utf8(bytes).unwrap();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

/// Whatever happened however often since `began` was said in this line, at most once in ten
/// seconds, and is not said again.
pub fn assert_said_rarely(datapath: &Datapath, began: Instant, line: &str) {
    let said = forwarded(datapath);
    let most = 1 + began.elapsed().as_secs() as usize / 10;
    assert!((1..=most).contains(&said.len()), "{said:?}");
    assert!(said.iter().all(|said| said == line), "{said:?}");
    assert_eq!(forwarded(datapath), Vec::<String>::new());
}

/// Pins are for what must outlive the agent; records need not.
#[test]
fn records_are_not_pinned() {
    kit::fresh(|| {
        let datapath = kit::load_with(&DatapathConfig {
            acceleration: true,
            ..kit::config()
        });
        assert_eq!(forwarded(&datapath), Vec::<String>::new());
        let names: Vec<_> = std::fs::read_dir(sinabro_common::names::BPF_DIR)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let accelerates = kit::unaccelerated().is_none();
        assert_eq!(
            names.iter().any(|name| name == "SOCKETS"),
            accelerates,
            "{names:?}"
        );
        for name in ["AYA_LOGS", "LOGGED_AT"] {
            assert!(!names.iter().any(|pin| pin == name), "{names:?}");
        }
    });
}
