//! Requests of S3 that the object_store crate has no call for: versioning, unfinished uploads, object lock, tags.
//!
//! This file addresses and signs a request; `retrying_client` sends it. `uploads` knows what to request, as do
//! `object_lock` and `exclude`.

use super::errors::store_error;
use super::retrying_client::{RetryingClient, SignRequest, StoreResponse, query_string, request};
use crate::error::Result;
use async_trait::async_trait;
use http::Method;
use md5::{Digest, Md5};
use object_store::aws::{AmazonS3, AwsAuthorizer};
use object_store::client::HttpRequest;
use object_store::path::Path;
use object_store::signer::Signer;
use std::sync::Arc;
use std::time::Duration;

/// The lifetime of a signature that is made only to learn an object's URL.
const UNUSED_SIGNATURE_LIFETIME: Duration = Duration::from_secs(60);

/// A client for one bucket.
pub struct S3 {
    store: Arc<AmazonS3>,
    client: RetryingClient,
    region: String,
    request_payer: bool,
}

impl S3 {
    /// Returns a client. Without a `region`, it signs for S3's default region.
    pub fn new(
        store: Arc<AmazonS3>,
        client: RetryingClient,
        region: Option<String>,
        request_payer: bool,
    ) -> Self {
        S3 {
            store,
            client,
            region: region.unwrap_or_else(|| "us-east-1".to_owned()),
            request_payer,
        }
    }

    /// Requests something about an object, or about the bucket if `path` is empty. See [`send`](Self::send).
    pub(super) async fn get(
        &self,
        action: &str,
        path: &Path,
        query: &[(&str, &str)],
    ) -> Result<StoreResponse> {
        self.send(action, Method::GET, path, query, &[], String::new())
            .await
    }

    /// Deletes something that may not exist.
    pub(super) async fn delete(
        &self,
        action: &str,
        path: &Path,
        query: &[(&str, &str)],
    ) -> Result<StoreResponse> {
        self.send(action, Method::DELETE, path, query, &[], String::new())
            .await
    }

    /// Sends a request about an object, or about the bucket if `path` is empty. `action` describes it in
    /// messages.
    ///
    /// # Errors
    /// Fails if there is no response. A refusal is a response.
    pub(super) async fn send(
        &self,
        action: &str,
        method: Method,
        path: &Path,
        query: &[(&str, &str)],
        headers: &[(&'static str, String)],
        body: String,
    ) -> Result<StoreResponse> {
        let mut headers = headers.to_vec();
        if !body.is_empty() {
            // For tags and retentions, S3 requires this header or a checksum.
            let sum = base64_simd::STANDARD.encode_to_string(Md5::digest(&body));
            headers.push(("content-md5", sum));
            headers.push(("content-type", "application/xml".to_owned()));
        }
        // The crate shows an object's URL only with a signature in the query.
        let signed = self
            .store
            .signed_url(Method::GET, path, UNUSED_SIGNATURE_LIFETIME);
        let mut url = signed.await.map_err(|e| store_error(action, e))?;
        let query = (!query.is_empty()).then(|| query_string(query));
        url.set_query(query.as_deref());
        let request = request(method, &url, &headers, body)?;
        self.client.send(action, request, self).await
    }
}

#[async_trait]
impl SignRequest for S3 {
    async fn sign(&self, request: &mut HttpRequest) -> object_store::Result<()> {
        let credential = self.store.credentials().get_credential().await?;
        AwsAuthorizer::new(&credential, "s3", &self.region)
            .with_request_payer(self.request_payer)
            .try_authorize(request, None)
    }
}
