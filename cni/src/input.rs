//! What the runtime writes to stdin, before it is known to be a network configuration.

use crate::error::{Code, Error};
use serde::Deserialize;
use std::io::{self, Read};

/// Longest input read: more than twice what a pod's annotations may take, which is 256 KiB
/// (TotalAnnotationSizeLimitB of Kubernetes) of bytes that Go writes as six (`\u003c`), and more
/// than a GC of 10,000 attachments. An ADD refused for its length could not be deleted either: the
/// runtime says the same to DEL.
pub const MAX_INPUT: usize = 4 << 20;

/// Reads stdin to its end.
///
/// # Errors
/// Code 5 if reading fails or there is more than [`MAX_INPUT`].
pub fn read(input: impl Read) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let limit = MAX_INPUT as u64 + 1;
    input
        .take(limit)
        .read_to_end(&mut bytes)
        .map_err(|e: io::Error| {
            Error::new(Code::Io, "network configuration cannot be read from stdin").details(e)
        })?;
    if bytes.len() > MAX_INPUT {
        return Err(Error::new(
            Code::Io,
            format!("network configuration on stdin is longer than {MAX_INPUT} bytes"),
        ));
    }
    Ok(bytes)
}

/// The `cniVersion` of an input, if it has a readable one.
pub fn peek_version(input: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Peek {
        cni_version: String,
    }
    let peek: Peek = serde_json::from_slice(input).ok()?;
    Some(peek.cni_version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn input_is_limited() {
        assert_eq!(read(io::repeat(b' ')).unwrap_err().code, Code::Io);
        assert_eq!(read(&b"{}"[..]).unwrap(), b"{}");
    }

    proptest! {
        #[test]
        fn garbage_has_no_version(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = peek_version(&bytes);
        }
    }
}
