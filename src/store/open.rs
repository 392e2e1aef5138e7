//! Opens a store by URL: which provider, with which settings and credentials.
//!
//! Settings come from the providers' usual environment variables, then from `--store-option`.

use super::Store;
use super::azure::{self, Azure};
use super::errors::store_error;
use super::exclude::ExcludeTags;
use super::gcs::Gcs;
use super::signed::{S3, Wire};
use crate::error::{Error, Reason, Result};
use object_store::ClientOptions;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3CopyIfNotExists};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{HttpConnector, ReqwestConnector};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, RetryConfig};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use url::Url;

/// Connecting takes no longer than this.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// No byte for this long is a failure; a whole transfer may take as long as it needs.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The settings of a connection that decide whether it comes about.
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

/// S3 copies no more than this as one part.
const S3_LARGEST_COPY: u64 = 5 << 30;

/// A setting of ours: how often a request is tried again.
const OPTION_MAX_RETRIES: &str = "max_retries";
/// A setting of ours: for how many seconds a request is tried again.
const OPTION_RETRY_TIMEOUT: &str = "retry_timeout";

/// Opens `url`: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///dir/prefix` or a plain path.
///
/// # Errors
/// `Usage` for a URL that cannot be understood, `Configuration` for a setting, `NoSnapshots` for a
/// local folder that is not there.
pub fn open(url: &str, options: &[(String, String)], handle: Handle) -> Result<Store> {
    let (retry, options) = retry_config(options)?;
    let parsed = match Url::parse(url) {
        Ok(u) if url.contains("://") => u,
        _ => return open_local(url, url, &options, handle),
    };
    // abfss://container@account.… is Azure's own form.
    let is_azure = parsed.scheme().starts_with("abfs");
    if (!parsed.username().is_empty() && !is_azure)
        || parsed.password().is_some()
        || parsed.query().is_some()
    {
        return Err(Error::new(
            Reason::Usage,
            "--store takes no user, password or query in its URL: give secrets by environment variables or --store-option",
        ));
    }
    let prefix = Path::from_url_path(parsed.path())
        .map_err(|e| Error::new(Reason::Usage, format!("--store {url}: {e}")))?;
    if parsed.scheme() != "file" && parsed.host_str().unwrap_or_default().is_empty() {
        return Err(Error::new(
            Reason::Usage,
            format!(
                "--store {url} names no bucket: use {}://bucket/prefix",
                parsed.scheme()
            ),
        ));
    }
    let what = format!("open {url}");
    let mut s3 = None;
    let (inner, prefix, tags): (Arc<dyn ObjectStore>, Path, ExcludeTags) = match parsed.scheme() {
        "file" => {
            let dir = parsed.to_file_path().map_err(|()| {
                Error::new(
                    Reason::Usage,
                    format!("--store {url} names no local folder: use file:///folder"),
                )
            })?;
            return open_local(&dir.to_string_lossy(), url, &options, handle);
        }
        "s3" | "s3a" => {
            let mut builder = AmazonS3Builder::from_env()
                .with_url(url)
                .with_retry(retry.clone())
                .with_copy_if_not_exists(S3CopyIfNotExists::Multipart);
            for (key, value) in with_timeouts(&options) {
                builder = builder.with_config(config_key::<AmazonS3ConfigKey>(&key)?, value);
            }
            let setting = |builder: &AmazonS3Builder, key| builder.get_config_value(&key);
            let plain_http = setting(&builder, AmazonS3ConfigKey::S3Endpoint)
                .or_else(|| setting(&builder, AmazonS3ConfigKey::Endpoint))
                .is_some_and(|e| e.starts_with("http://"));
            if plain_http {
                let key = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
                builder = builder.with_config(key, "true");
            }
            let wire = wire(&what, &retry, |key| {
                setting(&builder, AmazonS3ConfigKey::Client(key))
            })?;
            let is_set = |key| setting(&builder, key).as_deref() == Some("true");
            let unsigned = is_set(AmazonS3ConfigKey::SkipSignature);
            let request_payer = is_set(AmazonS3ConfigKey::RequestPayer);
            let region = setting(&builder, AmazonS3ConfigKey::Region);
            let store = Arc::new(builder.build().map_err(|e| misconfigured(&what, e))?);
            let tags = if unsigned {
                ExcludeTags::none()
            } else {
                let own = Arc::new(S3::new(store.clone(), wire, region, request_payer));
                s3 = Some(own.clone());
                ExcludeTags::s3(own)
            };
            (store, prefix, tags)
        }
        "gs" => {
            let mut builder = GoogleCloudStorageBuilder::from_env()
                .with_url(url)
                .with_retry(retry.clone());
            for (key, value) in with_timeouts(&options) {
                builder = builder.with_config(config_key::<GoogleConfigKey>(&key)?, value);
            }
            let setting = |key| builder.get_config_value(&key);
            let wire = wire(&what, &retry, |key| setting(GoogleConfigKey::Client(key)))?;
            let base = setting(GoogleConfigKey::BaseUrl);
            let store = Arc::new(builder.build().map_err(|e| misconfigured(&what, e))?);
            let bucket = parsed.host_str().unwrap_or_default();
            let own = Gcs::new(store.clone(), wire, bucket, base);
            (store, prefix, ExcludeTags::gcs(Arc::new(own)))
        }
        "az" | "azure" | "abfs" | "abfss" | "adl" => {
            let mut builder = MicrosoftAzureBuilder::from_env()
                .with_url(url)
                .with_retry(retry.clone());
            for (key, value) in with_timeouts(&options) {
                builder = builder.with_config(config_key::<AzureConfigKey>(&key)?, value);
            }
            let setting = |key| builder.get_config_value(&key);
            let is_set = |key| setting(key).as_deref() == Some("true");
            let wire = wire(&what, &retry, |key| setting(AzureConfigKey::Client(key)))?;
            let place = azure::Place {
                endpoint: setting(AzureConfigKey::Endpoint),
                is_fabric: is_set(AzureConfigKey::UseFabricEndpoint),
                is_emulator: is_set(AzureConfigKey::UseEmulator),
            };
            let unsigned = is_set(AzureConfigKey::SkipSignature);
            let store = Arc::new(builder.build().map_err(|e| misconfigured(&what, e))?);
            let tags = match Azure::new(store.clone(), wire, &place) {
                Some(own) if !unsigned => ExcludeTags::azure(Arc::new(own)),
                _ => ExcludeTags::none(),
            };
            (store, prefix, tags)
        }
        other => {
            return Err(Error::new(
                Reason::Usage,
                format!(
                    "--store {url}: \"{other}\" is no store deltafold knows: use s3://, gs://, az://, file:/// or a path"
                ),
            ));
        }
    };
    let mut store = Store::new(inner, prefix, url.to_owned(), tags, handle);
    if let Some(s3) = s3 {
        store = store.with_s3(s3);
    }
    Ok(match parsed.scheme() {
        "s3" | "s3a" => store.with_largest_copy(S3_LARGEST_COPY),
        _ => store,
    })
}

