//! Google Cloud Storage's custom metadata of an object that is there.
//!
//! The object_store crate sets it only when an object is written. The JSON API changes one entry of it and
//! leaves the rest, the content and its time alone. `exclude` calls it.

use super::retrying_client::{Answer, RetryingClient, request};
use crate::base::percent::encoded;
use crate::error::{Error, Result};
use http::header::AUTHORIZATION;
use http::{HeaderValue, Method};
use object_store::client::HttpRequest;
use object_store::gcp::GoogleCloudStorage;
use object_store::path::Path;
use serde_json::json;
use std::sync::Arc;
use url::Url;

const DEFAULT_URL: &str = "https://storage.googleapis.com";

/// The requests of one bucket.
pub struct Gcs {
    store: Arc<GoogleCloudStorage>,
    wire: RetryingClient,
    bucket: String,
    base: String,
}

impl Gcs {
    /// `base` where the settings have another than Google's own.
    pub fn new(
        store: Arc<GoogleCloudStorage>,
        wire: RetryingClient,
        bucket: &str,
        base: Option<String>,
    ) -> Self {
        Gcs {
            store,
            wire,
            bucket: bucket.to_owned(),
            base: base.unwrap_or_else(|| DEFAULT_URL.to_owned()),
        }
    }

    /// Sets one entry of an object's metadata, or takes it away.
    ///
    /// # Errors
    /// Where nothing was answered. A refusal is an answer.
    pub(super) async fn set_metadata(
        &self,
        what: &str,
        path: &Path,
        name: &str,
        value: Option<&str>,
    ) -> Result<Answer> {
        let url = object_url(&self.base, &self.bucket, path)
            .ok_or_else(|| Error::internal(format!("cannot {what}: no URL")))?;
        let body = json!({"metadata": {name: value}}).to_string();
        let headers = [("content-type", "application/json".to_owned())];
        let request = request(Method::PATCH, &url, &headers, body)?;
        let odd = |e| object_store::Error::Generic {
            store: "GCS",
            source: Box::new(e),
        };
        let sign = async |request: &mut HttpRequest| {
            let credential = self.store.credentials().get_credential().await?;
            if !credential.bearer.is_empty() {
                let bearer = HeaderValue::from_str(&format!("Bearer {}", credential.bearer));
                request
                    .headers_mut()
                    .insert(AUTHORIZATION, bearer.map_err(odd)?);
            }
            Ok(())
        };
        self.wire.send(what, request, sign).await
    }
}

fn object_url(base: &str, bucket: &str, path: &Path) -> Option<Url> {
    // An object's name is one part of the address.
    let name = encoded(path.as_ref());
    let base = base.trim_end_matches('/');
    Url::parse(&format!("{base}/storage/v1/b/{bucket}/o/{name}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_objects_name_is_one_part_of_its_address() {
        let url = |base| object_url(base, "b", &Path::from("p/v2/Full-1.gz")).unwrap();
        let rest = "/storage/v1/b/b/o/p%2Fv2%2FFull-1.gz";
        assert_eq!(url(DEFAULT_URL).as_str(), format!("{DEFAULT_URL}{rest}"));
        assert_eq!(
            url("http://127.0.0.1:9/").as_str(),
            format!("http://127.0.0.1:9{rest}")
        );
    }
}
