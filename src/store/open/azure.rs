//! Opens Azure Blob Storage.
//!
//! Called by `store::open`.

use super::secret::{Provider, Secret, SecretDerived};
use super::{Family, Location, OpenConfig, check_endpoint, config_key, misconfigured};
use crate::error::{Error, Reason, Result};
use crate::store::azure::{self, Azure, Conditional};
use crate::store::exclude::{ExcludeTags, TagKind};
use crate::store::{LookFirst, Store};
use object_store::ClientOptions;
use object_store::azure::{AzureConfigKey, AzureCredential, MicrosoftAzureBuilder};
use std::sync::Arc;
use tokio::runtime::Handle;

/// Parts of the names of options with credentials. If one of them is given, the Secret's credentials are not
/// used.
const OWN_CREDENTIALS: &[&str] = &["account_key", "sas_"];

pub(super) fn open(location: &Location, config: OpenConfig, handle: Handle) -> Result<Store> {
    let secret = config.read_secret()?;
    let (builder, client) = configure(location, &config, secret.as_ref())?;
    let builder = match (&config.secret, &secret) {
        (Some(source), Some(secret)) if !config.has_option(OWN_CREDENTIALS) => {
            let (location, config) = (location.clone(), config.clone());
            let derived = SecretDerived::new(source.clone(), secret.clone(), move |secret| {
                credentials(&location, &config, secret)
            })?;
            builder.with_credentials(Arc::new(derived))
        }
        _ => builder,
    };
    let client = config.retrying_client(&client, &location.action)?;
    let setting = |key| builder.get_config_value(&key);
    let is_set = |key| setting(key).as_deref() == Some("true");
    let server = azure::AccountServer {
        endpoint: setting(AzureConfigKey::Endpoint),
        is_fabric: is_set(AzureConfigKey::UseFabricEndpoint),
        is_emulator: is_set(AzureConfigKey::UseEmulator),
    };
    if let Some(endpoint) = &server.endpoint {
        check_endpoint("endpoint", endpoint)?;
    }
    let unsigned = is_set(AzureConfigKey::SkipSignature);
    let tagged = config.requests.tagged.clone();
    let store = builder
        .build()
        .map_err(|e| without_account(&location.action, e))?;
    let store = Arc::new(store);
    let requests = config.requests.most();
    let own = Azure::new(store.clone(), client, &server).filter(|_| !unsigned);
    let store = if let Some(own) = own {
        let own = Arc::new(own);
        let tags = ExcludeTags::of(TagKind::Azure(own.clone())).with_tagged(tagged);
        location.store(Arc::new(Conditional(own)), tags, handle)
    } else {
        let store = location.store(store, ExcludeTags::none(), handle);
        store.with_look_first(LookFirst::Large)
    };
    Ok(store.with_requests(requests).with_ranges())
}

/// Returns the error for a builder that fails. Without an account, it names the settings.
fn without_account(action: &str, e: object_store::Error) -> Error {
    match e.to_string().contains("Account must be specified") {
        true => Reason::Configuration.error(format!(
            "cannot {action}: the storage account is missing: give --store-option account_name=NAME, or set AZURE_STORAGE_ACCOUNT_NAME (and account_key, or AZURE_STORAGE_ACCOUNT_KEY)"
        )),
        false => misconfigured(action, e),
    }
}

/// Returns the provider of the credentials in a Secret.
fn credentials(
    location: &Location,
    config: &OpenConfig,
    secret: &Secret,
) -> Result<Provider<AzureCredential>> {
    let is_given = |name: &str| config.has_option_for_variable::<AzureConfigKey>(name);
    if !secret.has_credentials(Family::Azure, is_given) {
        return Err(secret.lacks_credentials(Family::Azure));
    }
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
) -> Result<(MicrosoftAzureBuilder, ClientOptions)> {
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
        builder = builder.with_config(config_key::<AzureConfigKey>(&key)?, value);
    }
    let client = config.client(|key| builder.get_config_value(&AzureConfigKey::Client(key)));
    Ok((builder.with_client_options(client.clone()), client))
}

/// Returns a builder with the settings in the providers' variables.
fn from_variables(config: &OpenConfig, secret: Option<&Secret>) -> MicrosoftAzureBuilder {
    // Without a Secret, the crate may also read variables with other names.
    let builder = match config.deciding_secret(secret, OWN_CREDENTIALS) {
        Some(_) => MicrosoftAzureBuilder::new(),
        None => MicrosoftAzureBuilder::from_env(),
    };
    config
        .variables(Family::Azure, secret, OWN_CREDENTIALS, is_credential)
        .into_iter()
        .fold(builder, |builder, (key, value)| {
            builder.with_config(key, value)
        })
}

/// Returns whether a setting is a part of the credentials.
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

/// Returns a Secret's settings under the builder's names.
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
        // An emulator has one host for all accounts. The account is a part of the path.
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
