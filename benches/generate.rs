//! Buckets in the real format, made from a seed: what the benches fold.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use deltafold::bolt::{TreeBuilder, write_file};
use deltafold::mvcc::{KeyValue, RecordKey, Revision};
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::ops::RangeInclusive;
use std::path::Path;

/// Bytes of values after which a delta ends, as etcd-backup-restore has it.
const DELTA_VALUES: u64 = 100 << 20;
/// Counted up when what is made changes.
const GENERATOR: u32 = 4;
const T0: i64 = 1_795_224_681;

/// What a bucket is made of.
#[derive(Debug, Clone)]
pub struct Shape {
    pub name: &'static str,
    pub keys_in_base: usize,
    /// Changes in all deltas together.
    pub changes: usize,
    pub value_bytes: RangeInclusive<usize>,
    /// Of a hundred changes how many create a new key, and how many delete one.
    pub inserts: u32,
    pub deletes: u32,
    /// Of a hundred revisions how many are transactions of several changes.
    pub transactions: u32,
    /// Whether the base is compressed too.
    pub packed_base: bool,
}

/// Lease renewals.
pub const LEASE: Shape = Shape {
    name: "lease",
    keys_in_base: 2_000,
    changes: 400_000,
    value_bytes: 100..=400,
    inserts: 0,
    deletes: 0,
    transactions: 0,
    packed_base: true,
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
    packed_base: true,
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
    deletes: 0,
    transactions: 0,
    packed_base: true,
};
/// Values of 8 MiB, far above what etcd takes by default.
pub const LONG: Shape = Shape {
    name: "long",
    keys_in_base: 4,
    changes: 120,
    value_bytes: 8 << 20..=8 << 20,
    inserts: 5,
    deletes: 0,
    transactions: 0,
    packed_base: true,
};
/// A full of 8 GB, and little that changes.
pub const LARGE: Shape = Shape {
    name: "large",
    keys_in_base: 2_600_000,
    changes: 20_000,
    value_bytes: 2048..=4096,
    inserts: 10,
    deletes: 5,
    transactions: 0,
    packed_base: false,
};

impl Shape {
    /// The same with `n` times the changes.
    pub fn times(&self, n: usize, name: &'static str) -> Shape {
        Shape {
            name,
            changes: self.changes * n,
            ..self.clone()
        }
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

/// Compresses with one stream, as Go's compress/gzip does, and hashes.
struct Snapshot {
    packed: Option<GzEncoder<BufWriter<File>>>,
    plain: Option<BufWriter<File>>,
    hash: Sha256,
}

impl Snapshot {
    fn create(path: &Path, gzip: bool) -> io::Result<Self> {
        let file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        let level = flate2::Compression::new(6);
        Ok(if gzip {
            Snapshot {
                packed: Some(GzEncoder::new(file, level)),
                plain: None,
                hash: Sha256::new(),
            }
        } else {
            Snapshot {
                packed: None,
                plain: Some(file),
                hash: Sha256::new(),
            }
        })
    }

    fn raw(&mut self, b: &[u8]) -> io::Result<()> {
        match (&mut self.packed, &mut self.plain) {
            (Some(p), _) => p.write_all(b),
            (_, Some(p)) => p.write_all(b),
            _ => Ok(()),
        }
    }

    fn write(&mut self, b: &[u8]) -> io::Result<()> {
        self.hash.update(b);
        self.raw(b)
    }

    fn finish(mut self) -> io::Result<()> {
        let hash = self.hash.finalize_reset();
        self.raw(hash.as_slice())?;
        if let Some(p) = self.packed {
            p.finish()?.flush()?;
        }
        if let Some(mut p) = self.plain {
            p.flush()?;
        }
        Ok(())
    }
}

fn compress_alone(plain: &Path, packed: &Path) -> io::Result<()> {
    let mut snapshot = Snapshot::create(packed, true)?;
    let mut r = BufReader::new(File::open(plain)?);
    let mut buf = vec![0; 1 << 20];
    loop {
        let n = r.read(&mut buf)?;
        if n == 0 {
            break;
        }
        snapshot.write(&buf[..n])?;
    }
    snapshot.finish()?;
    fs::remove_file(plain)
}

/// Makes the bucket in `dir`, unless it is there. Gives the number of keys that its deltas touch,
/// and their bytes.
pub fn bucket(dir: &Path, shape: &Shape) -> deltafold::Result<(u64, u64)> {
    let io = |e| deltafold::Error::io("generate a bucket", e);
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
    let _ = fs::remove_dir_all(dir);
    let v2 = dir.join("v2");
    fs::create_dir_all(&v2).map_err(io)?;
    let mut rng = fastrand::Rng::with_seed(20_261_121);
    let mut text = Vec::new();
    let pick = |rng: &mut fastrand::Rng| rng.usize(shape.value_bytes.clone());

    let mut keys = Vec::new();
    let mut revision = 1;
    let start = rng.clone();
    let file = tempfile::tempfile_in(dir).map_err(io)?;
    let mut file = write_file(file, 4096, "", |w| {
        // It is laid out twice.
        (rng, revision) = (start.clone(), 1);
        keys.clear();
        let mut tree = TreeBuilder::new(0);
        let (mut raw_key, mut record) = (Vec::new(), Vec::new());
        for number in 0..shape.keys_in_base {
            revision += 1;
            let len = pick(&mut rng);
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
            record.clear();
            kv.encode(&mut record);
            raw_key.clear();
            let rk = RecordKey {
                main: Revision(revision),
                sub: 0,
                tombstone: false,
            };
            rk.encode(&mut raw_key);
            tree.push(w, &raw_key, &record)?;
            keys.push(Key {
                number,
                create: revision,
                version: 1,
            });
        }
        let key_bucket = tree.finish(w)?;
        let mut root = TreeBuilder::new(0);
        for name in ["alarm", "auth", "authRoles", "authUsers", "cluster"] {
            let empty = TreeBuilder::new(0).finish(w)?;
            root.push_bucket(w, name.as_bytes(), &empty)?;
        }
        root.push_bucket(w, b"key", &key_bucket)?;
        for name in ["lease", "members", "members_removed", "meta"] {
            let empty = TreeBuilder::new(0).finish(w)?;
            root.push_bucket(w, name.as_bytes(), &empty)?;
        }
        Ok(root)
    })?;
    let suffix = if shape.packed_base { ".gz" } else { "" };
    let name = format!("Full-00000000-{revision:08}-{T0}{suffix}");
    let mut full = Snapshot::create(&v2.join(name), shape.packed_base).map_err(io)?;
    io::Seek::rewind(&mut file).map_err(io)?;
    let mut buf = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buf).map_err(io)?;
        if n == 0 {
            break;
        }
        full.write(&buf[..n]).map_err(io)?;
    }
    full.finish().map_err(io)?;

