//! Frames on the host.

use super::{Header, Packet};

/// The bytes of a frame, or the first of them.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    pub head: &'a [u8],
    /// Of the whole frame.
    pub len: u32,
}

impl<'a> Frame<'a> {
    /// A frame whose bytes are all there.
    pub fn whole(bytes: &'a [u8]) -> Self {
        Self {
            head: bytes,
            len: bytes.len() as u32,
        }
    }
}

impl Packet for Frame<'_> {
    fn len(&self) -> u32 {
        self.len
    }

    fn load<T: Header>(&self, offset: u32) -> Option<T> {
        let start = offset as usize;
        let bytes = self.head.get(start..start.checked_add(size_of::<T>())?)?;
        // SAFETY: as many bytes as the type has, and a `Header` may have any.
        Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
    }

    unsafe fn load_into<T: Header>(&self, offset: u32, to: *mut T) -> bool {
        let loaded = self.load(offset);
        if let Some(header) = loaded {
            // SAFETY: the caller's promise.
            unsafe { to.write(header) };
        }
        loaded.is_some()
    }
}
