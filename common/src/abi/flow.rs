//! What has the programs judge a flow anew that they have judged before: how that went they remember for a while.
//!
//! Map `FLOW_EPOCHS`, array of [`FLOW_EPOCHS`]: u32, numbers that are raised and mean nothing by themselves. The first is the agent's:
//! raised after it has changed anything that says where packets between pods go, or who may send them. Each other one is raised once a
//! connection has a record whose ends have that place ([`crate::algo::flow`]).

use crate::algo::flow::PLACES;

/// The agent's number, and one for each place.
pub const FLOW_EPOCHS: u32 = PLACES + 1;
/// Where the agent's is.
pub const OF_AGENT: u32 = 0;

/// Where the number of a place is.
#[inline(always)]
#[must_use]
pub const fn epoch_of(place: u32) -> u32 {
    1 + place
}