    // A delta is written plain first, so that several are compressed at once.
    let mut waiting: Vec<std::thread::JoinHandle<io::Result<()>>> = Vec::new();
    let mut touched_numbers = std::collections::HashSet::new();
    let (mut made, mut next_number, mut delta) = (0, shape.keys_in_base, 0);
    while made < shape.changes {
        delta += 1;
        let plain = dir.join("delta");
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&plain).map_err(io)?);
        let first = revision + 1;
        let mut values = 0u64;
        while made < shape.changes && values < DELTA_VALUES {
            revision += 1;
            let several = rng.u32(..100) < shape.transactions;
            let changes = if several { rng.usize(2..=8) } else { 1 };
            let mut touched = Vec::new();
            for sub in 0..changes {
                let dice = rng.u32(..100);
                let head = if values == 0 && sub == 0 { "[" } else { "," };
                let time = format!(
                    "2026-11-21T09:{:02}:{:02}.{:09}Z",
                    made / 60 % 60,
                    made % 60,
                    made
                );
                let event = if dice < shape.inserts || keys.len() < 3 {
                    let number = next_number;
                    next_number += 1;
                    keys.push(Key {
                        number,
                        create: revision,
                        version: 1,
                    });
                    touched.push(number);
                    Some(keys.len() - 1)
                } else {
                    let at = loop {
                        let at = rng.usize(..keys.len());
                        // A transaction changes a key once.
                        if !touched.contains(&keys[at].number) {
                            break at;
                        }
                    };
                    touched.push(keys[at].number);
                    if dice < shape.inserts + shape.deletes {
                        let gone = keys.swap_remove(at);
                        let key = STANDARD.encode(key_name(shape, gone.number));
                        write!(
                            out,
                            "{head}{{\"etcdEvent\":{{\"type\":1,\"kv\":{{\"key\":\"{key}\",\"mod_revision\":{revision}}}}},\"time\":\"{time}\"}}"
                        )
                        .map_err(io)?;
                        None
                    } else {
                        keys[at].version += 1;
                        Some(at)
                    }
                };
                values += 1;
                touched_numbers.extend(touched.last().copied());
                if let Some(at) = event {
                    let len = pick(&mut rng);
                    value(&mut rng, len, &mut text);
                    values += len as u64;
                    let k = &keys[at];
                    let key = STANDARD.encode(key_name(shape, k.number));
                    let text = STANDARD.encode(&text);
                    let (create, version) = (k.create, k.version);
                    write!(
                        out,
                        "{head}{{\"etcdEvent\":{{\"kv\":{{\"key\":\"{key}\",\"create_revision\":{create},\"mod_revision\":{revision},\"version\":{version},\"value\":\"{text}\"}}}},\"time\":\"{time}\"}}"
                    )
                    .map_err(io)?;
                }
                made += 1;
            }
        }
        out.write_all(b"]").map_err(io)?;
        out.flush().map_err(io)?;
        drop(out);
        let name = format!("Incr-{first:08}-{revision:08}-{}.gz", T0 + delta);
        let this = dir.join(format!("delta-{delta}"));
        fs::rename(&plain, &this).map_err(io)?;
        let packed = v2.join(name);
        if waiting.len() >= 2 {
            join(waiting.remove(0))?;
        }
        waiting.push(std::thread::spawn(move || compress_alone(&this, &packed)));
    }
    for w in waiting {
        join(w)?;
    }
    let keys = touched_numbers.len() as u64;
    let bytes = touched_numbers
        .iter()
        .map(|&n| key_name(shape, n).len() as u64)
        .sum();
    fs::write(done, format!("{made_of} {keys} {bytes}")).map_err(io)?;
    Ok((keys, bytes))
}

fn join(w: std::thread::JoinHandle<io::Result<()>>) -> deltafold::Result<()> {
    w.join()
        .map_err(|_| deltafold::Error::internal("a thread that compresses panicked"))?
        .map_err(|e| deltafold::Error::io("compress a delta", e))
}
