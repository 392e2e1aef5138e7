//! Exclusion markers: reads and sets the tag `x-etcd-snapshot-exclude=true` of a snapshot.
//!
//! It is a tag on S3 and Azure, and custom metadata on Google Cloud Storage. The object_store crate cannot
//! read or change tags, so they have requests of their own. A store without tags has an object
//! instead, which `backup::catalog` reads.

use super::azure::Azure;
use super::gcs::Gcs;
use super::retrying_client::StoreResponse;
use super::s3::S3;
use super::server_facts::{HasTags, ServerFacts};
use super::xml::{Document, Tag, TagSet, Tagging};
use super::{Store, store_error};
use crate::error::{Error, Reason, Result};
use futures::{StreamExt, TryStreamExt};
use http::Method;
use object_store::path::Path;
use object_store::{Attribute, Attributes, GetOptions, GetResult, ObjectStore};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use super::server_facts::EXCLUDE_TAG;

/// The exclude tags of one store: how they are read, and what is known about them.
#[derive(Clone)]
pub struct ExcludeTags {
    kind: TagKind,
    /// The store has refused a request for tags. No further ones are made.
    refused: Arc<AtomicBool>,
    /// It says that it has none.
    lacks_tags: Arc<AtomicBool>,
    /// It refused for lack of a permission, so there may be tags.
    denied: Arc<AtomicBool>,
    /// What the responses to reads have shown.
    pub(super) server: Arc<ServerFacts>,
}

/// Where a store keeps the exclude tag.
#[derive(Clone)]
pub(super) enum TagKind {
    /// Nowhere.
    None,
    /// In custom metadata. It can only be changed on Google Cloud Storage.
    Metadata(Option<Arc<Gcs>>),
    /// In an object's tags.
    S3(Arc<S3>),
    /// In a blob's tags.
    Azure(Arc<Azure>),
}

/// Why tags could not be read or changed.
pub(super) enum TagFailure {
    /// The object does not exist.
    Gone,
    /// The store has no tags, or no permission for them.
    Refused(Error),
    /// No response, or one that cannot be understood.
    Failed(Error),
}

impl From<Error> for TagFailure {
    fn from(e: Error) -> Self {
        TagFailure::Failed(e)
    }
}

impl ExcludeTags {
    /// For a store without tags.
    pub fn none() -> Self {
        Self::of(TagKind::None)
    }

    /// For a store whose custom metadata can be read and not changed.
    pub fn metadata() -> Self {
        Self::of(TagKind::Metadata(None))
    }

    pub(super) fn of(kind: TagKind) -> Self {
        ExcludeTags {
            kind,
            refused: Arc::default(),
            lacks_tags: Arc::default(),
            denied: Arc::default(),
            server: Arc::default(),
        }
    }

    /// Shares the knowledge that the store's connector collects.
    pub(super) fn with_server(mut self, server: Arc<ServerFacts>) -> Self {
        self.server = server;
        self
    }

    /// Remembers a refusal, and passes the result on.
    fn remember_refusal<T>(&self, result: Result<T, TagFailure>) -> Result<T, TagFailure> {
        if let Err(TagFailure::Refused(why)) = &result {
            self.refused.store(true, Ordering::Relaxed);
            if why.reason() == Reason::PermissionDenied {
                self.denied.store(true, Ordering::Relaxed);
            }
        }
        result
    }

    pub(super) fn can_tell(&self) -> bool {
        !matches!(self.kind, TagKind::None) && !self.lacks_tags.load(Ordering::Relaxed)
    }

    /// Returns whether the store has refused to read tags: then no snapshot counts as excluded by a tag.
    pub(super) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns whether it refused for lack of a permission.
    pub(super) fn was_denied(&self) -> bool {
        self.denied.load(Ordering::Relaxed)
    }

    /// Returns whether the server is known to obey the conditions of writes.
    pub(super) fn keeps_conditions(&self) -> bool {
        self.server.keeps_conditions()
    }

    pub(super) async fn is_excluded(
        &self,
        store: &Arc<dyn ObjectStore>,
        path: &Path,
    ) -> Result<bool> {
        if self.was_refused() {
            return Ok(false);
        }
        match &self.kind {
            TagKind::None => Ok(false),
            TagKind::Metadata(_) => has_exclude_metadata(store, path).await,
            TagKind::S3(_) | TagKind::Azure(_) => {
                match self.remember_refusal(self.read(path).await) {
                    Ok(tags) => Ok(has_exclude_tag(&tags)),
                    // Many roles for backups may not read tags, and some servers have none.
                    Err(TagFailure::Gone | TagFailure::Refused(_)) => Ok(false),
                    Err(TagFailure::Failed(e)) => Err(e),
                }
            }
        }
    }

