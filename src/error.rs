//! The one error of the program.
//!
//! Every failure has a [`Reason`]: a stable CamelCase name, an exit code and whether a retry can
//! help. It does not say how a failure is printed; `cli` does. Everything returns it.

use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;
use strum::{Display, IntoStaticStr, VariantArray};

/// Why something failed. The names and codes are a contract (`docs/exit-codes.md`).
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Display,
    IntoStaticStr,
    JsonSchema,
    Serialize,
    VariantArray,
)]
pub enum Reason {
    /// The command line or an environment variable cannot be understood.
    Usage,
    /// A snapshot's bytes are damaged: checksum, compression, bbolt page, JSON or record.
    CorruptSnapshot,
    /// A file of a data directory is damaged: WAL or .snap.
    CorruptDataDir,
    /// Revisions are missing between the base and the target.
    RevisionGap,
    /// A snapshot's name promises revisions that its content does not have.
    NameMismatch,
    /// A delta does not continue the history before it.
    HistoryMismatch,
    /// Members of the live etcd hold different data at one revision.
    MembersDiffer,
    /// The backup and the live etcd hold different data at one revision.
    BackupDiffers,
    /// An etcd that was started on what was restored holds other data than what was folded.
    DrillFailed,
    /// The prefix is the backup of another cluster.
    OtherCluster,
    /// Two timelines were written at the same time: two clusters share one prefix.
    InterleavedTimelines,
    /// A snapshot is larger than is allowed.
    TooLarge,
    /// A snapshot may be anybody's: it is plain text where snapshots are encrypted.
    Untrusted,
    /// A removal would leave less to restore than there is.
    WouldShrink,
    /// There is no snapshot to start from.
    NoSnapshots,
    /// The revision or time asked for is not covered.
    OutOfRange,
    /// No timeline has the ID asked for.
    NoSuchTimeline,
    /// The key asked for is not there.
    KeyNotFound,
    /// There is no revision that both the backup and the live etcd still hold.
    NoCommonRevision,
    /// The store does not answer, or answers with server errors.
    StoreUnreachable,
    /// No member of the live etcd answers.
    EtcdUnreachable,
    /// Members of the live etcd answer, and have no quorum.
    NoQuorum,
    /// The Kubernetes API does not answer.
    KubernetesUnreachable,
    /// A bug in deltafold: something it checks of itself did not hold.
    Internal,
    /// What is to be written exists already, with other content.
    TargetExists,
    /// A running etcd, or another restore, uses the data directory.
    TargetInUse,
    /// The cluster that a member would be restored into is alive without it.
    ClusterHasQuorum,
    /// Reading or writing a local file failed.
    Io,
    /// There is not enough room on a local disk.
    NoSpace,
    /// The listing changed during the run; a new run sees the new state.
    SnapshotVanished,
    /// The live etcd changed what was to be changed, or was compacted; a new run sees the new state.
    Conflict,
    /// Some of what was to be done was done, and some failed; a new run goes on with the rest.
    PartlyDone,
    /// Another run holds the lock.
    LockHeld,
    /// A member of the live etcd is not healthy, so that nothing is done that needs all others.
    MemberUnhealthy,
    /// A certificate has expired, or is not valid yet.
    CertificateExpired,
    /// The store, the file system or etcd refuses the operation.
    PermissionDenied,
    /// The store or etcd does not accept the credentials.
    Unauthenticated,
    /// A snapshot is encrypted, and no identity that was given opens it.
    CannotDecrypt,
    /// A setting of the store or of the way to etcd is wrong or missing.
    Configuration,
    /// SIGTERM or SIGINT ended the run.
    Terminated,
}

impl Reason {
    /// Every reason, in the order of the exit codes.
    pub const ALL: &[Reason] = Reason::VARIANTS;

