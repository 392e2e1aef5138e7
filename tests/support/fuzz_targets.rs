//! The fuzz targets. Used by tests/fuzz and tests/serverless/fuzz_corpus.rs.
//!
//! Each target takes any bytes and asserts what must always hold.

// Each fuzzer uses one target.
#![allow(dead_code)]

use deltafold::backup::catalog::mark_of;
use deltafold::backup::chain::{self, Choice, KnownBases};
use deltafold::backup::delta::DeltaReader;
use deltafold::backup::frame::{FrameReader, FrameWriter};
use deltafold::backup::survey::{Comparison, Continuity, Held};
use deltafold::backup::timeline::{self, Evidence, NamesOnly, Timeline, Timelines};
use deltafold::backup::{Catalog, Compression, Kind, ListedObject, SnapshotName, codec};
use deltafold::base::ReadAt;
use deltafold::bolt::page::{Meta, PAGE_HEADER_SIZE};
use deltafold::bolt::{
    Bucket, BucketValue, Database, PageBudget, PageId, TreeBuilder, Writer, write_file,
};
use deltafold::cli::table;
use deltafold::mvcc::{Base, KeyValue, Revision, hash_kv};
use deltafold::objects::columns::Column;
use deltafold::objects::json_path::JsonPath;
use deltafold::objects::resource::Resource;
use deltafold::objects::{EncryptionKeys, Object, yaml};
use deltafold::{Error, Reason, Result};
use serde_json::{Value, json};
use std::cell::Cell;
use std::io::{self, Read, Write};

/// The page size of the files under test: the smallest one, so that inputs stay small.
const PAGE: usize = 1024;

/// Bytes that count how many of them were read.
struct Counted {
    bytes: Vec<u8>,
    read: Cell<usize>,
}

impl ReadAt for Counted {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read.set(self.read.get() + buf.len());
        self.bytes.read_exact_at(buf, offset)
    }
    fn size(&self) -> io::Result<u64> {
        self.bytes.size()
    }
}

/// Input: a byte of switches, then a bbolt file. Opens the file, reads everything that `compact` reads, and
/// rewrites it.
pub fn bbolt_reader(data: &[u8]) {
    let Some((&switches, file)) = data.split_first() else {
        return;
    };
    let mut bytes = file[..file.len().min(48 * PAGE)].to_vec();
    // A mutation never hits a checksum and seldom a page number. Repair them, so that the rest is tested.
    if switches & 1 != 0 {
        mend(&mut bytes, switches & 2 != 0, switches & 4 != 0);
    }
    let size = bytes.len();
    let read = Cell::new(0);
    let src = Counted { bytes, read };
    let Ok(db) = Database::open(&src) else {
        return;
    };
    let sum = hash_kv(&db, None);
    if let Ok(base) = Base::read(&db) {
        // A revision in the middle takes another path through the keys.
        let within = (base.first_revision().0 / 2).saturating_add(base.revision.0 / 2);
        let _ = hash_kv(&db, Some(Revision(within)));
    }
    let mut entries = Vec::new();
    let walked = walk(&db, &db.root(), &db.page_budget(), 0, &mut entries);
    let copied = rewrite(&db);
    // No walk reads a page twice, so the walks above read a small multiple of the file.
    let most = 32 * size + 4096;
    assert!(src.read.get() <= most, "{} of {size}", src.read.get());
    let held: usize = entries.iter().map(Entry::bytes).sum();
    assert!(held <= size, "{held} bytes of entries in a file of {size}");
    let copy = match (walked, copied) {
        (Ok(()), Ok(copy)) => copy,
        (Err(a), Err(b)) => {
            assert_eq!(
                (a.reason(), b.reason()),
                (Reason::CorruptSnapshot, Reason::CorruptSnapshot)
            );
            return;
        }
        (a, b) => panic!("walked: {a:?}, rewritten: {:?}", b.err()),
    };
    let copy = Database::open(copy).expect("what was written opens");
    let mut again = Vec::new();
    walk(&copy, &copy.root(), &copy.page_budget(), 0, &mut again).expect("and is read");
    assert!(entries == again, "the copy holds something else");
    match (sum, hash_kv(&copy, None)) {
        (Ok(a), Ok(b)) => assert_eq!(a, b),
        (Err(a), Err(b)) => assert_eq!(a.reason(), b.reason()),
        (a, b) => panic!("HashKV was {a:?}, of the copy it is {b:?}"),
    }
}

