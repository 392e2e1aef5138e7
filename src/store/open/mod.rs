//! Opens a store by URL: which provider, with which settings and credentials.
//!
//! Settings come from the providers' usual environment variables, then from a mounted Secret, then
//! from `--store-option`. Each provider has a file of its own.

mod azure;
mod family;
mod gcs;
pub mod options;
#[cfg(feature = "oss")]
mod oss;
mod s3;
mod secret;
mod swift;

use super::Store;
use super::errors::store_error;
use super::exclude::ExcludeTags;
use super::folder::{FileMode, Folder};
use super::requests::{Connector, DEFAULT_REQUESTS, MOST_REQUESTS, Requests};
use super::retrying_client::RetryingClient;
use crate::error::{Error, Reason, Result};
use object_store::client::{HttpClient, HttpConnector};
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use reqwest::Certificate;
use secret::{Secret, Source};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use url::Url;

pub use family::Family;

/// Connecting takes no longer than this.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// No byte for this long is a failure; a whole transfer may take as long as it needs.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The settings of a connection that decide whether it comes about.
const CLIENT_KEYS: [ClientConfigKey; 13] = [
    ClientConfigKey::AllowHttp,
    ClientConfigKey::AllowInvalidCertificates,
    ClientConfigKey::NoSystemCertificates,
    ClientConfigKey::ConnectTimeout,
    ClientConfigKey::Http1Only,
    ClientConfigKey::Http2Only,
    ClientConfigKey::PoolIdleTimeout,
    ClientConfigKey::PoolMaxIdlePerHost,
    ClientConfigKey::ReadTimeout,
    ClientConfigKey::Timeout,
    ClientConfigKey::ProxyUrl,
    ClientConfigKey::ProxyCaCertificate,
    ClientConfigKey::ProxyExcludes,
];

/// A setting of ours: how often a request is tried again.
const OPTION_MAX_RETRIES: &str = "max_retries";
/// A setting of ours: for how many seconds a request is tried again.
const OPTION_RETRY_TIMEOUT: &str = "retry_timeout";
/// A setting of ours: how many requests are under way at once.
pub const OPTION_REQUESTS: &str = "requests";
/// A setting of ours: a folder with settings and credentials, as a Secret is mounted.
pub const OPTION_SECRET_DIR: &str = "secret_dir";
/// A setting of ours: a file of PEM certificates that servers are trusted by, beside the system's.
const OPTION_CA_CERTIFICATE: &str = "ca_certificate";
/// A setting of ours: the mode of files in a local folder.
pub const OPTION_FILE_MODE: &str = "file_mode";

/// What a URL names.
#[derive(Clone)]
struct Place {
    url: String,
    bucket: String,
    prefix: Path,
    /// For messages.
    what: String,
}

/// What is known beside the URL.
#[derive(Clone)]
struct Means {
    retry: RetryConfig,
    requests: Arc<Requests>,
    /// Beside the system's.
    certificates: Vec<Certificate>,
    secret: Option<Source>,
    /// The user's settings that are none of ours.
    options: Vec<(String, String)>,
}

