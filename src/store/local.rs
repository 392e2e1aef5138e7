//! A local folder as an object store, and staging files in it.
//!
//! A small object is written, synced, and renamed to its name, with as few calls as that takes. The sync of a
//! file makes its content survive a power loss; the sync of its folder makes its name survive, and all names
//! that were given there before. The staging folder is not synced: an object that is lost there had no name
//! yet. `folder` opens all files. Called by `publish`, and through the object_store trait by everything in
//! `store`.

use super::Store;
use super::errors::LOCAL;
use super::folder::{DEEPEST, FOLDER_ATTEMPTS, Folder, LINK, RenameOutcome, modified, split};
use super::staging::STAGING;
use crate::error::{Error, Result};
use async_trait::async_trait;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{
    Attributes, CopyMode, CopyOptions, Error as E, Extensions, GetOptions, GetResult,
    GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, RenameTargetMode,
    UploadPart,
};
use rustix::fs::Stat;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Writes a new staging file.
pub(super) fn write(folder: &Folder, below: &str, content: &[u8]) -> io::Result<()> {
    let mut attempts = 0;
    let mut file = loop {
        attempts += 1;
        match folder.create(below) {
            // Another process has removed the empty staging folder meanwhile.
            Err(e) if e.kind() == ErrorKind::NotFound && attempts < FOLDER_ATTEMPTS => {
                folder.make_without_sync(STAGING)?;
            }
            created => break created?,
        }
    };
    file.write_all(content)?;
    file.sync_all()
}

impl Store {
    /// Makes names that [`Staged::name`](super::Staged::name) gave survive a power loss, by one sync for each
    /// folder. Only a local folder needs it.
    ///
    /// # Errors
    /// Fails with `Io`.
    pub fn sync_names<'p>(&self, paths: impl IntoIterator<Item = &'p str>) -> Result<()> {
        let Some(root) = &self.local_root else {
            return Ok(());
        };
        let folders: BTreeSet<&str> = paths.into_iter().map(|path| split(path).0).collect();
        for folder in folders {
            let synced = root.sync(folder);
            synced.map_err(|e| Error::io(format!("sync {}", self.name(folder)), e))?;
        }
        Ok(())
    }
}

fn store_error(path: &str, e: io::Error) -> E {
    let path = path.to_owned();
    match e.kind() {
        ErrorKind::NotFound => E::NotFound {
            path,
            source: e.into(),
        },
        ErrorKind::AlreadyExists => E::AlreadyExists {
            path,
            source: e.into(),
        },
        _ => unnamed_error(e),
    }
}

/// Returns an error that keeps its kind; `errors::io_cause` reads it.
pub(super) fn unnamed_error(e: io::Error) -> E {
    E::Generic {
        store: LOCAL,
        source: e.into(),
    }
}

/// Returns the ETag of a file, by which the object_store crate tells versions apart.
fn e_tag(stat: &Stat) -> String {
    let (inode, size, at) = (stat.st_ino, stat.st_size, modified(stat));
    format!("\"{inode:x}-{:x}-{size:x}\"", at.timestamp_micros())
}

fn put_result(file: &File) -> io::Result<PutResult> {
    Ok(PutResult {
        e_tag: Some(e_tag(&rustix::fs::fstat(file)?)),
        version: None,
        extensions: Extensions::default(),
    })
}

fn not_implemented<T>(operation: &str) -> object_store::Result<T> {
    Err(E::NotImplemented {
        operation: operation.to_owned(),
        implementer: LOCAL.to_owned(),
    })
}

