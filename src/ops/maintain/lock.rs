//! The lock that keeps a second `maintain` away from the same cluster.
//!
//! It is a Lease in Kubernetes, an object in the store, or a file on this machine.

use super::{LockLease, Options};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::etcd::connect::Connector;
use crate::kubernetes::{self, lease};
use crate::prefix::Context;
use crate::store::lock::{self, Lock, LockGuard, Wait};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

/// A lock whose holder died expires after this time.
const LOCK_DURATION: Duration = Duration::from_secs(15);

/// The held lock, until it is dropped.
pub(super) enum MaintenanceLock {
    /// A dry run changes nothing and needs no lock.
    NotNeeded,
    /// A lock on a file of this machine. The system releases it when the process ends.
    File { _file: File },
    /// An expiring lock in the store, or a Lease.
    Expiring(LockGuard),
}

impl MaintenanceLock {
    /// Takes the lock of a cluster: the Lease if one is named, else an object in the store, or without a
    /// store a file.
    ///
    /// # Errors
    /// Fails with `LockHeld` if another process holds the lock; with the errors of Kubernetes, of the store,
    /// and `Io`.
    pub(super) fn acquire(
        connector: &Connector,
        store: Option<&Context>,
        options: &Options,
        cluster: &Cluster,
    ) -> Result<Self> {
        let name = format!("maintain-{}", cluster.hex_id());
        let identity = lock::identity();
        let mut lock = match (&options.lock_lease, store) {
            (Some(LockLease { name, namespace }), _) => {
                let (handle, cancel) = (connector.handle().clone(), connector.cancel().clone());
                let client = kubernetes::Client::connect(namespace.as_deref(), handle, cancel)?;
                lease::lock(&client, name, &identity, LOCK_DURATION)
            }
            (None, Some(ctx)) => Lock::new(&ctx.store, &name, &identity, LOCK_DURATION)?,
            (None, None) => {
                return lock_file(&options.temp_dir.join(format!("deltafold-{name}.lock")));
            }
        };
        lock.acquire(Wait::UntilSeenDead)
            .map(MaintenanceLock::Expiring)
    }

    /// Fails if the lock is lost, so that another process may have begun.
    pub(super) fn check(&self) -> Result<()> {
        match self {
            MaintenanceLock::NotNeeded | MaintenanceLock::File { .. } => Ok(()),
            MaintenanceLock::Expiring(guard) => guard.check(),
        }
    }
}

pub(super) fn lock_file(path: &Path) -> Result<MaintenanceLock> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        // Other users may write to the temporary directory: do not follow their symbolic links.
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::io(format!("open the lock {}", path.display()), e))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(MaintenanceLock::File { _file: file }),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Reason::LockHeld.error(format!(
            "another `deltafold maintain` is at work on this cluster (it holds the lock {}): run again later",
            path.display()
        ))),
        Err(e) => Err(Error::io(format!("lock {}", path.display()), e.into())),
    }
}
