//! A pseudo-terminal of 80 columns.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::FromRawFd as _;
use std::process::{Child, Command};
use std::ptr::{null, null_mut};
use std::sync::mpsc;
use std::time::Duration;

/// What a program prints on a terminal of 80 columns.
pub struct Terminal {
    child: Child,
    pieces: mpsc::Receiver<Vec<u8>>,
    shown: String,
}

impl Terminal {
    /// Starts a program with standard output and standard error on a new terminal.
    pub fn start(command: &mut Command) -> Self {
        let size = libc::winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let (mut ours, mut theirs) = (-1, -1);
        // SAFETY: the pointers are valid during the call, or null where that is allowed.
        let opened = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null(), &size) };
        let error = std::io::Error::last_os_error();
        assert_eq!(opened, 0, "a pseudo-terminal: {error}");
        // SAFETY: openpty has opened both, and nothing else owns them.
        let (mut ours, theirs) = unsafe { (File::from_raw_fd(ours), File::from_raw_fd(theirs)) };
        command.stdout(theirs.try_clone().expect("the terminal"));
        command.stderr(theirs);
        let child = command.spawn().expect("start the program");
        // The command holds the terminal open: replace its copies.
        command.stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let (sender, pieces) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Reading fails when the last process has closed the terminal.
            while let Ok(n @ 1..) = ours.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal {
            child,
            pieces,
            shown: String::new(),
        }
    }

    /// The process, for signals.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the terminal has shown a text.
    pub fn wait_for(&mut self, text: &str) {
        while !self.shown.contains(text) {
            let piece = self.pieces.recv_timeout(Duration::from_secs(60));
            let piece = piece.unwrap_or_else(|_| panic!("no {text:?} in:\n{}", self.shown));
            self.shown += &String::from_utf8_lossy(&piece);
        }
    }

    /// Waits for the end. Returns the exit code and everything that was shown.
    pub fn end(mut self) -> (i32, String) {
        while let Ok(piece) = self.pieces.recv_timeout(Duration::from_secs(60)) {
            self.shown += &String::from_utf8_lossy(&piece);
        }
        let status = self.child.wait().expect("the exit code");
        let shown = std::mem::take(&mut self.shown).replace("\r\n", "\n");
        (status.code().expect("no signal"), shown)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
