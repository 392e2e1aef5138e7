//! Delta snapshots: a JSON array of watch events, read one event at a time.
//!
//! It holds one event in memory and checks what a delta promises: revisions in order and without
//! holes, from the first to the last of its name. It does not know what came before the delta.
//!
//! The format is etcd-backup-restore's: `{"etcdEvent":{"type":1?,"kv":{…}},"time":…}`, where fields
//! of zero value are left out and byte strings are base64 in the standard alphabet.

use crate::bucket::name::SnapshotName;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Change, KeyValue, Revision};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Utc};
use memchr::{memchr2, memchr3};
use serde::Deserialize;
use std::borrow::Cow;
use std::io::Read;

/// The longest event that is read, in bytes of JSON; bbolt cannot hold a value of 2 GiB.
const LONGEST_EVENT: usize = 3 << 30;
const CHUNK: usize = 256 << 10;

/// One event of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// The transaction that made the change.
    pub main: Revision,
    /// The change within the transaction, from 0.
    pub sub: u32,
    /// What changed.
    pub change: Change<'a>,
    /// When the snapshotter saw it, in RFC 3339.
    pub time: &'a str,
}

impl Event<'_> {
    /// The time as an instant.
    ///
    /// # Errors
    /// `CorruptSnapshot` where it is no time.
    pub fn instant(&self) -> Result<DateTime<Utc>> {
        DateTime::parse_from_rfc3339(self.time)
            .map(|t| t.with_timezone(&Utc))
            .map_err(|e| {
                Error::corrupt(format!(
                    "the event at revision {} has the time \"{}\", which is none: {e}",
                    self.main, self.time
                ))
            })
    }
}

#[derive(Deserialize)]
struct WireEvent<'a> {
    #[serde(borrow, rename = "etcdEvent")]
    event: WireInner<'a>,
    #[serde(borrow, default)]
    time: Cow<'a, str>,
}

#[derive(Deserialize)]
struct WireInner<'a> {
    #[serde(default, rename = "type")]
    kind: i64,
    #[serde(borrow)]
    kv: WireKeyValue<'a>,
}

#[derive(Deserialize)]
struct WireKeyValue<'a> {
    #[serde(borrow, default)]
    key: Cow<'a, str>,
    #[serde(default)]
    create_revision: i64,
    #[serde(default)]
    mod_revision: i64,
    #[serde(default)]
    version: i64,
    #[serde(borrow, default)]
    value: Cow<'a, str>,
    #[serde(default)]
    lease: i64,
}

const TYPE_PUT: i64 = 0;
const TYPE_DELETE: i64 = 1;

/// Reads the events of one delta from its payload.
pub struct DeltaReader<R> {
    src: R,
    start: Revision,
    last: Revision,
    /// `buf[at..end]` was read and not yet given out.
    buf: Vec<u8>,
    at: usize,
    end: usize,
    position: Position,
    current: Revision,
    sub: u32,
    events: u64,
    key: Vec<u8>,
    value: Vec<u8>,
    time: String,
    /// Create revision, version and lease of a put.
    put: Option<(Revision, i64, i64)>,
}

#[derive(PartialEq)]
enum Position {
    BeforeArray,
    /// Before the first element, or behind one.
    InArray {
        first: bool,
    },
    Ended,
}

impl<R: Read> DeltaReader<R> {
    /// Reads a payload that shall hold what `name` says.
    pub fn new(src: R, name: &SnapshotName) -> Self {
        DeltaReader {
            src,
            start: name.start,
            last: name.last,
            buf: Vec::new(),
            at: 0,
            end: 0,
            position: Position::BeforeArray,
            current: name.start.previous(),
            sub: 0,
            events: 0,
            key: Vec::new(),
            value: Vec::new(),
            time: String::new(),
            put: None,
        }
    }

