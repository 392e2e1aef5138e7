//! Opens a store by its URL: chooses the provider, and collects its settings and credentials.
//!
//! Settings come from the providers' usual environment variables, from a mounted Secret and from `--store-option`; the
//! later ones win. Each provider has a file. Opening sends no request.

mod aws_profile;
mod azure;
mod builder;
mod family;
mod gcs;
pub mod options;
mod s3;
mod secret;
mod swift;

use super::Store;
use super::errors::store_error;
use super::exclude::ExcludeTags;
use super::folder::{FileMode, Folder};
use super::listing;
use super::requests::{Connector, DEFAULT_REQUESTS, MAX_REQUESTS, Requests};
use super::retrying_client::RetryingClient;
use crate::base::opt::{self, SNAPSHOT, STORE, STORE_OPTION, STORE_SECRET};
use crate::base::shell;
use crate::base::tls;
use crate::error::{Error, Reason, Result};
use object_store::client::{HttpClient, HttpConnector};
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use rustls::pki_types::CertificateDer;
use secret::{Secret, SecretSource};
use std::path::{Path as FilePath, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use url::Url;

pub use family::Family;

/// Time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time without a byte. A whole transfer may take as long as it needs.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The settings of a connection. `connect` uses these and no others of the object_store crate.
const CLIENT_KEYS: [ClientConfigKey; 9] = [
    ClientConfigKey::AllowHttp,
    ClientConfigKey::AllowInvalidCertificates,
    ClientConfigKey::NoSystemCertificates,
    ClientConfigKey::ConnectTimeout,
    ClientConfigKey::ReadTimeout,
    ClientConfigKey::Timeout,
    ClientConfigKey::ProxyUrl,
    ClientConfigKey::ProxyCaCertificate,
    ClientConfigKey::ProxyExcludes,
];

// Settings of our own, beside those of the object_store crate.

/// How often a request is retried.
const OPTION_MAX_RETRIES: &str = "max_retries";
/// For how many seconds after its start a request is retried.
const OPTION_RETRY_TIMEOUT: &str = "retry_timeout";
/// How many requests are under way at once.
pub const OPTION_REQUESTS: &str = "requests";
/// A folder with settings and credentials: a mounted Secret.
pub const OPTION_SECRET_DIR: &str = "secret_dir";
/// A file of PEM certificates that are trusted beside the system's.
const OPTION_CA_CERTIFICATE: &str = "ca_certificate";
/// The mode of files in a local folder.
pub const OPTION_FILE_MODE: &str = "file_mode";

/// The parts of a store's URL.
#[derive(Clone)]
struct Location {
    url: String,
    /// The URL up to the bucket.
    bucket_url: String,
    bucket: String,
    prefix: Path,
    /// `open URL`, for error messages.
    action: String,
}

/// The settings of a store that do not come from its URL.
#[derive(Clone)]
struct OpenConfig {
    retry: RetryConfig,
    requests: Arc<Requests>,
    /// Trusted beside the system's.
    certificates: Vec<CertificateDer<'static>>,
    secret: Option<SecretSource>,
    /// The user's `--store-option`s that are not our own: for the provider and the connection.
    options: Vec<(String, String)>,
}

/// Opens the store at `url`: `s3://bucket/prefix`, `gs://…`, `az://…`, `swift://container/prefix`,
/// `file:///dir/prefix` or a plain path.
///
/// # Errors
/// Fails with `Usage` if the URL is invalid, with `Configuration` if a setting or the Secret is invalid, and
/// with `NoSnapshots` if a local folder does not exist. Wrong credentials show only with the first request.
pub fn open(url: &str, options: &[(String, String)], handle: Handle) -> Result<Store> {
    crate::base::tls::ensure_provider();
    let Some((scheme, rest)) = url.split_once("://") else {
        return match scheme_without_slashes(url) {
            Some(scheme) => Err(Reason::Usage.error(format!(
                "{STORE} {url} lacks the slashes: use {scheme}://… (a folder of this name is ./{url})"
            ))),
            None => open_local(url, url, options, handle),
        };
    };
    let scheme = &*scheme.to_ascii_lowercase();
    check_parts(scheme, rest)?;
    // The variable is the one with which etcd-backup-restore finds its Secret.
    let config = |variable: &str| OpenConfig::new(options, variable);
    let family = Family::of_scheme(scheme);
    let location = || Location::new(url, scheme, rest, family);
    match family {
        Some(Family::Local) => {
            let dir = local_folder(url).ok_or_else(|| {
                Reason::Usage.error(format!(
                    "{STORE} {url} is not the URL of a local folder: write file:///folder"
                ))
            })?;
            open_local(&dir.to_string_lossy(), url, options, handle)
        }
        Some(Family::S3) => s3::open(&location()?, config("AWS_APPLICATION_CREDENTIALS")?, handle),
        Some(Family::Gcs) => {
            gcs::open(&location()?, config("GOOGLE_APPLICATION_CREDENTIALS")?, handle)
        }
        Some(Family::Azure) => {
            azure::open(&location()?, config("AZURE_APPLICATION_CREDENTIALS")?, handle)
        }
        Some(Family::Swift) => swift::open(
            &location()?,
            config("OPENSTACK_APPLICATION_CREDENTIALS")?,
            handle,
        ),
        None => Err(Reason::Usage.error(format!(
            "{STORE} {url}: \"{scheme}\" is no store deltafold knows: use s3://, gs://, az://, swift://, file:/// or a path{}",
            opt::fill(Family::advice(scheme))
        ))),
    }
}

/// Refuses a user, a password and a query in a URL: they belong in settings. Does not print the URL.
fn check_parts(scheme: &str, rest: &str) -> Result<()> {
    let authority = rest.split('/').next().unwrap_or_default();
    // Azure's own form of a URL has an @: abfss://container@account.…
    let has_user = match authority.split_once('@') {
        Some((user, _)) => !scheme.starts_with("abfs") || user.contains(':'),
        None => false,
    };
    if has_user || rest.contains('?') {
        return Err(Reason::Usage.error(format!("{STORE} takes no user, password or query in its URL, and no ? in a name: give secrets by environment variables, {STORE_SECRET} or {STORE_OPTION}")));
    }
    Ok(())
}

/// The longest prefix, in bytes. Stores take names of 1,024 bytes, and the names below a prefix need some.
const MAX_PREFIX: usize = 700;

impl Location {
    /// Takes a URL apart. The prefix is byte for byte what the URL has: nothing is decoded.
    ///
    /// # Errors
    /// Fails with `Usage` if there is no valid bucket, or if a store cannot have names with this prefix.
    fn new(url: &str, scheme: &str, rest: &str, family: Option<Family>) -> Result<Self> {
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let bucket_url = format!("{scheme}://{authority}");
        // Other stores write a bucket's name as the host of a URL.
        let host = match family {
            Some(Family::Swift) => Some(authority.to_owned()),
            _ => Url::parse(&bucket_url)
                .ok()
                .and_then(|u| Some(u.host_str()?.to_owned())),
        };
        let named = authority
            .split_once('@')
            .map_or(authority, |(_, host)| host);
        let bucket = host.filter(|host| !host.is_empty() && host == named);
        // What is written there may be a password.
        let bucket = bucket.ok_or_else(|| {
            Reason::Usage.error(format!(
                "{STORE} {scheme}://… names no valid bucket: use {scheme}://bucket/prefix"
            ))
        })?;
        let prefix = prefix_path(prefix, family).map_err(|problem| {
            Reason::Usage.error(format!(
                "{STORE} {url}: this prefix cannot be used: {problem}"
            ))
        })?;
        Ok(Location {
            url: url.to_owned(),
            bucket_url,
            bucket,
            prefix,
            action: format!("open {url}"),
        })
    }

    fn store(&self, inner: Arc<dyn ObjectStore>, tags: ExcludeTags, handle: Handle) -> Store {
        Store::new(inner, self.prefix.clone(), self.url.clone(), tags, handle)
    }
}

impl OpenConfig {
    /// Takes our own settings out of the user's. `variable` names the Secret if the user's settings do not.
    fn new(options: &[(String, String)], variable: &str) -> Result<OpenConfig> {
        let mut config = OpenConfig {
            retry: RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 10,
                retry_timeout: Duration::from_secs(60),
            },
            requests: Requests::new(DEFAULT_REQUESTS),
            certificates: Vec::new(),
            secret: SecretSource::from_env(variable),
            options: Vec::new(),
        };
        for (key, value) in options {
            match key.as_str() {
                OPTION_MAX_RETRIES => config.retry.max_retries = whole_number(key, value)? as usize,
                OPTION_RETRY_TIMEOUT => {
                    config.retry.retry_timeout = Duration::from_secs(whole_number(key, value)?);
                }
                OPTION_REQUESTS => {
                    let most = whole_number(key, value)?;
                    if !(1..=MAX_REQUESTS as u64).contains(&most) {
                        return Err(Reason::Configuration.error(format!(
                            "{STORE_OPTION} {key}={value}: give a number from 1 to {MAX_REQUESTS}"
                        )));
                    }
                    config.requests = Requests::new(most as usize);
                }
                // Only for local folders.
                OPTION_FILE_MODE => {}
                OPTION_SECRET_DIR => config.secret = Some(SecretSource::Folder(value.into())),
                OPTION_CA_CERTIFICATE => {
                    let text = std::fs::read(value).map_err(|e| {
                        Reason::Configuration
                            .error(format!("{STORE_OPTION} {key}={value} cannot be read: {e}"))
                    })?;
                    let source = format!("{STORE_OPTION} {key}={value}");
                    config.certificates.extend(certificates(&text, &source)?);
                }
                _ => config.options.push((key.clone(), value.clone())),
            }
        }
        Ok(config)
    }

    /// Returns whether the user has_option an option whose name contains one of `names`.
    fn has_option(&self, names: &[&str]) -> bool {
        let matches = |key: &str| names.iter().any(|name| key.contains(name));
        self.options.iter().any(|(key, _)| matches(key))
    }

    /// Returns whether the user has_option the option for the same setting as the environment variable
    /// `name`.
    fn has_option_for_variable<K: FromStr + PartialEq>(&self, name: &str) -> bool {
        let setting = |name: &str| name.parse::<K>().ok();
        let wanted = setting(&name.to_ascii_lowercase());
        wanted.is_some() && self.options.iter().any(|(key, _)| setting(key) == wanted)
    }

    /// Reads the Secret, if one is named.
    fn read_secret(&self) -> Result<Option<Secret>> {
        self.secret.as_ref().map(SecretSource::read).transpose()
    }

    /// Returns our time-outs. With the crate's own, a transfer of more than 30 s would fail.
    fn timeouts(&self) -> Vec<(String, String)> {
        let seconds = |d: Duration| format!("{} s", d.as_secs());
        vec![
            ("timeout".to_owned(), "1 day".to_owned()),
            ("connect_timeout".to_owned(), seconds(CONNECT_TIMEOUT)),
            ("read_timeout".to_owned(), seconds(READ_TIMEOUT)),
        ]
    }

    /// Returns the client for requests that the object_store crate has no call for. They go through the same
    /// connections.
    fn retrying_client(&self, client: &ClientOptions, action: &str) -> Result<RetryingClient> {
        Ok(RetryingClient::new(self.http(client, action)?, &self.retry))
    }

    /// Returns what makes the connections for all requests of this store.
    fn connector(&self) -> Connector {
        Connector {
            requests: Arc::clone(&self.requests),
            certificates: self.certificates.clone(),
            completes_if_free: false,
            takes_gzip: false,
        }
    }

    fn http(&self, client: &ClientOptions, action: &str) -> Result<HttpClient> {
        let http = self.connector().connect(client);
        http.map_err(|e| misconfigured(action, e))
    }

    /// Splits the user's options, for a provider without a builder: how to connect, and the other options.
    fn plain_client(&self) -> Result<(ClientOptions, Vec<(String, String)>)> {
        let (mut of_client, mut others) = (self.timeouts(), Vec::new());
        for (key, value) in &self.options {
            match key.parse::<ClientConfigKey>() {
                Ok(_) => of_client.push((key.clone(), value.clone())),
                Err(_) => others.push((key.clone(), value.clone())),
            }
        }
        let mut client = ClientOptions::new();
        for (key, value) in of_client {
            client = client.with_config(config_key::<ClientConfigKey>(&key)?, value);
        }
        Ok((client, others))
    }
}

