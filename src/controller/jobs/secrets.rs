//! Which Secrets a policy and a task refer to, what must be in them, and how their content reaches a Pod.
//!
//! Only names of keys are known here, never a value.

use super::super::api::{EtcdBackupPolicy, EtcdBackupTask, SecretRef, StoreSpec};
use std::collections::{BTreeMap, BTreeSet};
use url::Url;

/// Which keys each Secret has that is referred to: one that is not there is not in it.
pub type SecretKeys = BTreeMap<String, BTreeSet<String>>;

/// A Secret that is referred to, and what must be in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referenced {
    /// Its name, in the policy's namespace
    pub name: String,
    /// Keys that must be there
    pub needs: Vec<&'static str>,
    /// All keys of one of these must be there; `*.json` is any key that ends so. Empty: nothing more
    pub one_of: Vec<Vec<&'static str>>,
    /// Of these, all or none
    pub together: Vec<&'static str>,
    /// For people
    pub what_for: &'static str,
}

impl Referenced {
    /// What is wrong with the Secret, if something is, with the keys that it has; `None` where it is not there.
    pub fn problem(&self, keys: Option<&BTreeSet<String>>) -> Option<String> {
        let Referenced { name, what_for, .. } = self;
        let Some(keys) = keys else {
            return Some(format!("the Secret {name} for {what_for} is not there"));
        };
        let has = |key: &&str| match key.strip_prefix('*') {
            Some(suffix) => keys.iter().any(|k| k.ends_with(suffix)),
            None => keys.contains(*key),
        };
        let lacks = |what: String| format!("the Secret {name} for {what_for} lacks {what}");
        if let Some(key) = self.needs.iter().find(|k| !has(k)) {
            return Some(lacks((*key).to_owned()));
        }
        if self.together.iter().any(&has) {
            let missing = self.together.iter().find(|k| !has(k));
            if let Some(key) = missing {
                return Some(lacks(format!(
                    "{key}, of which it has the counterpart: give {} or none of them",
                    self.together.join(" and ")
                )));
            }
        }
        if !self.one_of.is_empty() && !self.one_of.iter().any(|all| all.iter().all(&has)) {
            let sets = self.one_of.iter().map(|all| all.join(" and "));
            let sets: Vec<String> = sets.collect();
            return Some(lacks(format!("credentials: give {}", sets.join("; or "))));
        }
        None
    }
}

/// The protocols of stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Local,
    S3,
    Gcs,
    Azure,
    Swift,
    Oss,
}

impl Family {
    /// Of a store's URL, if it is one.
    pub(super) fn of(url: &str) -> Option<Family> {
        if url.starts_with('/') {
            return Some(Family::Local);
        }
        match url.split_once("://")?.0 {
            "file" => Some(Family::Local),
            "s3" | "s3a" => Some(Family::S3),
            "gs" => Some(Family::Gcs),
            "az" | "azure" | "abfs" | "abfss" | "adl" => Some(Family::Azure),
            "swift" => Some(Family::Swift),
            "oss" => Some(Family::Oss),
            _ => None,
        }
    }

    /// Sets of keys of which one is enough: etcd-druid's, then the providers' variables.
    fn credentials(self) -> Vec<Vec<&'static str>> {
        match self {
            Family::Local => vec![],
            Family::S3 => vec![
                vec!["accessKeyID", "secretAccessKey"],
                vec!["roleARN", "token"],
                vec!["*.json"],
                vec!["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
            ],
            Family::Gcs => vec![
                vec!["serviceaccount.json"],
                vec!["*.json"],
                vec!["emulatorEnabled"],
                vec!["GOOGLE_SERVICE_ACCOUNT_KEY"],
            ],
            Family::Azure => vec![
                vec!["storageAccount", "storageKey"],
                vec!["storageAccount", "sasToken"],
                vec!["storageAccount", "emulatorEnabled"],
                vec!["*.json"],
                vec!["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"],
                vec!["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_SAS_TOKEN"],
                vec!["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_CLIENT_SECRET"],
            ],
            Family::Swift => vec![
                vec!["authURL", "username", "password"],
                vec!["authURL", "applicationCredentialSecret"],
                vec!["*.json"],
                vec!["OS_AUTH_URL", "OS_PASSWORD"],
                vec!["OS_AUTH_URL", "OS_APPLICATION_CREDENTIAL_SECRET"],
                vec!["ST_AUTH", "ST_USER", "ST_KEY"],
            ],
            Family::Oss => vec![
                vec!["accessKeyID", "accessKeySecret"],
                vec!["*.json"],
                vec!["ALICLOUD_ACCESS_KEY_ID", "ALICLOUD_ACCESS_KEY_SECRET"],
                vec![
                    "ALIBABA_CLOUD_ACCESS_KEY_ID",
                    "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
                ],
            ],
        }
    }

