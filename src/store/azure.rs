//! Requests for Azure's blob tags, for which the object_store crate has no call.
//!
//! Knows the URL of a blob and how to sign. What is requested, and what a response means, is `exclude`'s, the
//! caller.

use super::retrying_client::{RetryingClient, StoreResponse, query_string, request};
use crate::error::{Error, Result};
use http::Method;
use object_store::azure::{AzureAuthorizer, MicrosoftAzure};
use object_store::client::HttpRequest;
use object_store::path::Path;
use std::sync::Arc;
use url::Url;

/// The emulator's URL, unless its variable has another.
const EMULATOR: &str = "http://127.0.0.1:10000";
const EMULATOR_VARIABLE: &str = "AZURITE_BLOB_STORAGE_URL";

/// The server of a storage account, as the settings name it.
#[derive(Debug, Default)]
pub struct AccountServer {
    /// The account's whole URL, if it is given.
    pub endpoint: Option<String>,
    /// Whether the account is on Microsoft Fabric's host.
    pub is_fabric: bool,
    /// Whether the server is the emulator Azurite.
    pub is_emulator: bool,
}

/// A client for one container.
pub struct Azure {
    store: Arc<MicrosoftAzure>,
    client: RetryingClient,
    account: String,
    /// The container's URL.
    url: Url,
}

impl Azure {
    /// Returns a client, or `None` if the container's URL is unknown.
    pub fn new(
        store: Arc<MicrosoftAzure>,
        client: RetryingClient,
        server: &AccountServer,
    ) -> Option<Self> {
        // The crate shows the names only in its Display.
        let (account, container) = account_and_container(&store.to_string())?;
        let url = container_url(server, &account, &container)?;
        Some(Azure {
            store,
            client,
            account,
            url,
        })
    }

    /// Sends a request about a blob. `action` describes it in messages.
    ///
    /// # Errors
    /// Fails if there is no response. A refusal is a response.
    pub(super) async fn send(
        &self,
        action: &str,
        method: Method,
        path: &Path,
        query: &[(&str, &str)],
        body: String,
    ) -> Result<StoreResponse> {
        let url = blob_url(&self.url, path, query)
            .ok_or_else(|| Error::internal(format!("cannot {action}: no URL")))?;
        let mut headers = Vec::new();
        if !body.is_empty() {
            // The length is a part of the signature.
            headers.push(("content-length", body.len().to_string()));
            headers.push(("content-type", "application/xml; charset=UTF-8".to_owned()));
        }
        let request = request(method, &url, &headers, body)?;
        let sign = async |request: &mut HttpRequest| {
            let credential = self.store.credentials().get_credential().await?;
            AzureAuthorizer::new(&credential, &self.account).try_authorize(request)
        };
        self.client.send(action, request, sign).await
    }
}

/// Reads the account and the container in the crate's Display text.
fn account_and_container(shown: &str) -> Option<(String, String)> {
    let rest = shown.strip_prefix("MicrosoftAzure { account: ")?;
    let (account, container) = rest.strip_suffix(" }")?.split_once(", container: ")?;
    Some((account.to_owned(), container.to_owned()))
}

fn container_url(server: &AccountServer, account: &str, container: &str) -> Option<Url> {
    let service = match &server.endpoint {
        _ if server.is_emulator => {
            std::env::var(EMULATOR_VARIABLE).unwrap_or_else(|_| EMULATOR.to_owned())
        }
        Some(endpoint) => endpoint.clone(),
        None if server.is_fabric => format!("https://{account}.blob.fabric.microsoft.com"),
        None => format!("https://{account}.blob.core.windows.net"),
    };
    let mut url = Url::parse(&service).ok()?;
    {
        let mut segments = url.path_segments_mut().ok()?;
        if server.is_emulator {
            segments.push(account);
        }
        segments.push(container);
    }
    Some(url)
}

fn blob_url(container: &Url, path: &Path, query: &[(&str, &str)]) -> Option<Url> {
    let mut url = container.clone();
    url.path_segments_mut().ok()?.extend(path.parts());
    url.set_query(Some(&query_string(query)));
    Some(url)
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::azure::MicrosoftAzureBuilder;

    fn build(server: &AccountServer, account: &str) -> String {
        crate::base::tls::ensure_provider();
        let mut builder = MicrosoftAzureBuilder::new()
            .with_account(account)
            .with_container_name("backups")
            .with_access_key("aGVsbG8=")
            .with_use_emulator(server.is_emulator)
            .with_use_fabric_endpoint(server.is_fabric);
        if let Some(endpoint) = &server.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let store = builder.build().unwrap();
        let (account, container) = account_and_container(&store.to_string()).unwrap();
        let url = container_url(server, &account, &container).unwrap();
        let path = Path::from("a b/v2/Full-1");
        blob_url(&url, &path, &[("comp", "tags")]).unwrap().into()
    }

    #[test]
    fn a_blobs_url_is_the_one_that_the_crate_uses() {
        let url_at = |endpoint: Option<&str>, is_fabric| {
            let server = AccountServer {
                endpoint: endpoint.map(str::to_owned),
                is_fabric,
                is_emulator: false,
            };
            build(&server, "acct")
        };
        let blob = "/backups/a%20b/v2/Full-1?comp=tags";
        assert_eq!(
            url_at(None, false),
            format!("https://acct.blob.core.windows.net{blob}")
        );
        assert_eq!(
            url_at(None, true),
            format!("https://acct.blob.fabric.microsoft.com{blob}")
        );
        assert_eq!(
            url_at(Some("https://a.example/x"), false),
            format!("https://a.example/x{blob}")
        );
    }

    #[test]
    fn the_emulators_url_has_the_account_in_its_path() {
        let server = AccountServer {
            is_emulator: true,
            ..AccountServer::default()
        };
        let url = build(&server, "devstoreaccount1");
        assert!(
            url.ends_with("/devstoreaccount1/backups/a%20b/v2/Full-1?comp=tags"),
            "{url}"
        );
    }
}
