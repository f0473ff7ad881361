//! How much memory the kernel lets this process have: the least of the limits of its cgroup and of those above
//! it, as far as they are to be seen. From Linux 5.11 on maps count, too.

use super::{mounts_of, unescape};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// None if there is none, or nothing is known of it.
pub fn memory_limit() -> Option<u64> {
    let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    let limits = directories(&cgroups, &mounts)
        .into_iter()
        .filter_map(|(mount, own)| least(&mount, &own));
    limits.min()
}

/// Of a directory and of those above it, up to where the hierarchy is mounted.
fn least(mount: &Path, own: &Path) -> Option<u64> {
    let above = own.ancestors().take_while(|dir| dir.starts_with(mount));
    let limits = above.flat_map(|dir| {
        // Of version 2 and of version 1 (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst). `max` is no
        // number; version 1 has a number for it that is beyond any memory.
        ["memory.max", "memory.limit_in_bytes"].map(|file| fs::read_to_string(dir.join(file)))
    });
    limits
        .filter_map(|text| text.ok()?.trim().parse().ok())
        .min()
}

/// Where hierarchies that may limit memory are mounted, and this process's directory there (cgroups(7)).
fn directories(cgroups: &str, mountinfo: &[u8]) -> Vec<(PathBuf, PathBuf)> {
    let lines = cgroups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_of_memory = controllers
            .split(',')
            .any(|controller| controller == "memory");
        (is_of_memory || controllers.is_empty()).then_some((is_of_memory, Path::new(path)))
    });
    let own: Vec<_> = lines.collect();
    let mut found = Vec::new();
    for mount in mounts_of(mountinfo) {
        let mut options = mount.options.split(|&byte| byte == b',');
        let is_of_memory = match mount.kind {
            b"cgroup2" => false,
            b"cgroup" if options.any(|option| option == b"memory") => true,
            _ => continue,
        };
        let (root, mount) = (unescape(mount.root), unescape(mount.point));
        let of_hierarchy = own.iter().filter(|(memory, _)| *memory == is_of_memory);
        // A mount of another part of the hierarchy does not show this process's.
        let below = of_hierarchy.filter_map(|(_, path)| path.strip_prefix(&root).ok());
        found.extend(below.map(|below| (mount.clone(), mount.join(below))));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(cgroups: &str, mountinfo: &str) -> Vec<(String, String)> {
        let text = |path: PathBuf| path.display().to_string();
        let found = directories(cgroups, mountinfo.as_bytes()).into_iter();
        found.map(|(mount, own)| (text(mount), text(own))).collect()
    }

    #[test]
    fn a_containers_own_part_is_its_root() {
        let mounts = "29 25 0:26 / /sys/fs/cgroup ro shared:9 - cgroup2 cgroup rw\n\
                      30 25 0:26 /../../.. /host/sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let own = "/sys/fs/cgroup".to_owned();
        assert_eq!(found("0::/\n", mounts), [(own.clone(), own + "/")]);
    }

    #[test]
    fn both_versions_are_looked_at() {
        let mounts = "31 1 0:28 / /cg rw - tmpfs tmpfs rw\n\
                      35 31 0:32 /kubepods/a /cg/memory rw - cgroup cgroup rw,memory\n\
                      36 31 0:33 / /cg/cpu rw a:1 - cgroup cgroup rw,cpu\n\
                      41 31 0:38 / /cg/uni\\040fied rw - cgroup2 none rw\n\
                      broken";
        let cgroups = "4:memory:/kubepods/a/b\n3:cpu:/x\n0::/y:z\nnothing\n";
        let pairs = [
            ("/cg/memory", "/cg/memory/b"),
            ("/cg/uni fied", "/cg/uni fied/y:z"),
        ];
        assert_eq!(
            found(cgroups, mounts),
            pairs.map(|(mount, own)| (mount.to_owned(), own.to_owned()))
        );
    }

    #[test]
    fn the_least_limit_on_the_way_up_counts() {
        let mount = tempfile::tempdir().unwrap();
        let own = mount.path().join("pods/agent");
        fs::create_dir_all(&own).unwrap();
        assert_eq!(least(mount.path(), &own), None);
        fs::write(own.join("memory.max"), "max\n").unwrap();
        assert_eq!(least(mount.path(), &own), None);
        fs::write(mount.path().join("pods/memory.max"), "134217728\n").unwrap();
        assert_eq!(least(mount.path(), &own), Some(128 << 20));
        fs::write(own.join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        fs::write(own.join("memory.max"), "67108864\n").unwrap();
        assert_eq!(least(mount.path(), &own), Some(64 << 20));
    }
}
