//! An object store with faults: the n-th call of a kind fails in one of many ways.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use deltafold::base::Cancel;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, UploadPart,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    ServerError,
    Timeout,
    Throttled,
    NotFound,
    Denied,
    /// The local disk is full.
    Full,
    /// The call takes effect, but returns an error.
    LostAnswer,
    /// The call takes effect, its response is lost, and the retry is refused.
    LostThenRefused,
    /// The stream fails in the middle.
    Midway,
    /// The stream ends in the middle, as if it were complete.
    Short,
    /// A bit flips in what is read.
    Flipped,
    /// The object is deleted just before the call.
    Gone,
    /// The call never returns; the operation is cancelled.
    Hang,
    /// The call succeeds, and something else happens at the same time.
    Meanwhile,
    /// The call is denied after something else has happened.
    DeniedMeanwhile,
}

impl Fault {
    /// Returns the faults that make sense for a call.
    pub fn of(call: Call) -> Vec<Fault> {
        use Call::*;
        use Fault::*;
        let mut all = vec![ServerError, Timeout, Throttled, NotFound, Denied, Hang];
        all.extend_from_slice(match call {
            List => &[Midway],
            Head => &[],
            Get => &[Gone],
            Body => &[Midway, Short, Flipped],
            Put => &[Full, LostAnswer, LostThenRefused],
            Multipart => &[Full, LostAnswer],
            Part => &[Full, LostAnswer],
            Complete => &[Full, LostAnswer, LostThenRefused],
            Abort | Delete => &[LostAnswer],
        });
        all
    }

    fn takes_effect(self) -> bool {
        matches!(self, Fault::LostAnswer | Fault::LostThenRefused)
    }

    fn error(self, call: Call, path: &Path) -> Error {
        let (path, source) = (path.to_string(), format!("{self:?} at {call:?}").into());
        let server = |text: &str| Error::Generic {
            store: "S3",
            source: format!("Error after 5 retries: {text}").into(),
        };
        match self {
            Fault::NotFound => Error::NotFound { path, source },
            Fault::Denied => Error::PermissionDenied { path, source },
            Fault::LostThenRefused if call == Call::Complete => Error::NotFound { path, source },
            Fault::Full => Error::Generic {
                store: "LocalFileSystem",
                source: io::Error::from(io::ErrorKind::StorageFull).into(),
            },
            Fault::Timeout | Fault::LostAnswer => server("operation timed out"),
            Fault::Throttled => server("Server returned error response: status code: 429 Too Many"),
            _ => server("Server returned error response: status code: 503 Service Unavailable"),
        }
    }
}

/// A fault in the `nth` call of a kind, counted from 0.
#[derive(Clone, Copy, Debug)]
pub struct PlannedFault {
    pub call: Call,
    pub nth: usize,
    pub fault: Fault,
}

/// Forwards every call to another store, except for the faults.
#[derive(Clone)]
pub struct FaultStore {
    inner: Arc<dyn ObjectStore>,
    plan: Arc<Plan>,
    ignores_conditions: bool,
}

struct Plan {
    strikes: Vec<PlannedFault>,
    /// What happens at the same time for `Fault::Meanwhile`.
    meanwhile: Mutex<Box<dyn FnMut() + Send>>,
    /// Called before each call.
    watch: Mutex<Box<dyn FnMut() + Send>>,
    calls: Mutex<Vec<(Call, String)>>,
    /// Cancelled by a call that hangs, as if a signal came.
    cancel: Mutex<Option<Cancel>>,
}

impl FaultStore {
    pub fn new(inner: Arc<dyn ObjectStore>, strikes: Vec<PlannedFault>) -> Self {
        FaultStore {
            inner,
            plan: Arc::new(Plan {
                strikes,
                meanwhile: Mutex::new(Box::new(|| ())),
                watch: Mutex::new(Box::new(|| ())),
                calls: Mutex::default(),
                cancel: Mutex::default(),
            }),
            ignores_conditions: false,
        }
    }