/// Returns a variable of the environment without the blanks around it. One that is empty is not set.
fn variable(name: &str) -> Option<String> {
    let value = std::env::var(name).ok()?;
    let value = value.trim();
    (!value.is_empty()).then(|| value.to_owned())
}

/// Trims the value of a setting. `setting` is its name and its source, for messages.
///
/// # Errors
/// `Configuration` if it has a line break or another control character: no header can have one, and the object_store crate
/// panics with the first request. JSON text and certificates may have them. The value may be a secret and is not shown.
fn checked(setting: &str, value: &str) -> Result<String> {
    let value = value.trim();
    let is_text = value.starts_with('{') || value.starts_with("-----BEGIN");
    if is_text || !value.chars().any(char::is_control) {
        Ok(value.to_owned())
    } else {
        Err(Reason::Configuration.error(format!(
            "{setting} has a line break or another control character: write it without one (printf, not echo), and encode it once"
        )))
    }
}

fn flag(key: &str, value: &str) -> Result<bool> {
    value.parse().map_err(|_| {
        Reason::Configuration.error(format!("{STORE_OPTION} {key}={value}: give true or false"))
    })
}

/// Refuses a value that a setting does not have.
fn one_of(key: &str, value: &str, allowed: &[&str]) -> Result<()> {
    if allowed.contains(&value) {
        Ok(())
    } else {
        Err(Reason::Configuration.error(format!(
            "{STORE_OPTION} {key}={value}: give {}",
            allowed.join(" or ")
        )))
    }
}

