//! What the programs say in words, passed on to `tracing`.
//!
//! Programs log rarely (`agent-ebpf/src/rare.rs`), so their buffers are looked at now and then
//! rather than waited for, and are small: a record takes 256 or 512 bytes of one. They are not
//! pinned: what the programs of an agent before said and nobody read is gone with them.

use super::DatapathError;
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use log::{Level, Log, Metadata, Record};

/// The map of records that `aya-log-ebpf` declares.
const RECORDS: &str = "AYA_LOGS";

/// Bytes of a buffer, rounded up to a page by the loader.
const BUFFER: u32 = 4096;

/// The records of one object's programs.
pub type Reader = EbpfLogger<ToTracing>;

/// To be called before any object is loaded.
pub fn configure(loader: &mut EbpfLoader<'_>) {
    loader.map_max_entries(RECORDS, BUFFER);
}

/// Takes the records of a loaded object whose programs log.
pub fn reader(ebpf: &mut Ebpf) -> Result<Reader, DatapathError> {
    EbpfLogger::init_with_logger(ebpf, ToTracing).map_err(|source| DatapathError::Log {
        source: Box::new(source),
    })
}

/// Gives each record to `tracing` with the object it is of.
pub struct ToTracing;

impl Log for ToTracing {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let (object, text) = (record.target(), record.args());
        match record.level() {
            Level::Error => tracing::error!(object, "{text}"),
            Level::Warn => tracing::warn!(object, "{text}"),
            Level::Info => tracing::info!(object, "{text}"),
            Level::Debug => tracing::debug!(object, "{text}"),
            Level::Trace => tracing::trace!(object, "{text}"),
        }
    }

    fn flush(&self) {}
}