/// Makes both meta pages valid. Optionally corrects their size and the numbers of all pages.
fn mend(bytes: &mut Vec<u8>, size: bool, numbers: bool) {
    bytes.resize(bytes.len().next_multiple_of(PAGE).max(4 * PAGE), 0);
    let pages = bytes.len() / PAGE;
    for page in bytes.chunks_exact_mut(PAGE).take(2) {
        let at = |i: usize| {
            let word = page[PAGE_HEADER_SIZE + i..][..8].try_into();
            u64::from_le_bytes(word.expect("8 bytes"))
        };
        let high_water = if size { pages as u64 } else { at(40) };
        let meta = Meta {
            page_size: PAGE as u32,
            root: PageId(at(16)),
            sequence: at(24),
            freelist: PageId(at(32)),
            high_water: PageId(high_water),
            txid: at(48),
        };
        meta.encode(&mut page[PAGE_HEADER_SIZE..]);
    }
    if numbers {
        for (i, page) in bytes.chunks_exact_mut(PAGE).enumerate().skip(2) {
            page[..8].copy_from_slice(&(i as u64).to_le_bytes());
        }
    }
}

#[derive(PartialEq)]
enum Entry {
    Value(usize, Vec<u8>, Vec<u8>),
    /// A nested bucket and its sequence.
    Bucket(usize, Vec<u8>, u64),
}

impl Entry {
    fn bytes(&self) -> usize {
        match self {
            Entry::Value(_, key, value) => key.len() + value.len(),
            Entry::Bucket(_, key, _) => key.len(),
        }
    }
}

/// `compact` follows nested buckets to this depth.
const MAX_NESTING: usize = 16;

fn too_deep(depth: usize) -> Result<()> {
    match depth > MAX_NESTING {
        true => Err(Error::corrupt("buckets are nested without end")),
        false => Ok(()),
    }
}

fn walk<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    budget: &PageBudget,
    depth: usize,
    entries: &mut Vec<Entry>,
) -> Result<()> {
    too_deep(depth)?;
    let mut c = db.cursor_within(bucket, budget);
    while let Some(e) = c.next()? {
        if e.is_bucket() {
            let bucket = Bucket::decode(e.value)?;
            entries.push(Entry::Bucket(depth, e.key.to_vec(), bucket.sequence));
            walk(db, &bucket, budget, depth + 1, entries)?;
        } else {
            entries.push(Entry::Value(depth, e.key.to_vec(), e.value.to_vec()));
        }
    }
    Ok(())
}

fn rewrite<R: ReadAt>(db: &Database<R>) -> Result<std::fs::File> {
    let file = tempfile::tempfile().expect("a temporary file");
    write_file(file, PAGE, "", |w| {
        let mut root = TreeBuilder::new(db.meta().sequence);
        fill(db, &db.root(), &db.page_budget(), w, 0, &mut root)?;
        Ok(root)
    })
}

fn fill<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    budget: &PageBudget,
    writer: &mut Writer<'_>,
    depth: usize,
    tree: &mut TreeBuilder,
) -> Result<()> {
    too_deep(depth)?;
    let mut c = db.cursor_within(bucket, budget);
    while let Some(e) = c.next()? {
        if !e.is_bucket() {
            tree.push(writer, e.key, e.value)?;
            continue;
        }
        let nested = Bucket::decode(e.value)?;
        let mut below = TreeBuilder::new(nested.sequence);
        fill(db, &nested, budget, writer, depth + 1, &mut below)?;
        let value: BucketValue = below.finish(writer)?;
        tree.push_bucket(writer, e.key, &value)?;
    }
    Ok(())
}

