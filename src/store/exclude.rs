//! Whether a snapshot is tagged `x-etcd-snapshot-exclude=true`, and tagging it so.
//!
//! On S3 and Azure it is a tag, on Google Cloud Storage custom metadata. The object_store crate writes tags
//! with an object and does not read or change them, so they are asked for by signed requests. Stores
//! without tags, or that refuse them, use a `<name>.exclude` object instead; `backup::catalog` sees to
//! those.

use super::azure::Azure;
use super::gcs::Gcs;
use super::retrying_client::Answer;
use super::s3::S3;
use super::small_objects::bytes_of;
use super::staging::StagingName;
use super::tag_counts::Tagged;
use super::xml::{Document, Tag, TagSet, Tagging};
use super::{Store, store_error};
use crate::error::{Error, Reason, Result};
use futures::{StreamExt, TryStreamExt};
use http::Method;
use object_store::path::Path;
use object_store::{Attribute, GetOptions, ObjectStore, ObjectStoreExt, PutOptions, PutPayload};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use super::tag_counts::EXCLUDE_TAG;

/// What the name of a snapshot and this is that of an object that does the same.
const EXCLUDE_SUFFIX: &str = ".exclude";

/// How a store tells.
#[derive(Clone)]
pub struct ExcludeTags {
    kind: Kind,
    /// After one refusal no further requests are made.
    refused: Arc<AtomicBool>,
    /// It was for lack of a right: there may be tags.
    denied: Arc<AtomicBool>,
    /// What the answers to reads have told.
    tagged: Arc<Tagged>,
}

/// What tells.
#[derive(Clone)]
pub(super) enum Kind {
    None,
    /// Custom metadata, which only Google Cloud Storage can change.
    Metadata(Option<Arc<Gcs>>),
    /// Tags of objects.
    S3(Arc<S3>),
    /// Tags of blobs.
    Azure(Arc<Azure>),
}

/// Why a store did not tell, or did not change, what it was asked for.
pub(super) enum Untold {
    /// The object is not there.
    Gone,
    /// The store has no tags, or none for us.
    Refused(Error),
    /// It took a change, and did not keep it.
    Lied(Error),
    /// It gave no answer, or one that means nothing.
    Failed(Error),
}

impl From<Error> for Untold {
    fn from(e: Error) -> Self {
        Untold::Failed(e)
    }
}

impl ExcludeTags {
    /// The store has no tags.
    pub fn none() -> Self {
        Self::of(Kind::None)
    }

    /// Custom metadata that a HEAD request shows, and that nothing here can change.
    pub fn metadata() -> Self {
        Self::of(Kind::Metadata(None))
    }

    pub(super) fn of(kind: Kind) -> Self {
        ExcludeTags {
            kind,
            refused: Arc::default(),
            denied: Arc::default(),
            tagged: Arc::default(),
        }
    }

    /// The same, with what the store's connector takes in.
    pub(super) fn with_tagged(mut self, tagged: Arc<Tagged>) -> Self {
        self.tagged = tagged;
        self
    }

    /// Remembers a refusal.
    fn noted<T>(&self, told: Result<T, Untold>) -> Result<T, Untold> {
        if let Err(Untold::Refused(why)) = &told {
            self.refused.store(true, Ordering::Relaxed);
            if why.reason() == Reason::PermissionDenied {
                self.denied.store(true, Ordering::Relaxed);
            }
        }
        told
    }

    pub(super) fn can_tell(&self) -> bool {
        !matches!(self.kind, Kind::None)
    }

