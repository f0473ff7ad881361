//! Names of slices, kept beside the name of the Service that begins them: the control plane makes `web-x7k2p` of `web`
//! (`newEndpointSlice`, and `SimpleNameGenerator` of the API server). So most need no memory of their own.

/// A slice's name, within its Service.
#[derive(Debug, PartialEq, Eq)]
pub enum SliceName {
    /// What comes after the Service's name and a hyphen.
    Generated([u8; 5]),
    Other(Box<str>),
}

impl SliceName {
    pub fn new(name: &str, service: &str) -> Self {
        match generated(name, service) {
            Some(suffix) => Self::Generated(suffix),
            None => Self::Other(name.into()),
        }
    }

    /// Whether it is this name, of a slice of the same Service.
    pub fn is(&self, name: &str, service: &str) -> bool {
        match self {
            Self::Generated(suffix) => generated(name, service) == Some(*suffix),
            Self::Other(other) => **other == *name,
        }
    }
}

fn generated(name: &str, service: &str) -> Option<[u8; 5]> {
    let suffix = name.strip_prefix(service)?.strip_prefix('-')?;
    suffix.as_bytes().try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_itself_and_no_other() {
        // Beside 64 bytes of what a slice has, in each of tens of thousands.
        assert_eq!(size_of::<SliceName>(), 16);
        let service = "web";
        let generated = SliceName::new("web-x7k2p", service);
        assert_eq!(generated, SliceName::Generated(*b"x7k2p"));
        let names = [
            "web-x7k2p",
            "web-x7k2q",
            "web-x7k2",
            "web-x7k2pp",
            "webx7k2p",
            "web--x7k2p",
            "web-a-x7k2p",
            "we-x7k2p",
            "x7k2p",
            "-x7k2p",
            "web",
            "web-",
            "",
            // Five bytes as well.
            "web-é-ü",
        ];
        for name in names {
            let kept = SliceName::new(name, service);
            for other in names {
                assert_eq!(kept.is(other, service), other == name, "{name}, {other}");
            }
        }
    }
}
