//! The flags of commands that decode Kubernetes objects.

use crate::base::flag_values::yes_or_no;
use crate::base::opt::ENCRYPTION_CONFIG;
use crate::base::plural::count;
use crate::error::{Reason, Result};
use crate::mvcc::{KeyRange, KeyValue};
use crate::objects::key::EtcdPrefixes;
use crate::objects::reference::{KindsOf, Names};
use crate::objects::resource::{Resource, labels};
use crate::objects::selector::Selector;
use crate::objects::{EncryptionKeys, NotDecoded, Object};
use crate::ops::read::kinds;
use crate::prefix::open::{BackupLocation, State};
use clap::Args;
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// How Kubernetes objects are decoded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct ObjectArgs {
    /// Open objects that the API server has encrypted at rest (aescbc, aesgcm, secretbox) with the keys in this file:
    /// that of its --encryption-provider-config
    #[arg(long, hide_env_values = true, value_name = "FILE")]
    encryption_config: Option<PathBuf>,
}

impl ObjectArgs {
    /// Reads the keys.
    ///
    /// # Errors
    /// As [`EncryptionKeys::read`].
    pub(super) fn keys(&self) -> Result<EncryptionKeys> {
        let file = self.encryption_config.as_deref();
        Ok(file
            .map(EncryptionKeys::read)
            .transpose()?
            .unwrap_or_default())
    }
}

/// How Kubernetes objects are named.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct NameArgs {
    /// Namespace of the objects
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(super) namespace: Option<String>,
    #[command(flatten)]
    prefix: PrefixArgs,
}

impl NameArgs {
    /// What the API servers' keys begin with.
    pub(super) fn etcd_prefixes(&self) -> EtcdPrefixes {
        self.prefix.etcd_prefixes()
    }
}

/// Which objects or keys a command is about.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct SelectArgs {
    /// Objects: KIND/NAMESPACE/NAME, KIND NAME..., or all of KIND
    ///
    /// The kind is in any case, singular, plural or a short name (deployment, Deployments, deploy); KIND.GROUP if two
    /// have the same name; several kinds are separated by commas, and `all` means the common ones. KIND/NAME if the kind
    /// has no namespace. A word that begins with a slash is a key.
    #[arg(value_name = "OBJECT", help_heading = None, conflicts_with = "prefix")]
    pub(super) words: Vec<OsString>,
    #[command(flatten)]
    pub(super) names: NameArgs,
    /// The objects of KIND in all namespaces
    #[arg(short = 'A', long, visible_alias = "all-namespaces", conflicts_with = "namespace", value_parser = yes_or_no)]
    pub(super) all: bool,
    /// Keys with this prefix instead of objects; an empty prefix means all keys; repeatable
    ///
    /// In the environment variable: one prefix per line.
    #[arg(long, value_name = "P", value_delimiter = '\n', help_heading = "Keys", conflicts_with_all = ["namespace", "all"])]
    pub(super) prefix: Vec<OsString>,
}

impl SelectArgs {
    /// Whether it is said what is meant; if not, all keys are.
    pub(super) fn is_given(&self) -> bool {
        !self.words.is_empty() || !self.prefix.is_empty() || self.names.namespace.is_some()
    }

    /// Returns the keys of --prefix.
    pub(super) fn prefixes(&self) -> KeyRange {
        let all = self.prefix.iter().map(|p| p.as_bytes().to_vec());
        KeyRange::prefixes(all)
    }

    /// Returns all keys that are selected, and those of each part. `custom` returns the kinds that the backup defines. With
    /// `is_filter`, a kind means its objects in all namespaces.
    ///
    /// # Errors
    /// As [`Names::select`].
    pub(super) fn keys(
        &self,
        custom: impl Fn(KindsOf, &EtcdPrefixes) -> Result<Vec<Resource>>,
        is_filter: bool,
    ) -> Result<(KeyRange, Vec<KeyRange>)> {
        if !self.is_given() {
            return Ok((KeyRange::All, Vec::new()));
        }
        if !self.words.is_empty() && !self.prefix.is_empty() {
            return Err(Reason::Usage.error("give either objects or --prefix"));
        }
        if self.prefix.is_empty() {
            let prefixes = &self.names.etcd_prefixes();
            let names = self.named(prefixes, is_filter);
            let selection = names.select(|of| custom(of, prefixes))?;
            return Ok((selection.range(), selection.parts()));
        }
        let prefix = |p: &OsString| KeyRange::Prefix(p.as_bytes().to_vec());
        Ok((self.prefixes(), self.prefix.iter().map(prefix).collect()))
    }

