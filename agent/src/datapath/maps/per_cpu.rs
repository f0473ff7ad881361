//! A kernel may have few counters at hand for entries of tables that have one for each CPU, and makes more behind that
//! (`pcpu_alloc`, mm/percpu.c, without waiting): who wants many waits a little.

use aya::{
    Pod,
    maps::{MapData, MapError, PerCpuHashMap, PerCpuValues},
    util::nr_cpus,
};
use std::{io, thread, time::Duration};

const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(2);

/// Writes an entry, again and again while there is no memory for it.
pub fn patiently<T, E>(
    is_no_memory: impl Fn(&E) -> bool,
    mut write: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for _ in 1..TRIES {
        match write() {
            Err(error) if is_no_memory(&error) => thread::sleep(PAUSE),
            other => return other,
        }
    }
    write()
}

pub fn is_no_memory(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOMEM)
}

/// Writes an entry of zeros.
pub fn put_zeros<C: Pod + Default>(
    map: &mut PerCpuHashMap<MapData, u32, C>,
    key: u32,
) -> Result<(), MapError> {
    let cpus = nr_cpus().map_err(|(_, source)| source)?;
    let no_memory = |error: &MapError| matches!(error, MapError::SyscallError(error) if is_no_memory(&error.io_error));
    patiently(no_memory, || {
        let zeros = PerCpuValues::try_from(vec![C::default(); cpus])?;
        map.insert(key, zeros, 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often something is written that at first so many times fails like this, and what comes of it.
    fn written(failures: u32, code: i32) -> (u32, Option<i32>) {
        let mut tries = 0;
        let outcome = patiently(is_no_memory, || {
            tries += 1;
            match tries > failures {
                true => Ok(()),
                false => Err(io::Error::from_raw_os_error(code)),
            }
        });
        (tries, outcome.err().and_then(|error| error.raw_os_error()))
    }

    #[test]
    fn what_there_is_no_memory_for_is_written_again() {
        assert_eq!(written(0, libc::ENOMEM), (1, None));
        assert_eq!(written(2, libc::ENOMEM), (3, None));
        assert_eq!(written(TRIES, libc::ENOMEM), (TRIES, Some(libc::ENOMEM)));
        assert_eq!(written(1, libc::E2BIG), (1, Some(libc::E2BIG)));
    }
}
