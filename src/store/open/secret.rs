//! Settings and credentials from a mounted Secret, under the names that etcd-backup-restore and etcd-druid
//! use, or under the names of the providers' variables.
//!
//! Credentials follow a change of the Secret: a request asks for them before it is signed. Other settings (endpoint,
//! region, certificates) keep the values that they have when the store is opened.

use super::family::{Family, KeySet};
use crate::base::{lock, mounted_secret};
use crate::error::{Error, Reason, Result};
use async_trait::async_trait;
use object_store::CredentialProvider;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The shortest time between two reads of a Secret. Kubernetes takes up to two minutes to deliver a change.
const REREAD_AFTER: Duration = Duration::from_secs(1);

/// The file or folder of a Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SecretSource {
    /// A folder with one file for each setting, and perhaps JSON files with several settings.
    Folder(PathBuf),
    /// One JSON file with all settings.
    File(PathBuf),
}

/// The content of a Secret: values by name.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Secret {
    /// The path of the source, for messages.
    path: String,
    /// The folder of the settings' files; empty if the source is one file.
    folder: PathBuf,
    settings: BTreeMap<String, String>,
}

/// Shows the names and hides the values.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.settings.keys().collect();
        write!(f, "Secret({}: {names:?})", self.path)
    }
}

impl SecretSource {
    /// Returns the source that the environment variable `<name>_JSON` (a file) or `name` (a file or folder)
    /// names.
    pub(super) fn from_env(name: &str) -> Option<SecretSource> {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        if let Some(file) = set(&format!("{name}_JSON")) {
            return Some(SecretSource::File(file.into()));
        }
        let folder = PathBuf::from(set(name)?);
        Some(if folder.is_file() {
            SecretSource::File(folder)
        } else {
            SecretSource::Folder(folder)
        })
    }

    /// Reads the Secret. A Secret that Kubernetes has mounted is read as of one moment.
    ///
    /// # Errors
    /// Fails with `Configuration` if the Secret is unreadable.
    pub(super) fn read(&self) -> Result<Secret> {
        let (path, folder, settings) = match self {
            SecretSource::Folder(folder) => (folder, folder.clone(), read_folder(folder)),
            SecretSource::File(file) => (file, PathBuf::new(), read_file(file)),
        };
        let path = path.display().to_string();
        match settings {
            Ok(settings) => Ok(Secret {
                path,
                folder,
                settings,
            }),
            Err(e) => {
                Err(Reason::Configuration.error(format!("cannot read the Secret {path}: {e}")))
            }
        }
    }
}

impl Secret {
    /// Returns the path of the source.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Returns a value without the blanks around it, or `None` if it is missing or empty.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let value = self.settings.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// Returns the name of a file with this value.
    pub(super) fn name_of(&self, value: &str) -> Option<&str> {
        let mut settings = self.settings.iter();
        let found = settings.find(|(_, of_file)| of_file.trim() == value);
        found.map(|(name, _)| name.as_str())
    }

    /// Returns settings of a store. `names` has each setting's name in the store and in the Secret; missing
    /// ones are left out.
    pub(super) fn settings<const N: usize>(
        &self,
        names: [(&str, &str); N],
    ) -> impl Iterator<Item = (String, String)> {
        let setting =
            |(key, name): (&str, &str)| Some((key.to_owned(), self.get(name)?.to_owned()));
        names.into_iter().filter_map(setting)
    }