/// Opens `url`: `s3://bucket/prefix`, `gs://…`, `az://…`, `swift://container/prefix`, `oss://…`,
/// `file:///dir/prefix` or a plain path.
///
/// # Errors
/// `Usage` for a URL that cannot be understood, `Configuration` for a setting or a Secret,
/// `NoSnapshots` for a local folder that is not there. On Swift, whose credentials are exchanged for a
/// token when they are first used, nothing is asked for yet.
pub fn open(url: &str, options: &[(String, String)], handle: Handle) -> Result<Store> {
    crate::base::tls::ensure_provider();
    let parsed = match Url::parse(url) {
        Ok(u) if url.contains("://") => u,
        Ok(u) if Family::of_scheme(u.scheme()).is_some() => {
            return Err(Reason::Usage.error(format!(
                "--store {url} lacks the slashes: use {}://… (a folder of this name is ./{url})",
                u.scheme()
            )));
        }
        _ => return open_local(url, url, options, handle),
    };
    // abfss://container@account.… is Azure's own form.
    let is_azure = parsed.scheme().starts_with("abfs");
    if (!parsed.username().is_empty() && !is_azure)
        || parsed.password().is_some()
        || parsed.query().is_some()
    {
        return Err(Reason::Usage.error("--store takes no user, password or query in its URL: give secrets by environment variables, --store-secret or --store-option"));
    }
    let prefix = Path::from_url_path(parsed.path())
        .map_err(|e| Reason::Usage.error(format!("--store {url}: {e}")))?;
    let bucket = parsed.host_str().unwrap_or_default().to_owned();
    if parsed.scheme() != "file" && bucket.is_empty() {
        return Err(Reason::Usage.error(format!(
            "--store {url} names no bucket: use {}://bucket/prefix",
            parsed.scheme()
        )));
    }
    let place = Place {
        url: url.to_owned(),
        bucket,
        prefix,
        what: format!("open {url}"),
    };
    // The folder that etcd-backup-restore would look into.
    let means = |variable: &str| Means::new(options, variable);
    match Family::of_scheme(parsed.scheme()) {
        Some(Family::Local) => {
            let dir = parsed.to_file_path().map_err(|()| {
                Reason::Usage.error(format!("--store {url} names no local folder: use file:///folder"))
            })?;
            open_local(&dir.to_string_lossy(), url, options, handle)
        }
        Some(Family::S3) => s3::open(&place, means("AWS_APPLICATION_CREDENTIALS")?, handle),
        Some(Family::Gcs) => gcs::open(&place, means("GOOGLE_APPLICATION_CREDENTIALS")?, handle),
        Some(Family::Azure) => {
            azure::open(&place, means("AZURE_APPLICATION_CREDENTIALS")?, handle)
        }
        Some(Family::Swift) => swift::open(&place, means("OPENSTACK_APPLICATION_CREDENTIALS")?, handle),
        #[cfg(feature = "oss")]
        Some(Family::Oss) => oss::open(&place, means("ALICLOUD_APPLICATION_CREDENTIALS")?, handle),
        #[cfg(not(feature = "oss"))]
        Some(Family::Oss) => Err(Reason::Usage.error(format!(
            "--store {url}: this build has no support for OSS: build with `--features oss`, or use the image, which has it"
        ))),
        None => Err(Reason::Usage.error(format!(
            "--store {url}: \"{}\" is no store deltafold knows: use s3://, gs://, az://, swift://, oss://, file:/// or a path",
            parsed.scheme()
        ))),
    }
}

impl Place {
    fn store(&self, inner: Arc<dyn ObjectStore>, tags: ExcludeTags, handle: Handle) -> Store {
        Store::new(inner, self.prefix.clone(), self.url.clone(), tags, handle)
    }
}

