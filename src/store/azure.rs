//! Azure's blob tags, for which the object_store crate has no call.
//!
//! It knows the address of a blob and how a request is signed; `exclude` knows what is asked.

use super::retrying_client::{Answer, RetryingClient, query_string, request};
use crate::error::{Error, Result};
use http::Method;
use object_store::azure::{AzureAuthorizer, MicrosoftAzure};
use object_store::client::HttpRequest;
use object_store::path::Path;
use std::sync::Arc;
use url::Url;

/// Where the emulator listens, unless its variable says otherwise.
const EMULATOR: &str = "http://127.0.0.1:10000";
const EMULATOR_VARIABLE: &str = "AZURITE_BLOB_STORAGE_URL";

/// Where an account's blobs are, as the settings say.
#[derive(Debug, Default)]
pub struct Place {
    /// The whole URL of the account, if it is given.
    pub endpoint: Option<String>,
    /// Microsoft Fabric's host rather than the storage's own.
    pub is_fabric: bool,
    /// Azurite.
    pub is_emulator: bool,
}

/// The requests of one container.
pub struct Azure {
    store: Arc<MicrosoftAzure>,
    wire: RetryingClient,
    account: String,
    /// Of the container.
    url: Url,
}

impl Azure {
    /// `None` where its address cannot be told.
    pub fn new(store: Arc<MicrosoftAzure>, wire: RetryingClient, place: &Place) -> Option<Self> {
        // The crate tells them nowhere else.
        let (account, container) = account_and_container(&store.to_string())?;
        let url = container_url(place, &account, &container)?;
        Some(Azure {
            store,
            wire,
            account,
            url,
        })
    }

    /// Asks something of a blob.
    ///
    /// # Errors
    /// Where nothing was answered. A refusal is an answer.
    pub(super) async fn ask(
        &self,
        what: &str,
        method: Method,
        path: &Path,
        query: &[(&str, &str)],
        body: String,
    ) -> Result<Answer> {
        let url = blob_url(&self.url, path, query)
            .ok_or_else(|| Error::internal(format!("cannot {what}: no URL")))?;
        let mut headers = Vec::new();
        if !body.is_empty() {
            // It is signed along.
            headers.push(("content-length", body.len().to_string()));
            headers.push(("content-type", "application/xml; charset=UTF-8".to_owned()));
        }
        let request = request(method, &url, &headers, body)?;
        let sign = async |request: &mut HttpRequest| {
            let credential = self.store.credentials().get_credential().await?;
            AzureAuthorizer::new(&credential, &self.account).try_authorize(request)
        };
        self.wire.send(what, request, sign).await
    }
}

/// Out of how the crate's store prints itself.
fn account_and_container(shown: &str) -> Option<(String, String)> {
    let rest = shown.strip_prefix("MicrosoftAzure { account: ")?;
    let (account, container) = rest.strip_suffix(" }")?.split_once(", container: ")?;
    Some((account.to_owned(), container.to_owned()))
}

fn container_url(place: &Place, account: &str, container: &str) -> Option<Url> {
    let service = match &place.endpoint {
        _ if place.is_emulator => {
            std::env::var(EMULATOR_VARIABLE).unwrap_or_else(|_| EMULATOR.to_owned())
        }
        Some(endpoint) => endpoint.clone(),
        None if place.is_fabric => format!("https://{account}.blob.fabric.microsoft.com"),
        None => format!("https://{account}.blob.core.windows.net"),
    };
    let mut url = Url::parse(&service).ok()?;
    {
        let mut segments = url.path_segments_mut().ok()?;
        if place.is_emulator {
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

    fn build(place: &Place, account: &str) -> String {
        crate::base::tls::ensure_provider();
        let mut builder = MicrosoftAzureBuilder::new()
            .with_account(account)
            .with_container_name("backups")
            .with_access_key("aGVsbG8=")
            .with_use_emulator(place.is_emulator)
            .with_use_fabric_endpoint(place.is_fabric);
        if let Some(endpoint) = &place.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let store = builder.build().unwrap();
        let (account, container) = account_and_container(&store.to_string()).unwrap();
        let url = container_url(place, &account, &container).unwrap();
        let path = Path::from("a b/v2/Full-1");
        blob_url(&url, &path, &[("comp", "tags")]).unwrap().into()
    }

    #[test]
    fn a_blobs_address_is_that_of_the_crate() {
        let at = |endpoint: Option<&str>, is_fabric| {
            let place = Place {
                endpoint: endpoint.map(str::to_owned),
                is_fabric,
                is_emulator: false,
            };
            build(&place, "acct")
        };
        let blob = "/backups/a%20b/v2/Full-1?comp=tags";
        assert_eq!(
            at(None, false),
            format!("https://acct.blob.core.windows.net{blob}")
        );
        assert_eq!(
            at(None, true),
            format!("https://acct.blob.fabric.microsoft.com{blob}")
        );
        assert_eq!(
            at(Some("https://a.example/x"), false),
            format!("https://a.example/x{blob}")
        );
    }

    #[test]
    fn the_emulators_address_has_the_account_in_its_path() {
        let place = Place {
            is_emulator: true,
            ..Place::default()
        };
        let url = build(&place, "devstoreaccount1");
        assert!(
            url.ends_with("/devstoreaccount1/backups/a%20b/v2/Full-1?comp=tags"),
            "{url}"
        );
    }
}
