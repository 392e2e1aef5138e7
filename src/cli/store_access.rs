//! The flags of commands that open a store: its URL, settings and credentials, resources, limits and keys.
//!
//! All commands that read or write a backup flatten one of these structs into their arguments.

use super::encryption::{EncryptionArgs, PlaintextArg};
use crate::base::limits::Limits;
use crate::base::opt::STORE_SECRET;
use crate::base::{Cancel, byte_size};
use crate::error::{Reason, Result};
use crate::ops::restore::{BackupLocation, NamedBackup, PlainTarget};
use crate::prefix::Context;
use crate::prefix::open::FilePlace;
use crate::prefix::select::At;
use crate::prefix::set_aside::Marks;
use crate::prefix::snapshot_files::{Pattern, folder_error, open_named, open_newest};
use crate::store::{self, Store};
use chrono::Utc;
use clap::{Arg, Args};
use std::path::{Path, PathBuf};

/// A store, and how it is accessed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Store")]
pub(super) struct StoreArgs {
    /// URL of the folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, swift://…,
    /// file:///dir or a path
    #[arg(long, value_name = "URL")]
    store: String,
    #[command(flatten)]
    access: AccessArgs,
}

impl StoreArgs {
    /// Opens the store alone, with further settings. Makes a local folder.
    pub(super) fn store_with(&self, settings: &[(&str, &str)], cancel: &Cancel) -> Result<Store> {
        let open = |options: &[(String, String)], handle| {
            let settings = settings
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            let options: Vec<_> = options.iter().cloned().chain(settings).collect();
            store::open::make_folder(&self.store, "--store", &options)?;
            store::open(&self.store, &options, handle)
        };
        Ok(self
            .access
            .context_with(NthStore::ONLY, cancel, open)?
            .store)
    }

    pub(super) fn context(&self, cancel: &Cancel) -> Result<Context> {
        self.access.context(&self.store, cancel)
    }

    /// Returns the URL as given.
    pub(super) fn url(&self) -> &str {
        &self.store
    }
}

/// Flags for writing snapshots. Commands that only read accept them, since a variable may be set for all commands,
/// but do not offer them.
const FOR_WRITING: [&str; 3] = ["file_mode", "age_recipient", "age_recipients_file"];

fn hide_if_for_writing(arg: Arg) -> Arg {
    let is_for_writing = FOR_WRITING.contains(&arg.get_id().as_str());
    arg.hide(is_for_writing)
}

/// A plain snapshot file instead of a store.
#[derive(Debug, Args)]
#[command(next_help_heading = "Backup")]
pub(super) struct FileArg {
    /// Read a plain snapshot file instead, by its path or URL, as etcdctl, k3s, kOps, Talos or OpenShift write it
    ///
    /// It may be compressed. A * stands for the time in the names: 's3://b/k3s/etcd-snapshot-server1-*' is the newest of
    /// these files, or the newest that is not later than --time. kOps' are '…/*/etcd.backup.gz'.
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    pub(super) snapshot: Option<String>,
    #[command(flatten)]
    pub(super) plaintext: PlaintextArg,
}

/// A backup to read: the snapshots in a store, or a plain snapshot file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Backup", mut_args(hide_if_for_writing))]
pub(super) struct BackupArgs {
    /// URL of the folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, swift://…,
    /// file:///dir or a path
    #[arg(long, value_name = "URL", required_unless_present = "snapshot")]
    store: Option<String>,
    #[command(flatten)]
    file: FileArg,
    #[command(flatten)]
    access: AccessArgs,
}

impl BackupArgs {
    /// Opens the backup. Of a series of files, it is the newest one.
    pub(super) fn backup(&self, cancel: &Cancel) -> Result<BackupLocation> {
        self.backup_at(At::Newest, cancel)
    }

