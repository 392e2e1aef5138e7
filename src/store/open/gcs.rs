//! Opens Google Cloud Storage.

use super::secret::{Provider, Renewed, Secret, Source};
use super::{Means, Place, config_key, misconfigured};
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

pub(super) fn open(place: &Place, mut means: Means, handle: Handle) -> Result<Store> {
    let is_given = |name: &str| means.options.iter().any(|(key, _)| key.contains(name));
    let (own, other) = (
        is_given("service_account"),
        is_given("application_credentials"),
    );
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
        (Some(source), Some(secret)) if !own && !other => {
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
    })?;
    let json: Value = serde_json::from_str(text).ok()?;
    (json["type"] == SERVICE_ACCOUNT).then_some(text)
}

fn configure(
    place: &Place,
    means: &Means,
    secret: Option<&Secret>,
) -> Result<(GoogleCloudStorageBuilder, ClientOptions)> {
    let mut builder = GoogleCloudStorageBuilder::from_env()
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
