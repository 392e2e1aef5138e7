//! The error type of the whole program.
//!
//! Every error has a [`Reason`]: a stable CamelCase name, an exit code, and whether a retry can help. `cli`
//! decides how an error is printed.

use crate::base::printable;
use serde::Serialize;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use strum::{Display, IntoStaticStr, VariantArray};

/// Whether SIGINT, and not SIGTERM, ends the process.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Says that SIGINT ends the process: that decides the exit code of [`Reason::Terminated`].
pub(crate) fn set_interrupted() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Why something failed. The names and codes are a contract (`docs/exit-codes.md`).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Display, IntoStaticStr, Serialize, VariantArray,
)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Reason {
    /// The command line or an environment variable is invalid.
    Usage,
    /// A snapshot's bytes are damaged: checksum, compression, bbolt page, JSON or record.
    CorruptSnapshot,
    /// A file of a data directory is damaged: WAL or .snap.
    CorruptDataDir,
    /// Revisions are missing between the base and the target revision.
    RevisionGap,
    /// A snapshot does not contain the revisions that its name says.
    NameMismatch,
    /// A delta does not continue the history before it.
    HistoryMismatch,
    /// A full holds another state than the chain before it leads to.
    HistoryDiffers,
    /// Members of the live etcd hold different data at the same revision.
    MembersDiffer,
    /// The backup and the live etcd hold different data at the same revision.
    BackupDiffers,
    /// In a drill, the etcd that was started on the restored data holds other data than was restored.
    DrillFailed,
    /// The prefix is the backup of another cluster.
    OtherCluster,
    /// Two timelines were written at the same time: two clusters share one prefix.
    InterleavedTimelines,
    /// A snapshot exceeds a limit of [`crate::base::limits`].
    TooLarge,
    /// A snapshot is not encrypted although keys are given, so anybody may have written it.
    Untrusted,
    /// A removal would shorten the range of revisions that can be restored.
    WouldShrink,
    /// A value is not an object of Kubernetes that can be decoded.
    NotDecoded,
    /// The backup has no full snapshot to start from.
    NoSnapshots,
    /// The backup does not cover the requested revision or time.
    OutOfRange,
    /// No timeline has the requested ID.
    NoSuchTimeline,
    /// The requested key does not exist.
    KeyNotFound,
    /// The backup and the live etcd have no revision in common that both still hold.
    NoCommonRevision,
    /// The store does not respond, or responds with server errors.
    StoreUnreachable,
    /// No member of the live etcd responds.
    EtcdUnreachable,
    /// Members of the live etcd respond, but have no quorum.
    NoQuorum,
    /// The Kubernetes API does not respond.
    KubernetesUnreachable,
    /// An internal check failed: a bug in deltafold.
    Internal,
    /// The target of a write exists already, with other content.
    TargetExists,
    /// A running etcd, or another restore, uses the data directory.
    TargetInUse,
    /// The cluster has a quorum without the member whose data directory would be restored.
    ClusterHasQuorum,
    /// Reading or writing a local file failed.
    Io,
    /// A local disk, or the store, is full.
    NoSpace,
    /// The listing of the store changed during the operation. A new attempt sees the new listing.
    SnapshotVanished,
    /// Another client changed the same keys of the live etcd, or etcd was compacted. A new attempt sees the
    /// new state.
    Conflict,
    /// A part of the operation failed. A new attempt continues with the rest.
    PartlyDone,
    /// Another operation holds the lock.
    LockHeld,
    /// A member of the live etcd is unhealthy, and the operation needs all other members to be healthy.
    MemberUnhealthy,
    /// The newest snapshot is older than it may be.
    Stale,
    /// The cluster was set back not long ago: the history that it left ends above that point.
    SetBack,
    /// The backup was not verified for too long.
    NotVerified,
    /// A certificate has expired, or is not valid yet.
    CertificateExpired,
    /// The store, the file system or etcd refuses the operation.
    PermissionDenied,
    /// The store or etcd does not accept the credentials.
    Unauthenticated,
    /// A snapshot is encrypted, and none of the given identities decrypts it.
    CannotDecrypt,
    /// A setting of the store or of the connection to etcd is wrong or missing.
    Configuration,
    /// A retention policy or a hold of the store keeps an object that would be overwritten or deleted.
    ObjectLocked,
    /// An object is in an archive class of the store, which does not hand it out.
    Archived,
    /// SIGTERM or SIGINT ended the operation.
    Terminated,
}

