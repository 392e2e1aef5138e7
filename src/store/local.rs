//! A local folder as an object store, and the files in it that do not have their names yet.
//!
//! An object is written to a temporary file, synced, and renamed to its name if that is free. The sync of a file makes
//! its content survive a power loss, the sync of its folder its name. `folder` opens all files.

use super::errors::LOCAL;
use super::folder::{DEEPEST, Folder, modified, split};
use super::staging::{STAGING, temporary_path};
use crate::error::{Error, Result};
use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error as E, Extensions, GetOptions, GetResult, GetResultPayload,
    ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult,
};
use rustix::fs::Stat;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Write};

/// A file without its name, in the folder of temporary objects. Dropping it removes it.
pub(super) struct TemporaryFile {
    folder: Folder,
    path: String,
    file: File,
    is_named: bool,
}

impl TemporaryFile {
    /// Creates an empty file.
    ///
    /// # Errors
    /// Fails with `Io`, `PermissionDenied` or `NoSpace`.
    pub(super) fn create(folder: &Folder) -> Result<Self> {
        let path = temporary_path("new");
        let file = match folder.create(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                folder.make(STAGING).and_then(|()| folder.create(&path))
            }
            created => created,
        };
        let failed = |e| Error::io(format!("create {}", folder.shown(&path).display()), e);
        Ok(TemporaryFile {
            folder: folder.clone(),
            file: file.map_err(failed)?,
            path,
            is_named: false,
        })
    }

    /// Makes the content survive a power loss.
    ///
    /// # Errors
    /// Fails with `Io` or `NoSpace`.
    pub(super) fn synced(self) -> Result<Self> {
        let failed = |e| {
            Error::io(
                format!("write {}", self.folder.shown(&self.path).display()),
                e,
            )
        };
        self.file.sync_all().map_err(failed)?;
        Ok(self)
    }

    /// Gives the file its name, which then survives a power loss. Returns false if another file has the name.
    pub(super) fn name_if_free(&mut self, below: &str) -> io::Result<bool> {
        self.rename(below, Folder::rename_if_free)
    }

    /// Gives the file its name, in place of the one that has it.
    fn replace(&mut self, below: &str) -> io::Result<bool> {
        self.rename(below, |folder, from, to| {
            folder.rename(from, to).map(|()| true)
        })
    }

    /// Renames the file. Creates the folder of the name if it is missing. Returns whether the file has the name.
    fn rename(
        &mut self,
        below: &str,
        rename: impl Fn(&Folder, &str, &str) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let (folder, parent) = (&self.folder, split(below).0);
        self.is_named = match rename(folder, &self.path, below) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                folder.make(parent)?;
                rename(folder, &self.path, below)?
            }
            renamed => renamed?,
        };
        if self.is_named {
            folder.sync(parent)?;
        }
        Ok(self.is_named)
    }
}

impl Write for TemporaryFile {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.file.write(b)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.is_named {
            // If this fails, gc removes the file.
            let _ = self.folder.remove(&self.path);
        }
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

fn not_implemented<T>(operation: &str) -> object_store::Result<T> {
    Err(E::NotImplemented {
        operation: operation.to_owned(),
        implementer: LOCAL.to_owned(),
    })
}

impl Folder {
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
            if object.is_odd {
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
        let to = location.as_ref();
        let put = || -> io::Result<bool> {
            let mut file = TemporaryFile::create(self)?;
            payload.iter().try_for_each(|bytes| file.write_all(bytes))?;
            let mut file = file.synced()?;
            if if_free {
                file.name_if_free(to)
            } else {
                file.replace(to)
            }
        };
        if put().map_err(|e| store_error(to, e))? {
            Ok(PutResult {
                e_tag: None,
                version: None,
                extensions: Extensions::default(),
            })
        } else {
            Err(store_error(to, ErrorKind::AlreadyExists.into()))
        }
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        not_implemented("an upload in parts")
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

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> object_store::Result<()> {
        not_implemented("a copy")
    }
}