    /// Opens the backup. Of a series of files, it is the newest one that is not later than a time.
    pub(super) fn backup_at(&self, at: At, cancel: &Cancel) -> Result<BackupLocation> {
        match (&self.file.snapshot, &self.store) {
            (Some(file), _) => self.file(file, at, cancel),
            (None, Some(url)) => {
                let mut ctx = self.access.context(url, cancel)?;
                ctx.trust = self.file.plaintext.trust(ctx.keys.decrypts());
                Ok(BackupLocation::Prefix(ctx))
            }
            (None, None) => Err(Reason::Usage.error("give --store URL, or --snapshot FILE")),
        }
    }

    /// A plain snapshot file beside this backup, read with the same limits and keys.
    pub(super) fn file(&self, file: &str, at: At, cancel: &Cancel) -> Result<BackupLocation> {
        let plaintext = self.file.plaintext;
        self.access.backup_file(file, plaintext, at, cancel)
    }

    /// Whether --snapshot names a series of files.
    pub(super) fn is_series(&self) -> bool {
        self.file
            .snapshot
            .as_ref()
            .is_some_and(|file| file.contains('*'))
    }

    /// Returns the flag that names the backup, for a command that is printed.
    pub(super) fn flags(&self) -> Vec<String> {
        let flag = if self.file.snapshot.is_some() {
            "--snapshot"
        } else {
            "--store"
        };
        vec![flag.to_owned(), self.shown()]
    }

    /// Returns the URL or the path as given.
    pub(super) fn shown(&self) -> String {
        let given = self.file.snapshot.as_ref().or(self.store.as_ref());
        given.cloned().unwrap_or_default()
    }
}

/// A store of a command line, counted from 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct NthStore {
    pub(super) nth: usize,
    /// How many stores the command has.
    pub(super) of: usize,
}

impl NthStore {
    pub(super) const ONLY: Self = NthStore { nth: 0, of: 1 };
}

/// How stores are accessed, and the resources, limits and keys of an operation.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct AccessArgs {
    /// Set an option of the store, such as endpoint=http://minio:9000; repeatable
    ///
    /// In the environment variable: one option per line. Options win over the providers' usual variables
    /// (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, …), which are read
    /// too.
    #[arg(long, value_name = "KEY=VALUE", hide_env_values = true)]
    store_option: Vec<String>,
    /// Read the store's options and credentials from this folder, a mounted Secret
    ///
    /// Its files are named as in the Secrets of etcd-backup-restore and etcd-druid, or as the providers'
    /// variables (AWS_ACCESS_KEY_ID, …). Changed files are read again while the command runs. If a command has
    /// several stores: give it once for all, or once for each store, in their order.
    #[arg(long, value_name = "DIR")]
    store_secret: Vec<PathBuf>,
    /// Send at most this many requests to a store at a time (1 to 1024); local folders have no limit
    #[arg(long, value_name = "N", default_value_t = store::DEFAULT_REQUESTS as u16, value_parser = clap::value_parser!(u16).range(1..=store::MAX_REQUESTS as i64))]
    requests: u16,
    /// Mode of new files in a local folder, such as 0640; new folders get the matching mode, such as 0750
    /// [default: 0600]
    ///
    /// The umask is ignored. Existing files and folders keep their mode. Object stores have no modes.
    #[arg(long, value_name = "MODE")]
    file_mode: Option<store::FileMode>,
    /// Folder for temporary files [default: the system's]
    #[arg(long, value_name = "DIR", help_heading = "Resources")]
    temp_dir: Option<PathBuf>,
    /// Threads for reading, compressing and uploading [default: the number of processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Resources")]
    threads: Option<u16>,
    /// Refuse (TooLarge) full snapshots whose database, uncompressed, is larger than this
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = byte_size::parse, help_heading = "Resources")]
    max_database_bytes: u64,
    /// Refuse (TooLarge) snapshots with a key and value that together are larger than this
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = byte_size::parse, help_heading = "Resources")]
    max_value_bytes: u64,
    #[command(flatten)]
    encryption: EncryptionArgs,
}

