//! Opens Azure Blob Storage.
//!
//! Called by `store::open`.

use super::builder::{self, Builder};
use super::secret::{CredentialsOf, Secret};
use super::{Family, Location, OpenConfig};
use crate::error::{Error, Reason, Result};
use crate::store::azure::{AccountServer, Azure, Conditional};
use crate::store::exclude::{ExcludeTags, TagKind};
use crate::store::{LookFirst, Store};
use object_store::azure::{
    AzureConfigKey as K, AzureCredential, MicrosoftAzure, MicrosoftAzureBuilder,
};
use std::sync::Arc;
use tokio::runtime::Handle;

pub(super) fn open(location: &Location, mut config: OpenConfig, handle: Handle) -> Result<Store> {
    let secret = config.read_secret()?;
    let (builder, client) =
        builder::configured::<MicrosoftAzureBuilder>(location, &mut config, secret)?;
    let client = config.retrying_client(&client, &location.action)?;
    let server = AccountServer {
        endpoint: builder.endpoint(),
        is_fabric: builder.is_set(K::UseFabricEndpoint),
        is_emulator: builder.is_set(K::UseEmulator),
    };
    let unsigned = builder.is_set(K::SkipSignature);
    let store = builder::built(location, builder)?;
    let own = Azure::new(store.clone(), client, &server).filter(|_| !unsigned);
    let store = if let Some(own) = own {
        let own = Arc::new(own);
        let tags = ExcludeTags::of(TagKind::Azure(own.clone()));
        let tags = tags.with_server(config.requests.server.clone());
        location.store(Arc::new(Conditional(own)), tags, handle)
    } else {
        let store = location.store(store, ExcludeTags::none(), handle);
        store.with_look_first(LookFirst::Large)
    };
    Ok(store
        .with_requests(config.requests.most())
        .with_ranges()
        .with_retention_policies())
}

impl Builder for MicrosoftAzureBuilder {
    builder::crate_methods!(MicrosoftAzure, K, AzureCredential);

    const FAMILY: Family = Family::Azure;
    const OWN_CREDENTIALS: &'static [&'static str] = &["account_key", "sas_"];
    const ENDPOINT: &'static str = "endpoint";

    fn of_environment() -> Self {
        let endpoint = super::variable("IDENTITY_ENDPOINT");
        endpoint
            .into_iter()
            .fold(Self::new(), Self::with_msi_endpoint)
    }

    fn endpoint(&self) -> Option<String> {
        self.setting(K::Endpoint)
    }

    fn is_credential(key: &K) -> bool {
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
            // An emulator has one host for all accounts. The account is a part of the path.
            Some(domain) if emulator => {
                let base = domain.trim_end_matches('/');
                let base = match base.contains("://") {
                    true => base.to_owned(),
                    false => format!("http://{base}"),
                };
                add("endpoint", format!("{base}/{account}"));
            }
            Some(domain) => add("endpoint", format!("https://{account}.{domain}")),
            None if emulator => add("use_emulator", "true".to_owned()),
            None => {}
        }
        Ok(settings)
    }

    /// Names the settings of the account if it is missing.
    fn misconfigured(action: &str, e: object_store::Error) -> Error {
        match e.to_string().contains("Account must be specified") {
            true => Reason::Configuration.error(format!(
                "cannot {action}: the storage account is missing: give --store-option account_name=NAME, or set AZURE_STORAGE_ACCOUNT_NAME (and account_key, or AZURE_STORAGE_ACCOUNT_KEY)"
            )),
            false => super::misconfigured(action, e),
        }
    }
}
