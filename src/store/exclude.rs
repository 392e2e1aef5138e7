//! Whether a snapshot is tagged `x-etcd-snapshot-exclude=true`.
//!
//! On S3 it is an object tag, on Google Cloud Storage custom metadata. The object_store crate
//! writes tags and does not read them, so S3's are asked for by a signed request. Stores without
//! tags use a `<name>.exclude` object instead; `bucket::catalog` sees to those.

use super::errors::redact;
use super::store_error;
use crate::error::{Error, Reason, Result};
use object_store::aws::AmazonS3;
use object_store::client::{HttpClient, HttpRequestBody};
use object_store::path::Path;
use object_store::signer::{Method, SignedUrlOptions, Signer};
use object_store::{Attribute, GetOptions, ObjectStore};
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The tag that keeps a snapshot out of every chain; its value is `true`.
pub const EXCLUDE_TAG: &str = "x-etcd-snapshot-exclude";
const SIGNATURE_VALID_FOR: Duration = Duration::from_secs(300);

/// How a store tells.
#[derive(Clone)]
pub struct ExcludeTags(Kind);

#[derive(Clone)]
enum Kind {
    None,
    Metadata,
    S3 {
        signer: Arc<AmazonS3>,
        http: HttpClient,
        /// After one refusal no further requests are made.
        refused: Arc<AtomicBool>,
    },
}

#[derive(Deserialize)]
struct Tagging {
    #[serde(rename = "TagSet", default)]
    tag_set: TagSet,
}

#[derive(Deserialize, Default)]
struct TagSet {
    #[serde(rename = "Tag", default)]
    tags: Vec<Tag>,
}

#[derive(Deserialize)]
struct Tag {
    #[serde(rename = "Key")]
    key: String,
    #[serde(rename = "Value", default)]
    value: String,
}

impl ExcludeTags {
    /// The store has no tags.
    pub fn none() -> Self {
        ExcludeTags(Kind::None)
    }

    /// Custom metadata that a HEAD request shows.
    pub fn metadata() -> Self {
        ExcludeTags(Kind::Metadata)
    }

    /// S3's object tags.
    pub fn s3(signer: Arc<AmazonS3>, http: HttpClient) -> Self {
        ExcludeTags(Kind::S3 {
            signer,
            http,
            refused: Arc::default(),
        })
    }

    pub(super) fn can_tell(&self) -> bool {
        !matches!(self.0, Kind::None)
    }

    /// Whether the store would not tell: then nothing counts as excluded by a tag.
    pub(super) fn was_refused(&self) -> bool {
        match &self.0 {
            Kind::S3 { refused, .. } => refused.load(Ordering::Relaxed),
            _ => false,
        }
    }

    pub(super) async fn is_excluded(
        &self,
        store: &Arc<dyn ObjectStore>,
        path: &Path,
    ) -> Result<bool> {
        match &self.0 {
            Kind::None => Ok(false),
            Kind::Metadata => {
                let options = GetOptions {
                    head: true,
                    ..GetOptions::default()
                };
                match store.get_opts(path, options).await {
                    Ok(object) => Ok(object
                        .attributes
                        .get(&Attribute::Metadata(EXCLUDE_TAG.into()))
                        .is_some_and(|v| v.as_ref() == "true")),
                    Err(object_store::Error::NotFound { .. }) => Ok(false),
                    Err(e) => Err(store_error(format!("look at {path}"), e)),
                }
            }
            Kind::S3 {
                signer,
                http,
                refused,
            } => {
                if refused.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                let query = SignedUrlOptions::new().with_query([("tagging", "")]);
                let url = signer
                    .signed_url_opts(Method::GET, path, SIGNATURE_VALID_FOR, &query)
                    .await
                    .map_err(|e| {
                        store_error(format!("sign a request for the tags of {path}"), e)
                    })?;
                let (status, body) = get(http, url.as_str(), path).await?;
                match status {
                    200 => parse(&body).ok_or_else(|| {
                        Error::new(
                            Reason::StoreUnreachable,
                            format!("the tags of {path} cannot be understood"),
                        )
                    }),
                    404 => Ok(false),
                    _ => {
                        // Many backup roles may not read tags, some servers have none.
                        refused.store(true, Ordering::Relaxed);
                        Ok(false)
                    }
                }
            }
        }
    }
}

/// One GET, tried again a few times where the server is at fault.
async fn get(http: &HttpClient, url: &str, path: &Path) -> Result<(u16, Vec<u8>)> {
    const TRIES: u32 = 4;
    let mut last = String::new();
    for attempt in 0..TRIES {
        if attempt > 0 {
            tokio::time::sleep(Duration::from_millis(100 << attempt)).await;
        }
        let request = http::Request::get(url)
            .body(HttpRequestBody::empty())
            .map_err(|e| Error::internal(format!("a signed URL that is none: {e}")))?;
        let answer = match http.execute(request).await {
            Ok(a) => a,
            Err(e) => {
                last = redact(&e.to_string());
                continue;
            }
        };
        let status = answer.status();
        if status.as_u16() == 429 || (status.is_server_error() && status.as_u16() != 501) {
            last = status.to_string();
            continue;
        }
        match answer.into_body().bytes().await {
            Ok(body) => return Ok((status.as_u16(), body.to_vec())),
            Err(e) => last = redact(&e.to_string()),
        }
    }
    Err(Error::new(
        Reason::StoreUnreachable,
        format!("cannot read the tags of {path}: {last}"),
    ))
}

fn parse(xml: &[u8]) -> Option<bool> {
    let tagging: Tagging = quick_xml::de::from_reader(xml).ok()?;
    let mut tags = tagging.tag_set.tags.iter();
    Some(tags.any(|t| t.key == EXCLUDE_TAG && t.value == "true"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_read_from_s3s_xml() {
        let xml = |tags: &str| {
            let text = format!(
                r#"<?xml version="1.0" encoding="UTF-8"?><Tagging xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><TagSet>{tags}</TagSet></Tagging>"#
            );
            parse(text.as_bytes())
        };
        let tag = |k: &str, v: &str| format!("<Tag><Key>{k}</Key><Value>{v}</Value></Tag>");
        assert_eq!(xml(""), Some(false));
        assert_eq!(xml(&tag(EXCLUDE_TAG, "true")), Some(true));
        assert_eq!(
            xml(&(tag("a", "true") + &tag(EXCLUDE_TAG, "true"))),
            Some(true)
        );
        assert_eq!(xml(&tag(EXCLUDE_TAG, "false")), Some(false));
        assert_eq!(parse(b"<html>"), None);
    }
}