/// Refuses an endpoint that is no URL: the object_store crate panics with the first request. `setting` names
/// the setting.
fn check_endpoint(setting: &str, endpoint: &str) -> Result<()> {
    let url = Url::parse(endpoint).ok();
    let is_server = |u: &Url| matches!(u.scheme(), "http" | "https") && u.host().is_some();
    if url.as_ref().is_some_and(is_server) {
        return Ok(());
    }
    // It may contain a password.
    let shown = if endpoint.contains('@') { "" } else { endpoint };
    Err(Reason::Configuration.error(format!(
        "the store's {setting} \"{shown}\" is not the URL of a server: give {STORE_OPTION} {setting}=https://HOST:PORT, or http://HOST:PORT for a server without TLS"
    )))
}

fn whole_number(key: &str, value: &str) -> Result<u64> {
    value.parse().map_err(|_| {
        Reason::Configuration.error(format!("{STORE_OPTION} {key}={value}: give a whole number"))
    })
}

/// Reads the certificates in a PEM file. `source` names the file in messages.
fn certificates(pem: &[u8], source: &str) -> Result<Vec<CertificateDer<'static>>> {
    let wrong = |why: String| Reason::Configuration.error(format!("{source} {why}"));
    let certificates =
        tls::certificates(pem).map_err(|e| wrong(format!("has an invalid certificate: {e}")))?;
    if certificates.is_empty() {
        Err(wrong("has no PEM certificate".to_owned()))
    } else {
        Ok(certificates)
    }
}

