//! What the running kernel lacks.

use sinabro_netlink::Conn;
use std::path::Path;

/// Why nothing can be accelerated on this kernel, by what it lacks: not by whether it works, so
/// that a test never passes because what it looks at is broken.
pub fn unaccelerated() -> Option<&'static str> {
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Some("the kernel does not describe its types");
    }
    let cookie = Conn::new().and_then(|conn| conn.netns_cookie());
    match cookie {
        Ok(None) => Some("the kernel does not number network namespaces"),
        // Whatever fails there is the test's to find.
        Ok(Some(_)) | Err(_) => None,
    }
}
