//! Which way packets go between pods and what is outside of the cluster.

use std::fmt;

/// What was chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForwardingMode {
    /// Past netfilter, where nobody has rules there for what is forwarded.
    #[default]
    Auto,
    /// Past netfilter, whatever rules there are: of the old setting `forwarding` alone.
    Direct,
    /// By the kernel's stack alone.
    Kernel,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Forwarding {
    Direct,
    /// By the kernel's stack, and why.
    Kernel(String),
}

impl Forwarding {
    /// `obstacle` is what the kernel has that only its stack can do: asked for where it matters alone, with rules of others or
    /// without.
    pub fn choose(
        mode: ForwardingMode,
        may_translate: bool,
        obstacle: impl FnOnce(bool) -> Option<String>,
    ) -> Self {
        let why = match mode {
            ForwardingMode::Kernel => Some("dataPath: kernel".to_owned()),
            _ if !may_translate => Some("serviceProxy: off".to_owned()),
            ForwardingMode::Auto => obstacle(true),
            ForwardingMode::Direct => obstacle(false),
        };
        why.map_or(Self::Direct, Self::Kernel)
    }
}

impl fmt::Display for Forwarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => f.write_str("direct"),
            Self::Kernel(why) => write!(f, "kernel: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_others_count_unless_they_are_not_to() {
        let rules = |counts: bool| counts.then(|| "rules".to_owned());
        let choose = |mode| Forwarding::choose(mode, true, rules).to_string();
        assert_eq!(choose(ForwardingMode::Auto), "kernel: rules");
        assert_eq!(choose(ForwardingMode::Direct), "direct");
        assert_eq!(choose(ForwardingMode::Kernel), "kernel: dataPath: kernel");
        let ipsec = |_: bool| Some("IPsec".to_owned());
        let chosen = Forwarding::choose(ForwardingMode::Direct, true, ipsec);
        assert_eq!(chosen.to_string(), "kernel: IPsec");
    }

    #[test]
    fn the_kernel_is_asked_for_nothing_where_it_does_not_matter() {
        let asked = |_: bool| -> Option<String> { unreachable!("asked") };
        use ForwardingMode::{Auto, Direct, Kernel};
        for mode in [Auto, Direct, Kernel] {
            let chosen = Forwarding::choose(mode, false, asked);
            assert_ne!(chosen, Forwarding::Direct, "{mode:?}");
        }
    }
}
