//! nf_tables, read only: chains with their hooks and policies, and rules in outline.
//!
//! iptables-nft, kube-proxy, firewalld and ufw of today all end here. What a rule compares is left
//! to `nft`, which knows every expression; an outline says in what order which kinds of
//! expressions are, where it leads, and how often it was met.
//!
//! Numbers are those of linux/netfilter/nf_tables.h. Reading needs CAP_NET_ADMIN.

use crate::{
    Conn, Result, nft_addresses,
    nft_ports::Reader,
    wire::{self, Attr, Garbage, Message, Raw},
};
pub use crate::{nft_addresses::Addresses, nft_ports::Ports};
use std::fmt;

const SUBSYSTEM: u16 = 10;
const NEW_CHAIN: u16 = SUBSYSTEM << 8 | 3;
const GET_CHAIN: u16 = SUBSYSTEM << 8 | 4;
const NEW_RULE: u16 = SUBSYSTEM << 8 | 6;
const GET_RULE: u16 = SUBSYSTEM << 8 | 7;
/// struct nfgenmsg: family, version, resource.
const HEADER: usize = 4;

const ACCEPT: u32 = 1;
const DROP: u32 = 0;

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub family: Family,
    pub table: String,
    pub name: String,
    /// Only what is called from a hook has one.
    pub base: Option<Base>,
    /// How many rules it has, and how often others lead to it.
    pub uses: u32,
}

/// How the stack calls a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// As in `filter` or `nat`.
    pub kind: String,
    /// Number within the family: of IP, [`PREROUTING`], [`FORWARD`], [`POSTROUTING`] or another.
    pub hook: u32,
    pub priority: i32,
    /// What becomes of a packet that no rule decides: dropped.
    pub drops: bool,
}

/// NF_INET_PRE_ROUTING.
pub const PREROUTING: u32 = 0;
/// NF_INET_FORWARD.
pub const FORWARD: u32 = 2;
/// NF_INET_POST_ROUTING.
pub const POSTROUTING: u32 = 4;
/// NF_INET_INGRESS: of a link, in tables of the family inet alone (linux/netfilter.h, Linux 5.10).
pub const INGRESS: u32 = 5;

/// Whose packets (NFPROTO_…).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family(pub u8);

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("inet"),
            2 => f.write_str("ip"),
            3 => f.write_str("arp"),
            5 => f.write_str("netdev"),
            7 => f.write_str("bridge"),
            10 => f.write_str("ip6"),
            other => write!(f, "family {other}"),
        }
    }
}

impl Family {
    /// IPv4 and IPv6.
    pub const INET: Self = Self(1);
    pub const IP: Self = Self(2);
    pub const IP6: Self = Self(10);

    /// Whether a hook's number is one of IP's.
    fn is_ip(self) -> bool {
        matches!(self.0, 1 | 2 | 10)
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.family, self.table, self.name)?;
        if let Some(base) = &self.base {
            let names = [
                "prerouting",
                "input",
                "forward",
                "output",
                "postrouting",
                "ingress",
            ];
            let name = names.get(base.hook as usize);
            match name.filter(|_| self.family.is_ip()) {
                Some(name) => write!(f, " type {} hook {name}", base.kind)?,
                None => write!(f, " type {} hook {}", base.kind, base.hook)?,
            }
            let policy = if base.drops { "drop" } else { "accept" };
            write!(f, " priority {} policy {policy}", base.priority)?;
        }
        write!(f, " uses {}", self.uses)
    }
}

/// A rule in outline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub family: Family,
    pub table: String,
    pub chain: String,
    pub handle: u64,
    /// As in `payload cmp counter(7 packets, 588 bytes) jump(KUBE-SERVICES)`.
    pub expressions: Vec<String>,
    /// Which destination ports it is about.
    pub ports: Ports,
    /// Which addresses.
    pub addresses: Addresses,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (family, table, chain) = (self.family, &self.table, &self.chain);
        write!(f, "{family} {table} {chain} handle {}:", self.handle)?;
        self.expressions.iter().try_for_each(|e| write!(f, " {e}"))
    }
}

type Parsed<T> = std::result::Result<T, Garbage>;

