//! How large packets are where they leave a place or arrive, those of tunnels with all that is around them: whether any was
//! larger than may be there, or had to be cut.

use super::{
    offload,
    packet::interface,
    tally::{Kind, Tally},
};
use crate::place::Place;
use anyhow::{Result, ensure};

/// Counters of packets that may not be, and of those that are as large as can be, which show that the others see.
pub struct Sizes {
    name: String,
    wrong: [Tally; 2],
    full: Tally,
}

impl Sizes {
    /// Watches a link whose packets are there as the next one gets them.
    pub fn watch(place: &Place, link: &str, mtu: usize) -> Result<Self> {
        let interface = interface(place, link)?;
        let tally = |kind| Tally::start(place, interface, kind);
        Ok(Self {
            name: format!("{link} of {}", place.name()),
            wrong: [tally(Kind::LargerThan(mtu))?, tally(Kind::Fragment)?],
            full: tally(Kind::AsLargeAs(mtu))?,
        })
    }

    /// The same, and has the link [send packets](offload::cut_before) as they are on the wire.
    pub fn cut(place: &Place, link: &str, mtu: usize) -> Result<Self> {
        offload::cut_before(place, link)?;
        Self::watch(place, link, mtu)
    }

    /// Full packets since the last time.
    ///
    /// # Errors
    /// If there was any that may not be.
    pub fn full(&self) -> Result<u32> {
        let [larger, fragments] = [self.wrong[0].count()?, self.wrong[1].count()?];
        ensure!(
            larger == 0 && fragments == 0,
            "{}: {larger} packets too large, {fragments} fragments",
            self.name
        );
        self.full.count()
    }
}