/// Returns the path of a prefix.
///
/// # Errors
/// Says why no object below the prefix could be written and found again.
fn prefix_path(prefix: &str, family: Option<Family>) -> Result<Path, String> {
    const ODD: &str =
        "it begins or ends with white space, or has a character that stands for an unreadable one";
    let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
    if prefix.is_empty() {
        return Ok(Path::ROOT);
    }
    let parts = || prefix.split('/');
    let problem = if parts().any(|part| matches!(part, "" | "." | "..")) {
        "one of its parts is empty, . or ..".to_owned()
    } else if prefix.contains(char::is_control) {
        "it has a control character".to_owned()
    } else if family == Some(Family::Azure)
        && (prefix.contains('\\') || parts().any(|part| part.ends_with('.')))
    {
        "Azure changes names with a backslash, or with a dot at the end of a part".to_owned()
    } else if prefix.len() > MAX_PREFIX {
        format!("it has more than {MAX_PREFIX} bytes")
    } else if listing::is_odd(prefix) {
        ODD.to_owned()
    } else {
        return Path::parse(prefix).map_err(|e| e.to_string());
    };
    Err(problem)
}

/// Refuses a URL that ends in `v1` or `v2`. These folders are made below the prefix; in other tools the
/// prefix ends so, and it is a common mistake to copy it.
///
/// # Errors
/// Fails with `Usage`.
pub fn refuse_layout(url: &str, flag: &str) -> Result<()> {
    match url.trim_end_matches('/').rsplit('/').next() {
        Some(layout @ ("v1" | "v2")) => Err(Reason::Usage.error(format!(
            "{flag} {url} ends in {layout}: name the folder above it, the one that holds {layout}/"
        ))),
        _ => Ok(()),
    }
}