impl Chain {
    fn parse(body: &[u8]) -> Parsed<Self> {
        let mut chain = Self {
            family: family(body)?,
            table: String::new(),
            name: String::new(),
            base: None,
            uses: 0,
        };
        let (mut hook, mut drops, mut kind) = (None, false, String::new());
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                1 => chain.table = attr.text(),
                3 => chain.name = attr.text(),
                4 => hook = Some(place(&attr)?),
                5 => drops = u32_be(&attr)? == DROP,
                6 => chain.uses = u32_be(&attr)?,
                7 => kind = attr.text(),
                _ => {}
            }
        }
        chain.base = hook.map(|(hook, priority)| Base {
            kind,
            hook,
            priority,
            drops,
        });
        Ok(chain)
    }
}

/// Hook and priority.
fn place(attr: &Attr<'_>) -> Parsed<(u32, i32)> {
    let (mut hook, mut priority) = (0, 0);
    for attr in wire::attrs(attr.value) {
        let attr = attr?;
        match attr.kind {
            1 => hook = u32_be(&attr)?,
            2 => priority = u32_be(&attr)?.cast_signed(),
            _ => {}
        }
    }
    Ok((hook, priority))
}

impl Rule {
    fn parse(body: &[u8]) -> Parsed<Self> {
        let mut rule = Self {
            family: family(body)?,
            table: String::new(),
            chain: String::new(),
            handle: 0,
            expressions: Vec::new(),
            ports: Ports::Any,
            addresses: Addresses::default(),
        };
        let mut ports = Reader::default();
        let mut addresses = nft_addresses::Reader::new(rule.family);
        for attr in wire::attrs_after(body, HEADER)? {
            let attr = attr?;
            match attr.kind {
                1 => rule.table = attr.text(),
                2 => rule.chain = attr.text(),
                3 => rule.handle = attr.array().map(u64::from_be_bytes)?,
                4 => {
                    let mut outline = |element: Parsed<Attr<'_>>| {
                        let element = element?;
                        let (name, data) = name_and_data(&element)?;
                        ports.read(&name, data)?;
                        addresses.read(&name, data)?;
                        outline(name, data)
                    };
                    let expressions = wire::attrs(attr.value).map(&mut outline);
                    rule.expressions = expressions.collect::<Parsed<_>>()?;
                }
                _ => {}
            }
        }
        rule.ports = ports.ports();
        rule.addresses = addresses.addresses();
        Ok(rule)
    }
}

fn name_and_data<'a>(element: &Attr<'a>) -> Parsed<(String, &'a [u8])> {
    let (mut name, mut data) = (String::new(), &[][..]);
    for attr in wire::attrs(element.value) {
        let attr = attr?;
        match attr.kind {
            1 => name = attr.text(),
            2 => data = attr.value,
            _ => {}
        }
    }
    Ok((name, data))
}

/// One expression of a rule.
fn outline(name: String, data: &[u8]) -> Parsed<String> {
    Ok(match name.as_str() {
        "counter" => {
            let (mut bytes, mut packets) = (0, 0);
            for attr in wire::attrs(data) {
                let attr = attr?;
                match attr.kind {
                    1 => bytes = attr.array().map(u64::from_be_bytes)?,
                    2 => packets = attr.array().map(u64::from_be_bytes)?,
                    _ => {}
                }
            }
            format!("counter({packets} packets, {bytes} bytes)")
        }
        "immediate" => verdict(data)?.unwrap_or(name),
        // Extensions of iptables.
        "match" | "target" => match find(data, 1)? {
            Some(extension) => format!("{name}({})", extension.text()),
            None => name,
        },
        _ => name,
    })
}

/// Where an immediate expression leads; none if it loads a value.
fn verdict(data: &[u8]) -> Parsed<Option<String>> {
    let Some(loaded) = find(data, 2)? else {
        return Ok(None);
    };
    let Some(verdict) = find(loaded.value, 2)? else {
        return Ok(None);
    };
    let chain = find(verdict.value, 2)?.map(|chain| chain.text());
    let chain = chain.unwrap_or_default();
    let Some(code) = find(verdict.value, 1)? else {
        return Ok(None);
    };
    // NFT_CONTINUE, NFT_JUMP and so on are negative.
    Ok(Some(match u32_be(&code)? {
        DROP => "drop".into(),
        ACCEPT => "accept".into(),
        code => match code.cast_signed() {
            -1 => "continue".into(),
            -2 => "break".into(),
            -3 => format!("jump({chain})"),
            -4 => format!("goto({chain})"),
            -5 => "return".into(),
            other => format!("verdict({other})"),
        },
    }))
}

/// The chain to which an expression of a [`Rule`] leads, if it does.
#[must_use]
pub fn leads_to(expression: &str) -> Option<&str> {
    let jump = expression.strip_prefix("jump(");
    let to = jump.or_else(|| expression.strip_prefix("goto("))?;
    to.strip_suffix(')')
}

