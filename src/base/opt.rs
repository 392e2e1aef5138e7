//! The names of options in messages, which each surface writes in its own notation.

use std::borrow::Cow;
use std::fmt::{self, Display, Formatter};
use std::sync::OnceLock;

/// An option that a message tells to set, such as [`TEMP_DIR`]. Its name is that of the constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opt(&'static str);

/// A surface's way to write the name of an option.
type Notation = Box<dyn Fn(&str) -> String + Send + Sync>;

static NOTATION: OnceLock<Notation> = OnceLock::new();

impl Opt {
    /// Returns the name as of the command line's flag, without the dashes: `temp-dir`.
    pub fn name(self) -> String {
        self.0.to_lowercase().replace('_', "-")
    }

    /// Sets how the messages of this process write options, by their names. Only the first call counts.
    pub fn write_as(notation: impl Fn(&str) -> String + Send + Sync + 'static) {
        // The surface that a process began with stays.
        let _ = NOTATION.set(Box::new(notation));
    }
}

impl Display for Opt {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let name = self.name();
        f.write_str(&NOTATION.get().map_or(name.clone(), |write| write(&name)))
    }
}

/// Returns a text with options in place of `{temp-dir}` and the like, for texts that are constants.
pub fn fill(text: &str) -> Cow<'_, str> {
    let mut filled = Cow::Borrowed(text);
    // Most texts name none, and there is one for each object of a bucket.
    let named = |name: &str| ALL.iter().find(|option| option.name() == name);
    for place in text.split('{').skip(1) {
        let name = place.split('}').next().unwrap_or_default();
        if let Some(option) = named(name) {
            let whole = filled.replace(&format!("{{{name}}}"), &option.to_string());
            filled = Cow::Owned(whole);
        }
    }
    filled
}

macro_rules! options {
    ($($name:ident),* $(,)?) => {
        $(
            #[doc = concat!("The option ", stringify!($name), ".")]
            pub const $name: Opt = Opt(stringify!($name));
        )*

        /// All options that messages name.
        pub const ALL: &[Opt] = &[$($name),*];
    };
}

#[rustfmt::skip]
options! {
    AGE_IDENTITY, AGE_RECIPIENT, AGE_RECIPIENTS_FILE, ALL_CHAINS, ALLOW_HOST_NETWORK, ALLOW_HOST_PATH,
    ALLOW_PLAINTEXT, ALLOW_PRIORITY_CLASS, ALLOW_ROOT, ALLOW_SERVICE_ACCOUNT, ALLOW_SHRINK, ALLOW_TOLERATIONS,
    ALLOWED_IMAGE_PREFIX, AUTH_SECRET, BUMP_REVISION, CACERT, CERT, COMMAND_TIMEOUT, CONTEXT, DATA_DIR, DECRYPT,
    DEEP, DEFRAG, DELETE_EXTRA, DELTA_RETENTION, ENCRYPTION_CONFIG, ENDPOINTS, ETCD_BINARY, ETCD_PREFIX,
    EXACT_KEY, FILE_MODE, FROM, FROM_SNAPSHOTS, IF_NEEDED, INITIAL_ADVERTISE_PEER_URLS, INITIAL_CLUSTER,
    INITIAL_CLUSTER_TOKEN, JOB_IMAGE, KEY, LEVEL, LOCK_LEASE, MARK_COMPACTED, MAX_AGE, MAX_BACKUP_AGE,
    MAX_BACKUPS, MAX_DATABASE_BYTES, MAX_VALUE_BYTES, METRICS_FILE, NAME, NEW_ADDRESSES, NO_RECORD, OR_NEWEST, OTHER_CLUSTER, OVERWRITE, PASSWORD,
    PEER_CERT_FILE, PEER_KEY_FILE, PEER_TRUSTED_CA_FILE, PREFIX, QUOTA_BACKEND_BYTES, RAW_KUBERNETES, RESTORABLE_WINDOW,
    REVISION, SINCE, SINGLE_WRITER, SNAPSHOT, SNAPSHOT_LEASE_PREFIX, STAGING_AGE, STORE, STORE_OPTION,
    STORE_SECRET, TAKE_OVER, TEMP_DIR, THREADS, TIME, TIMELINE, TIMEOUT, TLS_SECRET, TO, TO_SNAPSHOT,
    USER, VERIFIED_WITHIN, WAL_DIR,
}
