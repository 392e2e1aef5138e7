//! Opens Azure Blob Storage.

use super::secret::{Provider, Renewed, Secret};
use super::{Family, Means, Place, config_key, misconfigured};
use crate::error::Result;
use crate::store::Store;
use crate::store::azure::{self, Azure};
use crate::store::exclude::{ExcludeTags, Kind};
use object_store::ClientOptions;
use object_store::azure::{AzureConfigKey, AzureCredential, MicrosoftAzureBuilder};
use std::sync::Arc;
use tokio::runtime::Handle;

/// What names of settings have in them that are credentials: with one of these, the Secret's are not asked for.
const OWN_CREDENTIALS: &[&str] = &["account_key", "sas_"];

pub(super) fn open(place: &Place, means: Means, handle: Handle) -> Result<Store> {
    let secret = means.read_secret()?;
    let (builder, client) = configure(place, &means, secret.as_ref())?;
    let builder = match (&means.secret, &secret) {
        (Some(source), Some(secret)) if !means.gives(OWN_CREDENTIALS) => {
            let (place, means) = (place.clone(), means.clone());
            let renewed = Renewed::new(source.clone(), secret.clone(), move |secret| {
                if !secret.has_credentials(Family::Azure, |name| {
                    means.gives_variable::<AzureConfigKey>(name)
                }) {
                    return Err(secret.lacks_credentials(Family::Azure));
                }
                let (builder, _) = configure(&place, &means, Some(secret))?;
                let store = builder.build().map_err(|e| misconfigured(&place.what, e))?;
                Ok(store.credentials().clone() as Provider<AzureCredential>)
            })?;
            builder.with_credentials(Arc::new(renewed))
        }
        _ => builder,
    };
    let wire = means.wire(&client, &place.what)?;
    let setting = |key| builder.get_config_value(&key);
    let is_set = |key| setting(key).as_deref() == Some("true");
    let server = azure::Place {
        endpoint: setting(AzureConfigKey::Endpoint),
        is_fabric: is_set(AzureConfigKey::UseFabricEndpoint),
        is_emulator: is_set(AzureConfigKey::UseEmulator),
    };
    let unsigned = is_set(AzureConfigKey::SkipSignature);
    let tagged = means.requests.tagged.clone();
    let store = builder.build().map_err(|e| misconfigured(&place.what, e))?;
    let store = Arc::new(store);
    let tags = match Azure::new(store.clone(), wire, &server) {
        Some(own) if !unsigned => ExcludeTags::of(Kind::Azure(Arc::new(own))).with_tagged(tagged),
        _ => ExcludeTags::none(),
    };
    let requests = means.requests.most();
    let store = place.store(store, tags, handle).with_requests(requests);
    Ok(store.with_ranges())
}

fn configure(
    place: &Place,
    means: &Means,
    secret: Option<&Secret>,
) -> Result<(MicrosoftAzureBuilder, ClientOptions)> {
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
        builder = builder.with_config(config_key::<AzureConfigKey>(&key)?, value);
    }
    let client = means.client(|key| builder.get_config_value(&AzureConfigKey::Client(key)));
    Ok((builder.with_client_options(client.clone()), client))
}

/// A builder with the settings of the providers' variables.
fn from_variables(means: &Means, secret: Option<&Secret>) -> MicrosoftAzureBuilder {
    // Without a Secret, the crate reads variables of other names, too.
    let builder = match means.decides(secret, OWN_CREDENTIALS) {
        Some(_) => MicrosoftAzureBuilder::new(),
        None => MicrosoftAzureBuilder::from_env(),
    };
    means
        .variables(Family::Azure, secret, OWN_CREDENTIALS, is_credential)
        .into_iter()
        .fold(builder, |builder, (key, value)| {
            builder.with_config(key, value)
        })
}

/// Whether a setting decides who asks.
fn is_credential(key: &AzureConfigKey) -> bool {
    use AzureConfigKey as K;
    matches!(
        key,
        K::AccessKey
            | K::AuthorityId
            | K::ClientId
            | K::ClientSecret
            | K::CredentialType
            | K::FabricClusterIdentifier
            | K::FabricSessionToken
            | K::FabricTokenServiceUrl
            | K::FabricWorkloadHost
            | K::FederatedTokenFile
            | K::MsiEndpoint
            | K::MsiResourceId
            | K::ObjectId
            | K::SasKey
            | K::Token
            | K::UseAzureCli
    )
}

fn from_secret(secret: &Secret) -> Result<Vec<(String, String)>> {
    let names = [
        ("account_name", "storageAccount"),
        ("account_key", "storageKey"),
        ("sas_token", "sasToken"),
    ];
    let mut settings: Vec<(String, String)> = secret.settings(names).collect();
    let mut add = |key: &str, value: String| settings.push((key.to_owned(), value));
    let account = secret.get("storageAccount").unwrap_or_default();
    let emulator = secret.flag("emulatorEnabled")? == Some(true);
    match secret.get("domain") {
        // An emulator has no host for each account: there it is a part of the path.
        Some(domain) if emulator => {
            let base = domain.trim_end_matches('/');
            let base = match base.contains("://") {
                true => base.to_owned(),
                false => format!("http://{base}"),
            };
            add("endpoint", format!("{base}/{account}"));
            add("allow_http", base.starts_with("http://").to_string());
        }
        Some(domain) => add("endpoint", format!("https://{account}.{domain}")),
        None if emulator => add("use_emulator", "true".to_owned()),
        None => {}
    }
    Ok(settings)
}
