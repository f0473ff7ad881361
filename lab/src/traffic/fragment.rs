//! Packets in parts (RFC 791 §3.2, RFC 8200 §4.5), cut where and sent in which order the caller likes.

use super::packet::checksum;
use anyhow::{Result, bail};
use std::ops::Range;

const ETH: usize = 14;
const IP4: usize = 20;
const IP6: usize = 40;
const FRAGMENT_HEADER: u8 = 44;

/// Cuts a frame's packet, which has no options, after every so many bytes: a multiple of eight.
pub fn cut(frame: &[u8], id: u32, size: usize) -> Result<Vec<Vec<u8>>> {
    let len = body(frame)?.len();
    let starts = (0..len).step_by(size);
    let ranges: Vec<_> = starts.map(|at| at..(at + size).min(len)).collect();
    cut_at(frame, id, &ranges)
}

/// Fragments of a frame's packet that have these bytes of what lies behind the IP header. Ranges may
/// overlap, and need not be all of it; each begins at a multiple of eight.
pub fn cut_at(frame: &[u8], id: u32, ranges: &[Range<usize>]) -> Result<Vec<Vec<u8>>> {
    let body = body(frame)?;
    let fragment = |range: &Range<usize>| -> Result<Vec<u8>> {
        let Some(part) = body
            .get(range.clone())
            .filter(|_| range.start.is_multiple_of(8))
        else {
            bail!("there is no fragment {range:?} of {} bytes", body.len());
        };
        let more = u16::from(range.end < body.len());
        Ok(match frame[ETH] >> 4 {
            4 => {
                let mut header = frame[ETH..ETH + IP4].to_vec();
                header[2..4].copy_from_slice(&((IP4 + part.len()) as u16).to_be_bytes());
                header[4..6].copy_from_slice(&(id as u16).to_be_bytes());
                let offset = (range.start / 8) as u16 | more << 13;
                header[6..8].copy_from_slice(&offset.to_be_bytes());
                header[10..12].fill(0);
                let sum = checksum(&[&header]);
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                [&frame[..ETH], &header, part].concat()
            }
            _ => {
                let mut header = frame[ETH..ETH + IP6].to_vec();
                header[4..6].copy_from_slice(&((8 + part.len()) as u16).to_be_bytes());
                let next = std::mem::replace(&mut header[6], FRAGMENT_HEADER);
                header.extend_from_slice(&[next, 0]);
                header.extend_from_slice(&(range.start as u16 | more).to_be_bytes());
                header.extend_from_slice(&id.to_be_bytes());
                [&frame[..ETH], &header, part].concat()
            }
        })
    };
    ranges.iter().map(fragment).collect()
}

/// What lies behind the IP header.
fn body(frame: &[u8]) -> Result<&[u8]> {
    let body = match frame.get(ETH) {
        Some(0x45) => frame.get(ETH + IP4..),
        Some(first) if first >> 4 == 6 => frame.get(ETH + IP6..),
        _ => None,
    };
    match body {
        Some(body) => Ok(body),
        None => bail!("not a frame with an IP packet without options"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::packet::Datagram, *};

    fn frame(src: &str, dst: &str) -> Vec<u8> {
        let datagram = Datagram {
            src_mac: [2; 6],
            dst_mac: [4; 6],
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            dst_port: 9,
            payload: &[7; 100],
            may_be_cut: true,
        };
        datagram.frame().unwrap()
    }

    #[test]
    fn parts_say_where_they_belong() {
        let parts = cut(&frame("10.0.0.1", "10.0.0.2"), 0x1234, 48).unwrap();
        // 108 bytes: 48, 48, 12.
        let said: Vec<_> = parts.iter().map(|part| part[16..22].to_vec()).collect();
        assert_eq!(
            said,
            [
                [0, 68, 0x12, 0x34, 0x20, 0],
                [0, 68, 0x12, 0x34, 0x20, 6],
                [0, 32, 0x12, 0x34, 0, 12]
            ]
        );
        for part in parts {
            assert_eq!(checksum(&[&part[14..34]]), 0);
        }
        let parts = cut(&frame("fd00::1", "fd00::2"), 0x1234_5678, 48).unwrap();
        let said: Vec<_> = parts
            .iter()
            .map(|part| [&part[18..21], &part[54..62]].concat())
            .collect();
        assert_eq!(
            said,
            [
                [0, 56, 44, 17, 0, 0, 1, 0x12, 0x34, 0x56, 0x78],
                [0, 56, 44, 17, 0, 0, 49, 0x12, 0x34, 0x56, 0x78],
                [0, 20, 44, 17, 0, 0, 96, 0x12, 0x34, 0x56, 0x78]
            ]
        );
    }

    #[test]
    fn what_is_no_part_is_refused() {
        let frame = frame("10.0.0.1", "10.0.0.2");
        for ranges in [[0..8, 4..12], [0..8, 104..112], [0..8, 8..200]] {
            cut_at(&frame, 1, &ranges).unwrap_err();
        }
        cut(&frame[..14], 1, 8).unwrap_err();
    }
}