    /// The stable CamelCase name.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The process exit code, after BSD's sysexits.h; 143 is 128 + SIGTERM.
    pub fn exit_code(self) -> u8 {
        match self {
            Reason::Usage => 64,
            Reason::CorruptSnapshot
            | Reason::CorruptDataDir
            | Reason::RevisionGap
            | Reason::NameMismatch
            | Reason::HistoryMismatch
            | Reason::MembersDiffer
            | Reason::BackupDiffers
            | Reason::DrillFailed
            | Reason::OtherCluster
            | Reason::InterleavedTimelines
            | Reason::TooLarge
            | Reason::Untrusted
            | Reason::WouldShrink => 65,
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
            | Reason::MemberUnhealthy => 75,
            Reason::CertificateExpired => 76,
            Reason::PermissionDenied | Reason::Unauthenticated | Reason::CannotDecrypt => 77,
            Reason::Configuration => 78,
            Reason::Terminated => 143,
        }
    }

    /// A failure for this reason; the message is lower case, without a full stop.
    pub fn error(self, message: impl Into<String>) -> Error {
        Error::new(self, message)
    }

    /// Whether snapshots or a data directory, not their surroundings, are what is wrong.
    pub fn is_bad_data(self) -> bool {
        let of_surroundings = matches!(
            self,
            Reason::MembersDiffer
                | Reason::BackupDiffers
                | Reason::DrillFailed
                | Reason::OtherCluster
                | Reason::Untrusted
                | Reason::WouldShrink
        );
        self.exit_code() == 65 && !of_surroundings
    }

    /// Whether the same command can succeed later without anything being mended by hand.
    pub fn is_retryable(self) -> bool {
        matches!(self.exit_code(), 69 | 74 | 75)
    }
}

/// A failure: a [`Reason`] and a sentence that says what, where and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    reason: Reason,
    message: String,
    plans_again: bool,
}

/// What everything here returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failure with `reason`; the message is lower case, without a full stop.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Error {
            reason,
            message: message.into(),
            plans_again: false,
        }
    }

    /// What a plan relied on turned out to be excluded: the same run can plan again without it.
    pub(crate) fn plan_again(message: impl Into<String>) -> Self {
        Error {
            plans_again: true,
            ..Reason::SnapshotVanished.error(message)
        }
    }

    /// Whether it is of [`plan_again`](Self::plan_again).
    pub(crate) fn plans_again(&self) -> bool {
        self.plans_again
    }

    /// The same error once more.
    pub(crate) fn again(&self) -> Self {
        Error {
            message: self.message.clone(),
            ..*self
        }
    }

    /// Damaged bytes.
    pub fn corrupt(message: impl Into<String>) -> Self {
        Reason::CorruptSnapshot.error(message)
    }

    /// A bug of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Reason::Internal.error(format!(
            "{} (this is a bug in deltafold: please report it)",
            message.into()
        ))
    }

    /// A local file operation that failed; `what` names the operation and the file.
    ///
    /// An error that one of our own readers passed through `std::io` keeps its reason.
    pub fn io(what: impl fmt::Display, e: std::io::Error) -> Self {
        use std::io::ErrorKind;
        match e.downcast::<Error>() {
            Ok(own) => own,
            Err(e) => {
                let reason = match e.kind() {
                    ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Reason::NoSpace,
                    ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                        Reason::PermissionDenied
                    }
                    _ => Reason::Io,
                };
                reason.error(format!("{what}: {e}"))
            }
        }
    }

    /// Puts `where_` before the message, keeping the reason.
    pub fn at(mut self, where_: impl fmt::Display) -> Self {
        self.message = format!("{where_}: {}", self.message);
        self
    }

    /// Why it failed.
    pub fn reason(&self) -> Reason {
        self.reason
    }
}

/// So that our readers can stand behind `std::io::Read` without losing the reason.
impl From<Error> for std::io::Error {
    fn from(e: Error) -> Self {
        std::io::Error::other(e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_survives_std_io() {
        let e = Error::corrupt("page 7 is torn");
        let back = Error::io("read x", std::io::Error::from(e));
        assert_eq!(back.reason(), Reason::CorruptSnapshot);
        assert_eq!(back.to_string(), "page 7 is torn");
    }

    #[test]
    fn only_unreachable_io_and_partly_done_are_worth_a_retry() {
        for &r in Reason::ALL {
            assert_eq!(
                r.is_retryable(),
                [69, 74, 75].contains(&r.exit_code()),
                "{r}"
            );
        }
    }
}
