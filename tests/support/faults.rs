//! An object store with faults: the n-th call of a kind fails in one of many ways.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use deltafold::base::Cancel;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    Error, GetResult, GetResultPayload, ObjectMeta, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, PutResult, Result, UploadPart,
};

pub use super::hooked_store::Call;
use super::hooked_store::{Hooked, Hooks, Inner};

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

/// Plans a fault in the `nth` call of a kind, counted from 0.
pub fn at(call: Call, nth: usize, fault: Fault) -> PlannedFault {
    PlannedFault { call, nth, fault }
}

/// A fault in a call of a clean run.
#[derive(Debug)]
pub struct Strike {
    pub planned: PlannedFault,
    pub call: Call,
    pub fault: Fault,
    pub path: String,
    /// Whether there was such a call with this path before.
    pub is_again: bool,
}

/// Lets every call of a clean run fail in every way. `attempt` makes a fresh world, runs the operation with the fault,
/// checks the result, and returns whether the operation failed; `None`: this fault is left out. Returns the numbers of
/// runs and of failed runs.
pub fn every_call_fails(
    clean: &FaultStore,
    mut attempt: impl FnMut(&Strike) -> Option<bool>,
) -> (usize, usize) {
    let (mut counts, mut paths) = (BTreeMap::new(), BTreeSet::new());
    let (mut runs, mut failed) = (0, 0);
    for (call, path) in clean.calls() {
        let nth = *counts.entry(call).and_modify(|n| *n += 1).or_insert(0);
        let is_again = !paths.insert((call, path.clone()));
        for fault in Fault::of(call) {
            let ended = attempt(&Strike {
                planned: at(call, nth, fault),
                call,
                fault,
                path: path.clone(),
                is_again,
            });
            runs += usize::from(ended.is_some());
            failed += usize::from(ended == Some(true));
        }
    }
    println!("{runs} faults, {failed} runs failed");
    (runs, failed)
}

/// Forwards every call to another store, except for the faults.
pub type FaultStore = Hooked<Faults>;

#[derive(Clone)]
pub struct Faults {
    inner: Inner,
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

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.plan.strikes)
    }
}

impl FaultStore {
    pub fn new(inner: Inner, strikes: Vec<PlannedFault>) -> Self {
        let plan = Plan {
            strikes,
            meanwhile: Mutex::new(Box::new(|| ())),
            watch: Mutex::new(Box::new(|| ())),
            calls: Mutex::default(),
            cancel: Mutex::default(),
        };
        let hooks = Faults {
            inner: inner.clone(),
            plan: Arc::new(plan),
            ignores_conditions: false,
        };
        Hooked { inner, hooks }
    }

    /// Makes this store accept conditional writes and ignore the condition.
    pub fn that_ignores_conditions(mut self) -> Self {
        self.hooks.ignores_conditions = true;
        self
    }

    /// Sets what a call that hangs cancels.
    pub fn cancels(&self, cancel: &Cancel) {
        *self.hooks.plan.cancel.lock().expect("a lock") = Some(cancel.clone());
    }

    /// Sets what happens for `Fault::Meanwhile`.
    pub fn meanwhile(&self, what: impl FnMut() + Send + 'static) {
        *self.hooks.plan.meanwhile.lock().expect("a lock") = Box::new(what);
    }

    /// Sets what is called before each call.
    pub fn watch(&self, what: impl FnMut() + Send + 'static) {
        *self.hooks.plan.watch.lock().expect("a lock") = Box::new(what);
    }

    /// Returns all calls so far, each with its path.
    pub fn calls(&self) -> Vec<(Call, String)> {
        self.hooks.plan.calls.lock().expect("a lock").clone()
    }
}

impl Faults {
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
        let is_taken = call == Call::Complete
            && !self.ignores_conditions
            && self.inner.head(path).await.is_ok();
        if is_taken {
            // As S3 and Azure do.
            let (path, source) = (path.to_string(), "the name is taken".into());
            return Err(Error::Precondition { path, source });
        }
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
}

fn flipped(bytes: &[u8]) -> Bytes {
    let mut bytes = bytes.to_vec();
    if let Some(b) = bytes.first_mut() {
        *b ^= 1;
    }
    bytes.into()
}

impl Hooks for Faults {
    async fn around<T: Send>(
        &self,
        call: Call,
        path: &Path,
        run: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let fault = self.count(call, path);
        self.call(call, path, fault, run).await
    }

    async fn put(
        &self,
        inner: &Inner,
        path: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        if self.ignores_conditions {
            options.mode = PutMode::Overwrite;
        }
        let is_create = matches!(options.mode, PutMode::Create);
        let fault = self.count(Call::Put, path);
        let put = async { inner.put_opts(path, payload, options).await };
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
            Fault::Flipped => stream::iter([Ok(flipped(&bytes.slice(half..)))]).boxed(),
            Fault::Hang => {
                let hooks = self.clone();
                stream::once(async move { hooks.hang().await }).boxed()
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

    fn list(&self, inner: &Inner, path: Path) -> BoxStream<'static, Result<ObjectMeta>> {
        let listing = inner.list(Some(&path));
        match self.count(Call::List, &path) {
            None => listing,
            Some(Fault::Hang) => {
                let hooks = self.clone();
                stream::once(async move { hooks.hang().await }).boxed()
            }
            Some(fault) => {
                let before = if fault == Fault::Midway { 1 } else { 0 };
                let error = stream::iter([Err(fault.error(Call::List, &path))]);
                listing.take(before).chain(error).boxed()
            }
        }
    }

    fn part(&self, path: Path, _: usize, sent: UploadPart) -> UploadPart {
        // Parts are counted in their order, not in that in which they are sent.
        let (hooks, fault) = (self.clone(), self.count(Call::Part, &path));
        Box::pin(async move { hooks.call(Call::Part, &path, fault, sent).await })
    }
}
