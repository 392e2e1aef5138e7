//! A fuzz target: any bytes become a hostile store, with any names, sizes, times, order and notes. Everything
//! that reads a prefix runs on it. Used by tests/fuzz and tests/serverless/fuzz_corpus.rs.

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use deltafold::backup::{Catalog, ListedObject, retention};
use deltafold::ops::copy::plan::Selection;
use deltafold::ops::{self};
use deltafold::prefix::{Context, identity};
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::lock::Lock;
use deltafold::store::{Folder, Keys, LOCKS, Store};
use deltafold::{Reason, Result};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Extensions, GetOptions, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult,
};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Duration;
use tokio::runtime::Runtime;

/// A command that takes longer has hung.
const HANGS: Duration = Duration::from_secs(60);

/// The input, byte by byte, followed by zeros.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        let Some((&b, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        b
    }
}

/// A valid full and a valid delta, with their names.
const SOUND: [(&str, &[u8]); 2] = [
    (
        "Full-00000000-00000275-1795228239.gz",
        include_bytes!("../../fixtures/kubernetes/v2/Full-00000000-00000275-1795228239.gz"),
    ),
    (
        "Incr-00000605-00000616-1795228319.gz",
        include_bytes!("../../fixtures/kubernetes/v2/Incr-00000605-00000616-1795228319.gz"),
    ),
];

/// Notes that an attacker might write.
const NOTES: [&str; 9] = [
    "",
    "{",
    r#"{"clusterId":"cdf818194e3a8c32","memberNames":["../../etc"],"recordedAt":"\u001b[2J","formerClusterIds":["1"]}"#,
    r#"{"clusterId":"../x"}"#,
    r#"{"removedAt":"+262142-12-31T23:59:59Z","reason":"late"}"#,
    r#"{"removedAt":"-262143-01-01T00:00:00Z","reason":"early"}"#,
    r#"{"pinnedAt":"+262142-12-31T23:59:59Z","reason":"\n\u001b]0;x\u0007"}"#,
    r#"{"holderIdentity":"x","acquireTime":"-262143-01-01T00:00:00Z","renewTime":"+262142-12-31T23:59:59.999999Z","leaseDurationSeconds":4294967295,"leaseTransitions":4294967295,"token":""}"#,
    r#"{"holderIdentity":"","acquireTime":"2026-01-01T00:00:00Z","renewTime":"+262142-12-31T23:59:59.999999Z","leaseDurationSeconds":0,"leaseTransitions":4294967295,"token":""}"#,
];

/// An object as the store lists it, and its content.
struct HostileObject {
    meta: ObjectMeta,
    content: Vec<u8>,
}

/// A store that lists anything. It keeps what is written to it.
struct Hostile {
    objects: Mutex<Vec<HostileObject>>,
    calls: AtomicUsize,
}

impl fmt::Debug for Hostile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hostile")
    }
}

impl fmt::Display for Hostile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hostile")
    }
}

impl Hostile {
    /// Counts a call.
    fn objects(&self) -> MutexGuard<'_, Vec<HostileObject>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.objects.lock().expect("a lock")
    }

    fn below(&self, prefix: Option<&Path>) -> Vec<ObjectMeta> {
        let objects = self.objects();
        let all = objects.iter().map(|o| o.meta.clone());
        all.filter(|meta| prefix.is_none_or(|p| meta.location.prefix_matches(p)))
            .collect()
    }
}