    /// Events given out so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Reads more; false at the end of the payload.
    fn fill(&mut self) -> Result<bool> {
        self.buf.copy_within(self.at..self.end, 0);
        self.end -= self.at;
        self.at = 0;
        if self.end > LONGEST_EVENT {
            return Err(Error::corrupt("an event is longer than 3 GiB"));
        }
        if self.end == self.buf.len() {
            // Doubling, so that a long event is not copied again for each chunk.
            self.buf.resize((2 * self.end).max(CHUNK), 0);
        }
        loop {
            match self.src.read(&mut self.buf[self.end..]) {
                Ok(n) => {
                    self.end += n;
                    return Ok(n > 0);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io("read", e)),
            }
        }
    }

    /// The next byte that is not white space, left in place; `None` at the end.
    fn peek(&mut self) -> Result<Option<u8>> {
        loop {
            while let Some(&b) = self.buf[..self.end].get(self.at) {
                if !matches!(b, b' ' | b'\t' | b'\r' | b'\n') {
                    return Ok(Some(b));
                }
                self.at += 1;
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    fn not_json(&self, what: &str) -> Error {
        Error::corrupt(format!(
            "its content is no JSON array of events: {what}, after event {} (revision {})",
            self.events, self.current
        ))
    }

    /// Finds the next event's object: its length from `self.at`, or `None` at the array's end.
    fn next_object(&mut self) -> Result<Option<usize>> {
        if self.position == Position::BeforeArray {
            match self.peek()? {
                Some(b'[') => self.at += 1,
                Some(b'n') => return Err(self.not_json("it is null or a word")),
                _ => return Err(self.not_json("it does not begin with \"[\"")),
            }
            self.position = Position::InArray { first: true };
        }
        let Position::InArray { first } = self.position else {
            return Ok(None);
        };
        match (self.peek()?, first) {
            (Some(b']'), _) => {
                self.at += 1;
                self.position = Position::Ended;
                return match self.peek()? {
                    None => Ok(None),
                    Some(_) => Err(self.not_json("bytes follow the array's end")),
                };
            }
            (Some(b'{'), true) => {}
            (Some(b','), false) => {
                self.at += 1;
                if self.peek()? != Some(b'{') {
                    return Err(self.not_json("an element is no object"));
                }
            }
            (None, _) => return Err(self.not_json("it ends without \"]\"")),
            _ => return Err(self.not_json("something else than an object stands there")),
        }
        self.position = Position::InArray { first: false };

        let (mut i, mut depth, mut in_string) = (0usize, 0u32, false);
        loop {
            let rest = &self.buf[self.at + i..self.end];
            if in_string {
                match memchr2(b'"', b'\\', rest) {
                    Some(n) if rest[n] == b'"' => {
                        in_string = false;
                        i += n + 1;
                        continue;
                    }
                    // The byte after a backslash is never a quote that ends the string.
                    Some(n) if n + 1 < rest.len() => {
                        i += n + 2;
                        continue;
                    }
                    Some(n) => i += n,
                    None => i += rest.len(),
                }
            } else {
                match memchr3(b'"', b'{', b'}', rest) {
                    Some(n) => {
                        i += n + 1;
                        match rest[n] {
                            b'"' => in_string = true,
                            b'{' => depth += 1,
                            _ => depth -= 1,
                        }
                        if depth == 0 {
                            return Ok(Some(i));
                        }
                        continue;
                    }
                    None => i += rest.len(),
                }
            }
            if !self.fill()? {
                return Err(self.not_json("an event is cut short"));
            }
        }
    }

    /// The next event, or `None` when the payload has been read to its end and the delta held
    /// every revision of its name.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `NameMismatch`; what the source returns.
    #[allow(clippy::should_implement_trait)] // it lends: an Iterator cannot
    pub fn next(&mut self) -> Result<Option<Event<'_>>> {
        match self.advance() {
            Ok(false) => Ok(None),
            Ok(true) => Ok(Some(self.event())),
            Err(e) => Err(self.explain(e)),
        }
    }

    /// Says of an error about this delta's events whether damaged bytes are the cause: reads on to
    /// the end, where the source checks its hash.
    pub fn explain(&mut self, e: Error) -> Error {
        if !e.reason().is_bad_data() {
            return e;
        }
        let mut rest = vec![0; CHUNK];
        loop {
            match self.src.read(&mut rest) {
                Ok(0) => return e,
                Ok(_) => {}
                Err(damage) if damage.kind() == std::io::ErrorKind::Interrupted => {}
                Err(damage) => {
                    let damage = Error::io("read", damage);
                    // A second read of what has failed before says nothing new.
                    return if damage.reason() == Reason::Io {
                        e
                    } else {
                        damage
                    };
                }
            }
        }
    }

    /// The event that was read last.
    fn event(&self) -> Event<'_> {
        let change = match self.put {
            Some((create_revision, version, lease)) => Change::Put(KeyValue {
                key: &self.key,
                create_revision,
                mod_revision: self.current,
                version,
                value: &self.value,
                lease,
            }),
            None => Change::Delete { key: &self.key },
        };
        Event {
            main: self.current,
            sub: self.sub,
            change,
            time: &self.time,
        }
    }

    /// Reads the next event into `self`; false at the end.
    fn advance(&mut self) -> Result<bool> {
        let Some(len) = self.next_object()? else {
            if self.current != self.last {
                return Err(if self.events == 0 {
                    Error::new(
                        Reason::NameMismatch,
                        format!(
                            "its name promises revisions {} to {}, it holds no event",
                            self.start, self.last
                        ),
                    )
                } else {
                    self.mismatch(&format!("it ends at revision {}", self.current))
                });
            }
            return Ok(false);
        };
        let object = self.at..self.at + len;
        self.at = object.end;
        let wire: WireEvent<'_> = serde_json::from_slice(&self.buf[object.clone()])
            .map_err(|e| self.not_json(&format!("an event cannot be read: {e}")))?;
        let kv = wire.event.kv;
        let main = Revision(kv.mod_revision);

        if main == self.current && self.events > 0 {
            self.sub = self
                .sub
                .checked_add(1)
                .ok_or_else(|| Error::corrupt("a transaction has too many changes"))?;
        } else if main <= self.current && self.events > 0 {
            return Err(Error::corrupt(format!(
                "its events are out of order: revision {main} follows revision {}",
                self.current
            )));
        } else if main != self.current.next() {
            let (first, current) = (self.events == 0, self.current);
            return Err(if first {
                self.mismatch(&format!("it begins at revision {main}"))
            } else {
                self.mismatch(&format!(
                    "revisions {} to {} are missing",
                    current.next(),
                    main.previous()
                ))
            });
        } else if main > self.last {
            return Err(self.mismatch(&format!("it goes on with revision {main}")));
        } else {
            self.sub = 0;
        }

        let base64 = |what: &str, text: &str, out: &mut Vec<u8>| {
            out.clear();
            STANDARD.decode_vec(text, out).map_err(|e| {
                Error::corrupt(format!(
                    "the {what} of an event at revision {main} is no base64: {e}"
                ))
            })
        };
        base64("key", &kv.key, &mut self.key)?;
        if self.key.is_empty() {
            return Err(Error::corrupt(format!(
                "an event at revision {main} has no key"
            )));
        }
        let put = match wire.event.kind {
            TYPE_PUT => true,
            TYPE_DELETE => false,
            other => {
                return Err(Error::corrupt(format!(
                    "an event at revision {main} has the unknown type {other}"
                )));
            }
        };
        if put {
            base64("value", &kv.value, &mut self.value)?;
        }
        self.time.clear();
        self.time.push_str(&wire.time);
        self.put = put.then_some((Revision(kv.create_revision), kv.version, kv.lease));
        self.current = main;
        self.events += 1;
        Ok(true)
    }

    fn mismatch(&self, is: &str) -> Error {
        Error::new(
            Reason::NameMismatch,
            format!(
                "its name promises revisions {} to {}, but {is}",
                self.start, self.last
            ),
        )
    }
}

#[cfg(test)]
mod tests {
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
            let text = match e.change {
                Change::Put(kv) => format!(
                    "put {}={}",
                    String::from_utf8_lossy(kv.key),
                    String::from_utf8_lossy(kv.value)
                ),
                Change::Delete { key } => format!("delete {}", String::from_utf8_lossy(key)),
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
}
