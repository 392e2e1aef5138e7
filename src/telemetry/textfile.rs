//! Writes metrics to a file, for the textfile collector of node exporter.
//!
//! A reader always sees a complete file: it is written under another name and then renamed.

use super::metrics::Metrics;
use crate::base::opt::METRICS_FILE;
use crate::error::{Error, Reason, Result};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// How often a long-running process writes the file.
const INTERVAL: Duration = Duration::from_secs(15);
/// The mode of the file: the collector, which runs as another user, must be able to read it.
const MODE: u32 = 0o644;

fn folder(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Checks, before an operation begins, that the file can be written.
///
/// # Errors
/// `Configuration` if its folder does not exist, or it is a folder itself.
pub fn check(file: &Path) -> Result<()> {
    let wrong = |problem: String| {
        let message = format!("{METRICS_FILE} {}: {problem}", file.display());
        Err(Reason::Configuration.error(message))
    };
    match folder(file) {
        f if !f.is_dir() => wrong(format!("the folder {} does not exist", f.display())),
        _ if file.is_dir() => {
            wrong("this is a folder: name a file in it, such as deltafold.prom".into())
        }
        _ => Ok(()),
    }
}

/// Writes the current metrics.
///
/// # Errors
/// `Io`, `NoSpace`, `PermissionDenied`.
pub fn write(file: &Path, metrics: &Metrics) -> Result<()> {
    let text = metrics.encode_text()?;
    let failed = |e| Error::io(format!("write the metrics to {}", file.display()), e);
    // The collector ignores this name: it reads only *.prom.
    let mut temporary = tempfile::Builder::new()
        .prefix(".deltafold-")
        .suffix(".tmp")
        .tempfile_in(folder(file))
        .map_err(failed)?;
    // A mode given at the creation would be masked by the umask, which is 0077 in the systemd units.
    let mode = Permissions::from_mode(MODE);
    temporary.as_file().set_permissions(mode).map_err(failed)?;
    temporary.write_all(text.as_bytes()).map_err(failed)?;
    temporary.persist(file).map_err(|e| failed(e.error))?;
    Ok(())
}

/// The file of a long-running process. It is written every 15 seconds, and when this is dropped.
#[derive(Debug)]
pub struct Textfile {
    file: PathBuf,
    metrics: Metrics,
    task: JoinHandle<()>,
}

impl Textfile {
    /// Starts to write the file.
    pub fn keep(file: PathBuf, metrics: &Metrics, handle: &Handle) -> Self {
        let task = handle.spawn(write_regularly(file.clone(), metrics.clone()));
        Textfile {
            file,
            metrics: metrics.clone(),
            task,
        }
    }
}

async fn write_regularly(file: PathBuf, metrics: Metrics) {
    loop {
        write_or_warn(&file, &metrics);
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Writes the current metrics. A failure is only logged.
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
