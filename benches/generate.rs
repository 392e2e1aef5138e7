//! Buckets in the real format, made from a seed: what the benches fold.

use chrono::{DateTime, TimeDelta, Utc};
use deltafold::backup::events::{EventRef, encode_event};
use deltafold::bolt::{TreeBuilder, Writer, write_file};
use deltafold::mvcc::{Change, KeyValue, RecordKey, Revision};
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// Counted up when what is made changes.
const GENERATOR: u32 = 6;
/// So many of the first keys are never deleted: something can be asked for at any time.
const LASTING: usize = 20;
/// When all buckets end; the deltas of long ones lie before.
pub const END: i64 = 1_795_224_681;

/// When a delta ends.
#[derive(Debug, Clone, Copy)]
pub enum Cut {
    /// After so many bytes of values.
    Bytes(u64),
    /// After so many events.
    Events(usize),
}

/// What a bucket is made of.
#[derive(Debug, Clone)]
pub struct Shape {
    pub name: &'static str,
    pub keys_in_base: usize,
    /// Changes in all deltas together.
    pub changes: usize,
    pub value_bytes: RangeInclusive<usize>,
    /// Of the base's values, if they are others.
    pub base_bytes: Option<RangeInclusive<usize>>,
    /// Of a hundred changes how many create a new key, and how many delete one.
    pub inserts: u32,
    pub deletes: u32,
    /// Of a hundred revisions how many are transactions of several changes.
    pub transactions: u32,
    /// Whether the base is compressed too.
    pub packed_base: bool,
    pub delta: Cut,
    /// Milliseconds from one event to the next.
    pub step: i64,
    /// Snapshotters that wrote side by side: deltas of the same events, cut elsewhere.
    pub streams: usize,
}

/// Lease renewals.
pub const LEASE: Shape = Shape {
    name: "lease",
    keys_in_base: 2_000,
    changes: 400_000,
    value_bytes: 100..=400,
    base_bytes: None,
    inserts: 0,
    deletes: 0,
    transactions: 0,
    packed_base: true,
    // As etcd-backup-restore has it.
    delta: Cut::Bytes(100 << 20),
    step: 1,
    streams: 1,
};
/// Pods that come, change and go.
pub const CHURN: Shape = Shape {
    name: "churn",
    keys_in_base: 10_000,
    changes: 150_000,
    value_bytes: 1024..=4096,
    inserts: 10,
    deletes: 10,
    transactions: 5,
    ..LEASE
};
/// As `churn`, on keys that stay.
pub const STEADY: Shape = Shape {
    name: "steady",
    inserts: 0,
    deletes: 0,
    ..CHURN
};
/// Mostly new keys.
pub const INSERT: Shape = Shape {
    name: "insert",
    keys_in_base: 1_000,
    changes: 100_000,
    value_bytes: 1024..=4096,
    inserts: 95,
    ..LEASE
};
/// Values of 8 MiB, far above what etcd takes by default.
pub const LONG: Shape = Shape {
    name: "long",
    keys_in_base: 4,
    changes: 120,
    value_bytes: 8 << 20..=8 << 20,
    inserts: 5,
    ..LEASE
};
/// A full of 8 GB, and little that changes.
pub const LARGE: Shape = Shape {
    name: "large",
    keys_in_base: 2_600_000,
    changes: 20_000,
    value_bytes: 2048..=4096,
    inserts: 10,
    deletes: 5,
    packed_base: false,
    ..LEASE
};
/// 90 days of deltas, one each five minutes.
pub const WIDE: Shape = Shape {
    name: "wide",
    keys_in_base: 2_000,
    changes: 26_000 * 20,
    value_bytes: 100..=300,
    inserts: 2,
    deletes: 2,
    delta: Cut::Events(20),
    step: 15_000,
    ..LEASE
};

impl Shape {
    /// A full without compression, and no deltas.
    pub fn plain_base(
        name: &'static str,
        keys: usize,
        value_bytes: RangeInclusive<usize>,
    ) -> Shape {
        Shape {
            name,
            keys_in_base: keys,
            changes: 0,
            value_bytes,
            packed_base: false,
            ..LEASE
        }
    }