/// Creates the folder of a local `url` if it is missing and its parent exists, for the first snapshot in a
/// store. A parent is not created: if a file system is not mounted, snapshots must not land on the disk below
/// its mount point. `flag` has given the URL. Ignores everything else that is wrong with the URL: [`open`]
/// reports it.
///
/// # Errors
/// Fails with `Configuration` if the parent is missing or is a file; with `Io`, `PermissionDenied` or
/// `NoSpace`.
pub fn make_folder(url: &str, flag: &str, options: &[(String, String)]) -> Result<()> {
    let Some(dir) = local_folder(url) else {
        return Ok(());
    };
    match file_mode(options)?.make_root(&dir) {
        Ok(()) => {
            tracing::info!(folder = %dir.display(), "made the store's folder");
            Ok(())
        }
        Err(e) => match e.kind() {
            std::io::ErrorKind::AlreadyExists => Ok(()),
            _ if dir.exists() => Ok(()),
            std::io::ErrorKind::NotFound if !has_parent(&dir) => Err(lacks_parent(url, flag, &dir)),
            std::io::ErrorKind::NotADirectory => Err(Reason::Configuration.error(format!(
                "cannot create {flag} {url}: a part of this path is a file"
            ))),
            _ => Err(Error::io(
                format!("cannot create the folder {} of {flag}", dir.display()),
                e,
            )),
        },
    }
}

/// Returns whether a folder can be created in the parent of `dir`. The parent of a relative name is the current
/// folder.
fn has_parent(dir: &FilePath) -> bool {
    let parent = dir.parent();
    parent.is_none_or(|p| p.as_os_str().is_empty() || p.is_dir())
}

/// Returns the error for a folder that cannot be created because its parent does not exist.
fn lacks_parent(url: &str, flag: &str, dir: &FilePath) -> Error {
    let parent = dir.parent().unwrap_or(dir).display().to_string();
    let quoted = shell::word(&parent);
    Reason::Configuration.error(format!(
        "cannot create {flag} {url}: the folder {parent} does not exist; if a file system belongs there, mount it, otherwise create it with `mkdir -p {quoted}`"
    ))
}

/// Returns the scheme of a URL that lacks its slashes, as in `s3:bucket`.
fn scheme_without_slashes(url: &str) -> Option<&str> {
    let (scheme, _) = url.split_once(':')?;
    Family::of_scheme(scheme).map(|_| scheme)
}

/// Returns the folder of a local `url`, or `None` if the URL is that of an object store or invalid. Nothing in it is
/// decoded.
pub fn local_folder(url: &str) -> Option<PathBuf> {
    let dir = match url.split_once("://") {
        Some((scheme, rest)) if Family::of_scheme(scheme) == Some(Family::Local) => {
            let rest = rest.strip_prefix("localhost").unwrap_or(rest);
            rest.starts_with('/').then_some(rest)?
        }
        Some(_) => return None,
        None if scheme_without_slashes(url).is_some() => return None,
        None => url,
    };
    (!dir.is_empty()).then(|| dir.into())
}

