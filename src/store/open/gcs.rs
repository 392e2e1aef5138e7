//! Opens Google Cloud Storage.
//!
//! Of a Secret, only keys of service accounts are read. Without one, the object_store crate finds credentials
//! itself.
//! Called by `store::open`.

use super::secret::{Provider, Secret, SecretDerived, SecretSource};
use super::{Family, Location, OpenConfig, check_endpoint, config_key, misconfigured};
use crate::error::Result;
use crate::store::exclude::{ExcludeTags, TagKind};
use crate::store::gcs::Gcs;
use crate::store::{LookFirst, Store};
use object_store::ClientOptions;
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use serde_json::Value;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The `type` of a service account's key.
const SERVICE_ACCOUNT: &str = "service_account";

/// Parts of the names of options with credentials. If one of them is given, the Secret's credentials are not
/// used.
const OWN_CREDENTIALS: &[&str] = &["service_account", "application_credentials"];

pub(super) fn open(location: &Location, mut config: OpenConfig, handle: Handle) -> Result<Store> {
    let mut secret = config.read_secret().or_else(|e| match &config.secret {
        // GOOGLE_APPLICATION_CREDENTIALS is Google's own variable: its file may be something else, or unused
        // here.
        Some(SecretSource::File(_)) => Ok(None),
        _ => Err(e),
    })?;
    if matches!(config.secret, Some(SecretSource::File(_)))
        && secret.as_ref().is_none_or(|s| key_of(s).is_none())
    {
        secret = None;
        config.secret = None;
    }
    let (builder, client) = configure(location, &config, secret.as_ref())?;
    let builder = match (&config.secret, &secret) {
        (Some(source), Some(secret)) if !config.has_option(OWN_CREDENTIALS) => {
            if key_of(secret).is_none() && secret.flag("emulatorEnabled")? != Some(true) {
                return Err(no_key(secret));
            }
            let (location, config) = (location.clone(), config.clone());
            let derived = SecretDerived::new(source.clone(), secret.clone(), move |secret| {
                credentials(&location, &config, secret)
            })?;
            builder.with_credentials(Arc::new(derived))
        }
        _ => builder,
    };
    let client = config.retrying_client(&client, &location.action)?;
    let base = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    if let Some(base) = &base {
        check_endpoint("base_url", base)?;
    }
    let tagged = config.requests.tagged.clone();
    let store = builder
        .build()
        .map_err(|e| misconfigured(&location.action, e))?;
    let store = Arc::new(store);
    let own = Gcs::new(store.clone(), client, &location.bucket, base);
    // A response to a read has all metadata of the object.
    tagged.set_tells();
    let tags = ExcludeTags::of(TagKind::Metadata(Some(Arc::new(own)))).with_tagged(tagged);
    let requests = config.requests.most();
    let store = location.store(store, tags, handle).with_requests(requests);
    Ok(store.with_ranges().with_look_first(LookFirst::Large))
}

/// Returns the error for a Secret without a usable key.
fn no_key(secret: &Secret) -> crate::error::Error {
    if !secret.has_credentials(Family::Gcs, |_| false) {
        return secret.lacks_credentials(Family::Gcs);
    }
    secret.wrong(
        "serviceaccount.json is missing or is not the key of a service account (external accounts are not supported)",
    )
}

/// Returns the JSON of a service account's key.
fn key_of(secret: &Secret) -> Option<&str> {
    let names = ["serviceaccount.json", "service-account-file.json"];
    let text = names.iter().find_map(|n| secret.get(n)).or_else(|| {
        // A single JSON file may have any name. Its fields are settings, too.
        (secret.get("type")? == SERVICE_ACCOUNT).then(|| secret.json())?
    });
    let Some(text) = text else {
        return key_of_variable(secret);
    };
    let json: Value = serde_json::from_str(text).ok()?;
    (json["type"] == SERVICE_ACCOUNT && is_key(&json)).then_some(text)
}

/// Returns the key under the variable's name. The crate checks no `type` there, so this does not, either.
fn key_of_variable(secret: &Secret) -> Option<&str> {
    let text = secret.get("GOOGLE_SERVICE_ACCOUNT_KEY")?;
    let json: Value = serde_json::from_str(text).ok()?;
    is_key(&json).then_some(text)
}

/// Returns whether the crate can read a key. It would print a key of another type in its error.
fn is_key(json: &Value) -> bool {
    let fields = ["private_key", "private_key_id", "client_email"];
    fields.iter().all(|name| json[name].is_string())
}

/// Returns the provider of the credentials in a Secret.
fn credentials(
    location: &Location,
    config: &OpenConfig,
    secret: &Secret,
) -> Result<Provider<GcpCredential>> {
    let (builder, _) = configure(location, config, Some(secret))?;
    let store = builder
        .build()
        .map_err(|e| misconfigured(&location.action, e))?;
    Ok(store.credentials().clone())
}

/// Returns a store's builder with all settings, and how it connects.
fn configure(
    location: &Location,
    config: &OpenConfig,
    secret: Option<&Secret>,
) -> Result<(GoogleCloudStorageBuilder, ClientOptions)> {
    let mut builder = from_variables(config, secret)
        .with_url(&location.url)
        .with_retry(config.retry.clone())
        .with_http_connector(config.connector());
    let mut settings = config.timeouts();
    if let Some(secret) = secret {
        settings.extend(from_secret(secret)?);
    }
    settings.extend(config.options.iter().cloned());
    for (key, value) in settings {
        builder = builder.with_config(config_key::<GoogleConfigKey>(&key)?, value);
    }
    let client = config.client(|key| builder.get_config_value(&GoogleConfigKey::Client(key)));
    Ok((builder.with_client_options(client.clone()), client))
}

/// Returns a builder with the settings in the providers' variables.
fn from_variables(config: &OpenConfig, secret: Option<&Secret>) -> GoogleCloudStorageBuilder {
    use GoogleConfigKey as K;
    let is_credential = |key: &K| {
        matches!(
            key,
            K::ApplicationCredentials | K::BearerToken | K::ServiceAccount | K::ServiceAccountKey
        )
    };
    // Without a Secret, the crate may also read variables with other names.
    let builder = match config.deciding_secret(secret, OWN_CREDENTIALS) {
        Some(_) => GoogleCloudStorageBuilder::new(),
        None => GoogleCloudStorageBuilder::from_env(),
    };
    config
        .variables(Family::Gcs, secret, OWN_CREDENTIALS, is_credential)
        .into_iter()
        // A Secret's key is checked first, and added by `from_secret`.
        .filter(|(key, _)| secret.is_none() || *key != K::ServiceAccountKey)
        .fold(builder, |builder, (key, value)| {
            builder.with_config(key, value)
        })
}

/// Returns a Secret's settings under the builder's names.
fn from_secret(secret: &Secret) -> Result<Vec<(String, String)>> {
    let mut settings = Vec::new();
    let mut add = |key: &str, value: &str| settings.push((key.to_owned(), value.to_owned()));
    if let Some(key) = key_of(secret) {
        add("service_account_key", key);
    }
    if let Some(endpoint) = secret.get("storageAPIEndpoint") {
        // The endpoint for etcd-backup-restore ends in the path of the JSON API.
        let base = endpoint.trim_end_matches('/');
        add("base_url", base.strip_suffix("/storage/v1").unwrap_or(base));
        if base.starts_with("http://") {
            add("allow_http", "true");
        }
    }
    if secret.flag("emulatorEnabled")? == Some(true) {
        add("skip_signature", "true");
    }
    Ok(settings)
}