    /// Returns whether an object is excluded that was just opened; `None` if the response does not tell, and its tags must be
    /// requested.
    pub(super) fn told_by(&self, opened: &GetResult) -> Option<bool> {
        match &self.kind {
            TagKind::None => Some(false),
            TagKind::Metadata(_) => Some(is_excluded_by(&opened.attributes)),
            TagKind::S3(_) | TagKind::Azure(_) => {
                let has_tags = opened.extensions.get();
                (has_tags == Some(&HasTags(false))).then_some(false)
            }
        }
    }

    async fn read(&self, path: &Path) -> Result<Vec<Tag>, TagFailure> {
        let action = format!("read the tags of {path}");
        let response = self.send(&action, Method::GET, path, String::new()).await?;
        if response.is_object_missing() {
            return Err(TagFailure::Gone);
        }
        match response.status.as_u16() {
            200..=299 => Ok(tags_of(&response).ok_or_else(|| {
                let why = format!("the tags of {path} cannot be understood");
                Reason::StoreUnreachable.error(why)
            })?),
            // The error code that some servers have for an object without tags.
            404 if response.code().starts_with("NoSuchTagSet") => Ok(Vec::new()),
            404 if response.code().is_empty() => Err(TagFailure::Gone),
            // Accounts of Azure with a hierarchical namespace have no tags.
            400 | 409 if response.code().starts_with("Feature") => {
                self.lacks_tags.store(true, Ordering::Relaxed);
                Ok(Vec::new())
            }
            _ => Err(TagFailure::Refused(response.refusal(&action))),
        }
    }

    async fn write(&self, path: &Path, tags: Vec<Tag>) -> Result<(), TagFailure> {
        let action = format!("change the tags of {path}");
        let body = match &self.kind {
            TagKind::Azure(_) => xml_of("Tags", tags),
            _ => xml_of("Tagging", tags),
        };
        let response = self.send(&action, Method::PUT, path, body?).await?;
        match response.status.as_u16() {
            200..=299 => Ok(()),
            _ if response.is_object_missing() => Err(TagFailure::Gone),
            _ => Err(TagFailure::Refused(response.refusal(&action))),
        }
    }

    async fn send(
        &self,
        action: &str,
        method: Method,
        path: &Path,
        body: String,
    ) -> Result<StoreResponse> {
        match &self.kind {
            TagKind::S3(s3) => {
                let query = [("tagging", "")];
                s3.send(action, method, path, &query, &[], body).await
            }
            TagKind::Azure(azure) => {
                let query = [("comp", "tags")];
                azure.send(action, method, path, &query, body).await
            }
            TagKind::None | TagKind::Metadata(_) => Err(Error::internal(format!(
                "cannot {action}: the store has none"
            ))),
        }
    }

    /// Sets the tag.
    pub(super) async fn set(&self, path: &Path) -> Result<(), TagFailure> {
        if let TagKind::Metadata(gcs) = &self.kind {
            return set_metadata(gcs.as_deref(), path).await;
        }
        // A write replaces all tags, so read those of others first.
        let mut tags = self.remember_refusal(self.read(path).await)?;
        if has_exclude_tag(&tags) {
            return Ok(());
        }
        tags.retain(|tag| tag.key != EXCLUDE_TAG);
        tags.push(Tag {
            key: EXCLUDE_TAG.to_owned(),
            value: "true".to_owned(),
        });
        self.write(path, tags).await
    }
}

async fn set_metadata(gcs: Option<&Gcs>, path: &Path) -> Result<(), TagFailure> {
    let action = format!("change the metadata of {path}");
    let Some(gcs) = gcs else {
        let why = format!("cannot {action}: this store has no request for it");
        return Err(TagFailure::Refused(Reason::Configuration.error(why)));
    };
    let response = gcs.set_metadata(&action, path, EXCLUDE_TAG, "true").await?;
    match response.status.as_u16() {
        200..=299 => Ok(()),
        404 => Err(TagFailure::Gone),
        _ => Err(TagFailure::Refused(response.refusal(&action))),
    }
}

impl Store {
    /// Returns for each path whether the object is tagged as excluded. Sends several requests at once. If the
    /// store has no tags or refuses to read them, no object counts as excluded.
    ///
    /// # Errors
    /// Fails with `StoreUnreachable` or `Terminated`.
    pub fn excluded_by_tag(&self, paths: &[String]) -> Result<Vec<bool>> {
        const PARALLEL_REQUESTS: usize = 32;
        if !self.can_request_tags() {
            return Ok(vec![false; paths.len()]);
        }
        self.block_on(async {
            futures::stream::iter(paths)
                .map(|p| async move { self.tags.is_excluded(&self.inner, &self.path(p)).await })
                .buffered(PARALLEL_REQUESTS)
                .try_collect()
                .await
        })?
    }