    /// Returns a boolean setting.
    ///
    /// # Errors
    /// Fails with `Configuration` if the value is neither true nor false.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name).map(str::to_ascii_lowercase).as_deref() {
            None => Ok(None),
            Some("true" | "1" | "t") => Ok(Some(true)),
            Some("false" | "0" | "f") => Ok(Some(false)),
            Some(_) => Err(self.wrong(&format!("{name} is neither true nor false"))),
        }
    }

    /// Returns the whole text of the JSON file that is the source.
    pub(super) fn json(&self) -> Option<&str> {
        let name = Path::new(&self.path).file_name()?.to_str()?;
        self.get(name)
    }

    /// Returns the path of a setting's file.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns the settings that have the names of the providers' variables, in the order of the names.
    pub(super) fn variables(&self, family: Family) -> impl Iterator<Item = (&str, &str)> {
        let prefixes = family.variables();
        let is_variable = move |name: &str| prefixes.iter().any(|p| name.starts_with(p));
        let names = self.settings.keys().map(String::as_str);
        let names = names.filter(move |name| is_variable(name));
        names.filter_map(|name| Some((name, self.get(name)?)))
    }

    /// Returns whether one set of the family's credentials is complete. Options may complete a set of the
    /// Secret.
    pub(super) fn has_credentials(&self, family: Family, is_given: impl Fn(&str) -> bool) -> bool {
        let has = |key: &&str| self.get(key).is_some() || is_given(key);
        // Options alone are not credentials of the Secret.
        let has_own = |set: &KeySet| set.iter().any(|key| self.get(key).is_some());
        let mut sets = family.credentials().iter();
        sets.any(|set| has_own(set) && set.iter().all(has))
    }

    /// Returns the error for a Secret without a complete set of credentials. The message shows names of keys
    /// and no values.
    pub(super) fn lacks_credentials(&self, family: Family) -> Error {
        let sets = family.credentials();
        let problem = match self.most_complete(sets) {
            Some(set) => {
                let (has, lacks): (Vec<&str>, Vec<&str>) =
                    set.iter().copied().partition(|key| self.get(key).is_some());
                format!(
                    "lacks {} (it has {})",
                    lacks.join(" and "),
                    has.join(" and ")
                )
            }
            None if self.settings.is_empty() => "is empty".to_owned(),
            None => "lacks credentials".to_owned(),
        };
        let sets: Vec<String> = sets.iter().map(|set| set.join(" and ")).collect();
        let sets = sets.join(", or ");
        let advice = if self.folder.as_os_str().is_empty() {
            format!("give {sets}")
        } else {
            mounted_secret::advice(&self.folder, &sets)
        };
        Reason::Configuration.error(format!(
            "the Secret {} {problem}: {advice}; see docs/stores.md",
            self.path
        ))
    }

    /// Returns the set with most keys in the Secret (the first of equal ones), or `None` if the Secret has no key of
    /// any set.
    fn most_complete(&self, sets: &'static [KeySet]) -> Option<KeySet> {
        let count = |set: &&KeySet| set.iter().filter(|key| self.get(key).is_some()).count();
        // `max_by_key` returns the last of equals.
        let best = sets.iter().rev().max_by_key(count)?;
        (count(&best) > 0).then_some(*best)
    }

    /// Returns the error for a Secret with an invalid content.
    pub(super) fn wrong(&self, what: &str) -> Error {
        Reason::Configuration.error(format!(
            "the Secret {}: {what}; see docs/stores.md",
            self.path
        ))
    }
}

fn read_folder(folder: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut settings = BTreeMap::new();
    let mut from_json = BTreeMap::new();
    for (name, value) in mounted_secret::read(folder)? {
        let Ok(value) = String::from_utf8(value) else {
            continue;
        };
        if name.ends_with(".json") {
            from_json.extend(parse_json(&value).unwrap_or_default());
        }
        settings.insert(name, value);
    }
    // A setting's own file wins over a JSON file.
    for (name, value) in from_json {
        settings.entry(name).or_insert(value);
    }
    Ok(settings)
}

fn read_file(file: &Path) -> io::Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(file)?;
    let mut settings =
        parse_json(&text).ok_or_else(|| io::Error::other("it is not a JSON object"))?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    settings.insert(name.into_owned(), text);
    Ok(settings)
}

/// Returns the strings, booleans and numbers in a JSON object, or `None` if the text is not an object.
fn parse_json(text: &str) -> Option<BTreeMap<String, String>> {
    use serde_json::Value;
    let object: BTreeMap<String, Value> = serde_json::from_str(text).ok()?;
    let mut settings = BTreeMap::new();
    for (name, value) in object {
        let text = match value {
            Value::String(s) => s,
            Value::Bool(b) => b.to_string(),
            Value::Number(n) => n.to_string(),
            _ => continue,
        };
        settings.insert(name, text);
    }
    Some(settings)
}

/// An object_store provider of credentials.
pub(super) type CredentialsOf<C> = Arc<dyn CredentialProvider<Credential = C>>;

type Derive<T> = dyn Fn(&Secret) -> Result<T> + Send + Sync;

/// A value that is derived from a Secret, and derived again when the Secret changes.
pub(super) struct SecretDerived<T> {
    source: SecretSource,
    derive: Box<Derive<T>>,
    loaded: Mutex<Loaded<T>>,
}

struct Loaded<T> {
    secret: Secret,
    value: T,
    read_at: Instant,
}

impl<T> fmt::Debug for SecretDerived<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretDerived({:?})", self.source)
    }
}