/// Whether a local folder holds `v2` or `v1`.
pub fn holds_backup(dir: &FilePath) -> bool {
    dir.join("v2").is_dir() || dir.join("v1").is_dir()
}

/// Returns the local folder that was probably meant by `url`, which has no `v2` or `v1` in it: a folder above
/// it, or a folder in it or beside it. `None` if there is none, if there are several in it, or if `url` is that
/// of an object store.
pub fn likely_folder(url: &str) -> Option<String> {
    /// The most entries of a folder that are looked at.
    const MOST: usize = 1000;
    let dir = local_folder(url)?;
    let within = |dir: &FilePath| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().take(MOST);
        let folders = entries.filter_map(|e| Some(e.ok()?.path()));
        let mut backups = folders.filter(|f| holds_backup(f));
        match (backups.next(), backups.next()) {
            (Some(only), None) => Some(only),
            _ => None,
        }
    };
    let above = dir.ancestors().skip(1).take(2);
    let above = above.filter(|d| !d.as_os_str().is_empty());
    let mut above = above.filter(|d| holds_backup(d)).map(FilePath::to_owned);
    let beside = || within(dir.parent().filter(|_| !dir.exists())?);
    let likely = above.next().or_else(|| within(&dir)).or_else(beside)?;
    Some(likely.display().to_string())
}

fn open_local(dir: &str, url: &str, options: &[(String, String)], handle: Handle) -> Result<Store> {
    if dir.is_empty() {
        return Err(Reason::Usage.error(format!("{STORE} is empty: give a URL or a folder")));
    }
    // Options for all object stores are ignored here, so that a user may set them for several stores at once.
    let ignored = [
        OPTION_MAX_RETRIES,
        OPTION_RETRY_TIMEOUT,
        OPTION_REQUESTS,
        OPTION_SECRET_DIR,
        OPTION_CA_CERTIFICATE,
        OPTION_FILE_MODE,
    ];
    let mut others = options
        .iter()
        .filter(|(k, _)| !ignored.contains(&k.as_str()));
    if let Some((key, _)) = others.next() {
        return Err(Reason::Configuration.error(format!(
            "{STORE_OPTION} {key}: a local folder has no settings"
        )));
    }
    let is_dir = std::fs::metadata(dir)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                let meant = likely_folder(url).map_or_else(String::new, |d| format!("; did you mean {d}?"));
                Reason::NoSnapshots.error(format!(
                    "{STORE} {url}: the folder does not exist; give the folder that holds v2/ (or v1/){meant}"
                ))
            }
            _ => Error::io(format!("open {dir}"), e),
        })?
        .is_dir();
    if !is_dir {
        let meant = likely_folder(url).map_or_else(String::new, |d| format!("; did you mean {d}?"));
        return Err(Reason::Usage.error(format!(
            "{STORE} {dir} is a file, and a single snapshot file is given with {SNAPSHOT}: give the folder that holds v2/{meant}"
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

/// Returns the mode of files and folders in a local folder.
fn file_mode(options: &[(String, String)]) -> Result<FileMode> {
    let Some((key, value)) = options.iter().rfind(|(key, _)| key == OPTION_FILE_MODE) else {
        return Ok(FileMode::default());
    };
    value
        .parse()
        .map_err(|e| Reason::Configuration.error(format!("{STORE_OPTION} {key}={value}: {e}")))
}

/// Returns the error for a builder that fails. Its reason is always `Configuration`: a retry cannot help.
fn misconfigured(action: &str, e: object_store::Error) -> Error {
    let e = store_error(action, e);
    Reason::Configuration.error(e.to_string())
}

fn config_key<K: FromStr<Err = object_store::Error>>(key: &str) -> Result<K> {
    if let Ok(of_client) = key.parse::<ClientConfigKey>()
        && !CLIENT_KEYS.contains(&of_client)
    {
        return Err(no_such_setting(key));
    }
    key.parse().map_err(|_| no_such_setting(key))
}

fn no_such_setting(key: &str) -> Error {
    Reason::Configuration.error(format!(
        "{STORE_OPTION} {key}: this store has no such setting; see docs/stores.md"
    ))
}
