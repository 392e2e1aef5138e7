//! The writer of deltas: reproduces deltas of etcd-backup-restore byte for byte, and what it writes is read
//! back unchanged.

use std::fs::{self, File};
use std::io::Read;

use crate::support::{fixture_names, fixtures_dir, rounds, seed};
use chrono::{DateTime, Utc};
use deltafold::backup::delta::DeltaReader;
use deltafold::backup::events::{EventRef, EventsWriter, encode_event};
use deltafold::backup::frame::FrameReader;
use deltafold::backup::{Kind, SnapshotName, codec};
use deltafold::mvcc::{Change, KeyValue, Revision};

/// Reads a payload and writes it again in three ways: from plain values, from base64 values, and from events
/// that were encoded one by one.
fn written_again(payload: &[u8], name: &SnapshotName) -> [Vec<u8>; 3] {
    let mut reader = DeltaReader::new(payload, name);
    let mut writers = [(); 3].map(|()| EventsWriter::new(Vec::new()));
    let (mut value, mut encoded) = (Vec::new(), Vec::new());
    while let Some(event) = reader.next().expect("an event") {
        let time = event.instant().expect("a time");
        value.clear();
        event
            .change
            .append_value(event.main, &mut value)
            .expect("a value");
        let as_read = EventRef {
            main: event.main,
            change: event.change,
        };
        let raw = EventRef {
            main: event.main,
            change: match event.change {
                Change::PutBase64(kv) => Change::Put(KeyValue {
                    value: &value,
                    ..kv
                }),
                other => other,
            },
        };
        encoded.clear();
        encode_event(&mut encoded, &raw, time);
        writers[0].push(&raw, time).expect("written");
        writers[1].push(&as_read, time).expect("written");
        writers[2].push_encoded(&encoded, 1).expect("written");
    }
    writers.map(|w| {
        assert_eq!(w.events(), reader.events());
        w.finish().expect("written")
    })
}

#[test]
fn every_delta_of_the_fixtures_is_written_again_to_the_byte() {
    let mut deltas = 0;
    for fixture in fixture_names() {
        for entry in fs::read_dir(fixtures_dir().join(&fixture).join("v2")).expect("v2") {
            let path = entry.expect("a snapshot").path();
            let name = path.file_name().and_then(|n| n.to_str()).expect("a name");
            let name: SnapshotName = name.parse().expect("a snapshot's name");
            if name.kind != Kind::Incr {
                continue;
            }
            let file = File::open(&path).expect("a delta");
            let plain = codec::decoder(name.compression, file).expect("a decoder");
            let mut payload = Vec::new();
            FrameReader::new(plain)
                .read_to_end(&mut payload)
                .expect("a payload");
            for again in written_again(&payload, &name) {
                assert!(again == payload, "{fixture}/{name} is spelled otherwise");
            }
            deltas += 1;
        }
    }
    assert!(deltas > 10, "{deltas} deltas");
}

#[test]
fn random_events_are_read_back_as_they_were() {
    let mut rng = fastrand::Rng::with_seed(seed());
    for _ in 0..rounds(4, 20) {
        let start = rng.i64(1..i64::MAX / 2);
        let mut main = start;
        let mut kept = Vec::new();
        for _ in 0..rng.usize(1..200) {
            let bytes = |rng: &mut fastrand::Rng, most: usize| -> Vec<u8> {
                let len = rng.usize(..=most);
                (0..len).map(|_| rng.u8(..)).collect()
            };
            let key = [vec![rng.u8(..)], bytes(&mut rng, 40)].concat();
            let longest = [0, 3, 1000, 300_000][rng.usize(..4)];
            let numbers = [rng.i64(1..=main), rng.i64(1..), rng.i64(..)];
            let lease = if rng.bool() { 0 } else { numbers[2] };
            // From whole seconds down to nanoseconds.
            let step = 10u32.pow(rng.u32(..=9));
            let nanoseconds = rng.u32(..1_000_000_000) / step * step;
            let time = DateTime::<Utc>::from_timestamp(rng.i64(0..4_000_000_000), nanoseconds);
            let put = rng.u8(..4) > 0;
            kept.push((
                main,
                put,
                key,
                numbers,
                bytes(&mut rng, longest),
                lease,
                time.expect("a time"),
            ));
            main += i64::from(rng.bool());
        }
        let last = kept.last().expect("an event").0;
        let mut writer = EventsWriter::new(Vec::new());
        for (main, put, key, [create_revision, version, _], value, lease, time) in &kept {
            let change = match put {
                true => Change::Put(KeyValue {
                    key,
                    create_revision: Revision(*create_revision),
                    mod_revision: Revision(*main),
                    version: *version,
                    value,
                    lease: *lease,
                }),
                false => Change::Delete { key },
            };
            let event = EventRef {
                main: Revision(*main),
                change,
            };
            writer.push(&event, *time).expect("written");
        }
        let payload = writer.finish().expect("written");

        let name: SnapshotName = format!("Incr-{start:08}-{last:08}-1")
            .parse()
            .expect("a name");
        let mut reader = DeltaReader::new(payload.as_slice(), &name);
        for (main, put, key, [create_revision, version, _], value, lease, time) in &kept {
            let event = reader.next().expect("an event").expect("one more event");
            assert_eq!(event.main.0, *main);
            assert_eq!(event.instant().expect("a time"), *time);
            assert_eq!(event.change.key(), key);
            match event.change {
                Change::PutBase64(kv) => {
                    assert!(put);
                    assert_eq!(kv.create_revision.0, *create_revision);
                    assert_eq!(kv.version, *version);
                    assert_eq!(kv.lease, *lease);
                    let mut read = Vec::new();
                    event
                        .change
                        .append_value(event.main, &mut read)
                        .expect("a value");
                    assert!(read == *value);
                }
                Change::Delete { .. } => assert!(!put),
                Change::Put(_) => panic!("not read as it stands"),
            }
        }
        assert!(reader.next().expect("the end").is_none());
        for again in written_again(&payload, &name) {
            assert!(again == payload);
        }
    }
}
