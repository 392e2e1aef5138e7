//! The one way from settings and credentials to a store of the object_store crate, for S3, Google and Azure.
//!
//! The crate's builders have the same methods and no trait in common: [`Builder`] is that trait. A setting comes from
//! the environment, then from the Secret under the providers' names, then from the Secret under etcd-druid's names,
//! then from the user; the last one wins.

use super::secret::{CredentialsOf, Secret, SecretDerived};
use super::{CLIENT_KEYS, Family, Location, OpenConfig, certificates, check_endpoint, checked};
use crate::base::opt::STORE_OPTION;
use crate::error::{Error, Result};
use crate::store::requests::Connector;
use object_store::client::HttpConnector;
use object_store::{ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A builder of the object_store crate, and what only its provider has.
pub(super) trait Builder: Sized {
    /// The crate's settings.
    type Key: FromStr<Err = object_store::Error> + PartialEq;
    /// The crate's store.
    type Store: ObjectStore;
    /// The crate's credentials.
    type Credential: fmt::Debug + Send + Sync + 'static;

    /// The family of the stores.
    const FAMILY: Family;
    /// Parts of the names of options with credentials. If one of them is given, the Secret's credentials are not used.
    const OWN_CREDENTIALS: &'static [&'static str];
    /// The option with the URL of the server.
    const ENDPOINT: &'static str;

    // The crate's methods; `crate_methods` defines them.

    fn empty() -> Self;
    fn located(self, url: &str, retry: RetryConfig) -> Self;
    fn connected(self, connector: impl HttpConnector) -> Self;
    fn with(self, key: Self::Key, value: String) -> Self;
    fn setting(&self, key: Self::Key) -> Option<String>;
    fn client_key(key: ClientConfigKey) -> Self::Key;
    fn with_client(self, client: ClientOptions) -> Self;
    fn with_provider(self, provider: CredentialsOf<Self::Credential>) -> Self;
    fn built(self) -> object_store::Result<Self::Store>;
    fn provider(store: &Self::Store) -> CredentialsOf<Self::Credential>;

    // What only the provider has.

    /// Returns a builder for the environment's credentials: some of the crate's builders know more names than settings.
    fn of_environment() -> Self {
        Self::empty()
    }

    /// Returns the URL of the server, if one is set.
    fn endpoint(&self) -> Option<String>;

    /// Returns whether uploads are completed on condition that the name is free.
    fn completes_if_free(&self) -> bool {
        false
    }

    /// Returns the settings of files that the provider's tools share, if the variables give no credentials.
    ///
    /// # Errors
    /// Fails with `Configuration` if a file cannot be read.
    fn shared_files(&self) -> Result<Vec<(String, String)>> {
        Ok(Vec::new())
    }

    /// Returns whether a setting is a part of the credentials.
    fn is_credential(key: &Self::Key) -> bool;

    /// Returns whether a provider's variable counts. `config` has the user's options.
    fn takes_variable(_: &Self::Key, _: &OpenConfig, _: Option<&Secret>) -> bool {
        true
    }

    /// Returns the settings that a Secret has under etcd-druid's names.
    ///
    /// # Errors
    /// Fails with `Configuration` if one is invalid.
    fn from_secret(secret: &Secret) -> Result<Vec<(String, String)>>;

    /// Adds settings.
    ///
    /// # Errors
    /// Fails with `Configuration` if one is unknown or invalid.
    fn with_settings(self, _: &Location, settings: Vec<(String, String)>) -> Result<Self> {
        settings.into_iter().try_fold(self, Self::with_text)
    }

    /// Adds a setting.
    ///
    /// # Errors
    /// Fails with `Configuration` if it is unknown.
    fn with_text(self, (key, value): (String, String)) -> Result<Self> {
        Ok(self.with(super::config_key(&key)?, value))
    }

    /// Fails with `Configuration` if a Secret lacks credentials.
    ///
    /// # Errors
    /// Says which keys are missing.
    fn check_credentials(secret: &Secret, config: &OpenConfig) -> Result<()> {
        let is_given = |name: &str| config.has_option_for_variable::<Self::Key>(name);
        if secret.has_credentials(Self::FAMILY, is_given) {
            Ok(())
        } else {
            Err(secret.lacks_credentials(Self::FAMILY))
        }
    }

    /// Returns the error for a store that cannot be built.
    fn misconfigured(action: &str, e: object_store::Error) -> Error {
        super::misconfigured(action, e)
    }

    /// Returns whether a setting is `true`.
    fn is_set(&self, key: Self::Key) -> bool {
        self.setting(key).as_deref() == Some("true")
    }
}

/// Defines the methods of [`Builder`] that all of the crate's builders have.
macro_rules! crate_methods {
    ($store:ty, $key:ty, $credential:ty) => {
        type Key = $key;
        type Store = $store;
        type Credential = $credential;

        fn empty() -> Self {
            Self::new()
        }

        fn located(self, url: &str, retry: object_store::RetryConfig) -> Self {
            self.with_url(url).with_retry(retry)
        }

        fn connected(self, connector: impl object_store::client::HttpConnector) -> Self {
            self.with_http_connector(connector)
        }

        fn with(self, key: $key, value: String) -> Self {
            self.with_config(key, value)
        }

        fn setting(&self, key: $key) -> Option<String> {
            self.get_config_value(&key)
        }

        fn client_key(key: object_store::ClientConfigKey) -> $key {
            <$key>::Client(key)
        }

        fn with_client(self, client: object_store::ClientOptions) -> Self {
            self.with_client_options(client)
        }

        fn with_provider(self, provider: CredentialsOf<$credential>) -> Self {
            self.with_credentials(provider)
        }

        fn built(self) -> object_store::Result<$store> {
            self.build()
        }

        fn provider(store: &$store) -> CredentialsOf<$credential> {
            store.credentials().clone()
        }
    };
}
pub(super) use crate_methods;