impl Reason {
    /// Every reason, in the order of the exit codes.
    pub const ALL: &[Reason] = Reason::VARIANTS;

    /// Returns the stable CamelCase name.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns the exit code of the process. Codes follow BSD's sysexits.h; 143 is 128 + SIGTERM, and 130 is 128 + SIGINT.
    pub fn exit_code(self) -> u8 {
        match self {
            Reason::Usage => 64,
            Reason::CorruptSnapshot
            | Reason::CorruptDataDir
            | Reason::RevisionGap
            | Reason::NameMismatch
            | Reason::HistoryMismatch
            | Reason::HistoryDiffers
            | Reason::MembersDiffer
            | Reason::BackupDiffers
            | Reason::DrillFailed
            | Reason::OtherCluster
            | Reason::InterleavedTimelines
            | Reason::TooLarge
            | Reason::Untrusted
            | Reason::WouldShrink
            | Reason::NotDecoded => 65,
            Reason::NoSnapshots
            | Reason::OutOfRange
            | Reason::NoSuchTimeline
            | Reason::KeyNotFound
            | Reason::NoCommonRevision => 66,
            Reason::StoreUnreachable
            | Reason::EtcdUnreachable
            | Reason::NoQuorum
            | Reason::KubernetesUnreachable => 69,
            Reason::Internal => 70,
            Reason::TargetExists | Reason::TargetInUse | Reason::ClusterHasQuorum => 73,
            Reason::Io | Reason::NoSpace => 74,
            Reason::SnapshotVanished
            | Reason::Conflict
            | Reason::PartlyDone
            | Reason::LockHeld
            | Reason::MemberUnhealthy
            | Reason::Stale
            | Reason::SetBack
            | Reason::NotVerified => 75,
            Reason::CertificateExpired => 76,
            Reason::PermissionDenied | Reason::Unauthenticated | Reason::CannotDecrypt => 77,
            Reason::Configuration | Reason::ObjectLocked | Reason::Archived => 78,
            Reason::Terminated if INTERRUPTED.load(Ordering::Relaxed) => 130,
            Reason::Terminated => 143,
        }
    }

    /// Creates an error with this reason. The message is lower case and has no full stop.
    pub fn error(self, message: impl Into<String>) -> Error {
        Error::new(self, message)
    }

    /// Whether snapshots or a data directory are damaged or contradict themselves. False if their content is
    /// fine and only differs from something else, such as the live etcd.
    pub fn is_bad_data(self) -> bool {
        let data_is_intact = matches!(
            self,
            Reason::MembersDiffer
                | Reason::BackupDiffers
                | Reason::DrillFailed
                | Reason::OtherCluster
                | Reason::Untrusted
                | Reason::WouldShrink
                | Reason::NotDecoded
        );
        self.exit_code() == 65 && !data_is_intact
    }

    /// Whether a snapshot cannot be opened, today and tomorrow: it is damaged, or no key opens it.
    pub fn is_unreadable(self) -> bool {
        self.is_bad_data() || self == Reason::CannotDecrypt
    }

    /// Whether a failure to read may be that of one object alone, so that others can be read nevertheless: it is damaged,
    /// sealed, not trusted, gone, or the store does not hand it out (denied, archived).
    pub fn is_of_one_object(self) -> bool {
        let is_refused = matches!(
            self,
            Reason::PermissionDenied | Reason::Untrusted | Reason::NoSnapshots | Reason::Archived
        );
        self.is_unreadable() || is_refused
    }

    /// Whether the same command can succeed later without a change by hand.
    pub fn is_retryable(self) -> bool {
        matches!(self.exit_code(), 69 | 74 | 75)
    }
}

/// An error: a [`Reason`], and a message that says what failed, where, and what to do next.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    reason: Reason,
    message: String,
    /// The full name of the snapshot without which the operation can make another plan.
    set_aside: Option<String>,
    /// The setting of the store (KEY=VALUE) with which it may accept what it refused.
    setting: Option<&'static str>,
}

