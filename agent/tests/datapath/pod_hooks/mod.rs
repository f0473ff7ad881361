//! `pod_out` and `pod_in` on single packets.

mod delivery;
mod identity;
mod malformed;
mod mss;

use crate::{
    kit::{self, Pod},
    packet::{self, ACK, IP4, IP6, Ip, SYN, TCP, UDP, see},
    run::{DROP, PASS, Programs, REDIRECT},
};
use sinabro_agent::datapath::Datapath;
use sinabro_common::{abi::drop::DropReason, names::HOST_MAC};
use std::net::IpAddr;

struct World {
    datapath: Datapath,
    programs: Programs,
    a: Pod,
    b: Pod,
}

fn world<T: Send>(test: impl FnOnce(World) -> T + Send) -> T {
    kit::fresh(|| {
        let datapath = kit::load();
        let (a, b) = (Pod::silent(&datapath, 5), Pod::silent(&datapath, 6));
        test(World {
            programs: Programs::of(&datapath),
            datapath,
            a,
            b,
        })
    })
}

impl World {
    /// What `pod_out` says to a frame from pod a.
    fn out(&self, frame: &[u8]) -> (i32, Vec<u8>) {
        self.programs.run("pod_out", self.a.ifindex, frame)
    }

    fn frame_of_a(&self, ip: &Ip) -> Vec<u8> {
        packet::eth(HOST_MAC, self.a.mac, ip.kind(), &ip.bytes())
    }

    fn passes(&self, frame: &[u8], what: &str) {
        let (verdict, out) = self.out(frame);
        assert_eq!((verdict, &out[..]), (PASS, frame), "{what}");
    }

    /// The frame is dropped, and for this reason.
    fn dropped(&self, frame: &[u8], reason: DropReason, what: &str) {
        let before = kit::dropped(&self.datapath, reason);
        let Some((verdict, _)) = self.programs.try_run("pod_out", self.a.ifindex, frame) else {
            return;
        };
        assert_eq!(verdict, DROP, "{what}");
        assert_eq!(
            kit::dropped(&self.datapath, reason) - before,
            1,
            "{what}: {:?}",
            self.datapath.drops()
        );
    }

    fn pairs(&self) -> [(IpAddr, IpAddr); 2] {
        [(self.a.v4, self.b.v4), (self.a.v6, self.b.v6)]
    }
}

fn far(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => "203.0.113.7".parse().unwrap(),
        IpAddr::V6(_) => "2001:db8::7".parse().unwrap(),
    }
}
