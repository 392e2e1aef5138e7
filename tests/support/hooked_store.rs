//! An object store that asks hooks before and after each call. What a test wants of a store that fails, waits or lies is
//! one implementation of [`Hooks`].

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt as _};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    UploadPart,
};

/// A request, or the body of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    List,
    Head,
    Get,
    Body,
    Put,
    Multipart,
    Part,
    Complete,
    Abort,
    Delete,
}

pub type Inner = Arc<dyn ObjectStore>;

/// What happens around the calls of a store: nothing, unless a test overrides it.
pub trait Hooks: Clone + fmt::Debug + Send + Sync + 'static {
    /// Makes a call of any kind, or does not.
    fn around<T: Send>(
        &self,
        _: Call,
        _: &Path,
        run: impl Future<Output = Result<T>> + Send,
    ) -> impl Future<Output = Result<T>> + Send {
        run
    }

    fn put(
        &self,
        inner: &Inner,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> impl Future<Output = Result<PutResult>> + Send {
        async move {
            let put = inner.put_opts(path, payload, options);
            self.around(Call::Put, path, put).await
        }
    }

    /// Makes a `Get` or `Head`. A call that returns the body has its `Body` inside.
    fn get(
        &self,
        inner: &Inner,
        path: &Path,
        options: GetOptions,
    ) -> impl Future<Output = Result<GetResult>> + Send {
        let call = if options.head { Call::Head } else { Call::Get };
        async move {
            let got = inner.get_opts(path, options);
            let got = self.around(call, path, got).await?;
            match call {
                Call::Head => Ok(got),
                _ => self.body(got, path).await,
            }
        }
    }

    fn body(&self, got: GetResult, _: &Path) -> impl Future<Output = Result<GetResult>> + Send {
        ready(Ok(got))
    }

    fn list(&self, inner: &Inner, path: Path) -> BoxStream<'static, Result<ObjectMeta>> {
        inner.list(Some(&path))
    }

    fn part(&self, path: Path, _bytes: usize, sent: UploadPart) -> UploadPart {
        let hooks = self.clone();
        Box::pin(async move { hooks.around(Call::Part, &path, sent).await })
    }
}

/// Forwards every call to another store, through its hooks.
#[derive(Clone)]
pub struct Hooked<H> {
    pub inner: Inner,
    pub hooks: H,
}

impl<H> fmt::Debug for Hooked<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl<H> fmt::Display for Hooked<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with hooks", self.inner)
    }
}

#[async_trait]
impl<H: Hooks> ObjectStore for Hooked<H> {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.hooks.put(&self.inner, path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let begun = self.inner.put_multipart_opts(path, options);
        let begun = self.hooks.around(Call::Multipart, path, begun);
        Ok(Box::new(HookedUpload {
            inner: begun.await?,
            hooks: self.hooks.clone(),
            path: path.clone(),
        }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.hooks.get(&self.inner, path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |path: Result<Path>| {
            let store = store.clone();
            async move {
                let path = path?;
                let deleted = async { store.inner.delete(&path).await };
                store.hooks.around(Call::Delete, &path, deleted).await?;
                Ok(path)
            }
        };
        paths.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let path = prefix.cloned().unwrap_or_default();
        self.hooks.list(&self.inner, path)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let path = prefix.cloned().unwrap_or_default();
        let listed = self.inner.list_with_delimiter(prefix);
        self.hooks.around(Call::List, &path, listed).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("nothing is copied in a store");
    }
}

#[derive(Debug)]
struct HookedUpload<H> {
    inner: Box<dyn MultipartUpload>,
    hooks: H,
    path: Path,
}

#[async_trait]
impl<H: Hooks> MultipartUpload for HookedUpload<H> {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        let bytes = part.content_length();
        let sent = self.inner.put_part(part);
        self.hooks.part(self.path.clone(), bytes, sent)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let completed = self.inner.complete();
        self.hooks
            .around(Call::Complete, &self.path, completed)
            .await
    }

    async fn abort(&mut self) -> Result<()> {
        let aborted = self.inner.abort();
        self.hooks.around(Call::Abort, &self.path, aborted).await
    }
}