    /// What the providers' variables begin with.
    fn variables(self) -> &'static [&'static str] {
        match self {
            Family::Local => &[],
            Family::S3 => &["AWS_"],
            Family::Gcs => &["GOOGLE_"],
            Family::Azure => &["AZURE_"],
            Family::Swift => &["OS_", "ST_"],
            Family::Oss => &["ALICLOUD_", "ALIBABA_CLOUD_"],
        }
    }
}

/// Whether two URLs of stores mean the same, on the same server.
pub fn same_url(a: &str, b: &str) -> bool {
    let (one, other) = (a.trim_end_matches('/'), b.trim_end_matches('/'));
    match (one.split_once("://"), other.split_once("://")) {
        (Some((_, p)), Some((_, q))) => p == q && Family::of(one) == Family::of(other),
        _ => one == other,
    }
}

/// The keys of a store's Secret that are a provider's variables, and so go into the environment.
pub(super) fn variables(store: &StoreSpec, secrets: &SecretKeys) -> Vec<String> {
    let prefixes = Family::of(&store.url).map_or(&[][..], Family::variables);
    let is_variable = |key: &str| {
        let fits = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_';
        prefixes.iter().any(|p| key.starts_with(p)) && key.bytes().all(fits)
    };
    let secret = store.secret_ref.as_ref();
    let keys = secret.and_then(|s| secrets.get(&s.name));
    let keys = keys.into_iter().flatten();
    keys.filter(|k| is_variable(k)).cloned().collect()
}

/// The setting that a provider's variable stands for, where it is the same name in small letters. For Swift and OSS it
/// is not.
pub(super) fn setting(variable: &str) -> Option<String> {
    let same = ["AWS_", "GOOGLE_", "AZURE_"];
    let is_same = same.iter().any(|p| variable.starts_with(p));
    is_same.then(|| variable.to_ascii_lowercase())
}

/// The folder of a store of local files.
pub(super) fn local_path(url: &str) -> Option<String> {
    if url.starts_with('/') {
        return Some(url.to_owned());
    }
    let path = Url::parse(url).ok().filter(|u| u.scheme() == "file")?;
    Some(path.to_file_path().ok()?.to_str()?.to_owned())
}

fn plain(secret: &SecretRef, needs: &[&'static str], what_for: &'static str) -> Referenced {
    Referenced {
        name: secret.name.clone(),
        needs: needs.to_vec(),
        one_of: Vec::new(),
        together: Vec::new(),
        what_for,
    }
}

fn of_store(store: &StoreSpec, copied: bool, what_for: &'static str) -> Option<Referenced> {
    let secret = store.secret_ref.as_ref()?;
    let family = Family::of(&store.url);
    let mut one_of = family.map(Family::credentials).unwrap_or_default();
    if copied && matches!(family, Some(Family::Swift | Family::Oss)) {
        // Of two stores the environment cannot tell whose a variable is.
        one_of.retain(|all| {
            !all.iter()
                .any(|k| k.starts_with(|c: char| c.is_uppercase()))
        });
    }
    Some(Referenced {
        one_of,
        ..plain(secret, &[], what_for)
    })
}

/// The Secrets that a policy refers to.
pub fn secrets_of(policy: &EtcdBackupPolicy) -> Vec<Referenced> {
    let spec = &policy.spec;
    let mut found = Vec::new();
    found.extend(of_store(&spec.store, false, "the store"));
    if let Some(etcd) = &spec.etcd {
        if let Some(secret) = &etcd.tls_secret_ref {
            found.push(Referenced {
                together: vec!["tls.crt", "tls.key"],
                ..plain(secret, &["ca.crt"], "etcd's certificates")
            });
        }
        if let Some(secret) = &etcd.auth_secret_ref {
            found.push(plain(secret, &["username", "password"], "etcd's user"));
        }
    }
    let identity = spec.encryption.as_ref();
    if let Some(secret) = identity.and_then(|e| e.identity_secret_ref.as_ref()) {
        found.push(plain(secret, &["identity.txt"], "the age identity"));
    }
    found
}

/// The Secrets that a task refers to, beside those of its policy.
pub fn secrets_of_task(task: &EtcdBackupTask) -> Vec<Referenced> {
    let config = task.spec.config.as_ref();
    let Some(copy) = config.and_then(|c| c.copy_backups.as_ref()) else {
        return Vec::new();
    };
    let source = copy.source_store.iter();
    let source = source.filter_map(|s| of_store(s, true, "the store that is copied from"));
    let target = copy.target_store.iter();
    let target = target.filter_map(|s| of_store(s, true, "the store that is copied to"));
    source.chain(target).collect()
}

/// What a copy from or to the policy's own store needs of its Secret: fewer ways lead there than for other Jobs.
pub fn secrets_of_copy(policy: &EtcdBackupPolicy, task: &EtcdBackupTask) -> Option<Referenced> {
    let config = task.spec.config.as_ref()?;
    let copy = config.copy_backups.as_ref()?;
    let is_own = copy.source_store.is_none() || copy.target_store.is_none();
    is_own.then(|| of_store(&policy.spec.store, true, "a copy of the store"))?
}
