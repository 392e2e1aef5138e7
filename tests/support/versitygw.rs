//! versitygw: a second real S3 server, by other authors, that stores objects as files.

use super::scratch;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::XattrFlags;
use tempfile::TempDir;

use super::process::{Process, free_port, http};
use super::s3::{ACCESS_KEY, REGION, S3, SECRET_KEY};
use super::tools::{self, tail};

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running versitygw with a folder of its own. It is killed when dropped.
#[derive(Debug)]
pub struct Versitygw {
    s3: S3,
    _process: Process,
    // Declared after the process, so removed after it.
    _folder: TempDir,
}

impl Versitygw {
    pub fn start() -> Self {
        let program = tools::versitygw();
        let folder = folder_with_attributes();
        let log = folder.path().join("versitygw.log");
        let (root, versions) = (folder.path().join("root"), folder.path().join("versions"));
        for dir in [&root, &versions] {
            std::fs::create_dir(dir).expect("a folder for versitygw");
        }
        // Another process may take a free port before the server binds it.
        for attempt in 1.. {
            let port = free_port();
            let address = format!("127.0.0.1:{port}");
            let mut command = Command::new(&program);
            tools::forget_env(&mut command, &["VGW_", "ROOT_", "LOGFILE", "WEBHOOK"]);
            command
                .args(["--port", &address, "--region", REGION])
                .args(["posix", "--versioning-dir"])
                .args([&versions, &root])
                .env("ROOT_ACCESS_KEY", ACCESS_KEY)
                .env("ROOT_SECRET_KEY", SECRET_KEY);
            let mut process =
                Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"));
            let ready = process.wait_until(START_TIMEOUT, || {
                http(port, "GET", "/", "").is_some_and(|answer| answer.contains("AccessDenied"))
            });
            match ready {
                Ok(()) => {
                    return Self {
                        s3: S3::new(&format!("http://{address}")),
                        _process: process,
                        _folder: folder,
                    };
                }
                Err(_) if attempt < 3 && tail(&log).contains("in use") => {}
                Err(err) => panic!("versitygw: {err}; the end of its log:\n{}", tail(&log)),
            }
        }
        unreachable!("the loop ends by returning")
    }

    pub fn s3(&self) -> &S3 {
        &self.s3
    }
}

/// Creates a folder on a file system with extended attributes, which versitygw needs: the temporary directory
/// or the build directory.
fn folder_with_attributes() -> TempDir {
    let places = [scratch::place(), PathBuf::from(env!("CARGO_TARGET_TMPDIR"))];
    let has_attributes = |folder: &Path| {
        let set = rustix::fs::setxattr(folder, "user.deltafold", b"1", XattrFlags::empty());
        set.is_ok()
    };
    for place in &places {
        let folder = tempfile::Builder::new()
            .prefix("versitygw-")
            .tempdir_in(place)
            .expect("a folder for versitygw");
        if has_attributes(folder.path()) {
            return folder;
        }
    }
    panic!("versitygw needs a file system with extended attributes: none at {places:?}; set TMPDIR")
}