    /// Returns what [`keys`](Self::keys) does, with the kinds of a state, or else of its whole timeline.
    ///
    /// # Errors
    /// As [`keys`](Self::keys) and [`kinds`].
    pub(super) fn keys_in(
        &self,
        backup: &BackupLocation,
        source: &State,
        is_filter: bool,
    ) -> Result<(KeyRange, Vec<KeyRange>)> {
        self.keys(
            |of, prefixes| kinds(backup, source, of, prefixes),
            is_filter,
        )
    }

    /// Returns all keys that are selected, by the kinds of a backup.
    ///
    /// # Errors
    /// As [`Names::select`].
    pub(super) fn keys_of(&self, kinds: &[Resource]) -> Result<KeyRange> {
        let custom = kinds.iter().filter(|r| r.is_custom).cloned();
        let custom: Vec<Resource> = custom.collect();
        Ok(self.keys(|_, _| Ok(custom.clone()), true)?.0)
    }

    /// Returns the names. With `is_filter`, a kind means its objects in all namespaces.
    pub(super) fn named<'a>(&'a self, prefixes: &'a EtcdPrefixes, is_filter: bool) -> Names<'a> {
        Names {
            words: &self.words,
            namespace: self.names.namespace.as_deref(),
            all_namespaces: self.all || is_filter,
            prefixes,
        }
    }
}

/// Which labels objects have.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct LabelArgs {
    /// Only objects with these labels, such as app=web, "tier in (a, b)" or !legacy
    #[arg(short = 'l', long, value_name = "LABELS")]
    pub(super) selector: Option<Selector>,
    /// The objects that are encrypted, so that their labels are unknown.
    #[arg(skip)]
    sealed: AtomicU64,
}

impl LabelArgs {
    /// Whether an object has the labels that are asked for, if any are.
    pub(super) fn match_object(&self, object: &Map<String, Value>) -> bool {
        let selector = self.selector.as_ref();
        selector.is_none_or(|selector| selector.matches(labels(object)))
    }

    /// Whether one of these records is an object with the labels that are asked for, if any are.
    pub(super) fn match_one<'k>(
        &self,
        records: impl IntoIterator<Item = &'k KeyValue<'k>>,
        keys: &EncryptionKeys,
    ) -> bool {
        if self.selector.is_none() {
            return true;
        }
        let (mut is_match, mut is_sealed) = (false, false);
        for kv in records {
            match Object::of_record(kv, keys) {
                Ok(object) => is_match |= self.match_object(&object.json),
                Err(e) => is_sealed |= matches!(e, NotDecoded::Encrypted { .. }),
            }
        }
        if is_sealed && !is_match {
            self.add_sealed();
        }
        is_match
    }

    /// Whether an object has the labels that are asked for, if any are; `None` if it is encrypted.
    pub(super) fn match_seen(&self, has_labels: Option<bool>) -> bool {
        if self.selector.is_none() {
            return true;
        }
        has_labels.unwrap_or_else(|| {
            self.add_sealed();
            false
        })
    }

    /// Counts an object whose labels cannot be looked at.
    pub(super) fn add_sealed(&self) {
        self.sealed.fetch_add(1, Relaxed);
    }

    /// Says how many objects could not be looked at.
    ///
    /// # Errors
    /// `CannotDecrypt` if their kind was named: what was asked for may lack.
    pub(super) fn end(&self, is_named: bool) -> Result<()> {
        let sealed = self.sealed.swap(0, Relaxed);
        if sealed == 0 {
            return Ok(());
        }
        let message = format!(
            "the labels of {} could not be looked at: the API server has encrypted them at rest; give the keys with {ENCRYPTION_CONFIG}, unless a KMS has them",
            count(sealed, "object")
        );
        if is_named {
            return Err(Reason::CannotDecrypt.error(message));
        }
        tracing::warn!("{message}");
        Ok(())
    }
}

/// Where an API server has its objects.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct PrefixArgs {
    /// What the API server's keys begin with: its --etcd-prefix [default: /registry, or what OpenShift has]
    #[arg(long, value_name = "PREFIX")]
    etcd_prefix: Option<String>,
}

impl PrefixArgs {
    /// What the API servers' keys begin with.
    pub(super) fn etcd_prefixes(&self) -> EtcdPrefixes {
        EtcdPrefixes::new(self.etcd_prefix.as_deref())
    }
}