    /// Whether the store would not tell: then nothing counts as excluded by a tag.
    pub(super) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Whether it would not for lack of a right.
    pub(super) fn was_denied(&self) -> bool {
        self.denied.load(Ordering::Relaxed)
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
            Kind::None => Ok(false),
            Kind::Metadata(_) => is_marked(store, path).await,
            Kind::S3(_) | Kind::Azure(_) => match self.noted(self.read(path).await) {
                Ok(tags) => Ok(is_set(&tags)),
                // Many backup roles may not read tags, some servers have none.
                Err(Untold::Gone | Untold::Refused(_) | Untold::Lied(_)) => Ok(false),
                Err(Untold::Failed(e)) => Err(e),
            },
        }
    }

    async fn read(&self, path: &Path) -> Result<Vec<Tag>, Untold> {
        let what = format!("read the tags of {path}");
        let answer = self.ask(&what, Method::GET, path, String::new()).await?;
        if answer.is_object_missing() {
            return Err(Untold::Gone);
        }
        match answer.status {
            200..=299 => Ok(tags_of(&answer).ok_or_else(|| {
                let why = format!("the tags of {path} cannot be understood");
                Reason::StoreUnreachable.error(why)
            })?),
            // Some servers have a word for "none".
            404 if answer.code().starts_with("NoSuchTagSet") => Ok(Vec::new()),
            404 if answer.code().is_empty() => Err(Untold::Gone),
            // Azure's accounts with a hierarchical namespace have none.
            400 | 409 if answer.code().starts_with("Feature") => Ok(Vec::new()),
            _ => Err(Untold::Refused(answer.refusal(&what))),
        }
    }

    async fn write(&self, path: &Path, tags: Vec<Tag>) -> Result<(), Untold> {
        let what = format!("change the tags of {path}");
        let body = match &self.kind {
            Kind::Azure(_) => xml_of("Tags", tags),
            _ => xml_of("Tagging", tags),
        };
        let answer = self.ask(&what, Method::PUT, path, body?).await?;
        match answer.status {
            200..=299 => Ok(()),
            _ if answer.is_object_missing() => Err(Untold::Gone),
            _ => Err(Untold::Refused(answer.refusal(&what))),
        }
    }

    async fn ask(&self, what: &str, method: Method, path: &Path, body: String) -> Result<Answer> {
        match &self.kind {
            Kind::S3(s3) => {
                let query = [("tagging", "")];
                s3.ask(what, method, path, &query, &[], body).await
            }
            Kind::Azure(azure) => {
                let query = [("comp", "tags")];
                azure.ask(what, method, path, &query, body).await
            }
            Kind::None | Kind::Metadata(_) => {
                Err(Error::internal(format!("cannot {what}: it has none")))
            }
        }
    }

    /// Sets or removes the mark, and looks whether it is as it should be.
    pub(super) async fn set(
        &self,
        store: &Arc<dyn ObjectStore>,
        path: &Path,
        excluded: bool,
    ) -> Result<(), Untold> {
        let kept = if let Kind::Metadata(gcs) = &self.kind {
            if is_marked(store, path).await? == excluded {
                return Ok(());
            }
            set_metadata(gcs.as_deref(), path, excluded).await?;
            is_marked(store, path).await?
        } else {
            // Written unread, the tags of others would be lost.
            let mut tags = self.noted(self.read(path).await)?;
            if is_set(&tags) == excluded {
                return Ok(());
            }
            tags.retain(|tag| tag.key != EXCLUDE_TAG);
            if excluded {
                tags.push(Tag {
                    key: EXCLUDE_TAG.to_owned(),
                    value: "true".to_owned(),
                });
            }
            self.write(path, tags).await?;
            is_set(&self.read(path).await?)
        };
        match kept == excluded {
            true => Ok(()),
            false => Err(Untold::Lied(Reason::Configuration.error(format!(
                "the store took a change of the tags of {path}, and did not keep it"
            )))),
        }
    }
}

async fn set_metadata(gcs: Option<&Gcs>, path: &Path, excluded: bool) -> Result<(), Untold> {
    let what = format!("change the metadata of {path}");
    let Some(gcs) = gcs else {
        let why = format!("cannot {what}: this store has no request for it");
        return Err(Untold::Refused(Reason::Configuration.error(why)));
    };
    let value = excluded.then_some("true");
    let answer = gcs.set_metadata(&what, path, EXCLUDE_TAG, value).await?;
    match answer.status {
        200..=299 => Ok(()),
        404 => Err(Untold::Gone),
        _ => Err(Untold::Refused(answer.refusal(&what))),
    }
}

impl Store {
    /// For each path whether the object is tagged as excluded; asks many at once. A store that
    /// does not tell counts as "no".
    ///
    /// # Errors
    /// `StoreUnreachable`, `Terminated`.
    pub fn excluded_by_tag(&self, paths: &[String]) -> Result<Vec<bool>> {
        /// Requests under way at once.
        const AT_ONCE: usize = 32;
        if !self.asks_tags() {
            return Ok(vec![false; paths.len()]);
        }
        let excluded: Vec<bool> = self.block_on(async {
            futures::stream::iter(paths)
                .map(|p| async move { self.tags.is_excluded(&self.inner, &self.path(p)).await })
                .buffered(AT_ONCE)
                .try_collect()
                .await
        })??;
        for (path, _) in paths.iter().zip(&excluded).filter(|e| *e.1) {
            self.tags.tagged.remember(path);
        }
        Ok(excluded)
    }

    /// Whether it is worth asking this store for tags.
    pub fn asks_tags(&self) -> bool {
        self.tags.can_tell() && !self.tags.was_refused()
    }

    /// Whether the answer to a read says that an object has tags, so that one without a word has none.
    pub fn tells_tags(&self) -> bool {
        self.tags.tagged.tells()
    }

    /// Whether an object is known to have, or to have had, tags: a read of it said so, or its tags were asked for.
    pub fn has_tags(&self, below: &str) -> bool {
        self.tags.tagged.has_tags(below)
    }

    /// Whether an object with tags was met at all.
    pub fn knows_tags(&self) -> bool {
        self.tags.tagged.knows_any()
    }