/// Returns a builder with all settings and credentials, and how it connects. The credentials follow a change of the
/// Secret.
///
/// # Errors
/// Fails with `Configuration` if a setting or the Secret is invalid.
pub(super) fn configured<B: Builder + 'static>(
    location: &Location,
    config: &mut OpenConfig,
    secret: Option<Secret>,
) -> Result<(B, ClientOptions)> {
    const CERTIFICATES: &str = "trustedCaCert";
    if let Some(pem) = secret.as_ref().and_then(|s| s.get(CERTIFICATES)) {
        let source = format!("{CERTIFICATES} in the Secret");
        config
            .certificates
            .extend(certificates(pem.as_bytes(), &source)?);
    }
    let (builder, client) = of_settings::<B>(location, config, secret.as_ref())?;
    match (&config.secret, secret) {
        (Some(source), Some(secret)) if !config.has_option(B::OWN_CREDENTIALS) => {
            let (location, config) = (location.clone(), config.clone());
            let derived = SecretDerived::new(source.clone(), secret, move |secret| {
                B::check_credentials(secret, &config)?;
                let (builder, _) = of_settings::<B>(&location, &config, Some(secret))?;
                let store = builder.built();
                let store = store.map_err(|e| B::misconfigured(&location.action, e))?;
                Ok(B::provider(&store))
            })?;
            Ok((builder.with_provider(Arc::new(derived)), client))
        }
        _ => Ok((builder, client)),
    }
}

/// Returns the crate's store.
///
/// # Errors
/// Fails with `Configuration` if a setting is missing or invalid.
pub(super) fn built<B: Builder>(location: &Location, builder: B) -> Result<Arc<B::Store>> {
    let store = builder.built();
    Ok(Arc::new(
        store.map_err(|e| B::misconfigured(&location.action, e))?,
    ))
}

/// Returns a builder with all settings, and how it connects.
fn of_settings<B: Builder>(
    location: &Location,
    config: &OpenConfig,
    secret: Option<&Secret>,
) -> Result<(B, ClientOptions)> {
    let secret_decides = secret.is_some() && !config.has_option(B::OWN_CREDENTIALS);
    // If the Secret's credentials are used, the environment's are not: they must not silently replace a key that the
    // Secret lacks.
    let mut builder = if secret_decides {
        B::empty()
    } else {
        B::of_environment()
    };
    let setting = |name: &str| name.to_ascii_lowercase().parse::<B::Key>().ok();
    let is_of_family = |name: &str| B::FAMILY.variables().iter().any(|p| name.starts_with(p));
    for (name, value) in std::env::vars_os() {
        if let (Some(name), Ok(value)) = (name.to_str(), value.into_string())
            && is_of_family(name)
            && !value.trim().is_empty()
            && let Some(key) = setting(name)
            && !(secret_decides && B::is_credential(&key))
            && B::takes_variable(&key, config, secret)
        {
            builder = builder.with(key, checked(name, &value)?);
        }
    }
    for (name, value) in secret.into_iter().flat_map(|s| s.variables(B::FAMILY)) {
        if let Some(key) = setting(name)
            && B::takes_variable(&key, config, secret)
        {
            builder = builder.with(key, of_secret(secret, name, value)?);
        }
    }
    builder = builder.located(&location.bucket_url, config.retry.clone());
    let mut settings = config.timeouts();
    let other_ways = ["container_", "identity_token", "skip_signature"];
    if !secret_decides && !config.has_option(B::OWN_CREDENTIALS) && !config.has_option(&other_ways)
    {
        settings.extend(builder.shared_files()?);
    }
    for (key, value) in secret
        .map(B::from_secret)
        .transpose()?
        .into_iter()
        .flatten()
    {
        let value = of_secret(secret, &key, &value)?;
        settings.push((key, value));
    }
    for (key, value) in &config.options {
        let value = checked(&format!("{STORE_OPTION} {key}"), value)?;
        settings.push((key.clone(), value));
    }
    builder = builder.with_settings(location, settings)?;
    if let Some(endpoint) = builder.endpoint() {
        check_endpoint(B::ENDPOINT, &endpoint)?;
        if endpoint.starts_with("http://") {
            let key = B::client_key(ClientConfigKey::AllowHttp);
            builder = builder.with(key, "true".to_owned());
        }
    }
    let connector = Connector {
        completes_if_free: builder.completes_if_free(),
        takes_gzip: B::FAMILY == Family::Gcs,
        ..config.connector()
    };
    let builder = builder.connected(connector);
    let client = client_options(|key| builder.setting(B::client_key(key)));
    Ok((builder.with_client(client.clone()), client))
}

/// Returns a setting of a Secret.
fn of_secret(secret: Option<&Secret>, name: &str, value: &str) -> Result<String> {
    let path = secret.map(Secret::path).unwrap_or_default();
    let name = secret.and_then(|s| s.name_of(value)).unwrap_or(name);
    checked(&format!("{name} in the Secret {path}"), value)
}

/// Returns how to connect, from the settings of a builder.
fn client_options(setting: impl Fn(ClientConfigKey) -> Option<String>) -> ClientOptions {
    let mut client = ClientOptions::new();
    for key in CLIENT_KEYS {
        if let Some(value) = setting(key) {
            client = client.with_config(key, value);
        }
    }
    client
}
