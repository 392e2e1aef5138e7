//! Metrics in a file, for node exporter's textfile collector.
//!
//! The file is whole whenever it is read: it is written beside its name and then renamed. What is in it, it does
//! not decide; `cli` says when it is written.

use super::metrics::Metrics;
use crate::error::{Error, Reason, Result};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// How often the file of a process that goes on is written.
const EVERY: Duration = Duration::from_secs(15);
/// The collector runs as another user.
const READABLE: u32 = 0o644;

fn folder(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Looks whether the file can be written; a job that nobody could look at should not begin.
///
/// # Errors
/// `Configuration` where its folder is not there, or it is a folder itself.
pub fn check(file: &Path) -> Result<()> {
    let wrong = |what: String| {
        let message = format!("--metrics-file {}: {what}", file.display());
        Err(Reason::Configuration.error(message))
    };
    match folder(file) {
        f if !f.is_dir() => wrong(format!("the folder {} is not there", f.display())),
        _ if file.is_dir() => {
            wrong("it is a folder: name a file in it, such as deltafold.prom".into())
        }
        _ => Ok(()),
    }
}

/// Writes the metrics as they are now.
///
/// # Errors
/// `Io`, `NoSpace`, `PermissionDenied`.
pub fn write(file: &Path, metrics: &Metrics) -> Result<()> {
    let text = metrics.encode_text()?;
    let failed = |e| Error::io(format!("write the metrics to {}", file.display()), e);
    // The collector reads *.prom and nothing else.
    let mut beside = tempfile::Builder::new()
        .prefix(".deltafold-")
        .suffix(".tmp")
        .permissions(Permissions::from_mode(READABLE))
        .tempfile_in(folder(file))
        .map_err(failed)?;
    beside.write_all(text.as_bytes()).map_err(failed)?;
    beside.persist(file).map_err(|e| failed(e.error))?;
    Ok(())
}

/// The file of a process that goes on: written now and then, and when this is dropped.
#[derive(Debug)]
pub struct Textfile {
    file: PathBuf,
    metrics: Metrics,
    task: JoinHandle<()>,
}

impl Textfile {
    /// Begins to write it.
    pub fn keep(file: PathBuf, metrics: &Metrics, handle: &Handle) -> Self {
        let (path, told) = (file.clone(), metrics.clone());
        let task = handle.spawn(async move {
            loop {
                write_or_warn(&path, &told);
                tokio::time::sleep(EVERY).await;
            }
        });
        Textfile {
            file,
            metrics: metrics.clone(),
            task,
        }
    }
}

/// As [`write`], where a failure changes nothing about what the process does.
pub fn write_or_warn(file: &Path, metrics: &Metrics) {
    if let Err(e) = write(file, metrics) {
        tracing::warn!(reason = e.reason().as_str(), "{e}");
    }
}

impl Drop for Textfile {
    fn drop(&mut self) {
        self.task.abort();
        write_or_warn(&self.file, &self.metrics);
    }
}
