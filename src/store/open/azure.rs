//! Opens Azure Blob Storage.

use super::builder::{self, Builder};
use super::secret::{CredentialsOf, Secret};
use super::{Family, Location, OpenConfig};
use crate::base::opt::STORE_OPTION;
use crate::error::{Error, Reason, Result};
use crate::store::azure::{AccountServer, Azure, Conditional};
use crate::store::exclude::{ExcludeTags, TagKind};
use crate::store::{LookFirst, Store};
use chrono::{DateTime, Utc};
use object_store::azure::{
    AzureConfigKey as K, AzureCredential, MicrosoftAzure, MicrosoftAzureBuilder,
};
use std::sync::Arc;
use tokio::runtime::Handle;

pub(super) fn open(location: &Location, mut config: OpenConfig, handle: Handle) -> Result<Store> {
    let secret = config.read_secret()?;
    let of_secret = secret.as_ref().and_then(|secret| secret.get("sasToken"));
    let of_secret = of_secret.map(str::to_owned);
    let (builder, client) =
        builder::configured::<MicrosoftAzureBuilder>(location, &mut config, secret)?;
    let sas = of_secret.or_else(|| builder.setting(K::SasKey));
    if let Some(end) = sas
        .as_deref()
        .and_then(end_of_sas)
        .filter(|end| *end < Utc::now())
    {
        return Err(Reason::Unauthenticated.error(format!(
            "cannot {}: the shared access signature (sas_token) has expired at {end} (se=): make a new one",
            location.action
        )));
    }
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

/// Returns when a shared access signature expires. A policy of the container may say it instead.
fn end_of_sas(token: &str) -> Option<DateTime<Utc>> {
    let mut pairs = url::form_urlencoded::parse(token.trim_start_matches('?').as_bytes());
    let (_, end) = pairs.find(|(name, _)| name == "se")?;
    let with_seconds = end.replace('Z', ":00Z");
    let with_time = format!("{end}T00:00:00Z");
    let forms = [end.as_ref(), &with_seconds, &with_time];
    let end = forms
        .iter()
        .find_map(|form| DateTime::parse_from_rfc3339(form).ok());
    end.map(|end| end.to_utc())
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
                let base = if base.contains("://") {
                    base.to_owned()
                } else {
                    format!("http://{base}")
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
        if e.to_string().contains("Account must be specified") {
            Reason::Configuration.error(format!(
                "cannot {action}: the storage account is missing: give {STORE_OPTION} account_name=NAME, or set AZURE_STORAGE_ACCOUNT_NAME (and account_key, or AZURE_STORAGE_ACCOUNT_KEY)"
            ))
        } else {
            super::misconfigured(action, e)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_signature_is_read_in_azures_three_forms() {
        for (token, end) in [
            (
                "?sv=2022-11-02&se=2026-01-02T03%3A04%3A05Z&sig=x",
                Some("2026-01-02T03:04:05+00:00"),
            ),
            ("se=2026-01-02T03:04Z", Some("2026-01-02T03:04:00+00:00")),
            ("sp=r&se=2026-01-02", Some("2026-01-02T00:00:00+00:00")),
            ("sv=2022-11-02&si=policy&sig=x", None),
        ] {
            let read = end_of_sas(token).map(|end| end.to_rfc3339());
            assert_eq!(read.as_deref(), end, "{token}");
        }
    }
}
