//! Settings and credentials from a mounted Secret, with the names that etcd-backup-restore and
//! etcd-druid give them, or the names of the providers' variables.
//!
//! A Secret is read again when it changes: whoever signs a request asks for the credentials anew. What
//! else it holds (endpoint, region, certificates) counts from the start of a run to its end.

use super::family::{Family, Set};
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

/// A Secret is not looked at more often. Kubernetes itself takes up to two minutes to bring a change.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Where a Secret is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// A folder with a file for each setting, and perhaps JSON files with several.
    Folder(PathBuf),
    /// One JSON file with all settings.
    File(PathBuf),
}

/// What a Secret holds: each setting by its name.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Secret {
    place: String,
    folder: PathBuf,
    settings: BTreeMap<String, String>,
}

/// Its values are not shown.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.settings.keys().collect();
        write!(f, "Secret({}: {names:?})", self.place)
    }
}

impl Source {
    /// The Secret that the variable `name` names: a folder; or `<name>_JSON`, a file.
    pub(super) fn from_env(name: &str) -> Option<Source> {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        if let Some(file) = set(&format!("{name}_JSON")) {
            return Some(Source::File(file.into()));
        }
        let folder = PathBuf::from(set(name)?);
        Some(match folder.is_file() {
            true => Source::File(folder),
            false => Source::Folder(folder),
        })
    }

    /// Reads it, all of it at one moment where Kubernetes has mounted it.
    ///
    /// # Errors
    /// `Configuration` where it cannot be read.
    pub(super) fn read(&self) -> Result<Secret> {
        let (path, folder, settings) = match self {
            Source::Folder(folder) => (folder, folder.clone(), read_folder(folder)),
            Source::File(file) => (file, PathBuf::new(), read_file(file)),
        };
        let place = path.display().to_string();
        match settings {
            Ok(settings) => Ok(Secret {
                place,
                folder,
                settings,
            }),
            Err(e) => {
                Err(Reason::Configuration.error(format!("the Secret {place} cannot be read: {e}")))
            }
        }
    }
}

impl Secret {
    /// A setting; an empty one is none.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let value = self.settings.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// Settings of a store, with the names that the Secret has for them: those that it holds.
    pub(super) fn settings<const N: usize>(
        &self,
        names: [(&str, &str); N],
    ) -> impl Iterator<Item = (String, String)> {
        let held = |(key, name): (&str, &str)| Some((key.to_owned(), self.get(name)?.to_owned()));
        names.into_iter().filter_map(held)
    }

    /// A setting that is on or off.
    ///
    /// # Errors
    /// `Configuration` where it is neither.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name).map(str::to_ascii_lowercase).as_deref() {
            None => Ok(None),
            Some("true" | "1" | "t") => Ok(Some(true)),
            Some("false" | "0" | "f") => Ok(Some(false)),
            Some(_) => Err(self.wrong(&format!("{name} is neither true nor false"))),
        }
    }

    /// The whole of the one JSON file that it is.
    pub(super) fn json(&self) -> Option<&str> {
        let name = Path::new(&self.place).file_name()?.to_str()?;
        self.get(name)
    }

    /// Where a setting's own file is.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// What it holds under the names of the providers' variables: each by its variable, in the order of their names.
    pub(super) fn variables(&self, family: Family) -> impl Iterator<Item = (&str, &str)> {
        let prefixes = family.variables();
        let is_variable = move |name: &str| prefixes.iter().any(|p| name.starts_with(p));
        let names = self.settings.keys().map(String::as_str);
        let names = names.filter(move |name| is_variable(name));
        names.filter_map(|name| Some((name, self.get(name)?)))
    }

    /// Whether one set of the family's credentials is complete. An option may give one of its keys, too.
    pub(super) fn has_credentials(&self, family: Family, is_given: impl Fn(&str) -> bool) -> bool {
        let has = |key: &&str| self.get(key).is_some() || is_given(key);
        // Options alone are no credentials of the Secret.
        let is_own = |set: &Set| set.iter().any(|key| self.get(key).is_some());
        let mut sets = family.credentials().iter();
        sets.any(|set| is_own(set) && set.iter().all(has))
    }

    /// What it lacks, none of the sets being complete. Names of keys are shown, and no value.
    pub(super) fn lacks_credentials(&self, family: Family) -> Error {
        let sets = family.credentials();
        let (place, has) = (&self.place, |key: &&&str| self.get(key).is_some());
        let begun = sets
            .iter()
            .rev()
            .max_by_key(|set| set.iter().filter(has).count());
        let begun = begun.filter(|set| set.iter().any(|key| has(&key)));
        let what = match begun {
            Some(set) => {
                let there: Vec<&str> = set.iter().filter(has).copied().collect();
                let missing: Vec<&str> = set.iter().filter(|key| !has(key)).copied().collect();
                let (there, missing) = (there.join(" and "), missing.join(" and "));
                format!("lacks {missing} (it has {there})")
            }
            None if self.settings.is_empty() => "is empty".to_owned(),
            None => "lacks credentials".to_owned(),
        };
        let sets: Vec<String> = sets.iter().map(|set| set.join(" and ")).collect();
        let sets = sets.join(", or ");
        let advice = match self.folder.as_os_str().is_empty() {
            true => format!("give {sets}"),
            false => mounted_secret::advice(&self.folder, &sets),
        };
        Reason::Configuration.error(format!(
            "the Secret {place} {what}: {advice}; see docs/stores.md"
        ))
    }

    /// What is wrong with it.
    pub(super) fn wrong(&self, what: &str) -> Error {
        Reason::Configuration.error(format!(
            "the Secret {}: {what}; see docs/stores.md",
            self.place
        ))
    }
}