/// Input: switches, the first revision and the number of revisions in the name, a place to damage; then a
/// delta's payload. Reads the payload as it is, as compressed bytes, and compressed by us, whole and damaged.
pub fn delta_parser(data: &[u8]) {
    let Some(([switches, start, more, at, bit], payload)) = data.split_first_chunk() else {
        return;
    };
    let compression = Compression::ALL[usize::from(switches % 5)];
    let start = 1 + i64::from(*start);
    let name = SnapshotName {
        kind: Kind::Incr,
        start: Revision(start),
        last: Revision(start + i64::from(*more)),
        created: 1,
        compression,
        is_final: false,
        is_encrypted: false,
    };
    let plain = drain(payload, &name);
    // A small buffer crosses every boundary.
    assert_eq!(
        drain(Slow(payload, 1 + usize::from(switches >> 5)), &name),
        plain
    );

    let unpack = |packed: &[u8]| -> Result<u64, String> {
        let src = codec::decoder(compression, packed).map_err(|e| e.to_string())?;
        drain(FrameReader::new(src), &name)
    };
    let _ = unpack(payload);
    if matches!(compression, Compression::Lzw | Compression::Zlib) {
        // They are only read.
        return;
    }
    let packed = codec::encoder(compression.into(), 1, Vec::new()).expect("an encoder");
    let mut framed = FrameWriter::new(packed);
    framed.write_all(payload).expect("to memory");
    let packed = framed.finish().and_then(codec::Encoder::finish);
    let mut packed = packed.expect("to memory");
    assert_eq!(unpack(&packed), plain);
    let at = usize::from(*at) * packed.len() / 256;
    packed[at] ^= 1 << (bit % 8);
    if let Ok(events) = unpack(&packed) {
        assert_eq!(Ok(events), plain, "a flipped bit at {at} went by unseen");
    }
}

struct Slow<'a>(&'a [u8], usize);

impl Read for Slow<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = out.len().min(self.1);
        self.0.read(&mut out[..n])
    }
}

/// Returns the number of events, or the error.
fn drain(src: impl Read, name: &SnapshotName) -> Result<u64, String> {
    let mut delta = DeltaReader::new(src, name);
    let mut events = 0;
    let mut next = || Ok::<_, Error>(delta.next()?.is_some());
    loop {
        match next() {
            Ok(true) => events += 1,
            Ok(false) => return Ok(events),
            Err(e) => {
                assert!(e.reason().is_bad_data(), "{}: {e}", e.reason());
                return Err(e.to_string());
            }
        }
    }
}

/// Reads small numbers from the input, and zeros after its end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn below(&mut self, n: u8) -> u8 {
        match self.0.split_first() {
            Some((&b, rest)) => {
                self.0 = rest;
                b % n
            }
            None => 0,
        }
    }

    fn up_to(&mut self, n: i64) -> i64 {
        i64::from(self.below(n as u8 + 1))
    }
}

/// The histories of a catalog: each snapshot belongs to one, and histories fork off one another.
struct Histories {
    /// For each history, its parent and the first revision of its own.
    forks: Vec<(usize, i64)>,
    /// For each snapshot of the catalog: its history, the first revision that it holds, and the last one.
    told: Vec<(usize, i64, i64)>,
    unreadable: Vec<bool>,
}

impl Histories {
    /// Returns the history that `h` shares at a revision.
    fn at(&self, mut h: usize, revision: i64) -> usize {
        while h > 0 && revision < self.forks[h].1 {
            h = self.forks[h].0;
        }
        h
    }

    fn compare(&self, a: usize, b: usize) -> Comparison {
        let ((x, from_x, to_x), (y, from_y, to_y)) = (self.told[a], self.told[b]);
        let mut found = Comparison::default();
        for r in from_x.max(from_y)..=to_x.min(to_y) {
            if self.at(x, r) != self.at(y, r) {
                found.conflict = Some(Revision(r));
                break;
            }
            found.agreed = Some(Revision(r));
        }
        found
    }
}

impl Evidence for Histories {
    fn held(&self, x: usize) -> Option<Held> {
        let (_, first, last) = self.told[x];
        let (first, last) = (Revision(first), Revision(last));
        Some(Held {
            first,
            complete_from: first,
            last,
        })
    }
    fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
        Ok(Histories::compare(self, a, b))
    }
    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
        let (x, y) = (self.told[before].0, self.told[after].0);
        Ok(match self.at(x, until.0) == self.at(y, until.0) {
            true => Continuity::Confirmed,
            false => Continuity::Contradicted,
        })
    }
    fn fingerprint(&self, snapshot: usize, revision: Revision) -> Result<String> {
        Ok(self.at(self.told[snapshot].0, revision.0).to_string())
    }
    fn last(&self, snapshot: usize) -> Option<Revision> {
        Some(Revision(self.told[snapshot].2))
    }
    fn is_unreadable(&self, snapshot: usize) -> bool {
        self.unreadable[snapshot]
    }
}