    /// A store that accepts conditional writes and ignores the condition.
    pub fn ignoring_conditions(inner: Arc<dyn ObjectStore>) -> Self {
        FaultStore {
            ignores_conditions: true,
            ..Self::new(inner, Vec::new())
        }
    }

    /// Makes this store ignore conditions.
    pub fn that_ignores_conditions(self) -> Self {
        FaultStore {
            ignores_conditions: true,
            ..self
        }
    }

    /// Sets what a call that hangs cancels.
    pub fn cancels(&self, cancel: &Cancel) {
        *self.plan.cancel.lock().expect("a lock") = Some(cancel.clone());
    }

    /// Sets what happens for `Fault::Meanwhile`.
    pub fn meanwhile(&self, what: impl FnMut() + Send + 'static) {
        *self.plan.meanwhile.lock().expect("a lock") = Box::new(what);
    }

    /// Sets what is called before each call.
    pub fn watch(&self, what: impl FnMut() + Send + 'static) {
        *self.plan.watch.lock().expect("a lock") = Box::new(what);
    }

    /// Returns all calls so far, each with its path.
    pub fn calls(&self) -> Vec<(Call, String)> {
        self.plan.calls.lock().expect("a lock").clone()
    }

    /// Counts a call and returns its fault, if it has one.
    fn count(&self, call: Call, path: &Path) -> Option<Fault> {
        (self.plan.watch.lock().expect("a lock"))();
        let mut calls = self.plan.calls.lock().expect("a lock");
        let nth = calls.iter().filter(|(c, _)| *c == call).count();
        calls.push((call, path.to_string()));
        let mut strikes = self.plan.strikes.iter();
        Some(strikes.find(|s| (s.call, s.nth) == (call, nth))?.fault)
    }

    async fn hang<T>(&self) -> T {
        if let Some(cancel) = &*self.plan.cancel.lock().expect("a lock") {
            cancel.cancel();
        }
        std::future::pending().await
    }

    /// Makes a call with its fault.
    async fn call<T>(
        &self,
        call: Call,
        path: &Path,
        fault: Option<Fault>,
        inner: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        match fault {
            Some(Fault::Hang) => self.hang().await,
            Some(Fault::Gone) => {
                self.inner.delete(path).await?;
                inner.await
            }
            Some(Fault::Meanwhile) => {
                (self.plan.meanwhile.lock().expect("a lock"))();
                inner.await
            }
            Some(Fault::DeniedMeanwhile) => {
                (self.plan.meanwhile.lock().expect("a lock"))();
                Err(Fault::Denied.error(call, path))
            }
            Some(f) if f.takes_effect() => {
                inner.await?;
                Err(f.error(call, path))
            }
            Some(f) if f != Fault::Flipped => Err(f.error(call, path)),
            _ => inner.await,
        }
    }

    async fn body(&self, got: GetResult, path: &Path) -> Result<GetResult> {
        let Some(fault) = self.count(Call::Body, path) else {
            return Ok(got);
        };
        let (meta, range) = (got.meta.clone(), got.range.clone());
        let (attributes, extensions) = (got.attributes.clone(), got.extensions.clone());
        let bytes = got.bytes().await?;
        let half = bytes.len() / 2;
        let first = stream::iter([Ok(bytes.slice(..half))]);
        let rest: BoxStream<'static, Result<Bytes>> = match fault {
            Fault::Short => stream::empty().boxed(),
            Fault::Flipped => {
                let rest = flipped(&bytes.slice(half..));
                stream::iter([Ok(rest)]).boxed()
            }
            Fault::Hang => {
                let store = self.clone();
                stream::once(async move { store.hang().await }).boxed()
            }
            _ => stream::iter([Err(fault.error(Call::Body, path))]).boxed(),
        };
        let stream = match fault {
            Fault::Midway | Fault::Short | Fault::Flipped | Fault::Hang => {
                first.chain(rest).boxed()
            }
            _ => rest,
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream),
            meta,
            range,
            attributes,
            extensions,
        })
    }
}

