//! Framing: four bytes of length in network order, then that much JSON.

use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// Longest body either side accepts: a GC list of 4000 attachments is 500 KB.
pub const MAX_LEN: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The other side closed between frames.
    #[error("connection closed")]
    Closed,
    #[error("frame of {0} bytes is longer than the {MAX_LEN} allowed")]
    TooLong(usize),
    #[error("frame is not valid: {0}")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A message as it goes over the wire, length first.
///
/// # Errors
/// [`FrameError::TooLong`] if the other side would refuse it.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let len = bytes.len() - 4;
    if len > MAX_LEN {
        return Err(FrameError::TooLong(len));
    }
    bytes[..4].copy_from_slice(&(len as u32).to_be_bytes());
    Ok(bytes)
}

/// The length that a header announces.
///
/// # Errors
/// [`FrameError::TooLong`] beyond [`MAX_LEN`]: nothing is allocated for it.
pub fn body_len(header: [u8; 4]) -> Result<usize, FrameError> {
    let len = u32::from_be_bytes(header) as usize;
    if len > MAX_LEN {
        return Err(FrameError::TooLong(len));
    }
    Ok(len)
}

/// Parses a body.
///
/// # Errors
/// [`FrameError::Json`] with the place of the fault.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    Ok(serde_json::from_slice(body)?)
}

/// Writes one message to a blocking stream.
///
/// # Errors
/// As [`encode`], and those of the stream.
pub fn write(stream: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    stream.write_all(&encode(message)?)?;
    Ok(stream.flush()?)
}

/// Reads one message from a blocking stream.
///
/// # Errors
/// [`FrameError::Closed`] if the stream ends before the first byte; as [`body_len`] and
/// [`decode`]; and those of the stream (an end in the middle is `UnexpectedEof`).
pub fn read<T: DeserializeOwned>(stream: &mut impl Read) -> Result<T, FrameError> {
    decode(&read_body(stream)?)
}

/// Reads the body of one message from a blocking stream.
///
/// # Errors
/// As [`read`], but for [`decode`]'s.
pub fn read_body(stream: &mut impl Read) -> Result<Vec<u8>, FrameError> {
    let mut header = [0; 4];
    let first = loop {
        match stream.read(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if first == 0 {
        return Err(FrameError::Closed);
    }
    stream.read_exact(&mut header[first..])?;
    let mut body = vec![0; body_len(header)?];
    stream.read_exact(&mut body)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;
    use proptest::prelude::*;

    fn request() -> RequestEnvelope {
        RequestEnvelope {
            version: VERSION,
            request: Request::Allocate {
                owner: Owner {
                    container_id: "c1".into(),
                    ifname: "eth0".into(),
                },
                network: "pods".into(),
                netns: "/run/netns/c1".into(),
                pod: PodRef::default(),
                addresses: vec!["10.244.0.9".parse().unwrap()],
                mac: Some("0a:58:0a:f4:00:09".parse().unwrap()),
                acceleration: Some(TcpAcceleration::Enabled),
                local_mtu: None,
                service_translation: None,
                host_ports: Some(vec!["udp/53".parse().unwrap()]),
                warnings: vec!["passed over".into()],
            },
        }
    }

    #[test]
    fn messages_survive_the_round_trip() {
        let bytes = encode(&request()).unwrap();
        let back: RequestEnvelope = read(&mut bytes.as_slice()).unwrap();
        assert_eq!(back, request());

        for reply in [
            Reply::Ok(Response::Done),
            Reply::Error(ApiError::new(
                ErrorCode::RangeFull,
                "range 10.244.0.0/24 is full",
            )),
        ] {
            let envelope = ReplyEnvelope {
                version: VERSION,
                reply,
            };
            let bytes = encode(&envelope).unwrap();
            assert_eq!(
                read::<ReplyEnvelope>(&mut bytes.as_slice()).unwrap(),
                envelope
            );
        }
    }

    /// Plugin and agent of two releases meet in every upgrade.
    #[test]
    fn requests_of_releases_without_the_newer_fields_are_understood() {
        let old = serde_json::json!({"version": 1, "request": {
            "call": "allocate",
            "owner": {"containerID": "c1", "ifname": "eth0"},
            "network": "pods",
            "netns": "/run/netns/c1",
        }});
        let Request::Allocate {
            acceleration,
            warnings,
            host_ports,
            ..
        } = decode::<RequestEnvelope>(old.to_string().as_bytes())
            .unwrap()
            .request
        else {
            panic!("not an Allocate");
        };
        assert_eq!((acceleration, warnings.len()), (None, 0));
        assert_eq!(host_ports, None);
        let old = serde_json::json!({"version": 1, "request": {
            "call": "activate",
            "owner": {"containerID": "c1", "ifname": "eth0"},
            "ifindex": 7,
        }});
        let request = decode::<RequestEnvelope>(old.to_string().as_bytes()).unwrap();
        assert!(matches!(
            request.request,
            Request::Activate {
                netns_cookie: None,
                local_mtu: false,
                ..
            }
        ));
    }

    /// An agent older than a field passes over it, as it does over any it does not know.
    #[test]
    fn fields_of_newer_releases_are_passed_over() {
        let mut newer = serde_json::to_value(request()).unwrap();
        newer["request"]["ofTheFuture"] = serde_json::json!({"any": "thing"});
        let read: RequestEnvelope = decode(newer.to_string().as_bytes()).unwrap();
        assert_eq!(read, request());
    }

    #[test]
    fn truncation_is_an_error_at_every_length() {
        let bytes = encode(&request()).unwrap();
        for len in 0..bytes.len() {
            let error = read::<RequestEnvelope>(&mut &bytes[..len]).unwrap_err();
            assert_eq!(
                len == 0,
                matches!(error, FrameError::Closed),
                "{len}: {error}"
            );
        }
    }

    #[test]
    fn a_huge_length_is_refused_before_allocation() {
        let bytes = u32::MAX.to_be_bytes();
        assert!(matches!(
            read::<RequestEnvelope>(&mut bytes.as_slice()),
            Err(FrameError::TooLong(_))
        ));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = decode::<RequestEnvelope>(&bytes);
            let _ = read::<ReplyEnvelope>(&mut bytes.as_slice());
        }
    }
}
