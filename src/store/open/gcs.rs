//! Opens Google Cloud Storage.

use super::secret::{Provider, Renewed, Secret, Source};
use super::{Family, Means, Place, config_key, misconfigured};
use crate::error::Result;
use crate::store::Store;
use crate::store::exclude::{ExcludeTags, Kind};
use crate::store::gcs::Gcs;
use object_store::ClientOptions;
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use serde_json::Value;
use std::sync::Arc;
use tokio::runtime::Handle;

/// Only keys of service accounts are read here; what else it may hold is the crate's to understand.
const SERVICE_ACCOUNT: &str = "service_account";

/// What names of settings have in them that are credentials: with one of these, the Secret's are not asked for.
const OWN_CREDENTIALS: &[&str] = &["service_account", "application_credentials"];

pub(super) fn open(place: &Place, mut means: Means, handle: Handle) -> Result<Store> {
    let mut secret = means.read_secret().or_else(|e| match &means.secret {
        // The variable is Google's own: it may name something else, or nothing that is needed here.
        Some(Source::File(_)) => Ok(None),
        _ => Err(e),
    })?;
    if matches!(means.secret, Some(Source::File(_)))
        && secret.as_ref().is_none_or(|s| key_of(s).is_none())
    {
        secret = None;
        means.secret = None;
    }
    let (builder, client) = configure(place, &means, secret.as_ref())?;
    let builder = match (&means.secret, &secret) {
        (Some(source), Some(secret)) if !means.gives(OWN_CREDENTIALS) => {
            if key_of(secret).is_none() && secret.flag("emulatorEnabled")? != Some(true) {
                return Err(no_key(secret));
            }
            let (place, means) = (place.clone(), means.clone());
            let renewed = Renewed::new(source.clone(), secret.clone(), move |secret| {
                let (builder, _) = configure(&place, &means, Some(secret))?;
                let store = builder.build().map_err(|e| misconfigured(&place.what, e))?;
                Ok(store.credentials().clone() as Provider<GcpCredential>)
            })?;
            builder.with_credentials(Arc::new(renewed))
        }
        _ => builder,
    };
    let wire = means.wire(&client, &place.what)?;
    let base = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    let tagged = means.requests.tagged.clone();
    let store = builder.build().map_err(|e| misconfigured(&place.what, e))?;
    let store = Arc::new(store);
    let own = Gcs::new(store.clone(), wire, &place.bucket, base);
    // It shows all metadata with an object.
    tagged.set_tells();
    let tags = ExcludeTags::of(Kind::Metadata(Some(Arc::new(own)))).with_tagged(tagged);
    let requests = means.requests.most();
    let store = place.store(store, tags, handle).with_requests(requests);
    Ok(store.with_ranges())
}

fn no_key(secret: &Secret) -> crate::error::Error {
    if !secret.has_credentials(Family::Gcs, |_| false) {
        return secret.lacks_credentials(Family::Gcs);
    }
    secret.wrong(
        "it has no serviceaccount.json with the key of a service account (external accounts are not supported)",
    )
}

/// The JSON of a service account's key.
fn key_of(secret: &Secret) -> Option<&str> {
    let names = ["serviceaccount.json", "service-account-file.json"];
    let text = names.iter().find_map(|n| secret.get(n)).or_else(|| {
        // A file that a variable names may have any name; then its lines stand beside it.
        (secret.get("type")? == SERVICE_ACCOUNT).then(|| secret.json())?
    });
    let Some(text) = text else {
        return key_of_variable(secret);
    };
    let json: Value = serde_json::from_str(text).ok()?;
    (json["type"] == SERVICE_ACCOUNT && is_key(&json)).then_some(text)
}

/// The same, as the variable has it: what else it may hold, the crate does not ask for.
fn key_of_variable(secret: &Secret) -> Option<&str> {
    let text = secret.get("GOOGLE_SERVICE_ACCOUNT_KEY")?;
    let json: Value = serde_json::from_str(text).ok()?;
    is_key(&json).then_some(text)
}

/// Whether the crate can read a key: it would show what has another type.
fn is_key(json: &Value) -> bool {
    let fields = ["private_key", "private_key_id", "client_email"];
    fields.iter().all(|name| json[name].is_string())
}

fn configure(
    place: &Place,
    means: &Means,
    secret: Option<&Secret>,
) -> Result<(GoogleCloudStorageBuilder, ClientOptions)> {
    let mut builder = from_variables(means, secret)
        .with_url(&place.url)
        .with_retry(means.retry.clone())
        .with_http_connector(means.connector());
    let mut settings = means.timeouts();
    if let Some(secret) = secret {
        settings.extend(from_secret(secret)?);
    }
    settings.extend(means.options.iter().cloned());
    for (key, value) in settings {
        builder = builder.with_config(config_key::<GoogleConfigKey>(&key)?, value);
    }
    let client = means.client(|key| builder.get_config_value(&GoogleConfigKey::Client(key)));
    Ok((builder.with_client_options(client.clone()), client))
}

/// A builder with the settings of the providers' variables.
fn from_variables(means: &Means, secret: Option<&Secret>) -> GoogleCloudStorageBuilder {
    use GoogleConfigKey as K;
    let is_credential = |key: &K| {
        matches!(
            key,
            K::ApplicationCredentials | K::BearerToken | K::ServiceAccount | K::ServiceAccountKey
        )
    };
    // Without a Secret, the crate reads variables of other names, too.
    let builder = match means.decides(secret, OWN_CREDENTIALS) {
        Some(_) => GoogleCloudStorageBuilder::new(),
        None => GoogleCloudStorageBuilder::from_env(),
    };
    means
        .variables(Family::Gcs, secret, OWN_CREDENTIALS, is_credential)
        .into_iter()
        // A Secret's key is added when it has been looked at.
        .filter(|(key, _)| secret.is_none() || *key != K::ServiceAccountKey)
        .fold(builder, |builder, (key, value)| {
            builder.with_config(key, value)
        })
}

fn from_secret(secret: &Secret) -> Result<Vec<(String, String)>> {
    let mut settings = Vec::new();
    let mut add = |key: &str, value: &str| settings.push((key.to_owned(), value.to_owned()));
    if let Some(key) = key_of(secret) {
        add("service_account_key", key);
    }
    if let Some(endpoint) = secret.get("storageAPIEndpoint") {
        // What the other tool takes ends in the path of the JSON API.
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