/// Makes the folder of a local `url` that is not there yet, if the one above it is: a first snapshot is
/// saved into an empty store. Whatever else is wrong with the URL, [`open`] tells.
///
/// # Errors
/// `Io`, `PermissionDenied`, `NoSpace`.
pub fn make_folder(url: &str) -> Result<()> {
    let dir = match Url::parse(url) {
        Ok(u) if url.contains("://") => match u.scheme() {
            "file" => u.to_file_path().ok(),
            _ => None,
        },
        _ => Some(std::path::PathBuf::from(url)),
    };
    let Some(dir) = dir.filter(|d| !d.as_os_str().is_empty()) else {
        return Ok(());
    };
    match std::fs::create_dir(&dir) {
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
        return Err(Error::new(
            Reason::Usage,
            "--store is empty: give a URL or a folder",
        ));
    }
    if let Some((key, _)) = options.first() {
        return Err(Error::new(
            Reason::Configuration,
            format!("--store-option {key}: a local folder has no settings"),
        ));
    }
    let is_dir = std::fs::metadata(dir)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::new(
                Reason::NoSnapshots,
                format!("the folder {dir} is not there: check --store"),
            ),
            _ => Error::io(format!("open {dir}"), e),
        })?
        .is_dir();
    if !is_dir {
        return Err(Error::new(
            Reason::Usage,
            format!("--store {dir} is a file: give the folder that holds v2/"),
        ));
    }
    let store = LocalFileSystem::new_with_prefix(dir)
        .map_err(|e| store_error(format!("open {dir}"), e))?
        .with_fsync(true);
    Ok(Store::new(
        Arc::new(store),
        Path::default(),
        url.to_owned(),
        ExcludeTags::none(),
        handle,
    )
    .with_local_root(dir.into()))
}

/// For requests of ours: they go the same way as all others, whoever set it.
fn wire(
    what: &str,
    retry: &RetryConfig,
    setting: impl Fn(ClientConfigKey) -> Option<String>,
) -> Result<Wire> {
    let mut client = ClientOptions::new();
    for key in CLIENT_KEYS {
        if let Some(value) = setting(key) {
            client = client.with_config(key, value);
        }
    }
    let http = ReqwestConnector::default()
        .connect(&client)
        .map_err(|e| misconfigured(what, e))?;
    Ok(Wire::new(http, retry))
}

/// Whatever a builder complains of, a retry does not mend.
fn misconfigured(what: &str, e: object_store::Error) -> Error {
    let e = store_error(what, e);
    Error::new(Reason::Configuration, e.to_string())
}

fn config_key<K: FromStr<Err = object_store::Error>>(key: &str) -> Result<K> {
    key.parse().map_err(|_| {
        Error::new(
            Reason::Configuration,
            format!("--store-option {key}: this store has no such setting; see docs/stores.md"),
        )
    })
}

/// The user's settings over our time-outs: the crate's own would cut off every transfer of more
/// than 30 s.
fn with_timeouts(options: &[(String, String)]) -> Vec<(String, String)> {
    let seconds = |d: Duration| format!("{} s", d.as_secs());
    let mut all = vec![
        ("timeout".to_owned(), "1 day".to_owned()),
        ("connect_timeout".to_owned(), seconds(CONNECT_TIMEOUT)),
        ("read_timeout".to_owned(), seconds(READ_TIMEOUT)),
    ];
    all.extend(options.iter().cloned());
    all
}

/// Takes our own settings out of the user's.
fn retry_config(options: &[(String, String)]) -> Result<(RetryConfig, Vec<(String, String)>)> {
    let mut retry = RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: 5,
        retry_timeout: Duration::from_secs(60),
    };
    let mut rest = Vec::new();
    for (key, value) in options {
        let number = || {
            value.parse::<u64>().map_err(|_| {
                Error::new(
                    Reason::Configuration,
                    format!("--store-option {key}={value}: it takes a whole number"),
                )
            })
        };
        match key.as_str() {
            OPTION_MAX_RETRIES => retry.max_retries = number()? as usize,
            OPTION_RETRY_TIMEOUT => retry.retry_timeout = Duration::from_secs(number()?),
            _ => rest.push((key.clone(), value.clone())),
        }
    }
    Ok((retry, rest))
}