    /// The same with `n` times the changes.
    pub fn times(&self, n: usize, name: &'static str) -> Shape {
        Shape {
            name,
            changes: self.changes * n,
            ..self.clone()
        }
    }

    /// When the base was taken.
    pub fn start(&self) -> i64 {
        END - self.changes as i64 * self.step / 1000
    }

    /// The name of a key that is in the base.
    pub fn key(&self, number: usize) -> String {
        key_name(self, number)
    }
}

struct Key {
    number: usize,
    create: i64,
    version: i64,
}

/// Words that come again and again between bytes that do not, so that it compresses to about a
/// half, as the objects of Kubernetes do in the fixtures.
pub fn value(rng: &mut fastrand::Rng, len: usize, out: &mut Vec<u8>) {
    const WORDS: [&str; 24] = [
        "{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\"metadata\":{\"name\":\"",
        "\",\"namespace\":\"kube-system\",\"uid\":\"",
        "\"},\"spec\":{\"volumes\":[{\"name\":\"kube-api-access-",
        "\",\"projected\":{\"sources\":[{\"serviceAccountToken\":{\"expirationSeconds\":3607",
        "\"containers\":[{\"name\":\"",
        "\",\"image\":\"registry.example/team/service:v1.",
        "\"resources\":{\"limits\":{\"cpu\":\"500m\",\"memory\":\"256Mi\"}},",
        "\"terminationMessagePath\":\"/dev/termination-log\",",
        "\"imagePullPolicy\":\"IfNotPresent\",",
        "\"status\":{\"phase\":\"Running\",\"conditions\":[",
        "{\"type\":\"Ready\",\"status\":\"True\",\"lastProbeTime\":null,",
        "\"lastTransitionTime\":\"2026-11-20T0",
        "\"containerID\":\"containerd://",
        "\"restartCount\":0,\"ready\":true,\"started\":true",
        "\"managedFields\":[{\"manager\":\"kubelet\",\"operation\":\"Update\",",
        "\"f:conditions\":{\".\":{},\"k:{\\\"type\\\":\\\"Ready\\\"}\":{",
        "\"hostIP\":\"10.88.",
        "\"podIP\":\"10.244.",
        "\"nodeName\":\"worker-",
        "\"tolerations\":[{\"key\":\"node.kubernetes.io/not-ready\",",
        "\"labels\":{\"app\":\"",
        "\"annotations\":{\"checksum/config\":\"",
        "\"ownerReferences\":[{\"apiVersion\":\"apps/v1\",\"kind\":\"ReplicaSet\",",
        "\"schedulerName\":\"default-scheduler\",",
    ];
    out.clear();
    while out.len() < len {
        out.extend_from_slice(WORDS[rng.usize(..WORDS.len())].as_bytes());
        let at = out.len();
        out.resize(at + rng.usize(24..56), 0);
        rng.fill(&mut out[at..]);
    }
    out.truncate(len);
}

fn key_name(shape: &Shape, number: usize) -> String {
    let scrambled = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!(
        "/registry/{}/namespace-{}/object-{scrambled:016x}",
        shape.name,
        number % 50
    )
}

/// Writes a snapshot, compressed with one stream as Go's compress/gzip does, its hash behind it.
fn write_snapshot(path: &Path, gzip: bool, payload: &mut impl Read) -> io::Result<()> {
    let file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    if gzip {
        let packed = GzEncoder::new(file, flate2::Compression::new(6));
        hashed(payload, packed)?.finish()?.flush()
    } else {
        hashed(payload, file)?.flush()
    }
}

fn hashed<W: Write>(payload: &mut impl Read, mut to: W) -> io::Result<W> {
    let mut hash = Sha256::new();
    let mut buf = vec![0; 1 << 20];
    loop {
        let n = payload.read(&mut buf)?;
        if n == 0 {
            to.write_all(hash.finalize().as_slice())?;
            return Ok(to);
        }
        hash.update(&buf[..n]);
        to.write_all(&buf[..n])?;
    }
}