/// Attributes that are numbers, in network order; zero where there is none.
pub(crate) fn numbers<const N: usize>(data: &[u8], kinds: [u16; N]) -> Parsed<[u32; N]> {
    let mut found = [0; N];
    for attr in wire::attrs(data) {
        let attr = attr?;
        if let Some(at) = kinds.iter().position(|kind| *kind == attr.kind) {
            found[at] = attr.array().map(u32::from_be_bytes)?;
        }
    }
    Ok(found)
}

pub(crate) fn find(tail: &[u8], kind: u16) -> Parsed<Option<Attr<'_>>> {
    for attr in wire::attrs(tail) {
        let attr = attr?;
        if attr.kind == kind {
            return Ok(Some(attr));
        }
    }
    Ok(None)
}

/// Appends an attribute that is a text, which ends with a zero.
fn push_text(request: &mut Vec<u8>, kind: u16, text: &str) {
    let length = (4 + text.len() + 1) as u16;
    request.extend(length.to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(text.as_bytes());
    request.push(0);
    request.resize(request.len().next_multiple_of(4), 0);
}

fn u32_be(attr: &Attr<'_>) -> Parsed<u32> {
    attr.array().map(u32::from_be_bytes)
}

fn family(body: &[u8]) -> Parsed<Family> {
    match body.first() {
        Some(family) => Ok(Family(*family)),
        None => wire::garbage("a message of nf_tables without a header"),
    }
}

/// A socket for nf_tables in the calling thread's network namespace.
#[derive(Debug)]
pub struct Nft(Conn);

impl Nft {
    /// # Errors
    /// If there can be none.
    pub fn new() -> Result<Self> {
        Conn::netfilter().map(Self)
    }

    /// All chains.
    ///
    /// # Errors
    /// If the kernel has no nf_tables, or the process may not read them.
    pub fn chains(&mut self) -> Result<Vec<Chain>> {
        let parse = |message: &Message<'_>| match message.kind {
            NEW_CHAIN => Chain::parse(message.body).map(Some),
            _ => Ok(None),
        };
        self.0.dump(
            "list chains of nf_tables",
            GET_CHAIN,
            &Raw(&[0; HEADER]),
            parse,
        )
    }

    /// Whether a rule of the chain's table has these bytes among what it compares: the name of an
    /// interface, for example.
    ///
    /// # Errors
    /// As [`Nft::chains`].
    pub fn mentions(&mut self, chain: &Chain, bytes: &[u8]) -> Result<bool> {
        let has = |message: &Message<'_>| {
            if message.kind != NEW_RULE || family(message.body)? != chain.family {
                return Ok(None);
            }
            let (mut same, mut has) = (false, false);
            for attr in wire::attrs_after(message.body, HEADER)? {
                let attr = attr?;
                match attr.kind {
                    1 => same = attr.text() == chain.table,
                    4 => has = attr.value.windows(bytes.len()).any(|part| part == bytes),
                    _ => {}
                }
            }
            Ok((same && has).then_some(()))
        };
        let what = "list rules of nf_tables";
        let found = self.0.dump(what, GET_RULE, &Raw(&[0; HEADER]), has)?;
        Ok(!found.is_empty())
    }

    /// All rules, in the order of each chain.
    ///
    /// # Errors
    /// As [`Nft::chains`].
    pub fn rules(&mut self) -> Result<Vec<Rule>> {
        self.list_rules(&[0; HEADER])
    }

    /// The rules of one chain, in their order.
    ///
    /// # Errors
    /// As [`Nft::chains`].
    pub fn rules_of(&mut self, chain: &Chain) -> Result<Vec<Rule>> {
        let mut request = vec![chain.family.0, 0, 0, 0];
        // NFTA_RULE_TABLE, NFTA_RULE_CHAIN.
        for (kind, name) in [(1, &chain.table), (2, &chain.name)] {
            push_text(&mut request, kind, name);
        }
        self.list_rules(&request)
    }

    fn list_rules(&mut self, request: &[u8]) -> Result<Vec<Rule>> {
        let parse = |message: &Message<'_>| match message.kind {
            NEW_RULE => Rule::parse(message.body).map(Some),
            _ => Ok(None),
        };
        let what = "list rules of nf_tables";
        self.0.dump(what, GET_RULE, &Raw(request), parse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn garbage_never_panics(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Chain::parse(&body);
            let _ = Rule::parse(&body);
        }
    }
}