impl Means {
    /// Takes our own settings out of the user's; `variable` may name a Secret where they do not.
    fn new(options: &[(String, String)], variable: &str) -> Result<Means> {
        let mut means = Means {
            retry: RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 5,
                retry_timeout: Duration::from_secs(60),
            },
            requests: Requests::new(DEFAULT_REQUESTS),
            certificates: Vec::new(),
            secret: Source::from_env(variable),
            options: Vec::new(),
        };
        for (key, value) in options {
            let number = || {
                value.parse::<u64>().map_err(|_| {
                    Reason::Configuration.error(format!(
                        "--store-option {key}={value}: it takes a whole number"
                    ))
                })
            };
            match key.as_str() {
                OPTION_MAX_RETRIES => means.retry.max_retries = number()? as usize,
                OPTION_RETRY_TIMEOUT => means.retry.retry_timeout = Duration::from_secs(number()?),
                OPTION_REQUESTS => {
                    let most = number()?;
                    if !(1..=MOST_REQUESTS as u64).contains(&most) {
                        return Err(Reason::Configuration.error(format!(
                            "--store-option {key}={value}: give a number from 1 to {MOST_REQUESTS}"
                        )));
                    }
                    means.requests = Requests::new(most as usize);
                }
                // It is for local folders.
                OPTION_FILE_MODE => {}
                OPTION_SECRET_DIR => means.secret = Some(Source::Folder(value.into())),
                OPTION_CA_CERTIFICATE => {
                    let text = std::fs::read(value).map_err(|e| {
                        Reason::Configuration
                            .error(format!("--store-option {key}={value} cannot be read: {e}"))
                    })?;
                    let what = format!("--store-option {key}={value}");
                    means.certificates.extend(certificates(&text, &what)?);
                }
                _ => means.options.push((key.clone(), value.clone())),
            }
        }
        Ok(means)
    }

    /// Whether the user gives a setting whose name has one of these in it.
    fn gives(&self, names: &[&str]) -> bool {
        let has = |key: &str| names.iter().any(|name| key.contains(name));
        self.options.iter().any(|(key, _)| has(key))
    }

    /// Whether the user gives the setting that a variable stands for.
    fn gives_variable<K: FromStr + PartialEq>(&self, name: &str) -> bool {
        let of = |name: &str| name.parse::<K>().ok();
        let meant = of(&name.to_ascii_lowercase());
        meant.is_some() && self.options.iter().any(|(key, _)| of(key) == meant)
    }

    /// The Secret, if its credentials count: not beside a user's `own`.
    fn decides<'s>(&self, secret: Option<&'s Secret>, own: &[&str]) -> Option<&'s Secret> {
        secret.filter(|_| !self.gives(own))
    }

    /// The settings of the providers' variables: those of the environment, and over them the Secret's. If the Secret
    /// decides who asks, the environment does not: a Secret that lacks a key must not be made up for in silence.
    fn variables<K: FromStr>(
        &self,
        family: Family,
        secret: Option<&Secret>,
        own: &[&str],
        is_credential: impl Fn(&K) -> bool,
    ) -> Vec<(K, String)> {
        let of = |name: &str| name.to_ascii_lowercase().parse::<K>().ok();
        let prefixes = family.variables();
        let of_env = |name: &str| {
            prefixes
                .iter()
                .any(|p| name.starts_with(p))
                .then(|| of(name))?
        };
        let replaced = self.decides(secret, own).is_some();
        let mut settings = Vec::new();
        for (name, value) in std::env::vars_os() {
            if let (Some(key), Ok(value)) = (name.to_str().and_then(of_env), value.into_string())
                && !(replaced && is_credential(&key))
            {
                settings.push((key, value));
            }
        }
        let in_secret = secret.into_iter().flat_map(|s| s.variables(family));
        settings.extend(in_secret.filter_map(|(name, value)| Some((of(name)?, value.to_owned()))));
        settings
    }

    /// The Secret as it is now.
    fn read_secret(&self) -> Result<Option<Secret>> {
        self.secret.as_ref().map(Source::read).transpose()
    }

    /// The certificates in a Secret.
    fn certificates_of(&self, secret: &Secret, name: &str) -> Result<Vec<Certificate>> {
        match secret.get(name) {
            Some(pem) => certificates(pem.as_bytes(), &format!("{name} in the Secret")),
            None => Ok(Vec::new()),
        }
    }

    fn flag(&self, key: &str, value: &str) -> Result<bool> {
        value.parse().map_err(|_| {
            let what = format!("--store-option {key}={value}: it takes true or false");
            Reason::Configuration.error(what)
        })
    }

    /// Our time-outs: the crate's own would cut off every transfer of more than 30 s.
    fn timeouts(&self) -> Vec<(String, String)> {
        let seconds = |d: Duration| format!("{} s", d.as_secs());
        vec![
            ("timeout".to_owned(), "1 day".to_owned()),
            ("connect_timeout".to_owned(), seconds(CONNECT_TIMEOUT)),
            ("read_timeout".to_owned(), seconds(READ_TIMEOUT)),
        ]
    }

    /// How a builder's store connects.
    fn client(&self, setting: impl Fn(ClientConfigKey) -> Option<String>) -> ClientOptions {
        let mut client = ClientOptions::new();
        for key in CLIENT_KEYS {
            if let Some(value) = setting(key) {
                client = client.with_config(key, value);
            }
        }
        client
    }

    /// What sends requests of ours: they go the same way as all others.
    fn wire(&self, client: &ClientOptions, what: &str) -> Result<RetryingClient> {
        Ok(RetryingClient::new(self.http(client, what)?, &self.retry))
    }

    /// What sends all requests of this store.
    fn connector(&self) -> Connector {
        Connector {
            requests: Arc::clone(&self.requests),
            certificates: self.certificates.clone(),
        }
    }

    fn http(&self, client: &ClientOptions, what: &str) -> Result<HttpClient> {
        let http = self.connector().connect(client);
        http.map_err(|e| misconfigured(what, e))
    }

    /// How a client connects that has no builder, and the settings that are left.
    fn plain_client(&self) -> Result<(ClientOptions, Vec<(String, String)>)> {
        let (mut of_client, mut rest) = (self.timeouts(), Vec::new());
        for (key, value) in &self.options {
            match key.parse::<ClientConfigKey>() {
                Ok(_) => of_client.push((key.clone(), value.clone())),
                Err(_) => rest.push((key.clone(), value.clone())),
            }
        }
        let mut client = ClientOptions::new();
        for (key, value) in of_client {
            client = client.with_config(config_key::<ClientConfigKey>(&key)?, value);
        }
        Ok((client, rest))
    }
}