fn flipped(bytes: &[u8]) -> Bytes {
    let mut bytes = bytes.to_vec();
    if let Some(b) = bytes.first_mut() {
        *b ^= 1;
    }
    bytes.into()
}

impl fmt::Debug for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}: {:?}", self.plan.strikes)
    }
}

impl fmt::Display for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with faults", self.inner)
    }
}

#[async_trait]
impl ObjectStore for FaultStore {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        if self.ignores_conditions {
            options.mode = PutMode::Overwrite;
        }
        let is_create = matches!(options.mode, PutMode::Create);
        let fault = self.count(Call::Put, path);
        let put = async { self.inner.put_opts(path, payload, options).await };
        match self.call(Call::Put, path, fault, put).await {
            // Only a condition makes the same request fail the second time.
            Err(source) if is_create && fault == Some(Fault::LostThenRefused) => {
                Err(Error::AlreadyExists {
                    path: path.to_string(),
                    source: Box::new(source),
                })
            }
            result => result,
        }
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let fault = self.count(Call::Multipart, path);
        let begun = self.inner.put_multipart_opts(path, options);
        Ok(Box::new(FaultUpload {
            inner: self.call(Call::Multipart, path, fault, begun).await?,
            store: self.clone(),
            path: path.clone(),
        }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let call = if options.head { Call::Head } else { Call::Get };
        let fault = self.count(call, path);
        let got = self.inner.get_opts(path, options);
        let got = self.call(call, path, fault, got).await?;
        match call {
            Call::Head => Ok(got),
            _ => self.body(got, path).await,
        }
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let fault = self.count(Call::Get, path);
        let got = self.inner.get_ranges(path, ranges);
        self.call(Call::Get, path, fault, got).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        paths
            .then(move |path| {
                let store = store.clone();
                async move {
                    let path = path?;
                    let fault = store.count(Call::Delete, &path);
                    let deleted = store.inner.delete(&path);
                    store.call(Call::Delete, &path, fault, deleted).await?;
                    Ok(path)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let path = prefix.cloned().unwrap_or_default();
        let listing = self.inner.list(prefix);
        match self.count(Call::List, &path) {
            None => listing,
            Some(Fault::Hang) => {
                let store = self.clone();
                stream::once(async move { store.hang().await }).boxed()
            }
            Some(fault) => {
                let before = if fault == Fault::Midway { 1 } else { 0 };
                let error = fault.error(Call::List, &path);
                listing
                    .take(before)
                    .chain(stream::iter([Err(error)]))
                    .boxed()
            }
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let path = prefix.cloned().unwrap_or_default();
        let fault = self.count(Call::List, &path);
        let listed = self.inner.list_with_delimiter(prefix);
        self.call(Call::List, &path, fault, listed).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("nothing is copied in a store");
    }
}

#[derive(Debug)]
struct FaultUpload {
    inner: Box<dyn MultipartUpload>,
    store: FaultStore,
    path: Path,
}

#[async_trait]
impl MultipartUpload for FaultUpload {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        let (store, path) = (self.store.clone(), self.path.clone());
        let fault = store.count(Call::Part, &path);
        let sent = self.inner.put_part(part);
        Box::pin(async move { store.call(Call::Part, &path, fault, sent).await })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let fault = self.store.count(Call::Complete, &self.path);
        let is_taken =
            !self.store.ignores_conditions && self.store.inner.head(&self.path).await.is_ok();
        if is_taken {
            // As S3 and Azure do.
            let (path, source) = (self.path.to_string(), "the name is taken".into());
            return Err(Error::Precondition { path, source });
        }
        let completed = self.inner.complete();
        self.store
            .call(Call::Complete, &self.path, fault, completed)
            .await
    }

    async fn abort(&mut self) -> Result<()> {
        let fault = self.store.count(Call::Abort, &self.path);
        let aborted = self.inner.abort();
        self.store
            .call(Call::Abort, &self.path, fault, aborted)
            .await
    }
}