    /// Finds out whether the store says with an object that it has tags: by a small object with a tag in the
    /// staging folder, which is read and deleted. If that fails, nobody knows.
    ///
    /// # Errors
    /// `Terminated`.
    pub fn find_out_whether_tags_are_told(&self) -> Result<()> {
        if !self.asks_tags() || self.tells_tags() {
            return Ok(());
        }
        let name = StagingName::new("tags");
        let path = self.path(&name.path);
        let mut tags = object_store::TagSet::default();
        tags.push("deltafold", "probe");
        let options = PutOptions::from(tags);
        let tried = self.block_on(async {
            let payload = PutPayload::from_static(b"x");
            self.inner.put_opts(&path, payload, options).await?;
            bytes_of(self.inner.get(&path).await?, 1).await
        })?;
        if let Err(e) = self.clean_up(self.inner.delete(&path)) {
            tracing::warn!(staging = %name.path, "a staging object is left behind: {e}");
        }
        let error = tried.err().map(|e| e.to_string());
        tracing::debug!(
            tells = self.tells_tags(),
            error,
            "tried whether tags are told"
        );
        Ok(())
    }

    /// Marks a snapshot as excluded, or takes the mark away: by tag or metadata where the store has
    /// them, by an object `<below>.exclude` where it has none or refuses them. Tags of others stay.
    /// Doing it twice does it once.
    ///
    /// # Errors
    /// The store's; `SnapshotVanished` where the snapshot is not there; where a mark that is there
    /// cannot be taken away.
    pub fn set_excluded(&self, below: &str, excluded: bool) -> Result<()> {
        let told = match self.asks_tags() {
            true => self.block_on(self.tags.set(&self.inner, &self.path(below), excluded))?,
            false if self.exists(below)? => Err(Untold::Refused(Error::internal("no tags"))),
            false => Err(Untold::Gone),
        };
        let object = format!("{below}{EXCLUDE_SUFFIX}");
        match told {
            Ok(()) if excluded => Ok(()),
            Ok(()) => self.delete(&object),
            Err(Untold::Failed(e)) => Err(e),
            Err(Untold::Gone) => Err(Reason::SnapshotVanished.error(format!(
                "{} was to be marked and is gone; run again",
                self.name(below)
            ))),
            Err(Untold::Refused(why) | Untold::Lied(why)) if excluded => {
                if self.tags.can_tell() {
                    tracing::debug!("marked by an object instead: {why}");
                }
                self.replace_small(&object, b"")
            }
            Err(Untold::Refused(why) | Untold::Lied(why)) => {
                self.delete(&object)?;
                // What the store does not tell may be marked and cannot be unmarked by us.
                match self.asks_tags() {
                    true => Err(why),
                    false => Ok(()),
                }
            }
        }
    }
}

async fn is_marked(store: &Arc<dyn ObjectStore>, path: &Path) -> Result<bool> {
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

fn is_set(tags: &[Tag]) -> bool {
    tags.iter()
        .any(|tag| tag.key == EXCLUDE_TAG && tag.value == "true")
}

fn tags_of(answer: &Answer) -> Option<Vec<Tag>> {
    match answer.document()? {
        Document::Tagging(tagging) => Some(tagging.tag_set.tags),
        _ => None,
    }
}

/// S3 wants the root `Tagging`, Azure `Tags`; what is in them is the same.
fn xml_of(root: &str, tags: Vec<Tag>) -> Result<String> {
    let tag_set = TagSet { tags };
    quick_xml::se::to_string_with_root(root, &Tagging { tag_set })
        .map_err(|e| Error::internal(format!("tags without XML: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(body: &str) -> Answer {
        Answer {
            status: 200,
            body: body.to_owned().into(),
        }
    }

    #[test]
    fn what_is_written_is_what_is_read() {
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
                assert_eq!(tags_of(&answer(&xml)), Some(tags));
            }
        }
    }

    #[test]
    fn tags_are_read_from_s3s_xml() {
        let xml = |tags: &str| {
            let text = format!(
                r#"<?xml version="1.0" encoding="UTF-8"?><Tagging xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><TagSet>{tags}</TagSet></Tagging>"#
            );
            tags_of(&answer(&text)).map(|tags| is_set(&tags))
        };
        let tag = |k: &str, v: &str| format!("<Tag><Key>{k}</Key><Value>{v}</Value></Tag>");
        assert_eq!(xml(""), Some(false));
        assert_eq!(xml(&tag(EXCLUDE_TAG, "true")), Some(true));
        assert_eq!(
            xml(&(tag("a", "true") + &tag(EXCLUDE_TAG, "true"))),
            Some(true)
        );
        assert_eq!(xml(&tag(EXCLUDE_TAG, "false")), Some(false));
        assert!(tags_of(&answer("<html>")).is_none());
    }
}