fn read_folder(folder: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut settings = BTreeMap::new();
    let mut of_json = BTreeMap::new();
    for (name, value) in mounted_secret::read(folder)? {
        let Ok(value) = String::from_utf8(value) else {
            continue;
        };
        if name.ends_with(".json") {
            of_json.extend(parse_json(&value).unwrap_or_default());
        }
        settings.insert(name, value);
    }
    // A file of its own says more than a line in another.
    for (name, value) in of_json {
        settings.entry(name).or_insert(value);
    }
    Ok(settings)
}

fn read_file(file: &Path) -> io::Result<BTreeMap<String, String>> {
    let text = fs::read_to_string(file)?;
    let mut settings = parse_json(&text).ok_or_else(|| io::Error::other("it is no JSON object"))?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    settings.insert(name.into_owned(), text);
    Ok(settings)
}

/// The plain values of a JSON object.
fn parse_json(text: &str) -> Option<BTreeMap<String, String>> {
    use serde_json::Value;
    let object: BTreeMap<String, Value> = serde_json::from_str(text).ok()?;
    let plain = object.into_iter().filter_map(|(name, value)| {
        let value = match value {
            Value::String(s) => s,
            Value::Bool(b) => b.to_string(),
            Value::Number(n) => n.to_string(),
            _ => return None,
        };
        Some((name, value))
    });
    Some(plain.collect())
}

/// What gives credentials for requests.
pub(super) type Provider<C> = Arc<dyn CredentialProvider<Credential = C>>;

type Make<T> = dyn Fn(&Secret) -> Result<T> + Send + Sync;

/// Something that is made of a Secret, and made anew when that changed.
pub(super) struct Renewed<T> {
    source: Source,
    make: Box<Make<T>>,
    now: Mutex<Now<T>>,
}

struct Now<T> {
    secret: Secret,
    made: T,
    looked: Instant,
}

impl<T> fmt::Debug for Renewed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Renewed({:?})", self.source)
    }
}

impl<T: Clone> Renewed<T> {
    /// What `make` makes of `secret`, and of each later state of `source`.
    ///
    /// # Errors
    /// Those of `make`.
    pub(super) fn new(
        source: Source,
        secret: Secret,
        make: impl Fn(&Secret) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Self> {
        let made = make(&secret)?;
        let now = Now {
            secret,
            made,
            looked: Instant::now(),
        };
        Ok(Renewed {
            source,
            make: Box::new(make),
            now: Mutex::new(now),
        })
    }

    /// What is to be used now. A Secret that cannot be read, or makes no sense, changes nothing: it
    /// may be in the middle of being changed, and what was read before may still do.
    pub(super) fn current(&self) -> T {
        let mut now = lock(&self.now);
        if now.looked.elapsed() >= LOOK_AGAIN_AFTER {
            now.looked = Instant::now();
            match self.source.read() {
                Ok(secret) if secret == now.secret => {}
                Ok(secret) => match (self.make)(&secret) {
                    Ok(made) => {
                        tracing::info!(secret = secret.place, "read changed credentials");
                        now.made = made;
                        now.secret = secret;
                    }
                    Err(e) => tracing::warn!("a changed Secret is not used: {e}"),
                },
                Err(e) => tracing::warn!("{e}; the credentials read before are used"),
            }
        }
        now.made.clone()
    }
}

#[async_trait]
impl<C: fmt::Debug + Send + Sync + 'static> CredentialProvider for Renewed<Provider<C>> {
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