impl AccessArgs {
    /// The options of a store of the command line.
    pub(super) fn options(&self, store: NthStore) -> Result<Vec<(String, String)>> {
        let mut options = Vec::new();
        let secret = match &self.store_secret[..] {
            [] => None,
            [of_all] => Some(of_all),
            each if each.len() == store.of => Some(&each[store.nth]),
            each => {
                return Err(Reason::Usage.error(format!(
                    "{STORE_SECRET} is given {} times for {} store(s): give it once, or once for each, in their order",
                    each.len(),
                    store.of,
                )));
            }
        };
        if let Some(dir) = secret {
            let key = store::open::OPTION_SECRET_DIR.to_owned();
            options.push((key, dir.display().to_string()));
        }
        let key = store::open::OPTION_REQUESTS.to_owned();
        options.push((key, self.requests.to_string()));
        if let Some(mode) = self.file_mode {
            let key = store::open::OPTION_FILE_MODE.to_owned();
            options.push((key, mode.to_string()));
        }
        options.extend(parse_options(&self.store_option, "--store-option")?);
        Ok(options)
    }

    pub(super) fn temp_dir(&self) -> Result<PathBuf> {
        let temp_dir = self.temp_dir.clone().unwrap_or_else(std::env::temp_dir);
        if temp_dir.is_dir() {
            Ok(temp_dir)
        } else {
            Err(Reason::Usage.error(format!("--temp-dir {} is not a folder", temp_dir.display())))
        }
    }