#[async_trait]
impl ObjectStore for Hostile {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        let e_tag = Some(self.calls.load(Ordering::Relaxed).to_string());
        let mut objects = self.objects();
        let there = objects.iter().any(|o| o.meta.location == *path);
        if there && matches!(options.mode, PutMode::Create) {
            return Err(object_store::Error::AlreadyExists {
                path: path.to_string(),
                source: "it is there".into(),
            });
        }
        objects.retain(|o| o.meta.location != *path);
        let content: Vec<u8> = payload.iter().flatten().copied().collect();
        objects.push(HostileObject {
            meta: ObjectMeta {
                location: path.clone(),
                last_modified: Utc::now(),
                size: content.len() as u64,
                e_tag: e_tag.clone(),
                version: None,
            },
            content,
        });
        Ok(PutResult {
            e_tag,
            version: None,
            extensions: Extensions::default(),
        })
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        _: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        drop(self.objects());
        Err(missing(path))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        let objects = self.objects();
        let told = objects.iter().find(|o| o.meta.location == *path);
        let HostileObject { meta, content } = told.ok_or_else(|| missing(path))?;
        options.check_preconditions(meta)?;
        let range = match options.range {
            Some(range) => range.as_range(meta.size).map_err(|_| missing(path))?,
            None => 0..meta.size,
        };
        let from = usize::try_from(range.start).map_or(content.len(), |n| n.min(content.len()));
        let body = content[from..].to_vec();
        Ok(GetResult {
            payload: GetResultPayload::Stream(stream::iter([Ok(body.into())]).boxed()),
            meta: meta.clone(),
            range,
            attributes: Attributes::default(),
            extensions: Extensions::default(),
        })
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        drop(self.objects());
        paths
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        stream::iter(self.below(prefix).into_iter().map(Ok)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        Ok(ListResult {
            objects: self.below(prefix),
            common_prefixes: Vec::new(),
            extensions: Extensions::default(),
        })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> object_store::Result<()> {
        drop(self.objects());
        Ok(())
    }
}

fn missing(path: &Path) -> object_store::Error {
    object_store::Error::NotFound {
        path: path.to_string(),
        source: "it is not there".into(),
    }
}

/// Decodes the objects of a store: numbers, then text for names, sizes, times, order and contents.
fn hostile(bytes: &mut Bytes<'_>) -> Vec<HostileObject> {
    const FOLDERS: [&str; 12] = [
        "v2",
        "v2",
        "v1/Backup-1795228239",
        "v1/Backup-99999999999999999999",
        "v2/deeper/still",
        "deltafold-timelines",
        "deltafold-pins",
        "deltafold-verified",
        "deltafold-staging",
        "deltafold-locks",
        "..",
        "",
    ];
    const NUMBERS: [i64; 8] = [0, 1, 275, 276, 605, 616, i64::MAX - 1, i64::MAX];
    const SECONDS: [i64; 8] = [
        0,
        1_795_228_239,
        1_795_228_319,
        // The last millisecond that chrono can represent, and the one after it.
        8_210_266_876_799,
        8_210_266_876_800,
        -8_334_601_228_800,
        i64::MAX,
        i64::MIN,
    ];
    const SIZES: [u64; 6] = [0, 1, 1 << 33, i64::MAX as u64, u64::MAX - 1, u64::MAX];
    const RAW: [&str; 10] = [
        "deltafold-identity.json",
        "gc.json",
        "..",
        ".",
        "a//b",
        "new\nline",
        "\u{1b}[2J",
        "%2e%2e%2f",
        "..\\x",
        "x#1",
    ];
    let mut objects = Vec::new();
    let count = bytes.next() % 16;
    let mut picks: Vec<[u8; 8]> = Vec::new();
    for _ in 0..count {
        picks.push(std::array::from_fn(|_| bytes.next()));
    }
    let rest = bytes.0;
    let text = String::from_utf8_lossy(rest);
    for [folder, kind, a, b, c, size, at, content] in picks {
        let pick = |n: u8| NUMBERS[usize::from(n) % NUMBERS.len()];
        let created = SECONDS[usize::from(c) % SECONDS.len()];
        let sound = SOUND[usize::from(kind) % 2];
        let suffix = ["", ".gz", ".zst", ".gz.age", ".gz.final", ".exclude"][usize::from(c) % 6];
        let name = match kind % 8 {
            0 | 1 => sound.0.to_owned(),
            2 => format!("Full-00000000-{:08}-{created}{suffix}", pick(b)),
            3 => format!("Incr-{:08}-{:08}-{created}{suffix}", pick(a), pick(b)),
            4 => RAW[usize::from(a) % RAW.len()].to_owned(),
            5 => format!("{}.exclude", sound.0),
            6 => format!("{}.{:016x}.{a}.{b}.{:016x}", sound.0, pick(a), pick(b)),
            _ => text.chars().take(usize::from(a)).collect(),
        };
        let folder = FOLDERS[usize::from(folder) % FOLDERS.len()];
        let content = match content % 4 {
            0 => SOUND[usize::from(kind) % 2].1.to_vec(),
            1 => SOUND[usize::from(a) % 2].1.to_vec(),
            2 => NOTES[usize::from(b) % NOTES.len()].into(),
            _ => rest.to_vec(),
        };
        let key = format!("{folder}/{name}");
        let time = SECONDS[usize::from(at) % SECONDS.len()];
        objects.push(HostileObject {
            meta: ObjectMeta {
                // A name that object_store refuses never reaches the program.
                location: Path::parse(&key).unwrap_or_else(|_| Path::from(key)),
                last_modified: DateTime::from_timestamp(time, 0)
                    .unwrap_or(DateTime::<Utc>::MAX_UTC),
                size: match size % 3 {
                    0 => SIZES[usize::from(size) % SIZES.len()],
                    _ => content.len() as u64,
                },
                e_tag: None,
                version: None,
            },
            content,
        });
    }
    objects
}

/// Runs every operation that reads a prefix on a hostile store.
pub fn listings_and_notes(data: &[u8]) {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("a runtime"));
    let mut bytes = Bytes(data);
    let what = bytes.next() % 8;
    let mut objects = hostile(&mut bytes);
    if what == 5 {
        // A foreign lock would be waited for, up to an hour.
        objects.retain(|o| !o.meta.location.as_ref().starts_with(LOCKS));
    }
    names_stay_in_their_folders(&objects, bytes.0);
    let count = objects.len();
    let hostile = Arc::new(Hostile {
        objects: Mutex::new(objects),
        calls: AtomicUsize::new(0),
    });
    let outside = tempfile::tempdir().expect("a folder");
    let target = outside.path().join("target");
    std::fs::create_dir(&target).expect("a folder");
    let handle = RUNTIME.handle().clone();
    let context = |store: Store| Context {
        store,
        temp_dir: std::env::temp_dir(),
        threads: 1,
        keys: Keys::default(),
        trust: Default::default(),
        limits: Default::default(),
        marks: Default::default(),
    };
    let from = context(Store::new(
        hostile.clone(),
        Path::default(),
        "hostile://bucket".to_owned(),
        ExcludeTags::none(),
        handle.clone(),
    ));
    let folder = Folder::from(target.clone());
    let to = Store::new(
        Arc::new(folder.clone()),
        Path::default(),
        target.display().to_string(),
        ExcludeTags::none(),
        handle,
    );
    let to = context(to.with_local_root(folder));
    let cancel = from.store.cancel().clone();
    let hangs = RUNTIME.spawn(async move {
        tokio::time::sleep(HANGS).await;
        cancel.cancel();
    });
    let done = match what {
        0 => identity::read(&from.store).map(|_| ()),
        1 => list(&from, false),
        2 => list(&from, true),
        3 => verify(&from),
        4 => collect(&from, false),
        5 => collect(&from, true),
        6 => take_lock(&from.store),
        _ => copy_all(&from, &to),
    };
    hangs.abort();
    if let Err(e) = done {
        let ours = [Reason::Internal, Reason::Terminated];
        assert!(!ours.contains(&e.reason()), "{}: {e}", e.reason());
    }
    let calls = hostile.calls.load(Ordering::Relaxed);
    assert!(
        calls <= 60 + 40 * count,
        "{calls} calls for {count} objects"
    );
    let names = |folder: &std::path::Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let names = entries.map(|e| e.expect("an entry").file_name());
        names.map(|n| n.to_string_lossy().into_owned()).collect()
    };
    assert_eq!(names(outside.path()), ["target"], "it left the folder");
    let known = [
        "v1",
        "v2",
        "deltafold-timelines",
        "deltafold-pins",
        "deltafold-staging",
        "deltafold-identity.json",
    ];
    for name in names(&target) {
        assert!(known.contains(&&*name), "{name}");
    }
}