/// Input: a catalog as numbers, then a name. Sorts timelines and builds chains to every revision.
pub fn chain_builder(data: &[u8]) {
    let mut bytes = Bytes(data);
    let mut forks = vec![(0, 0)];
    for h in 1..=usize::from(bytes.below(4)) {
        forks.push((usize::from(bytes.below(h as u8)), 1 + bytes.up_to(30)));
    }
    let mut listing = Vec::new();
    // By path: history, revisions beyond the name, distance of the compaction from the end, readable.
    let mut facts = std::collections::HashMap::new();
    for _ in 0..bytes.below(16) {
        let (switches, last, created) = (bytes.below(64), bytes.up_to(40), bytes.up_to(30));
        let full = switches & 3 == 0;
        let name = SnapshotName {
            kind: if full { Kind::Full } else { Kind::Incr },
            start: Revision(if full {
                0
            } else {
                (last - bytes.up_to(12)).max(1)
            }),
            last: Revision(last.max(1)),
            created,
            compression: Compression::ALL[usize::from(bytes.below(5))],
            is_final: switches & 4 != 0,
            is_encrypted: switches & 16 != 0,
        };
        let path = match switches & 8 {
            0 => format!("v2/{name}"),
            _ => format!("v1/Backup-{created}/{name}"),
        };
        let beyond = if full { bytes.up_to(8) } else { 0 };
        let fact = (
            bytes.below(forks.len() as u8),
            beyond,
            bytes.up_to(20),
            switches & 48 != 48,
        );
        if facts.insert(path.clone(), fact).is_none() {
            listing.push(path);
        }
    }
    if bytes.below(4) == 0
        && let Some(path) = listing.first()
    {
        listing.push(mark_of(path));
    }
    if let Ok(text) = std::str::from_utf8(bytes.0) {
        if let Ok(name) = text.parse::<SnapshotName>() {
            assert_eq!(name.to_string().parse(), Ok(name), "{text}");
        }
        listing.push(text.to_owned());
    }
    let objects = listing
        .into_iter()
        .map(|path| ListedObject { path, bytes: 1 });
    let catalog = Catalog::from_listing(objects.collect());

    let mut bases = KnownBases::new();
    let (mut told, mut unreadable) = (Vec::new(), Vec::new());
    for (i, s) in catalog.snapshots.iter().enumerate() {
        // The name at the end of the input belongs to the first history.
        let (history, beyond, compacted, readable) =
            facts.get(&s.path).copied().unwrap_or((0, 0, 0, true));
        let history = usize::from(history);
        unreadable.push(!readable);
        if s.name.kind == Kind::Incr {
            told.push((history, s.name.start.0, s.name.last.0));
            continue;
        }
        // An empty etcd is at revision 1.
        let last = s.name.last.0.saturating_add(beyond).max(1);
        let compact = last.saturating_sub(compacted);
        told.push((history, compact.max(1), last));
        let base = Base {
            revision: Revision(last),
            compact_revision: Revision(compact),
            compaction_finished: true,
            metadata_revision: Revision(last),
        };
        bases.insert(i, base);
    }
    // Only the last name can have large numbers, which no loop may count up to.
    let small = told.iter().all(|t| t.2 < 1000);
    let histories = Histories {
        forks,
        told,
        unreadable,
    };
    let doubtful = timeline::doubtful(&catalog);
    assert!(doubtful.is_sorted() && doubtful.iter().all(|i| catalog.usable().any(|u| u == *i)));
    let evidence: [&dyn Evidence; 2] = [&NamesOnly, &histories];
    for evidence in evidence.into_iter().take(1 + usize::from(small)) {
        timelines(&catalog, evidence, &bases);
    }
}