/// The certificates in a PEM file.
fn certificates(pem: &[u8], what: &str) -> Result<Vec<Certificate>> {
    let wrong = |why: String| Reason::Configuration.error(format!("{what} {why}"));
    let found = Certificate::from_pem_bundle(pem)
        .map_err(|e| wrong(format!("holds what is no certificate: {e}")))?;
    match found.is_empty() {
        true => Err(wrong("holds no PEM certificate".to_owned())),
        false => Ok(found),
    }
}

/// Refuses a URL that names the folder of a layout, which is made below the one that is named: the usual mistake
/// of who comes from a tool whose prefix ends so.
///
/// # Errors
/// `Usage`.
pub fn refuse_layout(url: &str, flag: &str) -> Result<()> {
    match url.trim_end_matches('/').rsplit('/').next() {
        Some(layout @ ("v1" | "v2")) => Err(Reason::Usage.error(format!(
            "{flag} {url} ends in {layout}: name the folder above it, the one that holds {layout}/"
        ))),
        _ => Ok(()),
    }
}

/// Makes the folder of a local `url` that is not there yet, if the one above it is: a first snapshot is
/// saved into an empty store. Whatever else is wrong with the URL, [`open`] tells.
///
/// # Errors
/// `Io`, `PermissionDenied`, `NoSpace`, `Configuration`.
pub fn make_folder(url: &str, options: &[(String, String)]) -> Result<()> {
    let dir = match Url::parse(url) {
        Ok(u) if url.contains("://") => match u.scheme() {
            "file" => u.to_file_path().ok(),
            _ => None,
        },
        Ok(u) if Family::of_scheme(u.scheme()).is_some() => None,
        _ => Some(std::path::PathBuf::from(url)),
    };
    let Some(dir) = dir.filter(|d| !d.as_os_str().is_empty()) else {
        return Ok(());
    };
    match file_mode(options)?.make_root(&dir) {
        Ok(()) => {
            tracing::info!(folder = %dir.display(), "made the store's folder");
            Ok(())
        }
        Err(e) => match e.kind() {
            std::io::ErrorKind::AlreadyExists | std::io::ErrorKind::NotFound => Ok(()),
            _ if dir.exists() => Ok(()),
            _ => Err(Error::io(format!("make the folder {}", dir.display()), e)),
        },
    }
}

fn open_local(dir: &str, url: &str, options: &[(String, String)], handle: Handle) -> Result<Store> {
    if dir.is_empty() {
        return Err(Reason::Usage.error("--store is empty: give a URL or a folder"));
    }
    // What counts for every object store may be set for several stores at once.
    let of_all = [
        OPTION_MAX_RETRIES,
        OPTION_RETRY_TIMEOUT,
        OPTION_REQUESTS,
        OPTION_SECRET_DIR,
        OPTION_CA_CERTIFICATE,
        OPTION_FILE_MODE,
    ];
    let mut others = options
        .iter()
        .filter(|(k, _)| !of_all.contains(&k.as_str()));
    if let Some((key, _)) = others.next() {
        return Err(Reason::Configuration.error(format!(
            "--store-option {key}: a local folder has no settings"
        )));
    }
    let is_dir = std::fs::metadata(dir)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Reason::NoSnapshots.error(format!("the folder {dir} is not there: check --store"))
            }
            _ => Error::io(format!("open {dir}"), e),
        })?
        .is_dir();
    if !is_dir {
        return Err(Reason::Usage.error(format!(
            "--store {dir} is a file: give the folder that holds v2/"
        )));
    }
    let folder = Folder::new(dir.into(), file_mode(options)?);
    Ok(Store::new(
        Arc::new(folder.clone()),
        Path::default(),
        url.to_owned(),
        ExcludeTags::none(),
        handle,
    )
    .with_local_root(folder))
}

/// The mode of what is made in a local folder.
fn file_mode(options: &[(String, String)]) -> Result<FileMode> {
    let mode = options.iter().rfind(|(key, _)| key == OPTION_FILE_MODE);
    mode.map_or(Ok(FileMode::default()), |(key, value)| {
        value.parse().map_err(|e| {
            let what = format!("--store-option {key}={value}: {e}");
            Reason::Configuration.error(what)
        })
    })
}

/// Whatever a builder complains of, a retry does not mend.
fn misconfigured(what: &str, e: object_store::Error) -> Error {
    let e = store_error(what, e);
    Reason::Configuration.error(e.to_string())
}

fn config_key<K: FromStr<Err = object_store::Error>>(key: &str) -> Result<K> {
    key.parse().map_err(|_| no_such_setting(key))
}

fn no_such_setting(key: &str) -> Error {
    Reason::Configuration.error(format!(
        "--store-option {key}: this store has no such setting; see docs/stores.md"
    ))
}
