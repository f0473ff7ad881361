//! Which translated ports to try for a new flow, in which order.

/// Attempts before a flow is refused. With half of the range taken the chance that all fail is
/// 2⁻³², with 90 % taken 3 %.
pub const ATTEMPTS: u32 = 32;

/// The port to try at `attempt` (from 0), within `min..=max`, host order.
///
/// The pod's own port comes first where it lies in the range, so that a quiet node keeps ports
/// as they are; then a walk from a place that depends on the flow, with a stride that is odd
/// and depends on the flow too, so that two flows do not follow each other.
#[inline(always)]
pub const fn candidate(flow_hash: u64, own_port: u16, attempt: u32, min: u16, max: u16) -> u16 {
    let (min, max) = if min <= max { (min, max) } else { (max, min) };
    if attempt == 0 && own_port >= min && own_port <= max {
        return own_port;
    }
    let size = (max - min) as u64 + 1;
    let start = flow_hash & 0xffff_ffff;
    let stride = (flow_hash >> 32) | 1;
    let step = (start + stride * attempt as u64) % size;
    min + step as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stays_in_range(hash: u64, own: u16, attempt in 0..ATTEMPTS, a: u16, b: u16) {
            let (min, max) = (a.min(b), a.max(b));
            let port = candidate(hash, own, attempt, a, b);
            prop_assert!((min..=max).contains(&port));
        }

        #[test]
        fn keeps_the_own_port_when_it_may(hash: u64, own in 61000u16..) {
            prop_assert_eq!(candidate(hash, own, 0, 61000, 65535), own);
        }

        #[test]
        fn tries_different_ports(hash: u64) {
            let tried: std::collections::HashSet<u16> =
                (0..ATTEMPTS).map(|n| candidate(hash, 0, n, 61000, 65535)).collect();
            // A stride that shares a factor with the size of the range repeats early; it must
            // not collapse to a handful.
            prop_assert!(tried.len() >= 3, "{} ports", tried.len());
        }
    }
}
