//! The fold against a plain model of etcd's MVCC: thousands of random histories, every record and HashKV
//! compared, without any server.

use crate::support::scratch;
use crate::support::{rounds, seed};
use deltafold::bolt::{Database, TreeBuilder, write_file};
use deltafold::mvcc::{
    Base, Change, Fold, FoldOptions, KeyRange, KeyValue, PartialFold, RecordKey, Revision, hash_kv,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;

/// A record of the model: (main, sub), tombstone, key, raw value.
#[derive(Clone, Debug, PartialEq)]
struct Record {
    rk: RecordKey,
    key: Vec<u8>,
    raw: Vec<u8>,
}

/// Every change ever made, and the current state of each key.
#[derive(Default)]
struct Model {
    records: Vec<Record>,
    /// create_revision and version of the live keys.
    alive: BTreeMap<Vec<u8>, (i64, i64)>,
    revision: i64,
}

impl Model {
    fn new() -> Self {
        Model {
            revision: 1,
            ..Model::default()
        }
    }

    fn record(&mut self, main: i64, sub: u32, tombstone: bool, key: &[u8], kv: KeyValue<'_>) {
        let mut raw = Vec::new();
        kv.encode(&mut raw);
        let rk = RecordKey {
            main: Revision(main),
            sub,
            tombstone,
        };
        self.records.push(Record {
            rk,
            key: key.to_vec(),
            raw,
        });
    }

    /// Applies one transaction of puts and deletes of distinct keys.
    fn transaction(&mut self, rng: &mut fastrand::Rng, keys: &[Vec<u8>]) {
        let main = self.revision + 1;
        let mut chosen = keys.to_vec();
        rng.shuffle(&mut chosen);
        let size = if rng.u8(..8) == 0 {
            rng.usize(1..=keys.len())
        } else {
            1
        };
        for (sub, key) in chosen.into_iter().take(size).enumerate() {
            let sub = sub as u32;
            let before = self.alive.get(&key).copied();
            if before.is_some() && rng.u8(..3) == 0 {
                self.alive.remove(&key);
                self.record(main, sub, true, &key, KeyValue::tombstone(&key));
            } else {
                let (create, version) = before.map_or((main, 1), |(c, v)| (c, v + 1));
                self.alive.insert(key.clone(), (create, version));
                let value = vec![rng.u8(..); rng.usize(..40)];
                let kv = KeyValue {
                    key: &key,
                    create_revision: Revision(create),
                    mod_revision: Revision(main),
                    version,
                    value: &value,
                    lease: if rng.u8(..4) == 0 { rng.i64(1..) } else { 0 },
                };
                self.record(main, sub, false, &key, kv);
            }
        }
        self.revision = main;
    }

    /// Returns the records on disk at revision `at` after a compaction at `compact`: everything above
    /// `compact`, and of the rest each key's newest record, tombstones only at exactly that revision.
    fn on_disk(&self, compact: i64, at: i64) -> Vec<Record> {
        let until = |r: &&Record| r.rk.main.0 <= at;
        let mut newest: BTreeMap<&[u8], RecordKey> = BTreeMap::new();
        for r in self
            .records
            .iter()
            .filter(|r| r.rk.main.0 <= compact.min(at))
        {
            newest.insert(&r.key, r.rk);
        }
        let kept = |r: &&Record| {
            r.rk.main.0 > compact
                || (newest[r.key.as_slice()] == r.rk && (!r.rk.tombstone || r.rk.main.0 == compact))
        };
        self.records
            .iter()
            .filter(until)
            .filter(kept)
            .cloned()
            .collect()
    }

    fn newest_at(&self, key: &[u8], at: i64) -> Option<RecordKey> {
        let of = |r: &&Record| r.key == key && r.rk.main.0 <= at;
        self.records.iter().filter(of).map(|r| r.rk).max()
    }

    /// Returns HashKV and the number of live keys of those records.
    fn hash(&self, compact: i64, at: i64) -> (u32, u64) {
        let mut newest: BTreeMap<&[u8], RecordKey> = BTreeMap::new();
        for r in self.records.iter().filter(|r| r.rk.main.0 <= at) {
            newest.insert(&r.key, r.rk);
        }
        let live = newest.values().filter(|rk| !rk.tombstone).count() as u64;
        let mut bytes = b"key".to_vec();
        for r in self.on_disk(compact, at) {
            let is_newest = newest[r.key.as_slice()] == r.rk && !r.rk.tombstone;
            let at_compaction = r.rk.tombstone && r.rk.main.0 == compact;
            if r.rk.main.0 > compact || (live == 0 && !at_compaction) || is_newest {
                r.rk.encode(&mut bytes);
                bytes.extend_from_slice(&r.raw);
            }
        }
        (crc_fast::crc32_iscsi(&bytes), live)
    }

    fn database(&self, compact: i64, at: i64, scheduled_only: bool) -> Database<File> {
        let records = match scheduled_only {
            true => self.on_disk(-1, at),
            false => self.on_disk(compact, at),
        };
        let file = write_file(tempfile::tempfile().unwrap(), 4096, "", |w| {
            let mut key = TreeBuilder::new(0);
            for r in &records {
                let mut k = Vec::new();
                r.rk.encode(&mut k);
                key.push(w, &k, &r.raw)?;
            }
            let mut meta = TreeBuilder::new(0);
            if compact > 0 {
                let at = deltafold::mvcc::revision::encode_revision(Revision(compact), 0);
                if !scheduled_only {
                    meta.push(w, b"finishedCompactRev", &at)?;
                }
                meta.push(w, b"scheduledCompactRev", &at)?;
            }
            let mut root = TreeBuilder::new(0);
            let value = key.finish(w)?;
            root.push_bucket(w, b"key", &value)?;
            let value = meta.finish(w)?;
            root.push_bucket(w, b"meta", &value)?;
            Ok(root)
        });
        Database::open(file.unwrap()).unwrap()
    }
}

fn one_history(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let keys: Vec<Vec<u8>> = (0..rng.usize(1..12))
        .map(|i| format!("key/{i}").into_bytes())
        .collect();
    let mut model = Model::new();
    for _ in 0..rng.usize(1..80) {
        model.transaction(&mut rng, &keys);
    }
    if rng.u8(..6) == 0 {
        // The last transaction may delete everything.
        let main = model.revision + 1;
        for (sub, key) in std::mem::take(&mut model.alive).into_keys().enumerate() {
            model.record(main, sub as u32, true, &key, KeyValue::tombstone(&key));
            model.revision = main;
        }
    }
    let last = model.revision;
    let base_at = rng.i64(1..=last);
    let base_compact = if rng.bool() { -1 } else { rng.i64(1..=base_at) };
    let scheduled_only = base_compact > 0 && rng.u8(..5) == 0;
    let target = rng
        .i64(base_at.min(base_compact.max(1))..=last)
        .max(base_compact.max(1));
    let compact = match rng.u8(..5) {
        0 => target,
        // Like a restore that bumps the revision.
        4 => target + rng.i64(1..1_000_000),
        1 => base_compact,
        _ => rng.i64(base_compact.max(1)..=target),
    };
    // Like commands that read a part of a backup.
    let range = match rng.u8(..8) {
        0 => KeyRange::Key(keys[0].clone()),
        1 => KeyRange::Prefix(b"key/1".to_vec()),
        _ => KeyRange::All,
    };
    let detach_leases = rng.u8(..6) == 0;
    let what = format!(
        "seed {seed}: base at {base_at} compacted at {base_compact} (unfinished: {scheduled_only}), target {target}, compact {compact}, last {last}, {range:?}, detached: {detach_leases}"
    );

    let db = model.database(base_compact, base_at, scheduled_only);
    let base = Base::read(&db).unwrap();
    assert_eq!(base.revision.0, base_at, "{what}");
    let options = FoldOptions {
        target: Revision(target),
        compact: Revision(compact),
        keys: range.clone(),
        detach_leases,
        base,
        temp_dir: scratch::place().into(),
        // So small that most histories are spilled to files.
        buffer_bytes: rng.usize(1..2000),
        limits: Default::default(),
    };
    let mut fold = Fold::new(options.clone(), &db).unwrap();
    // Deltas may overlap the base and go beyond the target.
    let from = rng.i64(1..=base_at + 1);
    let parts_seed = rng.u64(..);
    let add_all = |fold: &mut Fold<'_>| {
        let mut rng = fastrand::Rng::with_seed(parts_seed);
        // As if several deltas were read at once: later parts are folded separately.
        let mut parts: Vec<PartialFold> = Vec::new();
        let mut last = 0;
        for r in model.records.iter().filter(|r| r.rk.main.0 >= from) {
            let change = if r.rk.tombstone {
                Change::Delete { key: &r.key }
            } else {
                Change::Put(KeyValue::decode(&r.raw).unwrap())
            };
            if r.rk.main.0 != last && rng.u8(..20) == 0 {
                parts.push(PartialFold::new(options.clone(), rng.usize(1..2000)));
            }
            last = r.rk.main.0;
            let taken = match parts.last_mut() {
                Some(part) => part.apply(r.rk.main, r.rk.sub, &change),
                None => fold.apply(r.rk.main, r.rk.sub, &change),
            }
            .unwrap();
            assert_eq!(
                taken,
                r.rk.main.0 > base_at && r.rk.main.0 <= target && range.contains(&r.key),
                "{what}"
            );
        }
        for part in parts {
            fold.absorb(part).unwrap();
        }
    };
    add_all(&mut fold);
    let mut measured = Vec::new();
    fold.measure(&db, |r| {
        measured.push((r.key.to_vec(), r.len));
        Ok(())
    })
    .unwrap();
    let mut records = Vec::new();
    let mut written = Vec::new();
    let mut attached = BTreeSet::new();
    let folded = fold
        .finish(&db, |r| {
            written.push((r.key.to_vec(), r.record.len()));
            assert_eq!(RecordKey::decode(r.key)?, r.rk);
            let kv = KeyValue::decode(r.record)?;
            assert_eq!(kv.lease, r.lease, "{what}");
            if !r.rk.tombstone {
                let newest = model.newest_at(kv.key, target);
                assert_eq!(newest == Some(r.rk), r.is_newest, "{what}: {:?}", r.rk);
                if r.is_newest && r.lease != 0 {
                    attached.insert(r.lease);
                }
            }
            records.push(Record {
                rk: r.rk,
                key: kv.key.to_vec(),
                raw: r.record.to_vec(),
            });
            Ok(())
        })
        .unwrap();
    let mut expected = model.on_disk(compact, target);
    expected.retain(|r| range.contains(&r.key));
    if detach_leases {
        for r in &mut expected {
            let kv = KeyValue {
                lease: 0,
                ..KeyValue::decode(&r.raw).unwrap()
            };
            let mut raw = Vec::new();
            kv.encode(&mut raw);
            r.raw = raw;
        }
    }
    assert_eq!(records, expected, "{what}");
    assert_eq!(written, measured, "{what}");
    if range == KeyRange::All && !detach_leases {
        let expected = model.hash(compact, target);
        assert_eq!((folded.hash, folded.live_keys), expected, "{what}");
    }

    // The same as a stream, if no change can drop out again.
    let fold = Fold::new(options.clone(), &db).unwrap();
    assert_eq!(
        fold.can_stream(),
        compact <= base_at.max(base_compact),
        "{what}"
    );
    if fold.can_stream() {
        let mut streamed = Vec::new();
        let mut stream = fold
            .stream(&db, |r| {
                streamed.push((r.rk, r.key.to_vec(), r.record.to_vec()));
                Ok(())
            })
            .unwrap();
        add_all(&mut stream);
        let mut leases = BTreeSet::new();
        let hash = stream.finish_stream(&db, |lease, _| {
            leases.insert(lease);
        });
        assert_eq!(hash.unwrap(), folded, "{what}");
        assert_eq!(leases, attached, "{what}");
        assert_eq!(streamed.len(), records.len(), "{what}");
        for ((rk, key, raw), r) in streamed.iter().zip(&records) {
            assert_eq!((rk, raw), (&r.rk, &r.raw), "{what}");
            assert_eq!(RecordKey::decode(key).unwrap(), r.rk, "{what}");
        }
    }

    // HashKV of finished files, at any revision that they hold.
    let file = model.database(compact, target, false);
    let at = rng.i64(compact.max(1)..=target.max(compact));
    let hash = hash_kv(&file, Some(Revision(at))).unwrap();
    assert_eq!(
        (hash.hash, hash.live_keys),
        model.hash(compact, at.min(target)),
        "{what}, hash at {at}"
    );
}

