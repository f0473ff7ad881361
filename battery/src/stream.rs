//! Bytes that tell their place in a stream, so that any that are lost, doubled or exchanged show.

use super::stage::{LATE, Socket};
use nix::errno::Errno;
use std::time::{Duration, Instant};

/// Eight neighbouring bytes are one number, scrambled so that no two places look alike.
fn word(index: u64) -> [u8; 8] {
    let word = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (word ^ word >> 32).to_le_bytes()
}

/// A part of the stream.
pub fn part(from: u64, len: usize) -> Vec<u8> {
    let before = (from % 8) as usize;
    let mut data = Vec::with_capacity(before + len + 8);
    let mut index = from / 8;
    while data.len() < before + len {
        data.extend_from_slice(&word(index));
        index += 1;
    }
    data.truncate(before + len);
    data.drain(..before);
    data
}

/// Receives a stream, and says what became of it.
pub struct Reader {
    pub got: u64,
    wrong: Option<u64>,
    /// Most bytes asked for at once.
    pub at_once: usize,
    /// Between two receives.
    pub pause: Duration,
}

impl Reader {
    pub fn new() -> Self {
        Self {
            got: 0,
            wrong: None,
            at_once: 1 << 16,
            pause: Duration::ZERO,
        }
    }

    /// Receives until there are `total` bytes, or the end; what else ends it is told. A reader is
    /// patient as long as bytes come.
    ///
    /// Never blocks in a receive: that some of these are woken for nothing is another row's
    /// matter.
    pub fn read(&mut self, from: &Socket, total: u64, patience: Duration) -> String {
        let mut buffer = vec![0; self.at_once];
        let mut last = Instant::now();
        while self.got < total {
            let most = buffer.len().min((total - self.got) as usize);
            match from.recv_into(&mut buffer[..most], libc::MSG_DONTWAIT) {
                Ok(0) => return format!("{}, then the end", self.verdict()),
                Ok(len) => {
                    self.check(&buffer[..len]);
                    last = Instant::now();
                    if !self.pause.is_zero() {
                        std::thread::sleep(self.pause);
                    }
                }
                Err(Errno::EAGAIN) if last.elapsed() < patience => {
                    let _ = from.poll(libc::POLLIN, Duration::from_millis(20));
                }
                Err(Errno::EAGAIN) => return format!("{}, then {LATE}", self.verdict()),
                Err(errno) => return format!("{}, then {errno:?}", self.verdict()),
            }
        }
        self.verdict()
    }

    pub fn check(&mut self, data: &[u8]) {
        let expected = part(self.got, data.len());
        if self.wrong.is_none() && data != expected {
            let differs = data
                .iter()
                .zip(expected)
                .position(|(&found, right)| found != right);
            self.wrong = differs.map(|at| self.got + at as u64);
        }
        self.got += data.len() as u64;
    }

    pub fn verdict(&self) -> String {
        match self.wrong {
            None => format!("{} bytes, all right", self.got),
            Some(place) => format!("{} bytes, wrong from byte {place}", self.got),
        }
    }
}

/// Sends a part of the stream in messages of these sizes, over and over; blocking.
pub fn write(to: &Socket, from: u64, total: u64, sizes: &[usize]) -> Result<(), Errno> {
    let mut place = from;
    for &size in sizes.iter().cycle() {
        if place == from + total {
            break;
        }
        let len = size.min((from + total - place) as usize);
        let message = part(place, len);
        let mut rest = &message[..];
        while !rest.is_empty() {
            let sent = to.send(rest, 0)?;
            rest = &rest[sent..];
        }
        place += len as u64;
    }
    Ok(())
}

/// Sends without blocking until there is no room for a moment, or `most` bytes are on their way;
/// returns the place reached.
pub fn fill(to: &Socket, from: u64, most: u64, size: usize) -> Result<u64, Errno> {
    let mut place = from;
    let mut message = Vec::new();
    while place - from < most {
        if message.is_empty() {
            message = part(place, size);
        }
        match to.send(&message, libc::MSG_DONTWAIT) {
            Ok(sent) => {
                place += sent as u64;
                message.drain(..sent);
            }
            // Room may still be made: what is sent is on its way to the receiver.
            Err(Errno::EAGAIN) => {
                if to.poll(libc::POLLOUT, super::stage::MOMENT)? == 0 {
                    return Ok(place);
                }
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_another_place_are_noticed() {
        let data = part(0, 100_000);
        let verdict = |data: &[u8]| {
            let mut reader = Reader::new();
            reader.check(data);
            reader.verdict()
        };
        assert_eq!(verdict(&data), "100000 bytes, all right");
        for (one, other, len) in [
            (0, 8, 8),
            (4096, 65_536, 4096),
            (16, 17, 1),
            (0, 50_000, 1000),
        ] {
            let mut data = data.clone();
            let (a, b) = (
                data[one..one + len].to_vec(),
                data[other..other + len].to_vec(),
            );
            data[one..one + len].copy_from_slice(&b);
            data[other..other + len].copy_from_slice(&a);
            let verdict = verdict(&data);
            let wrong = verdict.split(' ').next_back().unwrap();
            // One byte in 256 looks the same.
            assert!(
                (one..one + 4).contains(&wrong.parse().unwrap()),
                "{verdict}"
            );
        }
        assert!(verdict(&data[8..]).contains("wrong from byte 0"));
    }
}
