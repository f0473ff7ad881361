//! A virtual machine: qemu's software emulation, which needs no rights and no hardware.
//!
//! Its first serial port is the kernel's console, kept in a file; the second one carries messages
//! ([`sinabro_guest::Message`]), a line each.

use super::{initrd::Archive, kernels::Image, modules::Module};
use anyhow::{Context as _, Result, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sinabro_guest::{JOB_FILE, Job, Message};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{BufRead as _, BufReader, Read, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, PoisonError,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::Duration,
};

const QEMU: &str = "qemu-system-x86_64";
/// A machine that says nothing for so long hangs: a step takes seconds, a test at most a minute,
/// and everything ten times as long beside others.
const SILENCE: Duration = Duration::from_secs(300);
/// Lines of the console worth showing.
const LAST_LINES: usize = 25;
/// All that can be emulated, but what makes emulation slow and no difference to us: `rep movsb` is one
/// step for each byte, and copies use it where it is said to be fast; a fifth level of page tables is one
/// more to walk; SMAP has each access to user space change the mode of translation.
const CPU: &str = "max,erms=off,la57=off,smap=off,smep=off";
/// All but CMPXCHG16B: qemu 7.2 leaves garbage in the flags after it, and the kernel's allocator uses it
/// on every path (seen as double faults in `__kmalloc` of 6.12).
const WITHOUT_CX16: &str = ",cx16=off";
/// One, so that no atomic instruction needs care for another processor, and no grace period of RCU a wait
/// for it. What two at once break is for the tests that run on a real one.
const PROCESSORS: &str = "1";
const MEMORY_MB: &str = "1280";

/// Machines that run; none once all were ended.
static RUNNING: Mutex<Option<BTreeSet<i32>>> = Mutex::new(Some(BTreeSet::new()));

fn running<T>(act: impl FnOnce(&mut Option<BTreeSet<i32>>) -> T) -> T {
    act(&mut RUNNING.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Ends every machine, and lets none start any more.
pub fn end_all() {
    for pid in running(Option::take).into_iter().flatten() {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// How a machine ended.
pub struct Ended {
    /// An error if not by itself: with the end of its console.
    pub result: Result<()>,
    /// Of this machine's processors.
    pub processor: Duration,
}

/// What a machine is started with.
pub struct Machine<'a> {
    pub image: &'a Image,
    /// Archives of everything but the modules and the job.
    pub programs: &'a [&'a [u8]],
    pub modules: &'a [Module],
    /// Files that were on its disk when it was switched off.
    pub survivors: &'a BTreeMap<PathBuf, Vec<u8>>,
    pub job: Job,
    /// For the kernel, besides what every machine gets.
    pub command_line: &'a str,
    /// Where its files go while it runs, and its console's log stays.
    pub dir: PathBuf,
}

impl Machine<'_> {
    /// Runs it to its end and hands over each message as it comes.
    pub fn run(self, mut each: impl FnMut(Message)) -> Ended {
        let console = self.dir.join("console.log");
        let mut processor = Duration::ZERO;
        let mut run = || -> Result<()> {
            let mut child = self.start(&console)?;
            let result = follow(&mut child, &mut each);
            processor = processor_time(child.id());
            result.and(end(&mut child))
        };
        let result = run().with_context(|| last_lines(&console));
        Ended { result, processor }
    }

    fn start(&self, console: &Path) -> Result<Child> {
        let mut command = self.command()?;
        command
            .args([
                "-chardev",
                &format!("file,id=console,path={}", console.display()),
            ])
            .args(["-serial", "chardev:console"])
            .args(["-chardev", "stdio,id=messages,signal=off"])
            // As the second port of a PC.
            .args(["-device", "isa-serial,chardev=messages,iobase=0x2f8,irq=3"])
            .args(["-monitor", "none", "-display", "none"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        start(&mut command)
    }

    /// Runs it with its console on this terminal.
    pub fn shell(self) -> Result<()> {
        let mut command = self.command()?;
        command.args(["-serial", "mon:stdio", "-display", "none"]);
        let status = start(&mut command)?.wait()?;
        if !status.success() {
            bail!("{QEMU} ended with {status}");
        }
        Ok(())
    }

    fn command(&self) -> Result<Command> {
        fs::create_dir_all(&self.dir)
            .with_context(|| format!("cannot make {}", self.dir.display()))?;
        let initrd = self.dir.join("initrd");
        self.write_initrd(&initrd)
            .with_context(|| format!("cannot write {}", initrd.display()))?;
        // With the kernel the machine ends, too. Neither the delay loop is measured nor whether the
        // timer ticks in time: on a busy machine that comes to anything. What guards a kernel against
        // its processor and its own bugs is only slow here, and what root may load is the same without.
        let command_line = format!(
            "console=ttyS0 panic=-1 reboot=t quiet lpj=4000000 no_timer_check random.trust_cpu=on \
             mitigations=off init_on_alloc=0 audit=0 apparmor=0 {}",
            self.command_line
        );
        let mut command = Command::new(QEMU);
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-M", "microvm,acpi=off,pic=on,pit=on,rtc=on,isa-serial=on"])
            .args([
                "-accel",
                "tcg,thread=multi",
                "-cpu",
                &cpu(&self.image.release),
            ])
            .args(["-smp", PROCESSORS, "-m", MEMORY_MB])
            .arg("-kernel")
            .arg(&self.image.vmlinuz)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", &command_line]);
        Ok(command)
    }

    fn write_initrd(&self, path: &Path) -> Result<()> {
        let mut archive = Archive::default();
        let mut job = self.job.clone();
        for module in self.modules {
            let path = format!("/modules/{}.ko", module.name);
            archive.file(&path, &module.bytes);
            job.modules.push(path.into());
        }
        for (path, content) in self.survivors {
            let path = path.to_str().context("a path that is no text")?;
            archive.file(path, content);
        }
        archive.file(JOB_FILE, &serde_json::to_vec(&job)?);
        let mut file = File::create(path)?;
        for archive in self.programs {
            file.write_all(archive)?;
        }
        Ok(file.write_all(&archive.finish())?)
    }
}

fn start(command: &mut Command) -> Result<Child> {
    // SAFETY: one system call; the thread that starts the machine waits for it.
    unsafe {
        command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?));
    }
    running(|running| {
        let Some(running) = running else {
            bail!("interrupted");
        };
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {QEMU}"))?;
        running.insert(child.id() as i32);
        Ok(child)
    })
}

/// Until the last message.
fn follow(child: &mut Child, each: &mut impl FnMut(Message)) -> Result<()> {
    let stdout = child.stdout.take().context("no standard output")?;
    let (sender, lines) = channel();
    let reader = thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n') {
            let Ok(line) = line else { return };
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut last = String::from("it started");
    loop {
        let line = match lines.recv_timeout(SILENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                bail!("it said nothing for {} s after: {last}", SILENCE.as_secs());
            }
            Err(RecvTimeoutError::Disconnected) => {
                let _ = reader.join();
                bail!("it ended before its end, after: {last}");
            }
        };
        match Message::from_line(&line)? {
            Message::Done => return Ok(()),
            message => {
                if let Message::Doing(what) = &message {
                    last.clone_from(what);
                }
                each(message);
            }
        }
    }
}

/// What a process has had of the processors, all its threads (proc_pid_stat(5)); of one that is no
/// more, nothing.
fn processor_time(pid: u32) -> Duration {
    /// Of a second (`USER_HZ`); 100 on every architecture.
    const TICKS: u64 = 100;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may contain anything, the first field is the third.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = fields.split_ascii_whitespace().skip(14 - 3).take(2);
    let ticks: u64 = ticks.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * (1000 / TICKS))
}