fn timelines(catalog: &Catalog, evidence: &dyn Evidence, bases: &KnownBases) {
    let timelines = Timelines::build(catalog, evidence).expect("evidence never fails here");
    for i in catalog.usable().filter(|&i| !evidence.is_unreadable(i)) {
        let on = |t: &&Timeline| t.members.iter().any(|m| m.snapshot == i);
        assert!(
            timelines.all.iter().any(|t| on(&t)),
            "{i} is on no timeline"
        );
    }
    if let Err(e) = timelines.newest(catalog) {
        assert_eq!(e.reason(), Reason::InterleavedTimelines, "{e}");
    }
    for t in &timelines.all {
        let same = timelines.by_id(&t.id).is_ok_and(|found| found == t);
        assert!(same, "two timelines have the ID {}", t.id);
        for m in &t.members {
            assert!(!catalog.snapshots[m.snapshot].excluded && !evidence.is_unreadable(m.snapshot));
        }
        choose(catalog, t, None, bases);
        for target in 0..60 {
            choose(catalog, t, Some(Revision(target)), bases);
        }
        for target in [i64::MAX - 1, i64::MAX] {
            choose(catalog, t, Some(Revision(target)), bases);
        }
        let ranges = chain::restorable(catalog, t, bases);
        for pair in ranges.windows(2) {
            assert!(pair[0].1.next() < pair[1].0, "{ranges:?}");
        }
        for (first, last) in ranges {
            for r in [first, last] {
                let choice = chain::choose(catalog, t, Some(r), bases);
                assert!(
                    matches!(choice, Ok(Choice::Chosen(_))),
                    "{r} of {t:?}: {choice:?}"
                );
            }
        }
    }
}

/// Chooses a chain as `compact` does. Checks it link by link, or checks that there is really none.
fn choose(catalog: &Catalog, t: &Timeline, target: Option<Revision>, bases: &KnownBases) {
    let name = |i: usize| &catalog.snapshots[i].name;
    let mut known = KnownBases::new();
    let choice = loop {
        match chain::choose(catalog, t, target, &known) {
            Ok(Choice::ReadFirst(i)) => {
                assert!(
                    known.insert(i, bases[&i]).is_none(),
                    "looks at {i} without end"
                );
            }
            Ok(Choice::Chosen(chain)) => {
                if known.insert(chain.base, bases[&chain.base]).is_some() {
                    break Ok(chain);
                }
            }
            Err(e) => break Err(e),
        }
    };
    let chain = match choice {
        Ok(chain) => chain,
        Err(e) => {
            let reasons = [Reason::NoSnapshots, Reason::OutOfRange, Reason::RevisionGap];
            assert!(reasons.contains(&e.reason()), "{}: {e}", e.reason());
            if let Some(goal) = target {
                let all = chain::bases(catalog, t);
                let reached = all.iter().any(|b| reaches(catalog, t, &bases[b], goal));
                // Beyond all names, only the newest full is read.
                let named = |m: &timeline::TimelineMember| name(m.snapshot).last.min(m.until);
                let by_name = t.members.iter().any(|m| goal <= named(m));
                assert!(
                    !reached || !by_name,
                    "revision {goal} can be had from {t:?}: {e}"
                );
                let with_all = chain::choose(catalog, t, target, bases);
                assert_eq!(reached, with_all.is_ok(), "{goal} of {t:?}: {with_all:?}");
            }
            return;
        }
    };
    assert!(target.is_none_or(|r| r == chain.target));
    assert_eq!(name(chain.base).kind, Kind::Full);
    assert!(t.members.iter().any(|m| m.snapshot == chain.base));
    let base = bases[&chain.base];
    assert!(base.first_revision() <= chain.target);
    let mut at = base.revision;
    for link in &chain.deltas {
        let n = name(link.snapshot);
        let member = t.members.iter().find(|m| m.snapshot == link.snapshot);
        assert_eq!(n.kind, Kind::Incr);
        assert!(member.is_some_and(|m| link.until <= m.until) && link.until <= n.last);
        assert!(n.start <= at.next(), "a gap before {n}");
        assert!(link.until > at, "{n} adds nothing");
        at = link.until;
    }
    assert!(
        at >= chain.target,
        "it ends at {at}, before {}",
        chain.target
    );
}

