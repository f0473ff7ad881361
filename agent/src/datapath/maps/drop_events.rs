//! `DROP_EVENTS`: packets that were dropped, as an object's programs tell of them.

use super::error;
use crate::datapath::DatapathError;
use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use sinabro_common::abi::drop::DropEvent;
use std::os::fd::{AsRawFd, RawFd};

const NAME: &str = "DROP_EVENTS";

/// What one object's programs tell. Readable, in the words of poll(2), once there is something.
pub struct DropEvents(RingBuf<MapData>);

impl DropEvents {
    /// None if the object's programs tell nothing: they may be an earlier version's.
    pub fn take(ebpf: &mut Ebpf) -> Result<Option<Self>, DatapathError> {
        let map = ebpf.take_map(NAME).map(RingBuf::try_from).transpose();
        Ok(map.map_err(error(NAME, "opening"))?.map(Self))
    }

    /// The oldest that is not taken yet.
    pub fn next_event(&mut self) -> Option<DropEvent> {
        loop {
            let item = self.0.next()?;
            if item.len() == size_of::<DropEvent>() {
                // SAFETY: as long as the type, as just checked, which takes any bytes (`aya::Pod`).
                return Some(unsafe { item.as_ptr().cast::<DropEvent>().read_unaligned() });
            }
        }
    }
}

impl AsRawFd for DropEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