/// Returns whether a name is that of an unfinished write: `<name>#<number>`.
fn is_unfinished(name: &str) -> bool {
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

impl Folder {
    /// Creates an unfinished file beside its later name, and its folder if that is missing. Returns it and
    /// its name.
    fn create_unfinished(&self, to: &str) -> io::Result<(File, String)> {
        let (mut number, mut attempts) = (1u64, 0);
        loop {
            let unfinished = format!("{to}#{number}");
            match self.create(&unfinished) {
                Ok(file) => return Ok((file, unfinished)),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => number += 1,
                // Another process has removed the empty folder meanwhile.
                Err(e) if e.kind() == ErrorKind::NotFound && attempts < FOLDER_ATTEMPTS => {
                    attempts += 1;
                    self.make(split(to).0)?;
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Renames a complete file to its name, and syncs the name.
    fn finish(&self, from: &str, to: &str, if_free: bool) -> io::Result<()> {
        match if_free {
            false => self.rename(from, to)?,
            true => match self.rename_if_free(from, to)? {
                RenameOutcome::Done => {}
                RenameOutcome::Taken => return Err(ErrorKind::AlreadyExists.into()),
                RenameOutcome::NotPossible => {
                    self.link(from, to)?;
                    self.remove(from)?;
                }
            },
        }
        self.sync(split(to).0)
    }

    /// Copies a file: gives it a second name. The content of a file never changes, so both names may share
    /// it.
    fn copy(&self, from: &str, to: &str, if_free: bool) -> io::Result<()> {
        let link = |to: &str| match self.link(from, to) {
            // Create the folder, but only if the file exists.
            Err(e) if e.kind() == ErrorKind::NotFound && self.read(from).is_ok() => {
                self.make(split(to).0)?;
                self.link(from, to)
            }
            linked => linked,
        };
        if if_free {
            link(to)?;
            return self.sync(split(to).0);
        }
        let mut number = 1u64;
        loop {
            let beside = format!("{to}#{number}");
            match link(&beside) {
                Ok(()) => return self.finish(&beside, to, false),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(e),
            }
        }
    }

    fn list_objects(
        &self,
        prefix: Option<&Path>,
        depth: usize,
    ) -> object_store::Result<Vec<ObjectMeta>> {
        let below = prefix.map_or("", Path::as_ref);
        let listed = self.list(below, depth).map_err(|e| E::Generic {
            store: LOCAL,
            source: Box::new(io::Error::from(e)),
        })?;
        let mut objects = Vec::new();
        for object in listed {
            if is_unfinished(&object.path) || object.path.ends_with(LINK) {
                continue;
            }
            if let Ok(location) = Path::parse(&object.path) {
                objects.push(ObjectMeta {
                    location,
                    last_modified: object.modified,
                    size: object.bytes,
                    e_tag: None,
                    version: None,
                });
            }
        }
        Ok(objects)
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.shown("").display())
    }
}

#[async_trait]
impl ObjectStore for Folder {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        let if_free = match options.mode {
            PutMode::Create => true,
            PutMode::Overwrite => false,
            PutMode::Update(_) => return not_implemented("a write on condition of a version"),
        };
        if !options.attributes.is_empty() {
            return not_implemented("attributes");
        }
        let to = location.as_ref();
        let failed = |e| store_error(to, e);
        let (mut file, unfinished) = self.create_unfinished(to).map_err(failed)?;
        let mut write = || {
            payload.iter().try_for_each(|b| file.write_all(b))?;
            file.sync_all()?;
            let put = put_result(&file)?;
            self.finish(&unfinished, to, if_free).map(|()| put)
        };
        write().map_err(|e| {
            // The first error is the one to report.
            let _ = self.remove(&unfinished);
            failed(e)
        })
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        if !options.attributes.is_empty() {
            return not_implemented("attributes");
        }
        let to = location.to_string();
        let created = self.create_unfinished(&to);
        let (file, unfinished) = created.map_err(|e| store_error(&to, e))?;
        Ok(Box::new(LocalUpload {
            folder: self.clone(),
            unfinished: Some(unfinished),
            to,
            file: Arc::new(file),
            end: 0,
        }))
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        let below = location.as_ref();
        let (file, stat) = self.read(below).map_err(|e| store_error(below, e))?;
        let meta = ObjectMeta {
            location: location.clone(),
            last_modified: modified(&stat),
            size: stat.st_size as u64,
            e_tag: Some(e_tag(&stat)),
            version: None,
        };
        options.check_preconditions(&meta)?;
        let range = match options.range {
            Some(range) => range.as_range(meta.size).map_err(|e| E::Generic {
                store: LOCAL,
                source: Box::new(e),
            })?,
            None => 0..meta.size,
        };
        Ok(GetResult {
            payload: GetResultPayload::File(file, self.shown(below)),
            attributes: Attributes::default(),
            range,
            meta,
            extensions: Extensions::default(),
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        let folder = self.clone();
        let delete = move |location: object_store::Result<Path>| {
            let location = location?;
            let removed = folder.remove(location.as_ref());
            removed.map_err(|e| store_error(location.as_ref(), e))?;
            Ok(location)
        };
        locations.map(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let listed = match self.list_objects(prefix, DEEPEST) {
            Ok(objects) => objects.into_iter().map(Ok).collect(),
            Err(e) => vec![Err(e)],
        };
        futures::stream::iter(listed).boxed()
    }

    /// Returns the files and no folders: no caller needs them.
    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        Ok(ListResult {
            common_prefixes: Vec::new(),
            objects: self.list_objects(prefix, 0)?,
            extensions: Extensions::default(),
        })
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        let if_free = matches!(options.mode, CopyMode::Create);
        let copied = self.copy(from.as_ref(), to.as_ref(), if_free);
        copied.map_err(|e| store_error(to.as_ref(), e))
    }

    async fn rename_opts(
        &self,
        from: &Path,
        to: &Path,
        options: RenameOptions,
    ) -> object_store::Result<()> {
        let if_free = matches!(options.target_mode, RenameTargetMode::Create);
        let rename = || self.finish(from.as_ref(), to.as_ref(), if_free);
        let renamed = match rename() {
            Err(e) if e.kind() == ErrorKind::NotFound && self.read(from.as_ref()).is_ok() => {
                self.make(split(to.as_ref()).0).and_then(|()| rename())
            }
            renamed => renamed,
        };
        renamed.map_err(|e| store_error(to.as_ref(), e))
    }
}

/// A file that is written part by part, and renamed to its name when it is complete.
#[derive(Debug)]
struct LocalUpload {
    folder: Folder,
    unfinished: Option<String>,
    to: String,
    file: Arc<File>,
    /// Where the next part begins.
    end: u64,
}

#[async_trait]
impl MultipartUpload for LocalUpload {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        let mut at = self.end;
        self.end += part.content_length() as u64;
        let file = Arc::clone(&self.file);
        let mut write = move || {
            for bytes in part.iter() {
                file.write_all_at(bytes, at).map_err(unnamed_error)?;
                at += bytes.len() as u64;
            }
            Ok(())
        };
        async move {
            match tokio::runtime::Handle::try_current() {
                Ok(handle) => handle.spawn_blocking(write).await.map_err(E::from)?,
                Err(_) => write(),
            }
        }
        .boxed()
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        let Some(unfinished) = self.unfinished.take() else {
            return Err(unnamed_error(ErrorKind::NotFound.into()));
        };
        let write = || {
            self.file.sync_all()?;
            let put = put_result(&self.file)?;
            self.folder
                .finish(&unfinished, &self.to, false)
                .map(|()| put)
        };
        write().map_err(|e| {
            // The first error is the one to report.
            let _ = self.folder.remove(&unfinished);
            store_error(&self.to, e)
        })
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        match self.unfinished.take() {
            Some(unfinished) => self.folder.remove(&unfinished).map_err(unnamed_error),
            None => Ok(()),
        }
    }
}

impl Drop for LocalUpload {
    fn drop(&mut self) {
        if let Some(unfinished) = &self.unfinished {
            // If this fails, the next run removes the file as debris.
            let _ = self.folder.remove(unfinished);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_name_is_given_once_and_its_object_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (root, a, b) = (dir.path(), "deltafold-staging/a", "deltafold-staging/b");
        let folder = Folder::from(root.to_owned());
        let read = |below: &str| fs::read(root.join(below)).unwrap();
        // `write` creates the staging folder.
        write(&folder, a, b"one").unwrap();
        write(&folder, b, b"two").unwrap();
        let again = write(&folder, a, b"three").unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);
        assert_eq!(read(a), b"one");

        // The target's folder does not exist yet.
        let rename = |from| folder.rename_if_free(from, "v2/full").unwrap();
        assert!(matches!(rename(a), RenameOutcome::NotPossible));
        fs::create_dir(root.join("v2")).unwrap();
        assert!(matches!(rename(a), RenameOutcome::Done));
        assert!(matches!(rename(b), RenameOutcome::Taken));
        assert_eq!((read("v2/full"), read(b)), (b"one".into(), b"two".into()));
        assert!(!root.join(a).exists());
    }
}
