//! The cookie of this process's network namespace, where the kernel tells it to programs alone (Linux 5.7 to 5.13): a
//! program is attached for a moment, and a socket that it is told of connects.

use super::on_cgroup::Cgroup;
use crate::datapath::{DatapathError, maps, object::Tried, sys::AttachType};
use aya::{maps::HashMap, programs::CgroupSockAddr};
use socket2::{Domain, Socket, Type};
use std::{
    error::Error,
    net::{Ipv4Addr, SocketAddr},
    os::fd::AsFd as _,
    path::Path,
};

const PROGRAM: &str = "tell_netns";

/// Where a datagram socket connects to without sending anything; the discard port (RFC 863).
const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9);

/// The cookie of the calling thread's network namespace.
///
/// # Errors
/// If the program cannot be attached, or does not see the sockets of this process.
pub fn ask(tried: &mut Tried, cgroup: Option<&Path>) -> Result<u64, DatapathError> {
    let mut cgroup = Cgroup::open(cgroup)?;
    let told = maps::take(&mut tried.ebpf, "TOLD")?;
    let missing = DatapathError::Missing {
        what: "program",
        name: PROGRAM,
    };
    let program: &CgroupSockAddr = tried
        .ebpf
        .program(PROGRAM)
        .and_then(|program| program.try_into().ok())
        .ok_or(missing)?;
    let asked = || -> Result<u64, Box<dyn Error + Send + Sync>> {
        let mut told: HashMap<_, u64, u64> = told.try_into()?;
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
        let cookie = socket.cookie()?;
        told.insert(cookie, 0, 0)?;
        let program = program.fd()?.as_fd();
        let _link = cgroup.put(program, PROGRAM, AttachType::Inet4Connect, None)?;
        // There need be no way there: the program runs before that is looked for.
        let _ = socket.connect(&NOWHERE.into());
        match told.get(&cookie, 0)? {
            0 => Err("this process is not below it".into()),
            netns => Ok(netns),
        }
    };
    asked().map_err(cgroup.error(PROGRAM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{chain::Chain, datapath::object};
    use sinabro_common::names;
    use sinabro_lab::{Lifetime, Namespace, wait::eventually};
    use sinabro_netlink::Conn;
    use std::{fs, path::PathBuf};

    /// Below this process's own.
    fn fresh_cgroup() -> PathBuf {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
        let mount = mount.unwrap().split(' ').nth(4).unwrap();
        let own = fs::read_to_string("/proc/thread-self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let name = format!("sinabro-tell-{}", std::process::id());
        let path = Path::new(mount).join(own.unwrap()).join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("cgroup.type"), "threaded").unwrap();
        path
    }

    #[test]
    fn it_is_what_the_kernel_tells_where_it_does() {
        let cgroup = fresh_cgroup();
        let node = Namespace::new("node", Lifetime::Process).unwrap();
        let compare = || {
            let load = || object::try_each(Path::new(names::BPF_DIR), object::SERVICE_SOCK_OBJECT);
            let outside = ask(&mut load()?, Some(&cgroup)).unwrap_err();
            assert!(
                Chain(&outside).to_string().contains("not below"),
                "{outside}"
            );
            fs::write(cgroup.join("cgroup.threads"), "0")?;
            let told = ask(&mut load()?, Some(&cgroup))?;
            let known = Conn::new()?.netns_cookie()?;
            assert!(known.is_none_or(|known| known == told), "{known:?}, {told}");
            Ok(())
        };
        node.run(compare).unwrap();
        // The thread is counted for a moment longer.
        eventually("an empty cgroup", || fs::remove_dir(&cgroup).is_ok());
    }
}