/// A result whose error is [`Error`] by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Creates an error. The message is lower case and has no full stop; of a message of more than 1 KiB the
    /// middle is left out.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Error {
            reason,
            message: printable::message(message.into()),
            set_aside: None,
            setting: None,
        }
    }

    /// Creates a `SnapshotVanished` error for a plan that relied on a snapshot which a tag turned out to exclude.
    /// `name` is the snapshot's full name.
    pub(crate) fn excluded(name: String) -> Self {
        let message = format!("{name} is excluded by a tag: run the command again");
        Reason::SnapshotVanished.error(message).setting_aside(name)
    }

    /// Says that the operation can make another plan, without the snapshot of this full name.
    pub(crate) fn setting_aside(mut self, name: impl Into<String>) -> Self {
        self.set_aside = Some(name.into());
        self
    }

    /// Returns the full name of the snapshot without which the operation can make another plan, if there is one.
    pub(crate) fn set_aside(&self) -> Option<&str> {
        self.set_aside.as_deref()
    }

    /// Says that the store may accept this with another setting (KEY=VALUE).
    pub(crate) fn with_setting(mut self, setting: &'static str) -> Self {
        self.setting = Some(setting);
        self
    }

    /// Returns the setting of the store (KEY=VALUE) with which it may accept what it refused.
    pub(crate) fn setting(&self) -> Option<&'static str> {
        self.setting
    }

    /// Whether a tag excludes the snapshot of [`set_aside`](Self::set_aside).
    pub(crate) fn is_of_excluded(&self) -> bool {
        self.reason == Reason::SnapshotVanished && self.set_aside.is_some()
    }

    /// Returns a copy, for a second report of the same failure. The type is not `Clone`, so that errors are
    /// not copied by accident.
    pub(crate) fn again(&self) -> Self {
        Error {
            message: self.message.clone(),
            set_aside: self.set_aside.clone(),
            ..*self
        }
    }

    /// Returns the error with another message.
    pub(crate) fn reworded(&self, message: impl Into<String>) -> Self {
        Error {
            message: printable::message(message.into()),
            ..self.again()
        }
    }

    /// Creates a `CorruptSnapshot` error.
    pub fn corrupt(message: impl Into<String>) -> Self {
        Reason::CorruptSnapshot.error(message)
    }

    /// Creates an `Internal` error, which asks the user to report a bug.
    pub fn internal(message: impl Into<String>) -> Self {
        Reason::Internal.error(format!(
            "{} (this is a bug in deltafold: please report it)",
            message.into()
        ))
    }

    /// Creates an error for a local file operation. `operation` names the operation and the file.
    ///
    /// The reason is `NoSpace`, `PermissionDenied` or `Io`. An [`Error`] inside `e`, which one of our
    /// own readers passed through `std::io`, is returned unchanged.
    pub fn io(operation: impl fmt::Display, e: std::io::Error) -> Self {
        use std::io::ErrorKind;
        match e.downcast::<Error>() {
            Ok(inner) => inner,
            Err(e) => {
                let reason = match e.kind() {
                    ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Reason::NoSpace,
                    ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                        Reason::PermissionDenied
                    }
                    _ => Reason::Io,
                };
                reason.error(format!("{operation}: {e}"))
            }
        }
    }

    /// Puts `place` and a colon before the message.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.message = printable::message(format!("{place}: {}", self.message));
        self
    }

    /// Returns the reason.
    pub fn reason(&self) -> Reason {
        self.reason
    }
}

/// Lets our readers implement `std::io::Read` without losing the reason: [`Error::io`] restores it.
impl From<Error> for std::io::Error {
    fn from(e: Error) -> Self {
        std::io::Error::other(e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_survives_a_conversion_to_std_io() {
        let e = Error::corrupt("page 7 is torn");
        let back = Error::io("read x", std::io::Error::from(e));
        assert_eq!(back.reason(), Reason::CorruptSnapshot);
        assert_eq!(back.to_string(), "page 7 is torn");
    }

    #[test]
    fn what_may_succeed_later_is_retryable() {
        let retryable = Reason::ALL.iter().filter(|r| r.is_retryable());
        let retryable: Vec<&str> = retryable.map(|r| r.as_str()).collect();
        let expected = [
            "StoreUnreachable",
            "EtcdUnreachable",
            "NoQuorum",
            "KubernetesUnreachable",
            "Io",
            "NoSpace",
            "SnapshotVanished",
            "Conflict",
            "PartlyDone",
            "LockHeld",
            "MemberUnhealthy",
            "Stale",
            "SetBack",
            "NotVerified",
        ];
        assert_eq!(retryable, expected);
    }
}