/// Ends it, whatever it does, and says what qemu complained of.
fn end(child: &mut Child) -> Result<()> {
    let pid = child.id() as i32;
    let _ = child.kill();
    child.wait().context("cannot wait for the machine")?;
    running(|running| running.as_mut().map(|running| running.remove(&pid)));
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut said);
    }
    match said.trim() {
        "" => Ok(()),
        said => Err(anyhow!("{QEMU}: {said}")),
    }
}

/// The end of the console, from the kernel's panic on if there was one.
fn last_lines(console: &Path) -> String {
    let text = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let panic = lines.iter().position(|line| is_panic(line));
    let from = panic.unwrap_or(lines.len().saturating_sub(LAST_LINES));
    let some = &lines[from..lines.len().min(from + LAST_LINES)];
    let head = match panic {
        Some(_) => "the machine's kernel panicked",
        None => "the machine's console ends with",
    };
    format!("{head}:\n{}\n({})", some.join("\n"), console.display())
}

fn is_panic(line: &str) -> bool {
    [
        "Kernel panic",
        "BUG: ",
        "Oops: ",
        "general protection fault",
    ]
    .iter()
    .any(|what| line.contains(what))
}

/// What the console says of the kernel's own trouble, if anything, though the machine went on.
pub fn kernel_trouble(dir: &Path) -> Option<String> {
    let console = dir.join("console.log");
    let text = fs::read(&console).ok()?;
    let text = String::from_utf8_lossy(&text);
    let is_trouble = |line: &&str| is_panic(line) || line.contains("WARNING: ");
    let line = text.lines().find(is_trouble)?;
    Some(format!("{} ({})", line.trim(), console.display()))
}