    pub(super) fn context_with(
        &self,
        nth: NthStore,
        cancel: &Cancel,
        open: impl FnOnce(&[(String, String)], tokio::runtime::Handle) -> Result<Store>,
    ) -> Result<Context> {
        let temp_dir = self.temp_dir()?;
        let handle = tokio::runtime::Handle::current();
        let threads = match self.threads {
            Some(n) => usize::from(n),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let keys = self.encryption.keys()?;
        Ok(Context {
            store: open(&self.options(nth)?, handle)?.with_cancel(cancel.clone()),
            temp_dir,
            threads,
            trust: PlaintextArg::default().trust(keys.are_given()),
            keys,
            limits: Limits {
                database_bytes: self.max_database_bytes,
                value_bytes: self.max_value_bytes,
            },
            marks: Marks::default(),
        })
    }

    pub(super) fn context(&self, url: &str, cancel: &Cancel) -> Result<Context> {
        self.nth_context(NthStore::ONLY, url, cancel)
    }

    fn nth_context(&self, nth: NthStore, url: &str, cancel: &Cancel) -> Result<Context> {
        self.context_with(nth, cancel, |options, handle| {
            store::open(url, options, handle)
        })
    }

    /// The snapshots of the `nth` store. A store that cannot be opened is no error: the operation may use another one.
    pub(super) fn backup_store(
        &self,
        nth: NthStore,
        url: &str,
        plaintext: PlaintextArg,
        cancel: &Cancel,
    ) -> Result<NamedBackup> {
        let location = match self.nth_context(nth, url, cancel) {
            Ok(mut ctx) => {
                // Recipients alone encrypt the written file: the backup itself may be plain.
                ctx.trust = plaintext.trust(ctx.keys.decrypts());
                Ok(BackupLocation::Prefix(ctx))
            }
            Err(e) if e.reason() == Reason::Usage => return Err(e),
            Err(e) => Err(e),
        };
        Ok(NamedBackup {
            name: url.to_owned(),
            location,
        })
    }

    /// A context whose store is a placeholder that is never read.
    pub(super) fn context_without_store(&self, cancel: &Cancel) -> Result<Context> {
        let placeholder = self.temp_dir()?.display().to_string();
        self.context_with(NthStore::ONLY, cancel, |_, handle| {
            store::open(&placeholder, &[], handle)
        })
    }

    /// A plain snapshot that is written, by its path or URL. That of an object is the `nth` store.
    pub(super) fn plain_target(
        &self,
        nth: NthStore,
        file: &Path,
        cancel: &Cancel,
    ) -> Result<PlainTarget> {
        let Some(url) = object_url(file) else {
            let path = file.to_str().and_then(store::open::local_folder);
            return Ok(PlainTarget::File(path.unwrap_or_else(|| file.to_owned())));
        };
        let (above, name) = folder_and_name(url);
        if name.is_empty() {
            return Err(Reason::Usage.error(format!(
                "{url} is a bucket: add the name of the snapshot file"
            )));
        }
        let store = self.nth_context(nth, above, cancel)?.store;
        Ok(PlainTarget::Object(Box::new(store), name.to_owned()))
    }

    /// A plain snapshot file on this machine or by a URL, or the file of a series: the newest one, or the newest that is not
    /// later than a time.
    pub(super) fn backup_file(
        &self,
        file: &str,
        plaintext: PlaintextArg,
        at: At,
        cancel: &Cancel,
    ) -> Result<BackupLocation> {
        if let Some(pattern) = Pattern::parse(file)? {
            let mut ctx = self.folder_context(&pattern.folder, "--snapshot", cancel)?;
            ctx.trust = plaintext.trust(ctx.keys.decrypts());
            let until = match at {
                At::Time(time) => Some(time),
                At::Newest | At::Revision(_) => None,
            };
            let opened = open_newest(&ctx, &pattern, until, Utc::now())?;
            return Ok(BackupLocation::File(ctx, Box::new(opened)));
        }
        let (mut ctx, place) = match store::open::local_folder(file) {
            // The store of the context is a placeholder that is never read.
            Some(path) => (self.context_without_store(cancel)?, FilePlace::Path(path)),
            None => {
                let (above, name) = folder_and_name(file);
                (
                    self.context(above, cancel)?,
                    FilePlace::Object(name.to_owned()),
                )
            }
        };
        ctx.trust = plaintext.trust(ctx.keys.decrypts());
        let opened = match open_named(&ctx, &place) {
            Err(e) if e.reason() == Reason::NoSnapshots => {
                // It may be a folder.
                let folder = self.folder_context(file, "--snapshot", cancel)?;
                return Err(folder_error(&folder, "--snapshot")?.unwrap_or(e));
            }
            opened => opened?,
        };
        Ok(BackupLocation::File(ctx, Box::new(opened)))
    }

    /// A context whose store is the folder of plain snapshot files, which `flag` has named. One of this machine has no
    /// options.
    pub(super) fn folder_context(
        &self,
        folder: &str,
        flag: &str,
        cancel: &Cancel,
    ) -> Result<Context> {
        let is_local = store::open::local_folder(folder);
        if let Some(path) = is_local.as_ref().filter(|path| !path.is_dir()) {
            return Err(Reason::NoSnapshots.error(format!(
                "there is no file or folder {}: check {flag}",
                path.display()
            )));
        }
        self.context_with(NthStore::ONLY, cancel, |options, handle| {
            let options = if is_local.is_some() { &[] } else { options };
            store::open(folder, options, handle)
        })
    }
}

/// Returns the URL of a file in an object store; `None` if the file is one of this machine.
pub(super) fn object_url(file: &Path) -> Option<&str> {
    let text = file.to_str()?;
    let is_url = text.contains("://") && store::open::local_folder(text).is_none();
    is_url.then_some(text)
}

/// Returns the URL of the folder of an object, and the object's name. That of a bucket is empty.
fn folder_and_name(url: &str) -> (&str, &str) {
    let url = url.trim_end_matches('/');
    match url.rsplit_once('/') {
        Some((above, name)) if !above.ends_with('/') => (above, name),
        _ => (url, ""),
    }
}

/// Parses options of a store: values of a flag, each one or more lines `KEY=VALUE`.
pub(super) fn parse_options(values: &[String], flag: &str) -> Result<Vec<(String, String)>> {
    let lines = values.iter().flat_map(|o| o.lines());
    lines
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .map(|l| parse_option(l, flag))
        .collect()
}

fn parse_option(line: &str, flag: &str) -> Result<(String, String)> {
    match line.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.trim().to_owned(), value.to_owned())),
        // The value may be a secret: do not show it.
        _ => Err(Reason::Usage.error(format!("a {flag} is not of the form KEY=VALUE"))),
    }
}
