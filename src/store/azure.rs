//! Requests of Azure that the object_store crate has no call for: blob tags, and committing a blob on condition that its
//! name is free.
//!
//! Knows the URL of a blob and how to sign. What a request for tags means is `exclude`'s, the caller.

use super::retrying_client::{RetryingClient, SignRequest, StoreResponse, query_string, request};
use crate::base::lock;
use crate::error::{Error, Result};
use async_trait::async_trait;
use futures::stream::BoxStream;
use http::Method;
use object_store::azure::{AzureAuthorizer, MicrosoftAzure};
use object_store::client::HttpRequest;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    CopyOptions, Extensions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, UploadPart,
};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
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
        let request = self.request(action, method, path, query, &[], body)?;
        self.client.send(action, request, self).await
    }

    fn request(
        &self,
        action: &str,
        method: Method,
        path: &Path,
        query: &[(&str, &str)],
        headers: &[(&'static str, String)],
        body: String,
    ) -> Result<HttpRequest> {
        let url = blob_url(&self.url, path, query)
            .ok_or_else(|| Error::internal(format!("cannot {action}: no URL")))?;
        let mut headers = headers.to_vec();
        if !body.is_empty() {
            // The length is a part of the signature.
            headers.push(("content-length", body.len().to_string()));
            headers.push(("content-type", "application/xml; charset=UTF-8".to_owned()));
        }
        request(method, &url, &headers, body)
    }
}

#[async_trait]
impl SignRequest for Azure {
    async fn sign(&self, request: &mut HttpRequest) -> object_store::Result<()> {
        let credential = self.store.credentials().get_credential().await?;
        AzureAuthorizer::new(&credential, &self.account).try_authorize(request)
    }
}

/// A container in which an upload gets its name only if the name is free.
#[derive(Debug)]
pub struct Conditional(pub Arc<Azure>);

impl fmt::Debug for Azure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Azure({})", self.url)
    }
}

impl fmt::Display for Conditional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.store.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Conditional {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.0.store.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        _: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        Ok(Box::new(BlockUpload {
            azure: self.0.clone(),
            path: path.clone(),
            count: 0,
            blocks: Arc::default(),
        }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.0.store.get_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.0.store.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.0.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.0.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.0.store.copy_opts(from, to, options).await
    }
}

/// An upload in blocks. Azure removes blocks that are not committed within a week.
#[derive(Debug)]
struct BlockUpload {
    azure: Arc<Azure>,
    path: Path,
    count: usize,
    /// The IDs of the blocks that are at the server, by their number.
    blocks: Arc<Mutex<BTreeMap<usize, String>>>,
}

#[async_trait]
impl MultipartUpload for BlockUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (azure, path, blocks) = (self.azure.clone(), self.path.clone(), self.blocks.clone());
        let number = self.count;
        self.count += 1;
        Box::pin(async move {
            let upload = String::new();
            let part = azure.store.put_part(&path, &upload, number, data).await?;
            let id = part.content_id;
            lock(&blocks).insert(number, base64_simd::STANDARD.encode_to_string(id));
            Ok(())
        })
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        let mut list = String::new();
        for id in lock(&self.blocks).values() {
            list += &format!("<Uncommitted>{id}</Uncommitted>");
        }
        let body = format!("<BlockList>{list}</BlockList>");
        let action = format!("complete {}", self.path);
        let failed = |source| object_store::Error::Generic {
            store: "Azure",
            source,
        };
        let request = self.azure.request(
            &action,
            Method::PUT,
            &self.path,
            &[("comp", "blocklist")],
            &[("if-none-match", "*".to_owned())],
            body,
        );
        let mut request = request.map_err(|e| failed(e.into()))?;
        self.azure.sign(&mut request).await?;
        // Without retries: after an error, `publish` looks at the name first.
        let response = self.azure.client.send_once(request).await;
        let response = response.map_err(|e| failed(e.into()))?;
        let path = self.path.to_string();
        match response.status.as_u16() {
            200..=299 => Ok(PutResult {
                e_tag: None,
                version: None,
                extensions: Extensions::default(),
            }),
            409 | 412 => Err(object_store::Error::AlreadyExists {
                path,
                source: response.refusal(&action).into(),
            }),
            _ => Err(failed(response.refusal(&action).into())),
        }
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        Ok(())
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