    /// Excludes a snapshot: by tag or metadata if the store has them, else by an empty object `mark`. Other
    /// tags stay. A second call changes nothing.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `SnapshotVanished` if the snapshot does not exist.
    pub fn exclude(&self, below: &str, mark: &str) -> Result<()> {
        let tagged = if self.can_request_tags() {
            self.block_on(self.tags.set(&self.path(below)))?
        } else {
            Err(TagFailure::Refused(Error::internal("no tags")))
        };
        let tagged = match tagged {
            // A store without tags does not say that an object is missing.
            Err(TagFailure::Refused(_)) if !self.exists(below)? => Err(TagFailure::Gone),
            tagged => tagged,
        };
        match tagged {
            Ok(()) => Ok(()),
            Err(TagFailure::Failed(e)) => Err(e),
            Err(TagFailure::Gone) => Err(Reason::SnapshotVanished.error(format!(
                "cannot exclude {}: it is gone; run again",
                self.name(below)
            ))),
            Err(TagFailure::Refused(why)) => {
                if self.tags.can_tell() {
                    tracing::debug!("excluded by an object instead of a tag: {why}");
                }
                self.replace_small(mark, b"")
            }
        }
    }
}

async fn has_exclude_metadata(store: &Arc<dyn ObjectStore>, path: &Path) -> Result<bool> {
    let options = GetOptions {
        head: true,
        ..GetOptions::default()
    };
    match store.get_opts(path, options).await {
        Ok(object) => Ok(is_excluded_by(&object.attributes)),
        Err(object_store::Error::NotFound { .. }) => Ok(false),
        Err(e) => Err(store_error(format!("look at {path}"), e)),
    }
}

fn is_excluded_by(metadata: &Attributes) -> bool {
    let mark = metadata.get(&Attribute::Metadata(EXCLUDE_TAG.into()));
    mark.is_some_and(|mark| mark.as_ref() == "true")
}

fn has_exclude_tag(tags: &[Tag]) -> bool {
    tags.iter()
        .any(|tag| tag.key == EXCLUDE_TAG && tag.value == "true")
}

fn tags_of(response: &StoreResponse) -> Option<Vec<Tag>> {
    match response.document()? {
        Document::Tagging(tagging) => Some(tagging.tag_set.tags),
        _ => None,
    }
}

/// Returns tags as XML. S3's root element is `Tagging`, Azure's is `Tags`; the content is the same.
fn xml_of(root: &str, tags: Vec<Tag>) -> Result<String> {
    let tag_set = TagSet { tags };
    quick_xml::se::to_string_with_root(root, &Tagging { tag_set })
        .map_err(|e| Error::internal(format!("cannot write tags as XML: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(body: &str) -> StoreResponse {
        StoreResponse {
            status: http::StatusCode::OK,
            body: body.to_owned().into(),
        }
    }

    #[test]
    fn tags_are_read_as_they_were_written() {
        let tag = |(key, value): (&str, &str)| Tag {
            key: key.to_owned(),
            value: value.to_owned(),
        };
        let tags = [
            ("a&b", "<1>"),
            (EXCLUDE_TAG, "true"),
            ("empty", ""),
            (" x", "y "),
            ("]]>", "\"'"),
        ];
        let tags = tags.map(tag).to_vec();
        for root in ["Tagging", "Tags"] {
            for tags in [tags.clone(), Vec::new()] {
                let xml = xml_of(root, tags.clone()).unwrap();
                assert!(xml.starts_with(&format!("<{root}>")), "{xml}");
                assert_eq!(tags_of(&response(&xml)), Some(tags));
            }
        }
    }

    #[test]
    fn tags_are_read_from_s3s_xml() {
        let xml = |tags: &str| {
            let text = format!(
                r#"<?xml version="1.0" encoding="UTF-8"?><Tagging xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><TagSet>{tags}</TagSet></Tagging>"#
            );
            tags_of(&response(&text)).map(|tags| has_exclude_tag(&tags))
        };
        let tag = |k: &str, v: &str| format!("<Tag><Key>{k}</Key><Value>{v}</Value></Tag>");
        assert_eq!(xml(""), Some(false));
        assert_eq!(xml(&tag(EXCLUDE_TAG, "true")), Some(true));
        assert_eq!(
            xml(&(tag("a", "true") + &tag(EXCLUDE_TAG, "true"))),
            Some(true)
        );
        assert_eq!(xml(&tag(EXCLUDE_TAG, "false")), Some(false));
        assert!(tags_of(&response("<html>")).is_none());
    }
}
