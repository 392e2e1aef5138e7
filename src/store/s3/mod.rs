//! What S3 can do and the object_store crate has no call for: versions, unfinished uploads, object lock, copies by ranges.
//!
//! Here is how a request is addressed and signed; it is sent the way all others go (`wire`).

mod copy;
mod versions;

pub(super) use copy::{Copied, Copying, Prepared};
pub use versions::{ObjectVersion, UnfinishedUpload, Versioning};

use super::Store;
use super::errors::store_error;
use super::retrying_client::{Answer, RetryingClient, query_string, request};
use crate::error::{Error, Result};
use http::Method;
use md5::{Digest, Md5};
use object_store::aws::{AmazonS3, AwsAuthorizer};
use object_store::client::HttpRequest;
use object_store::path::Path;
use object_store::signer::Signer;
use std::sync::Arc;
use std::time::Duration;

/// A signature that is thrown away, with this time in it.
const ADDRESS_LASTS: Duration = Duration::from_secs(60);

/// The requests of one S3 bucket.
pub struct S3 {
    store: Arc<AmazonS3>,
    wire: RetryingClient,
    region: String,
    request_payer: bool,
}

impl S3 {
    /// `region` as the store's builder has it; S3's own default where it has none.
    pub fn new(
        store: Arc<AmazonS3>,
        wire: RetryingClient,
        region: Option<String>,
        request_payer: bool,
    ) -> Self {
        S3 {
            store,
            wire,
            region: region.unwrap_or_else(|| "us-east-1".to_owned()),
            request_payer,
        }
    }

    /// The bucket's name.
    fn bucket(&self) -> String {
        // The crate tells it nowhere else.
        let shown = self.store.to_string();
        let name = shown.strip_prefix("AmazonS3(");
        let name = name.and_then(|n| n.strip_suffix(')'));
        name.unwrap_or(&shown).to_owned()
    }

    /// Asks for something of an object, or of the bucket if `path` is empty; as [`ask`](Self::ask).
    pub(super) async fn get(
        &self,
        what: &str,
        path: &Path,
        query: &[(&str, &str)],
    ) -> Result<Answer> {
        self.ask(what, Method::GET, path, query, &[], String::new())
            .await
    }

    /// Deletes something that may be gone already.
    async fn delete(&self, what: &str, path: &Path, query: &[(&str, &str)]) -> Result<Answer> {
        self.ask(what, Method::DELETE, path, query, &[], String::new())
            .await
    }

    /// Asks something of an object, or of the bucket if `path` is empty.
    ///
    /// # Errors
    /// If nothing was answered. A refusal is an answer.
    pub(super) async fn ask(
        &self,
        what: &str,
        method: Method,
        path: &Path,
        query: &[(&str, &str)],
        headers: &[(&'static str, String)],
        body: String,
    ) -> Result<Answer> {
        let mut headers = headers.to_vec();
        if !body.is_empty() {
            // S3 demands it, or a checksum of its own kind, of tags and retentions.
            let sum = base64_simd::STANDARD.encode_to_string(Md5::digest(&body));
            headers.push(("content-md5", sum));
            headers.push(("content-type", "application/xml".to_owned()));
        }
        // The crate tells the address only with a signature in the query.
        let address = self.store.signed_url(Method::GET, path, ADDRESS_LASTS);
        let mut url = address.await.map_err(|e| store_error(what, e))?;
        url.set_query(Some(&query_string(query)));
        let request = request(method, &url, &headers, body)?;
        let sign = async |request: &mut HttpRequest| {
            let credential = self.store.credentials().get_credential().await?;
            AwsAuthorizer::new(&credential, "s3", &self.region)
                .with_request_payer(self.request_payer)
                .try_authorize(request, None)
        };
        self.wire.send(what, request, sign).await
    }
}

impl Store {
    /// What S3 can do, for what only S3 has.
    fn s3(&self, what: &str) -> Result<&S3> {
        let s3 = self.s3.as_deref();
        s3.ok_or_else(|| Error::internal(format!("cannot {what}: this store is not S3")))
    }
}