    /// As kubelet's atomic writer mounts a Secret, and changes it.
    struct Mounted {
        root: tempfile::TempDir,
        states: usize,
    }

    impl Mounted {
        fn new(files: &[(&str, String)]) -> Self {
            let mut mounted = Mounted {
                root: tempfile::tempdir().unwrap(),
                states: 0,
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
            self.states += 1;
            let name = format!("..2026_11_20_{}", self.states);
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
        let mut mounted = Mounted::new(&pair(0));
        let source = Source::Folder(mounted.path().to_owned());
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
    fn a_file_of_json_and_files_say_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let json =
            r#"{"authURL": "https://a.example/v3", "password": "from JSON", "n": 3, "x": {}}"#;
        fs::write(folder.path().join("secret.json"), json).unwrap();
        fs::write(folder.path().join("password"), "its own\n").unwrap();
        fs::write(folder.path().join("emulatorEnabled"), "True").unwrap();
        fs::write(folder.path().join("empty"), "\n").unwrap();
        let secret = Source::Folder(folder.path().to_owned()).read().unwrap();
        assert_eq!(secret.get("authURL"), Some("https://a.example/v3"));
        assert_eq!(secret.get("password"), Some("its own"));
        assert_eq!(secret.get("n"), Some("3"));
        assert_eq!((secret.get("empty"), secret.get("x")), (None, None));
        assert_eq!(secret.flag("emulatorEnabled").unwrap(), Some(true));
        assert_eq!(secret.flag("none").unwrap(), None);
        assert!(secret.flag("password").is_err());
        assert!(!format!("{secret:?}").contains("its own"));
        let file = Source::File(folder.path().join("secret.json"));
        assert_eq!(file.read().unwrap().get("password"), Some("from JSON"));
    }

    #[test]
    fn a_folder_that_is_not_there_is_told() {
        let e = Source::Folder("/no/such/folder".into()).read().unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration);
        assert!(e.to_string().contains("/no/such/folder"), "{e}");
    }

    #[test]
    fn what_a_secret_lacks_is_told_by_names_of_keys_alone() {
        let folder = tempfile::tempdir().unwrap();
        let source = Source::Folder(folder.path().join("backup-s3"));
        fs::create_dir(folder.path().join("backup-s3")).unwrap();
        let file = |name: &str| folder.path().join("backup-s3").join(name);
        let lacks = |family: Family| {
            let secret = source.read().unwrap();
            assert!(!secret.has_credentials(family, |_| false));
            let e = secret.lacks_credentials(family);
            assert_eq!(e.reason(), Reason::Configuration);
            e.to_string()
        };
        let said = lacks(Family::S3);
        assert!(said.contains("/backup-s3 is empty: give accessKeyID and secretAccessKey, or roleARN and token, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;"), "{said}");
        assert!(
            said.contains("a Secret backup-s3 with this content must be in the Job's namespace"),
            "{said}"
        );
        fs::write(file("AWS_ACCESS_KEY_ID"), "QUITE").unwrap();
        fs::write(file("AWS_SECRET_ACCESS_KEY"), "\n").unwrap();
        let said = lacks(Family::S3);
        let part = "lacks AWS_SECRET_ACCESS_KEY (it has AWS_ACCESS_KEY_ID): give";
        assert!(said.contains(part) && !said.contains("QUITE"), "{said}");
        assert!(lacks(Family::Azure).contains("lacks credentials: give storageAccount"));
        // One of each is none.
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
        // An option may give a part, and not all.
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
    async fn credentials_follow_the_secret_but_for_nonsense() {
        let mut mounted = Mounted::new(&pair(1));
        let source = Source::Folder(mounted.path().to_owned());
        let rotating = Renewed::new(source.clone(), source.read().unwrap(), |secret| {
            let key = secret
                .get("accessKeyID")
                .ok_or_else(|| secret.wrong("no key"))?;
            Ok(Arc::new(Fixed(Arc::new(key.to_owned()))) as Provider<String>)
        })
        .unwrap();
        let later = || {
            let mut now = rotating.now.lock().unwrap();
            now.looked -= LOOK_AGAIN_AFTER;
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
