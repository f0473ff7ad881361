//! Traffic control, read only: the filters of a link.

use crate::{
    Conn, Result,
    wire::{self, Garbage, Message, Raw},
};
use std::fmt;

/// struct tcmsg: family and padding, then index, handle, parent and info.
const HEADER: usize = 20;
/// Where filters of a clsact qdisc are: TC_H_CLSACT with TC_H_MIN_INGRESS or TC_H_MIN_EGRESS
/// (linux/pkt_sched.h).
const PARENTS: [(&str, u32); 2] = [("ingress", 0xffff_fff2), ("egress", 0xffff_fff3)];
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
/// linux/pkt_cls.h.
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_ID: u16 = 11;

/// A filter of a clsact qdisc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// `ingress` or `egress`.
    pub direction: &'static str,
    pub priority: u16,
    pub handle: u32,
    /// As in `bpf` or `flower`.
    pub kind: String,
    /// Of a BPF filter: the name it was given, and its program.
    pub program: Option<(String, u32)>,
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (direction, kind) = (self.direction, &self.kind);
        write!(
            f,
            "{direction} priority {} handle {:#x} {kind}",
            self.priority, self.handle
        )?;
        match &self.program {
            Some((name, id)) => write!(f, " {name} program {id}"),
            None => Ok(()),
        }
    }
}

fn parse(body: &[u8], direction: &'static str) -> std::result::Result<Filter, Garbage> {
    let (Some(handle), Some(info)) = (wire::u32_at(body, 8), wire::u32_at(body, 16)) else {
        return wire::garbage("a filter without a header");
    };
    let mut filter = Filter {
        direction,
        priority: (info >> 16) as u16,
        handle,
        kind: String::new(),
        program: None,
    };
    let mut options = &[][..];
    for attr in wire::attrs_after(body, HEADER)? {
        let attr = attr?;
        match attr.kind {
            TCA_KIND => filter.kind = attr.text(),
            TCA_OPTIONS => options = attr.value,
            _ => {}
        }
    }
    if filter.kind == "bpf" {
        let (mut name, mut id) = (String::new(), None);
        for attr in wire::attrs(options) {
            let attr = attr?;
            match attr.kind {
                TCA_BPF_NAME => name = attr.text(),
                TCA_BPF_ID => id = Some(attr.u32()?),
                _ => {}
            }
        }
        filter.program = id.map(|id| (name, id));
    }
    Ok(filter)
}

impl Conn {
    /// The filters of a link's clsact qdisc, anybody's; none if it has no such qdisc.
    pub fn filters(&mut self, link: u32) -> Result<Vec<Filter>> {
        let mut found = Vec::new();
        for (direction, parent) in PARENTS {
            let mut header = [0; HEADER];
            header[4..8].copy_from_slice(&link.to_ne_bytes());
            header[12..16].copy_from_slice(&parent.to_ne_bytes());
            let of_link = |message: &Message<'_>| match message.kind {
                libc::RTM_NEWTFILTER => parse(message.body, direction).map(Some),
                _ => Ok(None),
            };
            let what = "list filters";
            let filters = self.dump(what, libc::RTM_GETTFILTER, &Raw(&header), of_link)?;
            // The first message of a chain has its priority alone.
            found.extend(filters.into_iter().filter(|filter| filter.handle != 0));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn garbage_never_panics(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&body, "ingress");
        }
    }
}
