//! What happens to packets between the nodes.

use sinabro_lab::Lab;
use std::process::Command;

/// Pods' addresses, in rules.
pub const PODS: [&str; 2] = ["ip saddr 10.244.0.0/16", "ip6 saddr fd00:10:244::/48"];

/// What programs send in tunnels over IPv6.
pub const WITHOUT_CHECKSUM: &str = "udp dport 8472 udp checksum 0";

/// The network between the nodes, which drops packets, or says of them that it is congested.
pub struct Fabric<'a>(pub &'a Lab);

impl Fabric<'_> {
    /// Of packets that were sent by who understands it.
    pub fn marks(&self) {
        self.nft(
            "table bridge fabric {
                chain forward { type filter hook forward priority 0;
                    ip ecn ect0 ip ecn set ce; ip6 ecn ect0 ip6 ecn set ce; };
            }",
        );
    }

    pub fn drops(&self, what: &[&str]) {
        let rules: String = what
            .iter()
            .map(|addresses| format!("{addresses} counter name dropped drop; "))
            .collect();
        self.nft(&format!(
            "table bridge fabric {{ counter dropped {{ packets 0 bytes 0; }};
                chain forward {{ type filter hook forward priority 0; {rules} }}; }}"
        ));
    }

    pub fn dropped(&self) -> u32 {
        let text = self.nft("list counter bridge fabric dropped");
        let (_, packets) = text.split_once("packets ").unwrap();
        packets.split(' ').next().unwrap().parse().unwrap()
    }

    pub fn lets_pass(&self) {
        self.nft("delete table bridge fabric");
    }

    fn nft(&self, commands: &str) -> String {
        let mut nft = Command::new("nft");
        self.0.router().place().put(nft.arg(commands));
        let output = nft.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}