/// Returns whether deltas lead from a full to a revision: any delta that holds the next revision, repeatedly.
fn reaches(catalog: &Catalog, t: &Timeline, base: &Base, goal: Revision) -> bool {
    let mut at = base.revision;
    while at < goal {
        let holds = |m: &&timeline::TimelineMember| {
            let n = &catalog.snapshots[m.snapshot].name;
            n.kind == Kind::Incr && n.start <= at.next() && at < n.last.min(m.until)
        };
        match t.members.iter().find(holds) {
            Some(m) => at = catalog.snapshots[m.snapshot].name.last.min(m.until),
            None => return false,
        }
    }
    base.first_revision() <= goal
}

/// Decodes a value of etcd as an object of Kubernetes, and shows it in every form.
pub fn object_decoder(data: &[u8]) {
    let kv = KeyValue {
        key: b"/registry/secrets/a/b",
        value: data,
        ..KeyValue::default()
    };
    let Ok(mut object) = Object::of_record(&kv, &EncryptionKeys::default()) else {
        return;
    };
    let yaml = yaml::from_object(&object.json);
    let is_safe = |c: char| c == '\n' || c == '\t' || !c.is_control();
    assert!(yaml.chars().all(is_safe), "{yaml:?}");
    // The JSON of the object decodes to the same object.
    let json = serde_json::to_vec(&object.json).expect("JSON");
    let again = Object::decode(&json).map(|object| object.json);
    assert!(again.as_ref() == Ok(&object.json), "{again:?}");
    assert!(object.changes_since(&object.clone()).is_empty());
    object.hide_secrets();
    // What kubectl takes for a list stays as it is.
    let is_list = object.json.contains_key("items");
    assert!(object.cleaned().is_ok() || is_list);
}

/// Input: pieces with zeros between them. The first one is a header, two are paths of columns, and the rest are the
/// values of an object. Prints the object as `get` does, as an object of every kind.
pub fn tables(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut pieces = text.split('\0');
    let mut piece = || pieces.next().unwrap_or_default();
    let (header, paths) = (long(piece()), [piece(), piece()]);
    let mut value = || {
        let text = piece();
        serde_json::from_str(text).unwrap_or_else(|_| Value::String(long(text)))
    };
    let object = json!({
        "type": value(),
        "metadata": {"creationTimestamp": value(), "annotations": {"example.com/x": value()}},
        "spec": {
            "template": {"spec": {"containers": [{"image": value()}, {"image": value()}]}},
            "nodeName": value(), "replicas": value(), "clusterIP": value(), "schedule": value(),
            "ports": [{"port": 1, "protocol": value()}],
        },
        "status": {
            "conditions": [{"type": "Ready", "status": value()}, {"type": value(), "at": value()}],
            "phase": value(), "capacity": {"storage": value()}, "list": value(),
        },
    });
    let size = |value: &Value| value.to_string().len();
    for path in paths.iter().flat_map(|path| JsonPath::parse(path)) {
        let found: usize = path.values(&object).into_iter().map(size).sum();
        assert!(found <= size(&object), "{path:?} finds {found} bytes");
    }
    let column = |kind, path| json!({"name": header, "type": kind, "jsonPath": path});
    let columns = paths.map(|path| [column("string", path), column("date", path)]);
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1beta1", "kind": "CustomResourceDefinition",
        "spec": {
            "group": "example.com", "names": {"kind": "Widget", "plural": "widgets"},
            "additionalPrinterColumns": columns.concat(),
        },
    });
    let definition = Object::decode(definition.to_string().as_bytes()).expect("a definition");
    let custom = Resource::of_definition(&definition).expect("a kind");
    let objects = [object, json!({})];
    for resource in Resource::built_in().chain([custom]) {
        let columns = Column::of(&resource, false).len();
        let table = table(&resource, &objects).expect("to memory");
        assert_eq!(table.matches('\n').count(), 1 + objects.len(), "{table:?}");
        for line in table.split('\n') {
            let hostile = |c: char| c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c);
            assert!(!line.contains(hostile), "{line:?}");
            // A cell has 1,000 characters, and 3 more to the next one. The last column is the age.
            assert!(line.chars().count() <= 1003 * (columns + 1), "{line:?}");
        }
    }
}

/// Repeats a text as often as its first character says, up to 70,000 characters.
fn long(text: &str) -> String {
    let times = text.chars().next().map_or(0, |c| 1 << (u32::from(c) % 17));
    text.chars()
        .cycle()
        .take((times * text.len()).min(70_000))
        .collect()
}
