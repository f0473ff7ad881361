//! Ports at which sockets of the node hear everybody, of protocols whose sockets programs cannot ask for: the kernel has functions for TCP
//! and UDP alone (`bpf_skc_lookup_tcp`, `bpf_sk_lookup_udp`).

use super::NodeError;
use crate::datapath::PortSet;
use sinabro_common::api::PortProtocol;
use std::{fs, io};

const SCTP: u8 = PortProtocol::Sctp.number();
const UDP_LITE: u8 = 136;

/// Finds a port in a line of the kernel's, if it has one that somebody hears at.
type Parse = fn(&str) -> Option<u16>;

/// The kernel's lists, which are there as far as it has the protocol.
const LISTS: [(&str, u8, Parse); 3] = [
    ("udplite", UDP_LITE, of_datagrams),
    ("udplite6", UDP_LITE, of_datagrams),
    ("sctp/eps", SCTP, of_endpoint),
];

/// Adds them.
///
/// # Errors
/// If the kernel has a list and it cannot be read.
pub(super) fn add_to(ports: &mut PortSet) -> Result<(), NodeError> {
    for (name, proto, parse) in LISTS {
        let path = format!("/proc/thread-self/net/{name}");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(NodeError::Sockets { path, source }),
        };
        for port in text.lines().filter_map(parse) {
            ports.add(proto, port..=port);
        }
    }
    Ok(())
}

/// Of `sl local_address rem_address …`, addresses and ports in hexadecimal (`net/ipv4/udp.c`, `udp4_format_sock`). Who is connected hears one
/// remote end, and has a record once he has sent.
fn of_datagrams(line: &str) -> Option<u16> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (fields.next()?, fields.next()?);
    let (_, port) = local.rsplit_once(':')?;
    let is_alone = remote.bytes().all(|byte| matches!(byte, b'0' | b':'));
    let port = u16::from_str_radix(port, 16).ok()?;
    (is_alone && port != 0).then_some(port)
}

/// Of `ENDPT SOCK STY SST HBKT LPORT …` (`net/sctp/proc.c`, `sctp_eps_seq_show`).
fn of_endpoint(line: &str) -> Option<u16> {
    let port = line.split_ascii_whitespace().nth(5)?;
    port.parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sinabro_netlink::netns::in_fresh;
    use socket2::{Domain, Protocol, Socket, Type};
    use std::net::SocketAddr;

    /// As far as the kernel has the protocol.
    #[test]
    fn sockets_that_hear_everybody_have_their_ports() {
        let bound = |at: &str| {
            let at: SocketAddr = at.parse().unwrap();
            let protocol = Protocol::from(i32::from(UDP_LITE));
            let socket = Socket::new(Domain::for_address(at), Type::DGRAM, Some(protocol)).ok()?;
            socket.set_reuse_address(true).unwrap();
            socket.bind(&at.into()).unwrap();
            Some(socket)
        };
        in_fresh(|| {
            let Some(_v4) = bound("0.0.0.0:7001") else {
                return;
            };
            let _v6 = bound("[::]:7002").unwrap();
            let connected = bound("127.0.0.1:7003").unwrap();
            let to: SocketAddr = "127.0.0.1:9".parse().unwrap();
            connected.connect(&to.into()).unwrap();
            let mut ports = PortSet::default();
            add_to(&mut ports).unwrap();
            let has = [7001, 7002, 7003, 7004].map(|port| ports.contains(UDP_LITE, port));
            assert_eq!(has, [true, true, false, false]);
        });
    }

    #[test]
    fn lines_are_read_as_the_kernel_writes_them() {
        let of_datagrams = |line: &str| super::of_datagrams(line);
        assert_eq!(
            of_datagrams(
                "  123: 00000000:1F90 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 1 2 0 0"
            ),
            Some(8080)
        );
        assert_eq!(
            of_datagrams("1: 0100007F:1F90 0200007F:0009 01 00000000:00000000"),
            None
        );
        assert_eq!(
            of_datagrams("  sl  local_address rem_address   st tx_queue"),
            None
        );
        assert_eq!(
            of_endpoint("ffff8881 ffff8882 2   10  19  9899  0 1234 0.0.0.0"),
            Some(9899)
        );
        assert_eq!(
            of_endpoint(" ENDPT     SOCK   STY SST HBKT LPORT   UID INODE LADDRS"),
            None
        );
    }

    proptest! {
        #[test]
        fn other_lines_are_passed_over(line in "\\PC{0,80}") {
            of_datagrams(&line);
            of_endpoint(&line);
        }
    }
}