/// Asserts that a catalog accepts any text, and that a snapshot's path stays in its folder.
fn names_stay_in_their_folders(objects: &[HostileObject], rest: &[u8]) {
    let text = String::from_utf8_lossy(rest);
    let raw = ["v2/", "v1/Backup-1/", "v2/../", "../", "/", ""].map(|at| format!("{at}{text}"));
    let told = objects
        .iter()
        .map(|o| (o.meta.location.to_string(), o.meta.size));
    let raw = raw.into_iter().map(|path| (path, 0));
    let listing = told
        .chain(raw)
        .map(|(path, bytes)| ListedObject { path, bytes });
    let catalog = Catalog::from_listing(listing.collect());
    for s in &catalog.snapshots {
        let parts: Vec<&str> = s.path.split('/').collect();
        assert!(matches!(parts[..], ["v2", _] | ["v1", _, _]), "{}", s.path);
        assert!(
            !parts.iter().any(|p| matches!(*p, "" | "." | "..")),
            "{}",
            s.path
        );
        assert!(!s.path.contains(char::is_control), "{:?}", s.path);
    }
}

fn list(ctx: &Context, deep: bool) -> Result<()> {
    ops::list::run(ctx, ops::list::Options { deep }).map(|_| ())
}

fn verify(ctx: &Context) -> Result<()> {
    let options = ops::verify::store::Options {
        level: ops::verify::store::Level::Checksums,
        all_chains: true,
        timeline: None,
        drill: None,
        record: false,
    };
    ops::verify::store::run(ctx, &options).map(|_| ())
}

fn collect(ctx: &Context, apply: bool) -> Result<()> {
    let options = ops::gc::Options {
        retention: retention::Options {
            policy: retention::Policy::Limit(1),
            delta_retention: Some(TimeDelta::days(1)),
            restorable_window: Some(TimeDelta::days(3)),
        },
        staging_age: TimeDelta::hours(24),
        apply,
        allow_shrink: true,
        timeout: Duration::from_secs(3600),
        lock_lease: None,
        single_writer: true,
    };
    ops::gc::run(ctx, &options).map(|_| ())
}

fn take_lock(store: &Store) -> Result<()> {
    let mut lock = Lock::new(store, "gc", "fuzzer", Duration::from_secs(30))?;
    lock.try_acquire().map(|_| ())
}

fn copy_all(from: &Context, to: &Context) -> Result<()> {
    let options = ops::copy::Options {
        selection: Selection {
            excluded: true,
            ..Selection::default()
        },
        parallel: 1,
        wait_for_final: None,
        interval: Duration::from_secs(1),
        series: None,
        take_over: false,
        dry_run: false,
    };
    ops::copy::run(from, to, &options).map(|_| ())
}