/// A database with the records that `fill` pushes, compacted at a revision unless that is 0; `fill` is called twice.
fn database(
    dir: &Path,
    compacted: i64,
    mut fill: impl FnMut(&mut Writer<'_>, &mut TreeBuilder) -> deltafold::Result<()>,
) -> deltafold::Result<File> {
    let file = tempfile::tempfile_in(dir).map_err(io)?;
    let mut file = write_file(file, 4096, "", |w| {
        let mut tree = TreeBuilder::new(0);
        fill(w, &mut tree)?;
        let key_bucket = tree.finish(w)?;
        let mut root = TreeBuilder::new(0);
        for name in ["alarm", "auth", "authRoles", "authUsers", "cluster"] {
            let empty = TreeBuilder::new(0).finish(w)?;
            root.push_bucket(w, name.as_bytes(), &empty)?;
        }
        root.push_bucket(w, b"key", &key_bucket)?;
        for name in ["lease", "members", "members_removed"] {
            let empty = TreeBuilder::new(0).finish(w)?;
            root.push_bucket(w, name.as_bytes(), &empty)?;
        }
        let mut meta = TreeBuilder::new(0);
        if compacted > 0 {
            let mut at = Vec::new();
            record_key(compacted).encode(&mut at);
            for name in ["finishedCompactRev", "scheduledCompactRev"] {
                meta.push(w, name.as_bytes(), &at)?;
            }
        }
        let meta = meta.finish(w)?;
        root.push_bucket(w, b"meta", &meta)?;
        Ok(root)
    })?;
    io::Seek::rewind(&mut file).map_err(io)?;
    Ok(file)
}

fn record_key(revision: i64) -> RecordKey {
    RecordKey {
        main: Revision(revision),
        sub: 0,
        tombstone: false,
    }
}

fn push_record(
    w: &mut Writer<'_>,
    tree: &mut TreeBuilder,
    kv: &KeyValue<'_>,
) -> deltafold::Result<()> {
    let (mut key, mut record) = (Vec::new(), Vec::new());
    kv.encode(&mut record);
    record_key(kv.mod_revision.0).encode(&mut key);
    tree.push(w, &key, &record)
}

/// The deltas of one snapshotter.
struct Stream {
    v2: PathBuf,
    cut: Cut,
    /// Events after which the first delta ends, if it is a shorter one.
    short: Option<usize>,
    payload: Vec<u8>,
    first: i64,
    bytes: u64,
    events: usize,
    /// Large ones are compressed beside the making.
    waiting: Vec<JoinHandle<io::Result<()>>>,
}

impl Stream {
    /// Takes the events of a revision; `at` is when the next one comes.
    fn push(
        &mut self,
        revision: i64,
        events: &[Vec<u8>],
        bytes: u64,
        at: i64,
    ) -> deltafold::Result<()> {
        if self.events == 0 {
            self.first = revision;
        }
        for event in events {
            self.payload
                .push(if self.payload.is_empty() { b'[' } else { b',' });
            self.payload.extend_from_slice(event);
        }
        self.events += events.len();
        self.bytes += bytes;
        let is_full = match (self.short, self.cut) {
            (Some(most), _) | (None, Cut::Events(most)) => self.events >= most,
            (None, Cut::Bytes(most)) => self.bytes >= most,
        };
        if is_full {
            self.end(revision, at)
        } else {
            Ok(())
        }
    }

    fn end(&mut self, last: i64, at: i64) -> deltafold::Result<()> {
        /// A thread costs more than smaller ones.
        const LARGE: usize = 1 << 20;
        if self.events == 0 {
            return Ok(());
        }
        (self.events, self.bytes, self.short) = (0, 0, None);
        let mut payload = std::mem::take(&mut self.payload);
        payload.push(b']');
        let path = self
            .v2
            .join(format!("Incr-{:08}-{last:08}-{at}.gz", self.first));
        if payload.len() < LARGE {
            return write_snapshot(&path, true, &mut &payload[..]).map_err(io);
        }
        if self.waiting.len() >= 2 {
            join(self.waiting.remove(0))?;
        }
        let packing = move || write_snapshot(&path, true, &mut &payload[..]);
        self.waiting.push(std::thread::spawn(packing));
        Ok(())
    }
}

fn join(w: JoinHandle<io::Result<()>>) -> deltafold::Result<()> {
    w.join()
        .map_err(|_| deltafold::Error::internal("a thread that compresses panicked"))?
        .map_err(io)
}

fn io(e: io::Error) -> deltafold::Error {
    deltafold::Error::io("generate a bucket", e)
}

/// When an event of a bucket was seen, in seconds and milliseconds of them.
fn moment(shape: &Shape, event: usize) -> (i64, DateTime<Utc>) {
    let since = TimeDelta::milliseconds(event as i64 * shape.step);
    let at = DateTime::from_timestamp(shape.start(), 0).unwrap_or_default() + since;
    (at.timestamp(), at)
}

/// An empty bucket's `v2`.
fn new_folder(dir: &Path) -> deltafold::Result<PathBuf> {
    let _ = fs::remove_dir_all(dir);
    let v2 = dir.join("v2");
    fs::create_dir_all(&v2).map_err(io)?;
    Ok(v2)
}

/// Makes the bucket in `dir`, unless it is there. Gives the number of keys that its deltas touch,
/// and their bytes.
pub fn bucket(dir: &Path, shape: &Shape) -> deltafold::Result<(u64, u64)> {
    let done = dir.join("made");
    let made_of = format!("{GENERATOR} {shape:?}");
    if let Ok(made) = fs::read_to_string(&done)
        && let Some(touched) = made.strip_prefix(&made_of)
        && let Some((keys, bytes)) = touched.trim().split_once(' ')
        && let (Ok(keys), Ok(bytes)) = (keys.parse(), bytes.parse())
    {
        return Ok((keys, bytes));
    }
    eprintln!("making the bucket {} …", shape.name);
    let v2 = new_folder(dir)?;
    let mut rng = fastrand::Rng::with_seed(20_261_121);
    let mut text = Vec::new();
    let pick = |rng: &mut fastrand::Rng| rng.usize(shape.value_bytes.clone());

    let mut keys = Vec::new();
    let mut revision = 1;
    let start = rng.clone();
    let mut file = database(dir, 0, |w, tree| {
        (rng, revision) = (start.clone(), 1);
        keys.clear();
        for number in 0..shape.keys_in_base {
            revision += 1;
            let len = rng.usize(
                shape
                    .base_bytes
                    .clone()
                    .unwrap_or(shape.value_bytes.clone()),
            );
            value(&mut rng, len, &mut text);
            let name = key_name(shape, number);
            let kv = KeyValue {
                key: name.as_bytes(),
                create_revision: Revision(revision),
                mod_revision: Revision(revision),
                version: 1,
                value: &text,
                lease: 0,
            };
            push_record(w, tree, &kv)?;
            keys.push(Key {
                number,
                create: revision,
                version: 1,
            });
        }
        Ok(())
    })?;
    let suffix = if shape.packed_base { ".gz" } else { "" };
    let name = format!("Full-00000000-{revision:08}-{}{suffix}", shape.start());
    write_snapshot(&v2.join(name), shape.packed_base, &mut file).map_err(io)?;

    let stream = |number| Stream {
        v2: v2.clone(),
        cut: shape.delta,
        short: match shape.delta {
            Cut::Events(most) if number > 0 => Some(most * number / shape.streams),
            _ => None,
        },
        payload: Vec::new(),
        first: 0,
        bytes: 0,
        events: 0,
        waiting: Vec::new(),
    };
    let mut streams: Vec<Stream> = (0..shape.streams).map(stream).collect();
    let mut touched_numbers = std::collections::HashSet::new();
    let (mut made, mut next_number) = (0, shape.keys_in_base);
    while made < shape.changes {
        revision += 1;
        let several = rng.u32(..100) < shape.transactions;
        let changes = if several { rng.usize(2..=8) } else { 1 };
        let (mut touched, mut events, mut bytes) = (Vec::new(), Vec::new(), 0);
        for _ in 0..changes {
            let dice = rng.u32(..100);
            let at = if dice < shape.inserts || keys.len() < 3 {
                keys.push(Key {
                    number: next_number,
                    create: revision,
                    version: 0,
                });
                next_number += 1;
                keys.len() - 1
            } else {
                loop {
                    let at = rng.usize(..keys.len());
                    // A transaction changes a key once.
                    if !touched.contains(&keys[at].number) {
                        break at;
                    }
                }
            };
            let number = keys[at].number;
            let deletes = shape.inserts..shape.inserts + shape.deletes;
            let is_deleted = deletes.contains(&dice) && number >= LASTING;
            touched.push(number);
            touched_numbers.insert(number);
            let name = key_name(shape, number);
            let key = name.as_bytes();
            let change = if is_deleted && keys[at].version > 0 {
                keys.swap_remove(at);
                Change::Delete { key }
            } else {
                keys[at].version += 1;
                let len = pick(&mut rng);
                value(&mut rng, len, &mut text);
                bytes += len as u64;
                Change::Put(KeyValue {
                    key,
                    create_revision: Revision(keys[at].create),
                    mod_revision: Revision(revision),
                    version: keys[at].version,
                    value: &text,
                    lease: 0,
                })
            };
            let main = Revision(revision);
            let mut event = Vec::new();
            encode_event(
                &mut event,
                &EventRef { main, change },
                moment(shape, made).1,
            );
            events.push(event);
            bytes += 1;
            made += 1;
        }
        for stream in &mut streams {
            stream.push(revision, &events, bytes, moment(shape, made).0)?;
        }
    }
    for mut stream in streams {
        stream.end(revision, moment(shape, made).0)?;
        for w in stream.waiting {
            join(w)?;
        }
    }
    let keys = touched_numbers.len() as u64;
    let bytes = touched_numbers
        .iter()
        .map(|&n| key_name(shape, n).len() as u64)
        .sum();
    fs::write(done, format!("{made_of} {keys} {bytes}")).map_err(io)?;
    Ok((keys, bytes))
}

/// Makes a bucket of many names, unless it is there: deltas of one event each, one in five minutes, and fulls between
/// them.
pub fn names(dir: &Path, deltas: usize, fulls: usize) -> deltafold::Result<()> {
    const PERIOD: i64 = 300;
    let (done, made_of) = (dir.join("made"), format!("{GENERATOR} {deltas} {fulls}"));
    if fs::read_to_string(&done).is_ok_and(|made| made == made_of) {
        return Ok(());
    }
    eprintln!("making a bucket of {deltas} deltas and {fulls} fulls …");
    let v2 = new_folder(dir)?;
    let put = |revision| KeyValue {
        key: NAMES_KEY.as_bytes(),
        create_revision: Revision(2),
        mod_revision: Revision(revision),
        version: revision - 1,
        value: b"a value",
        lease: 0,
    };
    for number in 0..=deltas {
        let revision = 2 + number as i64;
        let at = END - (deltas - number) as i64 * PERIOD;
        if number > 0 {
            let event = EventRef {
                main: Revision(revision),
                change: Change::Put(put(revision)),
            };
            let seen = DateTime::from_timestamp(at - 1, 0).unwrap_or_default();
            let mut payload = vec![b'['];
            encode_event(&mut payload, &event, seen);
            payload.push(b']');
            let path = v2.join(format!("Incr-{revision:08}-{revision:08}-{at}.gz"));
            write_snapshot(&path, true, &mut &payload[..]).map_err(io)?;
        }
        if number == 0 || number * fulls / (deltas + 1) > (number - 1) * fulls / (deltas + 1) {
            let push =
                |w: &mut Writer<'_>, tree: &mut TreeBuilder| push_record(w, tree, &put(revision));
            let mut file = database(dir, revision, push)?;
            let path = v2.join(format!("Full-00000000-{revision:08}-{at}.gz"));
            write_snapshot(&path, true, &mut file).map_err(io)?;
        }
    }
    fs::write(done, made_of).map_err(io)
}

/// The only key of such a bucket.
pub const NAMES_KEY: &str = "/registry/leases/a-lease";