impl<T: Clone> SecretDerived<T> {
    /// Derives a value from `secret`, which was read from `source`.
    ///
    /// # Errors
    /// Fails with the errors of `derive`.
    pub(super) fn new(
        source: SecretSource,
        secret: Secret,
        derive: impl Fn(&Secret) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Self> {
        let value = derive(&secret)?;
        let loaded = Loaded {
            secret,
            value,
            read_at: Instant::now(),
        };
        Ok(SecretDerived {
            source,
            derive: Box::new(derive),
            loaded: Mutex::new(loaded),
        })
    }

    /// Returns the value for the Secret as it is now. If the Secret is unreadable or invalid, keeps the last
    /// value: the Secret may be in the middle of a change, and the old credentials may still work.
    pub(super) fn current(&self) -> T {
        let mut loaded = lock(&self.loaded);
        if loaded.read_at.elapsed() >= REREAD_AFTER {
            loaded.read_at = Instant::now();
            match self.source.read() {
                Ok(secret) if secret == loaded.secret => {}
                Ok(secret) => match (self.derive)(&secret) {
                    Ok(value) => {
                        tracing::info!(secret = secret.path, "read changed credentials");
                        loaded.value = value;
                        loaded.secret = secret;
                    }
                    Err(e) => tracing::warn!("ignoring a changed Secret: {e}"),
                },
                Err(e) => tracing::warn!("{e}; the credentials read before are used"),
            }
        }
        loaded.value.clone()
    }
}

#[async_trait]
impl<C: fmt::Debug + Send + Sync + 'static> CredentialProvider for SecretDerived<CredentialsOf<C>> {
    type Credential = C;

    async fn get_credential(&self) -> object_store::Result<Arc<C>> {
        self.current().get_credential().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A Secret as kubelet mounts and changes it, by exchanging a symlink.
    struct MountedSecret {
        root: tempfile::TempDir,
        versions: usize,
    }

    impl MountedSecret {
        fn new(files: &[(&str, String)]) -> Self {
            let mut mounted = MountedSecret {
                root: tempfile::tempdir().unwrap(),
                versions: 0,
            };
            mounted.change(files);
            for (name, _) in files {
                symlink(format!("..data/{name}"), mounted.path().join(name)).unwrap();
            }
            mounted
        }

        fn path(&self) -> &Path {
            self.root.path()
        }

        fn change(&mut self, files: &[(&str, String)]) {
            self.versions += 1;
            let name = format!("..2026_11_20_{}", self.versions);
            fs::create_dir(self.path().join(&name)).unwrap();
            for (file, content) in files {
                fs::write(self.path().join(&name).join(file), content).unwrap();
            }
            let before = fs::read_link(self.path().join("..data")).ok();
            symlink(&name, self.path().join("..data_tmp")).unwrap();
            fs::rename(self.path().join("..data_tmp"), self.path().join("..data")).unwrap();
            if let Some(before) = before {
                fs::remove_dir_all(self.path().join(before)).unwrap();
            }
        }
    }

    fn pair(i: usize) -> [(&'static str, String); 2] {
        [
            ("accessKeyID", format!("key {i}\n")),
            ("secretAccessKey", format!("secret {i}")),
        ]
    }

    #[test]
    fn a_key_is_never_read_with_the_secret_of_another() {
        let mut mounted = MountedSecret::new(&pair(0));
        let source = SecretSource::Folder(mounted.path().to_owned());
        let done = AtomicBool::new(false);
        std::thread::scope(|s| {
            let reader = s.spawn(|| {
                let mut seen = std::collections::BTreeSet::new();
                while !done.load(Ordering::Relaxed) {
                    let secret = source.read().unwrap();
                    let id = secret.get("accessKeyID").unwrap();
                    let number = id.strip_prefix("key ").unwrap();
                    assert_eq!(
                        secret.get("secretAccessKey").unwrap(),
                        format!("secret {number}")
                    );
                    seen.insert(number.to_owned());
                }
                seen.len()
            });
            for i in 1..300 {
                mounted.change(&pair(i));
            }
            done.store(true, Ordering::Relaxed);
            assert!(reader.join().unwrap() > 1);
        });
    }

    #[test]
    fn a_json_file_and_single_files_mean_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let json =
            r#"{"authURL": "https://a.example/v3", "password": "from JSON", "n": 3, "x": {}}"#;
        fs::write(folder.path().join("secret.json"), json).unwrap();
        fs::write(folder.path().join("password"), "its own\n").unwrap();
        fs::write(folder.path().join("emulatorEnabled"), "True").unwrap();
        fs::write(folder.path().join("empty"), "\n").unwrap();
        let secret = SecretSource::Folder(folder.path().to_owned())
            .read()
            .unwrap();
        assert_eq!(secret.get("authURL"), Some("https://a.example/v3"));
        assert_eq!(secret.get("password"), Some("its own"));
        assert_eq!(secret.get("n"), Some("3"));
        assert_eq!((secret.get("empty"), secret.get("x")), (None, None));
        assert_eq!(secret.flag("emulatorEnabled").unwrap(), Some(true));
        assert_eq!(secret.flag("none").unwrap(), None);
        assert!(secret.flag("password").is_err());
        assert!(!format!("{secret:?}").contains("its own"));
        let file = SecretSource::File(folder.path().join("secret.json"));
        assert_eq!(file.read().unwrap().get("password"), Some("from JSON"));
    }

    #[test]
    fn a_missing_folder_is_named() {
        let e = SecretSource::Folder("/no/such/folder".into())
            .read()
            .unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration);
        assert!(e.to_string().contains("/no/such/folder"), "{e}");
    }

