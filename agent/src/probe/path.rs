//! How large packets may be that get to a peer and back.

/// A search is over when it is known to so many bytes.
const EXACT: u32 = 8;
/// Requests of one size that are lost before it counts as too large.
const TRIES: u32 = 3;
/// Every path takes these: less than the least an IPv4 host must take whole, RFC 791 section 3.1.
const SMALL: u32 = 500;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    Unknown,
    /// Packets of the overlay's MTU get through.
    Whole,
    /// So many in a row were lost.
    Losing(u32),
    /// They do not; which do is being found out.
    Searched(Search),
    /// They do not; the largest that do, if it was found out.
    Narrow(Option<u32>),
}

impl Path {
    pub fn is_searched(&self) -> bool {
        matches!(self, Self::Searched(_))
    }

    /// Whether packets of the overlay's MTU are lost.
    pub fn is_narrow(&self) -> bool {
        matches!(self, Self::Searched(_) | Self::Narrow(_))
    }

    pub fn largest(&self) -> Option<u32> {
        match self {
            Self::Narrow(largest) => *largest,
            _ => None,
        }
    }
}

/// A search by halves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Search {
    passes: u32,
    lost: u32,
    tries: u32,
}

impl Search {
    /// For the largest size below one that is lost.
    pub fn below(lost: u32) -> Self {
        Self {
            passes: SMALL.min(lost),
            lost,
            tries: 0,
        }
    }

    pub fn next(&self) -> u32 {
        self.passes + (self.lost - self.passes) / 2
    }

    /// A packet got through; the result, if that ends it.
    pub fn passed(&mut self, packet: u32) -> Option<u32> {
        self.tries = 0;
        self.passes = self.passes.max(packet.min(self.lost));
        self.found()
    }

    /// A packet was lost.
    pub fn lost(&mut self, packet: u32) -> Option<u32> {
        self.tries += 1;
        if self.tries >= TRIES {
            self.tries = 0;
            self.lost = self.lost.min(packet.max(self.passes));
        }
        self.found()
    }

    fn found(&self) -> Option<u32> {
        (self.lost - self.passes <= EXACT).then_some(self.passes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_size_that_passes_is_found_from_below(mtu in 1280u32..65_535, passes in 500u32..65_535) {
            let passes = passes.min(mtu - 1);
            let mut search = Search::below(mtu);
            for _ in 0..40 {
                let packet = search.next();
                let found = match packet <= passes {
                    true => search.passed(packet),
                    false => search.lost(packet),
                };
                if let Some(found) = found {
                    prop_assert!(found <= passes && passes - found < EXACT, "{found} {passes}");
                    return Ok(());
                }
            }
            prop_assert!(false, "{search:?} does not end");
        }
    }
}
