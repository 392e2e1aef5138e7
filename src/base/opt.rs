//! The names of options in messages, which each surface writes in its own notation.

use std::fmt::{self, Display, Formatter};
use std::sync::OnceLock;

/// An option that a message tells to set. Its name is that of the command line's flag, without the dashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opt(&'static str);

/// A surface's way to write the name of an option.
type Notation = Box<dyn Fn(&str) -> String + Send + Sync>;

static NOTATION: OnceLock<Notation> = OnceLock::new();

impl Opt {
    /// Sets how the messages of this process write options, by their names. Only the first call counts.
    pub fn write_as(notation: impl Fn(&str) -> String + Send + Sync + 'static) {
        // The surface that a process began with stays.
        let _ = NOTATION.set(Box::new(notation));
    }
}

impl Display for Opt {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match NOTATION.get() {
            Some(notation) => f.write_str(&notation(self.0)),
            None => f.write_str(self.0),
        }
    }
}

/// Returns a text with the names of options in place of `{temp-dir}` and the like, for texts that are constants.
pub fn fill(text: &str) -> String {
    let mut filled = text.to_owned();
    for name in ALL.iter().filter(|name| text.contains(**name)) {
        filled = filled.replace(&format!("{{{name}}}"), &Opt(name).to_string());
    }
    filled
}

macro_rules! options {
    ($($name:ident = $text:literal,)*) => {
        $(
            #[doc = concat!("The option `", $text, "`.")]
            pub const $name: Opt = Opt($text);
        )*

        /// The names of all options that messages name.
        pub const ALL: &[&str] = &[$($text),*];
    };
}

options! {
    AGE_IDENTITY = "age-identity",
    AGE_RECIPIENT = "age-recipient",
    AGE_RECIPIENTS_FILE = "age-recipients-file",
    ALL_CHAINS = "all-chains",
    ALLOW_HOST_NETWORK = "allow-host-network",
    ALLOW_HOST_PATH = "allow-host-path",
    ALLOW_PLAINTEXT = "allow-plaintext",
    ALLOW_PRIORITY_CLASS = "allow-priority-class",
    ALLOW_ROOT = "allow-root",
    ALLOW_SERVICE_ACCOUNT = "allow-service-account",
    ALLOW_SHRINK = "allow-shrink",
    ALLOW_TOLERATIONS = "allow-tolerations",
    ALLOWED_IMAGE_PREFIX = "allowed-image-prefix",
    AUTH_SECRET = "auth-secret",
    BUMP_REVISION = "bump-revision",
    CACERT = "cacert",
    CERT = "cert",
    COMMAND_TIMEOUT = "command-timeout",
    CONTEXT = "context",
    DATA_DIR = "data-dir",
    DECRYPT = "decrypt",
    DEEP = "deep",
    DEFRAG = "defrag",
    DELETE_EXTRA = "delete-extra",
    DELTA_RETENTION = "delta-retention",
    ENCRYPTION_CONFIG = "encryption-config",
    ENDPOINTS = "endpoints",
    ETCD_BINARY = "etcd-binary",
    ETCD_PREFIX = "etcd-prefix",
    EXACT_KEY = "exact-key",
    FILE_MODE = "file-mode",
    FROM = "from",
    FROM_SNAPSHOTS = "from-snapshots",
    IF_NEEDED = "if-needed",
    INITIAL_ADVERTISE_PEER_URLS = "initial-advertise-peer-urls",
    INITIAL_CLUSTER = "initial-cluster",
    INITIAL_CLUSTER_TOKEN = "initial-cluster-token",
    JOB_IMAGE = "job-image",
    KEEP_HISTORY = "keep-history",
    KEY = "key",
    LEVEL = "level",
    LOCK_LEASE = "lock-lease",
    MARK_COMPACTED = "mark-compacted",
    MAX_AGE = "max-age",
    MAX_BACKUP_AGE = "max-backup-age",
    MAX_BACKUPS = "max-backups",
    MAX_DATABASE_BYTES = "max-database-bytes",
    MAX_VALUE_BYTES = "max-value-bytes",
    METRICS_FILE = "metrics-file",
    NAME = "name",
    NO_RECORD = "no-record",
    OR_NEWEST = "or-newest",
    OUTPUT = "output",
    PASSWORD = "password",
    PEER_CERT_FILE = "peer-cert-file",
    PEER_KEY_FILE = "peer-key-file",
    PEER_TRUSTED_CA_FILE = "peer-trusted-ca-file",
    PREFIX = "prefix",
    QUOTA_BACKEND_BYTES = "quota-backend-bytes",
    RESTORABLE_WINDOW = "restorable-window",
    REVISION = "revision",
    SINCE = "since",
    SINGLE_WRITER = "single-writer",
    SNAPSHOT = "snapshot",
    SNAPSHOT_LEASE_PREFIX = "snapshot-lease-prefix",
    STAGING_AGE = "staging-age",
    STORE = "store",
    STORE_OPTION = "store-option",
    STORE_SECRET = "store-secret",
    TAKE_OVER = "take-over",
    TEMP_DIR = "temp-dir",
    THREADS = "threads",
    TIME = "time",
    TIMELINE = "timeline",
    TIMEOUT = "timeout",
    TLS_SECRET = "tls-secret",
    TO = "to",
    TO_SNAPSHOT = "to-snapshot",
    TOKEN_FILE = "token-file",
    USER = "user",
    VERIFIED_WITHIN = "verified-within",
    WAL_DIR = "wal-dir",
}
