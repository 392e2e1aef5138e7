//! Opens Google Cloud Storage.
//!
//! Of a Secret, only keys of service accounts are read. Without one, the object_store crate finds credentials itself.

use super::builder::{self, Builder};
use super::secret::{CredentialsOf, Secret, SecretSource};
use super::{Family, Location, OpenConfig};
use crate::error::Result;
use crate::store::exclude::{ExcludeTags, TagKind};
use crate::store::gcs::Gcs;
use crate::store::{LookFirst, Store};
use object_store::gcp::{
    GcpCredential, GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey as K,
};
use serde_json::Value;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The `type` of a service account's key.
const SERVICE_ACCOUNT: &str = "service_account";

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
    let (builder, client) =
        builder::configured::<GoogleCloudStorageBuilder>(location, &mut config, secret)?;
    let client = config.retrying_client(&client, &location.action)?;
    let base = builder.endpoint();
    let store = builder::built(location, builder)?;
    let own = Gcs::new(store.clone(), client, &location.bucket, base);
    let server = config.requests.server.clone();
    let tags = ExcludeTags::of(TagKind::Metadata(Some(Arc::new(own)))).with_server(server);
    Ok(location
        .store(store, tags, handle)
        .with_requests(config.requests.most())
        .with_ranges()
        .with_look_first(LookFirst::Large)
        .with_retention_policies())
}

impl Builder for GoogleCloudStorageBuilder {
    builder::crate_methods!(GoogleCloudStorage, K, GcpCredential);

    const FAMILY: Family = Family::Gcs;
    const OWN_CREDENTIALS: &'static [&'static str] =
        &["service_account", "application_credentials"];
    const ENDPOINT: &'static str = "base_url";

    fn of_environment() -> Self {
        let path = super::variable("SERVICE_ACCOUNT");
        path.into_iter()
            .fold(Self::new(), Self::with_service_account_path)
    }

    fn endpoint(&self) -> Option<String> {
        self.setting(K::BaseUrl)
    }

    fn is_credential(key: &K) -> bool {
        matches!(
            key,
            K::ApplicationCredentials | K::BearerToken | K::ServiceAccount | K::ServiceAccountKey
        )
    }

    /// A Secret's key is checked first, and added by `from_secret`.
    fn takes_variable(key: &K, _: &OpenConfig, secret: Option<&Secret>) -> bool {
        secret.is_none() || *key != K::ServiceAccountKey
    }

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
        }
        if secret.flag("emulatorEnabled")? == Some(true) {
            add("skip_signature", "true");
        }
        Ok(settings)
    }

    fn check_credentials(secret: &Secret, _: &OpenConfig) -> Result<()> {
        if key_of(secret).is_some() || secret.flag("emulatorEnabled")? == Some(true) {
            Ok(())
        } else if secret.has_credentials(Family::Gcs, |_| false) {
            Err(secret.wrong(
                "serviceaccount.json is missing or is not the key of a service account (external accounts are not supported)",
            ))
        } else {
            Err(secret.lacks_credentials(Family::Gcs))
        }
    }
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