    #[test]
    fn missing_credentials_are_named_by_key_and_never_by_value() {
        let folder = tempfile::tempdir().unwrap();
        let source = SecretSource::Folder(folder.path().join("backup-s3"));
        fs::create_dir(folder.path().join("backup-s3")).unwrap();
        let file = |name: &str| folder.path().join("backup-s3").join(name);
        let lacks = |family: Family| {
            let secret = source.read().unwrap();
            assert!(!secret.has_credentials(family, |_| false));
            let e = secret.lacks_credentials(family);
            assert_eq!(e.reason(), Reason::Configuration);
            e.to_string()
        };
        let text = lacks(Family::S3);
        assert!(text.contains("/backup-s3 is empty: give accessKeyID and secretAccessKey, or roleARN and token, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;"), "{text}");
        assert!(
            text.contains("a Secret backup-s3 with this content must be in the Job's namespace"),
            "{text}"
        );
        fs::write(file("AWS_ACCESS_KEY_ID"), "QUITE").unwrap();
        fs::write(file("AWS_SECRET_ACCESS_KEY"), "\n").unwrap();
        let text = lacks(Family::S3);
        let part = "lacks AWS_SECRET_ACCESS_KEY (it has AWS_ACCESS_KEY_ID): give";
        assert!(text.contains(part) && !text.contains("QUITE"), "{text}");
        assert!(lacks(Family::Azure).contains("lacks credentials: give storageAccount"));
        // One key of each set is not enough.
        fs::write(file("secretAccessKey"), "SECRET").unwrap();
        assert!(!lacks(Family::S3).contains("SECRET "));
        fs::write(file("AWS_SECRET_ACCESS_KEY"), "SECRET").unwrap();
        let secret = source.read().unwrap();
        assert!(secret.has_credentials(Family::S3, |_| false));
        let variables: Vec<_> = secret.variables(Family::S3).collect();
        let expected = [
            ("AWS_ACCESS_KEY_ID", "QUITE"),
            ("AWS_SECRET_ACCESS_KEY", "SECRET"),
        ];
        assert_eq!(variables, expected);
        // An option may give some of the keys, but not all.
        fs::write(file("AZURE_STORAGE_ACCOUNT_KEY"), "SECRET").unwrap();
        let secret = source.read().unwrap();
        let is_given = |name: &str| name == "AZURE_STORAGE_ACCOUNT_NAME";
        assert!(secret.has_credentials(Family::Azure, is_given));
        assert!(!secret.has_credentials(Family::Swift, |_| true));
        assert!(!secret.has_credentials(Family::Local, |_| true));
    }

    #[derive(Debug)]
    struct Fixed(Arc<String>);

    #[async_trait]
    impl CredentialProvider for Fixed {
        type Credential = String;

        async fn get_credential(&self) -> object_store::Result<Arc<String>> {
            Ok(self.0.clone())
        }
    }

    #[tokio::test]
    async fn credentials_follow_the_secret_unless_it_is_invalid() {
        let mut mounted = MountedSecret::new(&pair(1));
        let source = SecretSource::Folder(mounted.path().to_owned());
        let derive = |secret: &Secret| {
            let key = secret.get("accessKeyID");
            let key = key.ok_or_else(|| secret.wrong("no key"))?;
            Ok(Arc::new(Fixed(Arc::new(key.to_owned()))) as CredentialsOf<String>)
        };
        let rotating = SecretDerived::new(source.clone(), source.read().unwrap(), derive).unwrap();
        let later = || {
            let mut loaded = rotating.loaded.lock().unwrap();
            loaded.read_at -= REREAD_AFTER;
        };
        assert_eq!(*rotating.get_credential().await.unwrap(), "key 1");
        mounted.change(&pair(2));
        later();
        assert_eq!(*rotating.get_credential().await.unwrap(), "key 2");
        mounted.change(&[("somethingElse", "x".to_owned())]);
        later();
        assert_eq!(*rotating.get_credential().await.unwrap(), "key 2");
        mounted.change(&pair(3));
        later();
        assert_eq!(*rotating.get_credential().await.unwrap(), "key 3");
    }
}
