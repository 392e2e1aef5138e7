//! A child process that is killed when dropped, free ports, and plain HTTP requests.

use super::etcd::{STOP_TIMEOUT, Signal};
use super::tools::tail;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Returns a free port of 127.0.0.1 that stays free for a while: it is below the range that the kernel assigns
/// to clients, and each call returns another one.
pub fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 20_000;
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(7919);
    std::iter::repeat_with(|| {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + begin.wrapping_add(call) % COUNT;
        u16::try_from(port).expect("a port")
    })
    .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
    .expect("an endless search")
}

/// Sends one plain HTTP request. Returns the response with its headers, or `None` if there is none.
pub fn http(port: u16, method: &str, target: &str, body: &str) -> Option<String> {
    http_at("127.0.0.1", port, method, target, body)
}

/// Like `http`, at another address.
pub fn http_at(host: &str, port: u16, method: &str, target: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect((host, port)).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .ok()?;
    // HTTP/1.0: the response comes in one piece and ends with the connection.
    let request = format!(
        "{method} {target} HTTP/1.0\r\nHost: {host}:{port}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// A child process that is killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// The file of standard error, or of all output.
    pub log: PathBuf,
}

/// Gives a server all that its field `process` can do.
macro_rules! is_a_process {
    ($server:ty) => {
        impl std::ops::Deref for $server {
            type Target = crate::support::process::Process;

            fn deref(&self) -> &Self::Target {
                &self.process
            }
        }
    };
}
pub(crate) use is_a_process;

impl Process {
    pub fn spawn(command: &mut Command, log: &Path) -> Result<Self, String> {
        let out = File::create(log).map_err(|err| format!("{}: {err}", log.display()))?;
        let err = out.try_clone().map_err(|err| err.to_string())?;
        Self::spawn_to(command, out, err, log)
    }

    /// Starts a process with standard output and standard error in separate files. `log` is the second one.
    pub fn spawn_to(
        command: &mut Command,
        out: File,
        err: File,
        log: &Path,
    ) -> Result<Self, String> {
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(|err| format!("start {}: {err}", command.get_program().display()))?;
        let log = log.to_owned();
        Ok(Self { child, log })
    }

    /// Returns the log so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Returns the end of the log.
    pub fn tail(&self) -> String {
        tail(&self.log)
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal. The process was not waited for, so the pid is still its own.
    pub fn signal(&self, signal: Signal) {
        let _ =
            rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal);
    }

    /// Kills the process and waits for its end.
    pub fn end(&mut self) {
        self.kill();
    }

    /// Returns the exit status if the process ends within `timeout`.
    pub fn ended_within(&mut self, timeout: Duration) -> Option<std::process::ExitStatus> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("the state of a child") {
                return Some(status);
            }
            if started.elapsed() > timeout {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails if the process has ended.
    pub fn runs(&mut self) -> Result<(), String> {
        match self.child.try_wait().map_err(|err| err.to_string())? {
            Some(status) => Err(format!("it ended with {status}")),
            None => Ok(()),
        }
    }

    pub fn wait_until(
        &mut self,
        timeout: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), String> {
        let started = Instant::now();
        loop {
            self.runs()?;
            if ready() {
                return Ok(());
            }
            if started.elapsed() > timeout {
                return Err(format!("it did not serve within {} s", timeout.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the process to end and waits; kills it if it does not.
    pub fn stop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // Not waited for yet, so the pid is still this child's.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.child),
            rustix::process::Signal::TERM,
        );
        let started = Instant::now();
        while started.elapsed() < STOP_TIMEOUT {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill();
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