#[test]
fn thousands_of_random_histories() {
    let first = seed();
    for seed in first..first + rounds(400, 4000) as u64 {
        one_history(seed);
    }
}

#[test]
fn a_change_that_does_not_follow_is_refused() {
    let mut model = Model::new();
    let mut rng = fastrand::Rng::with_seed(1);
    let keys = [b"a".to_vec()];
    while model.alive.is_empty() || model.revision < 5 {
        model.transaction(&mut rng, &keys);
    }
    let (create, version) = model.alive[&keys[0]];
    let at = model.revision;
    let put = |create: i64, version: i64| {
        Change::Put(KeyValue {
            key: b"a",
            create_revision: Revision(create),
            mod_revision: Revision(at + 1),
            version,
            value: b"",
            lease: 0,
        })
    };
    let new = KeyValue {
        key: b"b",
        create_revision: Revision(at + 1),
        mod_revision: Revision(at + 1),
        version: 1,
        ..KeyValue::default()
    };
    for compact in [-1, at] {
        let run = |changes: &[Change<'_>]| {
            let db = model.database(compact, at, false);
            let options = FoldOptions {
                target: Revision(at + 1),
                compact: Revision(at + 1),
                keys: KeyRange::All,
                detach_leases: false,
                base: Base::read(&db)?,
                temp_dir: scratch::place().into(),
                buffer_bytes: 1 << 20,
                limits: Default::default(),
            };
            let mut fold = Fold::new(options, &db)?;
            for (sub, c) in changes.iter().enumerate() {
                fold.apply(Revision(at + 1), sub as u32, c)?;
            }
            fold.finish(&db, |_| Ok(())).map(|_| ())
        };
        use deltafold::Reason;
        let reason = |c: &[Change<'_>]| run(c).map_err(|e| e.reason());
        assert_eq!(reason(&[put(create, version + 1)]), Ok(()));
        assert_eq!(reason(&[Change::Delete { key: b"a" }]), Ok(()));
        assert_eq!(reason(&[Change::Put(new)]), Ok(()));
        for bad in [
            put(create, version + 2),
            put(create - 1, version + 1),
            put(at + 1, 1),
            Change::Delete { key: b"b" },
        ] {
            assert_eq!(reason(&[bad]), Err(Reason::HistoryMismatch), "{bad:?}");
        }
        let twice = [Change::Delete { key: b"a" }, Change::Delete { key: b"a" }];
        assert_eq!(reason(&twice), Err(Reason::HistoryMismatch));
        assert_eq!(reason(&[put(create, 0)]), Err(Reason::CorruptSnapshot));
        assert_eq!(reason(&[put(at + 2, 1)]), Err(Reason::CorruptSnapshot));
    }
}
