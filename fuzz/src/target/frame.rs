//! Messages on the agent's socket, in both directions.

use crate::is_planted;
use serde::{Serialize, de::DeserializeOwned};
use sinabro_common::api::{ReplyEnvelope, Request, RequestEnvelope, frame};

pub fn run(bytes: &[u8]) -> bool {
    message(bytes);
    // The same with a length that is right: one byte more or less, and nothing behind it is read.
    let Some((_, body)) = bytes.split_at_checked(4) else {
        return false;
    };
    let framed = [&(body.len() as u32).to_be_bytes(), body].concat();
    let Some(Request::Allocate { network, .. }) = message(&framed) else {
        return false;
    };
    is_planted(&network)
}

fn message(bytes: &[u8]) -> Option<Request> {
    one::<ReplyEnvelope>(bytes);
    one::<RequestEnvelope>(bytes).map(|envelope| envelope.request)
}

/// Reads a message from a stream. One that is read survives being written.
fn one<T>(bytes: &[u8]) -> Option<T>
where
    T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug,
{
    let mut stream = bytes;
    let message: T = frame::read(&mut stream).ok()?;
    // Not a byte of the next message is taken.
    let body = frame::body_len([bytes[0], bytes[1], bytes[2], bytes[3]]).expect("it was read");
    assert_eq!(bytes.len() - stream.len(), 4 + body);
    // Escapes may make it longer than a frame may be.
    if let Ok(written) = frame::encode(&message) {
        let again: T = frame::read(&mut &*written).expect("what was written is read");
        assert_eq!(message, again);
    }
    Some(message)
}
