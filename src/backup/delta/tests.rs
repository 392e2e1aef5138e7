//! Tests of reading deltas.

use super::*;

fn read_all(json: &[u8], start: i64, last: i64) -> Result<Vec<(i64, u32, String)>> {
    struct Slow<'a>(&'a [u8]);
    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let n = out.len().min(3);
            self.0.read(&mut out[..n])
        }
    }
    let name = format!("Incr-{start:08}-{last:08}-1").parse().unwrap();
    let mut r = DeltaReader::new(Slow(json), &name);
    let mut out = Vec::new();
    while let Some(e) = r.next()? {
        let mut value = Vec::new();
        e.change.append_value(e.main, &mut value)?;
        let key = String::from_utf8_lossy(e.change.key());
        let text = match e.change {
            Change::Delete { .. } => format!("delete {key}"),
            _ => format!("put {key}={}", String::from_utf8_lossy(&value)),
        };
        out.push((e.main.0, e.sub, text));
    }
    Ok(out)
}

#[test]
fn events_are_read_whatever_the_spelling() {
    let json = br#" [ {"etcdEvent":{"kv":{"key":"YQ==","create_revision":5,"mod_revision":5,"version":1,"value":"Yg=="}},"time":"2026-11-20T01:02:03.000000004Z"},
      {"etcdEvent":{"type":1,"kv":{"key":"Y2M=","mod_revision":5}},"time":"2026-11-20T01:02:03Z","new":{"}":"\"{"}} ,{"time":"2026-11-20T01:02:03Z",
      "etcdEvent":{"type":0,"kv":{"key":"\u0059\u0051==","create_revision":5,"mod_revision":6,"version":2},"prev_kv":null}}]
    "#;
    assert_eq!(
        read_all(json, 5, 6).unwrap(),
        [
            (5, 0, "put a=b".to_owned()),
            (5, 1, "delete cc".to_owned()),
            (6, 0, "put a=".to_owned())
        ]
    );
}

fn event(rev: i64) -> String {
    format!(
        r#"{{"etcdEvent":{{"kv":{{"key":"YQ==","create_revision":{rev},"mod_revision":{rev},"version":1}}}},"time":"2026-11-20T01:02:03Z"}}"#
    )
}

#[test]
fn bad_deltas_are_refused_with_the_right_reason() {
    use Reason::*;
    let e = event;
    for (json, reason) in [
        (String::new(), CorruptSnapshot),
        ("null".into(), CorruptSnapshot),
        ("{}".into(), CorruptSnapshot),
        ("[".into(), CorruptSnapshot),
        ("[]".into(), NameMismatch),
        ("[1]".into(), CorruptSnapshot),
        ("[{}]".into(), CorruptSnapshot),
        (format!("[{}", e(5)), CorruptSnapshot),
        (format!("[{} {}]", e(5), e(6)), CorruptSnapshot),
        (format!("[{},]", e(5)), CorruptSnapshot),
        (format!("[{},{}]]", e(5), e(6)), CorruptSnapshot),
        (format!("[{}]", e(5)), NameMismatch),
        (format!("[{}]", e(6)), NameMismatch),
        (format!("[{},{},{}]", e(5), e(6), e(7)), NameMismatch),
        (format!("[{},{}]", e(5), e(7)), NameMismatch),
        (format!("[{},{},{}]", e(5), e(6), e(5)), CorruptSnapshot),
        (
            format!("[{},{}]", e(5), e(6)).replace("YQ==", "Y"),
            CorruptSnapshot,
        ),
        (
            format!("[{},{}]", e(5), e(6)).replace("YQ==", ""),
            CorruptSnapshot,
        ),
        (
            format!("[{},{}]", e(5), e(6)).replace("{\"kv", "{\"type\":2,\"kv"),
            CorruptSnapshot,
        ),
    ] {
        assert_eq!(
            read_all(json.as_bytes(), 5, 6).unwrap_err().reason(),
            reason,
            "{json}"
        );
    }
}

/// The general parser reads every event that the scanner accepts in the same way. The events are in the
/// spelling of Go, with random bytes changed, inserted and removed.
#[test]
fn the_scanner_and_the_parser_agree() {
    let seed = crate::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let spelled = [
        r#"{"etcdEvent":{"kv":{"key":"YQ==","create_revision":5,"mod_revision":17,"version":2,"value":"Yg==","lease":-71}},"time":"2026-11-20T01:02:03Z"}"#,
        r#"{"etcdEvent":{"type":1,"kv":{"key":"Y2M=","mod_revision":9223372036854775807}},"time":""}"#,
    ];
    let (mut scanned, mut passed_on) = (0, 0);
    for _ in 0..200_000 {
        let mut b = spelled[rng.usize(..2)].as_bytes().to_vec();
        for _ in 0..rng.usize(..3) {
            let at = rng.usize(..b.len());
            let byte = match rng.u8(..3) {
                0 => b"\"\\{}[]:,-0e. "[rng.usize(..13)],
                _ => rng.u8(b' '..=b'~'),
            };
            match rng.u8(..3) {
                0 => b[at] = byte,
                1 => b.insert(at, byte),
                _ => drop(b.remove(at)),
            }
        }
        let Some(raw) = EventScanner::new(&b, 0).event() else {
            passed_on += 1;
            continue;
        };
        scanned += 1;
        let shown = String::from_utf8_lossy(&b);
        let text = |r: &Range<usize>| std::str::from_utf8(&b[r.clone()]).unwrap();
        let wire: WireEvent<'_> =
            serde_json::from_slice(&b[..raw.end]).unwrap_or_else(|e| panic!("{e}: {shown}"));
        let kv = &wire.event.kv;
        assert_eq!(wire.event.kind, raw.kind, "{shown}");
        assert_eq!(kv.key, text(&raw.key), "{shown}");
        assert_eq!(kv.create_revision, raw.create_revision, "{shown}");
        assert_eq!(kv.mod_revision, raw.mod_revision, "{shown}");
        assert_eq!(kv.version, raw.version, "{shown}");
        assert_eq!(kv.value, text(&raw.value), "{shown}");
        assert_eq!(kv.lease, raw.lease, "{shown}");
        assert_eq!(wire.time, text(&raw.time), "{shown}");
    }
    assert!(
        scanned > 20_000 && passed_on > 20_000,
        "{scanned} {passed_on}"
    );
}