/// The processor for a kernel. Since 7.2 BPF's storage of sockets is allocated without locks
/// (`kmalloc_nolock`), and without CMPXCHG16B not at all: nothing would be accelerated there.
fn cpu(release: &str) -> String {
    let mut numbers = release
        .split(['.', '-'])
        .map(|number| number.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version >= (7, 2) {
        true => CPU.to_owned(),
        false => format!("{CPU}{WITHOUT_CX16}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program in the place of qemu.
    fn messages(script: &str) -> (Vec<Message>, Result<()>) {
        let mut said = Vec::new();
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let result = follow(&mut child, &mut |message| said.push(message));
        let ended = end(&mut child);
        (said, result.and(ended))
    }

    #[test]
    fn newer_kernels_need_all_of_the_processor() {
        for release in ["7.2.12+deb13-cloud-amd64", "7.10-rc1", "8.0.0"] {
            assert_eq!(cpu(release), CPU, "{release}");
        }
        for release in ["7.0.0-14-generic", "6.12.107+deb13", "5.10.0-46", ""] {
            assert!(cpu(release).ends_with(WITHOUT_CX16), "{release}");
        }
    }

    #[test]
    fn a_machine_that_ends_early_or_talks_nonsense_is_an_error() {
        let doing = Message::Doing("a step".into());
        let line = doing.to_line().unwrap();
        let done = Message::Done.to_line().unwrap();
        let say = |text: &str| format!("printf '%s' '{text}'");
        let (said, result) = messages(&say(&format!("{line}{done}")));
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(said, [doing]);

        let error = messages(&say(&line)).1.unwrap_err().to_string();
        assert_eq!(error, "it ended before its end, after: a step");
        assert!(messages(&say(&line[..line.len() - 4])).1.is_err());
        assert!(messages(&say("garbage\n")).1.is_err());
        // What qemu itself says is not lost.
        let error = messages(&format!("echo no memory >&2; {}", say(&done))).1;
        assert!(error.unwrap_err().to_string().contains("no memory"));
    }

    #[test]
    fn a_process_has_had_processor_time() {
        let mut shell = Command::new("sh");
        // Ends once it has had some, and is not waited for until that was read.
        shell.args([
            "-c",
            "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo",
        ]);
        let mut child = shell.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = [0];
        child.stdout.take().unwrap().read_exact(&mut line).unwrap();
        assert!(processor_time(child.id()) > Duration::ZERO);
        child.wait().unwrap();
        assert_eq!(processor_time(child.id()), Duration::ZERO);
    }

    #[test]
    fn a_panic_is_shown_from_its_first_line_on() {
        let dir = tempfile::tempdir().unwrap();
        let console = dir.path().join("console.log");
        let before: String = (0..100).map(|n| format!("line {n}\r\n")).collect();
        fs::write(&console, &before).unwrap();
        let shown = last_lines(&console);
        assert!(
            shown.contains("line 99") && !shown.contains("line 70\n"),
            "{shown}"
        );
        let panic = "[ 1.0] Kernel panic - not syncing: Attempted to kill init!\r\n";
        fs::write(&console, format!("{before}{panic}{before}")).unwrap();
        let shown = last_lines(&console);
        assert!(
            shown.starts_with("the machine's kernel panicked:\n[ 1.0] Kernel panic"),
            "{shown}"
        );
        assert!(kernel_trouble(dir.path()).unwrap().contains("not syncing"));
        assert!(last_lines(Path::new("/none")).contains("/none"));
    }
}
