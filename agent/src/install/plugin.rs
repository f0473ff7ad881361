//! The plugin's file on the node.
//!
//! Who can replace it is root on the node at the next pod. So an agent in Kubernetes has its
//! directory read-only: `sinabroctl prepare`, a privileged container that ends, installs it before
//! each agent starts. Where the agent may write there, it installs the plugin itself.

use super::{InstallError, file};
use sinabro_common::names;
use std::{fs, path::Path};

pub const MODE: u32 = 0o755;

/// The plugin to install.
pub fn read(source: &Path) -> Result<Vec<u8>, InstallError> {
    fs::read(source).map_err(|error| InstallError::Source {
        path: source.to_owned(),
        source: error,
    })
}

/// Installs the plugin once; says whether there was something to do.
///
/// # Errors
/// If it cannot be read or written.
pub fn install(source: &Path, dir: &Path) -> Result<bool, InstallError> {
    let content = read(source)?;
    let path = dir.join(names::CNI_PLUGIN);
    if file::is_in_place(&path, &content, MODE) {
        return Ok(false);
    }
    file::put(&path, &content, MODE)?;
    Ok(true)
}

/// Whether there is a plugin of ours, of whatever version.
pub fn is_there(path: &Path) -> bool {
    fs::read(path).is_ok_and(|program| is_ours(&program))
}

/// Whether a program is our plugin, by what it has to say.
pub fn is_ours(program: &[u8]) -> bool {
    let says = names::CNI_PLUGIN_SAYS.as_bytes();
    program.windows(says.len()).any(|window| window == says)
}
