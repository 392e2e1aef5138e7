//! Changes the custom metadata of an existing object on Google Cloud Storage.
//!
//! The object_store crate sets metadata only when it writes an object. The JSON API changes one entry, and leaves the
//! other entries, the content and the time of writing alone.

use super::retrying_client::{RetryingClient, SignRequest, StoreResponse, request};
use crate::base::percent::encoded;
use crate::error::{Error, Result};
use async_trait::async_trait;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Method};
use object_store::client::HttpRequest;
use object_store::gcp::GoogleCloudStorage;
use object_store::path::Path;
use serde_json::json;
use std::sync::Arc;
use url::Url;

const DEFAULT_URL: &str = "https://storage.googleapis.com";

/// A client for one bucket.
pub struct Gcs {
    store: Arc<GoogleCloudStorage>,
    client: RetryingClient,
    bucket: String,
    base: String,
}

impl Gcs {
    /// Returns a client. `base` is the server's URL if it is not Google's own.
    pub fn new(
        store: Arc<GoogleCloudStorage>,
        client: RetryingClient,
        bucket: &str,
        base: Option<String>,
    ) -> Self {
        Gcs {
            store,
            client,
            bucket: bucket.to_owned(),
            base: base.unwrap_or_else(|| DEFAULT_URL.to_owned()),
        }
    }

    /// Sets one entry of an object's metadata. `action` describes the request in messages.
    ///
    /// # Errors
    /// Fails if there is no response. A refusal is a response.
    pub(super) async fn set_metadata(
        &self,
        action: &str,
        path: &Path,
        name: &str,
        value: &str,
    ) -> Result<StoreResponse> {
        let url = object_url(&self.base, &self.bucket, path)
            .ok_or_else(|| Error::internal(format!("cannot {action}: no URL")))?;
        let body = json!({"metadata": {name: value}}).to_string();
        let headers = [("content-type", "application/json".to_owned())];
        let request = request(Method::PATCH, &url, &headers, body)?;
        self.client.send(action, request, self).await
    }
}

#[async_trait]
impl SignRequest for Gcs {
    async fn sign(&self, request: &mut HttpRequest) -> object_store::Result<()> {
        let invalid_token = |e| object_store::Error::Generic {
            store: "GCS",
            source: Box::new(e),
        };
        let credential = self.store.credentials().get_credential().await?;
        if !credential.bearer.is_empty() {
            let bearer = HeaderValue::from_str(&format!("Bearer {}", credential.bearer));
            request
                .headers_mut()
                .insert(AUTHORIZATION, bearer.map_err(invalid_token)?);
        }
        Ok(())
    }
}

fn object_url(base: &str, bucket: &str, path: &Path) -> Option<Url> {
    // In this API, an object's name is one segment of the path.
    let name = encoded(path.as_ref());
    let base = base.trim_end_matches('/');
    Url::parse(&format!("{base}/storage/v1/b/{bucket}/o/{name}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_objects_name_is_one_segment_of_its_url() {
        let url = |base| object_url(base, "b", &Path::from("p/v2/Full-1.gz")).unwrap();
        let rest = "/storage/v1/b/b/o/p%2Fv2%2FFull-1.gz";
        assert_eq!(url(DEFAULT_URL).as_str(), format!("{DEFAULT_URL}{rest}"));
        assert_eq!(
            url("http://127.0.0.1:9/").as_str(),
            format!("http://127.0.0.1:9{rest}")
        );
    }
}
