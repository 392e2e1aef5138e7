//! Delta snapshots: a JSON array of watch events, read one event at a time.
//!
//! It holds one event in memory and checks what a delta promises: revisions in order and without
//! holes, from the first to the last of its name. It does not know what came before the delta.
//!
//! The format is etcd-backup-restore's: `{"etcdEvent":{"type":1?,"kv":{…}},"time":…}`, where fields
//! of zero value are left out and byte strings are base64 in the standard alphabet.

use crate::backup::name::SnapshotName;
use crate::base::limits::Limits;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Change, KeyValue, Revision};
use base64_simd::STANDARD;
use chrono::{DateTime, Utc};
use memchr::{memchr, memchr2, memchr3};
use serde::Deserialize;
use std::borrow::Cow;
use std::io::Read;
use std::ops::Range;

const CHUNK: usize = 256 << 10;
const FIRST_CHUNK: usize = 16 << 10;
/// An event that needs a larger buffer is a long one: see [`DeltaReader::with_leave`].
const LONG: usize = 1 << 20;
/// No time in RFC 3339 is longer.
const LONGEST_TIME: usize = 64;

/// One event of a delta. The value of a put is still base64: what is not kept is not decoded.
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

#[derive(Default, Deserialize)]
#[serde(default)]
struct WireKeyValue<'a> {
    #[serde(borrow)]
    key: Cow<'a, str>,
    create_revision: i64,
    mod_revision: i64,
    version: i64,
    #[serde(borrow)]
    value: Cow<'a, str>,
    lease: i64,
}

const TYPE_PUT: i64 = 0;
const TYPE_DELETE: i64 = 1;

/// An event as it stands in the buffer.
#[derive(Debug, Default, PartialEq)]
struct Found {
    kind: i64,
    key: Range<usize>,
    create_revision: i64,
    mod_revision: i64,
    version: i64,
    value: Range<usize>,
    lease: i64,
    time: Range<usize>,
    /// Where the next byte is.
    end: usize,
}

/// Reads an event in the one spelling that Go's encoding/json gives it. `None` where it is spelled
/// in another way, or goes on behind the end of `b`: then the general parser has to see to it.
struct Scan<'a> {
    b: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    fn literal(&mut self, text: &[u8]) -> Option<()> {
        self.b
            .get(self.at..)?
            .starts_with(text)
            .then(|| self.at += text.len())
    }

    /// What stands up to the next quote, which is passed over.
    fn text(&mut self) -> Option<Range<usize>> {
        let from = self.at;
        let to = from + memchr(b'"', self.b.get(from..)?)?;
        self.at = to + 1;
        Some(from..to)
    }

    /// A number of up to 18 digits after `name`, or 0 where that is not there.
    fn number(&mut self, name: &[u8]) -> Option<i64> {
        if self.literal(name).is_none() {
            return Some(0);
        }
        let negative = self.literal(b"-").is_some();
        let from = self.at;
        let mut n = 0i64;
        let digit = |at: usize| self.b.get(at).map(|d| d.wrapping_sub(b'0'));
        while let Some(d) = digit(self.at).filter(|&d| d <= 9) {
            n = n.checked_mul(10)?.checked_add(i64::from(d))?;
            self.at += 1;
        }
        let plain = self.at > from && (self.b[from] != b'0' || self.at == from + 1);
        // To JSON -0 is no integer.
        (plain && !(negative && n == 0)).then_some(if negative { -n } else { n })
    }

    fn event(mut self) -> Option<Found> {
        let mut found = Found::default();
        self.literal(b"{\"etcdEvent\":{")?;
        if self.literal(b"\"type\":1,").is_some() {
            found.kind = TYPE_DELETE;
        }
        self.literal(b"\"kv\":{\"key\":\"")?;
        found.key = self.text()?;
        found.create_revision = self.number(b",\"create_revision\":")?;
        found.mod_revision = self.number(b",\"mod_revision\":")?;
        found.version = self.number(b",\"version\":")?;
        if self.literal(b",\"value\":\"").is_some() {
            found.value = self.text()?;
        }
        found.lease = self.number(b",\"lease\":")?;
        self.literal(b"}},\"time\":\"")?;
        found.time = self.text()?;
        self.literal(b"}")?;
        found.end = self.at;
        // An escape means something else, which only the general parser knows.
        let plain = |r: &Range<usize>| memchr(b'\\', &self.b[r.clone()]).is_none();
        let control = self.b[found.time.clone()].iter().any(|&x| x < b' ');
        let taken = plain(&found.key) && plain(&found.value) && plain(&found.time) && !control;
        taken.then_some(found)
    }
}

/// Reads the events of one delta from its payload.
pub struct DeltaReader<'l, R> {
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
    /// The value's base64: where it stands in `buf`, or itself where it had escapes.
    value: Range<usize>,
    unescaped: Vec<u8>,
    time: String,
    /// Create revision, version and lease of a put.
    put: Option<(Revision, i64, i64)>,
    damaged: bool,
    limits: Limits,
    leave: Option<Leave<'l>>,
}

type Leave<'l> = Box<dyn FnMut() -> Result<()> + 'l>;

#[derive(PartialEq)]
enum Position {
    BeforeArray,
    /// Before the first element, or behind one.
    InArray {
        first: bool,
    },
    Ended,
}

impl<'l, R: Read> DeltaReader<'l, R> {
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
            value: 0..0,
            unescaped: Vec::new(),
            time: String::new(),
            put: None,
            damaged: false,
            limits: Limits::default(),
            leave: None,
        }
    }

    /// Reads no more than `limits` allow: a small object may hold an event without end, or events without end.
    pub fn within(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Calls `leave` before memory is taken for an event of more than a megabyte, so that those who
    /// read several deltas at once do not hold several such events.
    pub fn with_leave(mut self, leave: impl FnMut() -> Result<()> + 'l) -> Self {
        self.leave = Some(Box::new(leave));
        self
    }

    /// Whether the event that was read last, or one shortly before it, was a long one.
    pub fn is_long(&self) -> bool {
        self.buf.len() > LONG
    }

    /// Whether the bytes, not what they say, are at fault.
    pub fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// Events given out so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Reads more; false at the end of the payload.
    fn fill(&mut self) -> Result<bool> {
        let was_full = self.end == self.buf.len();
        self.buf.copy_within(self.at..self.end, 0);
        self.end -= self.at;
        self.at = 0;
        let longest = self.limits.event_bytes();
        if self.end > longest {
            return Err(self.limits.value_too_large(format!(
                "the event after revision {} has more than {longest} bytes of JSON",
                self.current
            )));
        }
        let len = self.buf.len();
        if self.end == len || (was_full && len < CHUNK) {
            let size = match len {
                // Most deltas are small.
                0 => FIRST_CHUNK,
                _ if len < CHUNK => CHUNK,
                // By half, so that a long event is not copied again for each chunk.
                _ => (self.end + self.end / 2).min(longest.saturating_add(CHUNK)),
            };
            if size > LONG
                && let Some(leave) = &mut self.leave
            {
                leave()?;
            }
            self.buf.reserve_exact(size - len);
            self.buf.resize(size, 0);
        } else if self.buf.len() > LONG && self.end < CHUNK / 2 {
            // One long event must not keep its memory.
            self.buf.truncate(CHUNK);
            self.buf.shrink_to_fit();
            self.unescaped.shrink_to(CHUNK);
        }
        loop {
            match self.src.read(&mut self.buf[self.end..]) {
                Ok(n) => {
                    self.end += n;
                    return Ok(n > 0);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.damaged = true;
                    return Err(Error::io("read", e));
                }
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

    /// Moves to the next event's first byte; false at the array's end.
    fn next_element(&mut self) -> Result<bool> {
        if self.position == Position::BeforeArray {
            match self.peek()? {
                Some(b'[') => self.at += 1,
                Some(b'n') => return Err(self.not_json("it is null or a word")),
                _ => return Err(self.not_json("it does not begin with \"[\"")),
            }
            self.position = Position::InArray { first: true };
        }
        let Position::InArray { first } = self.position else {
            return Ok(false);
        };
        match (self.peek()?, first) {
            (Some(b']'), _) => {
                self.at += 1;
                self.position = Position::Ended;
                return match self.peek()? {
                    None => Ok(false),
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
        Ok(true)
    }

    /// The length of the object that begins at `self.at`.
    fn object(&mut self) -> Result<usize> {
        let (mut i, mut depth, mut in_string) = (0usize, 0u32, false);
        loop {
            let rest = &self.buf[self.at + i..self.end];
            let found = match in_string {
                true => memchr2(b'"', b'\\', rest),
                false => memchr3(b'"', b'{', b'}', rest),
            };
            match found.map(|n| (n, rest[n])) {
                // The byte after a backslash is never a quote that ends the string.
                Some((n, b'\\')) if n + 1 < rest.len() => {
                    i += n + 2;
                    continue;
                }
                Some((n, b'\\')) => i += n,
                Some((n, mark)) => {
                    i += n + 1;
                    match mark {
                        b'"' => in_string = !in_string,
                        b'{' => depth += 1,
                        _ => depth -= 1,
                    }
                    if depth == 0 {
                        return Ok(i);
                    }
                    continue;
                }
                None => i += rest.len(),
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
        // What is too large already is not read to its end.
        if !e.reason().is_bad_data() || e.reason() == Reason::TooLarge {
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
                    self.damaged = true;
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
            Some((create_revision, version, lease)) => Change::PutBase64(KeyValue {
                key: &self.key,
                create_revision,
                mod_revision: self.current,
                version,
                value: match self.unescaped.is_empty() {
                    true => &self.buf[self.value.clone()],
                    false => &self.unescaped,
                },
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
        if !self.next_element()? {
            return match self.current == self.last {
                true => Ok(false),
                false if self.events == 0 => Err(self.mismatch("it holds no event")),
                false => Err(self.mismatch(&format!("it ends at revision {}", self.current))),
            };
        }
        let scan = Scan {
            b: &self.buf[..self.end],
            at: self.at,
        };
        let found = match scan.event() {
            Some(found) => {
                let time = std::str::from_utf8(&self.buf[found.time.clone()])
                    .map_err(|_| Error::corrupt("the time of an event is no text"))?;
                self.time.clear();
                self.time.push_str(time);
                self.unescaped.clear();
                self.key.clear();
                self.key.extend_from_slice(&self.buf[found.key.clone()]);
                found
            }
            None => self.parse()?,
        };
        self.at = found.end;
        self.value = found.value;
        if self.time.len() > LONGEST_TIME {
            return Err(self.not_json("a time is longer than any"));
        }
        let main = Revision(found.mod_revision);

        self.step_to(main)?;
        let key = STANDARD.decode_inplace(&mut self.key).map_err(|e| {
            Error::corrupt(format!(
                "the key of an event at revision {main} is no base64: {e}"
            ))
        })?;
        let len = key.len();
        self.key.truncate(len);
        if self.key.is_empty() {
            return Err(Error::corrupt(format!(
                "an event at revision {main} has no key"
            )));
        }
        let put = match found.kind {
            TYPE_PUT => true,
            TYPE_DELETE => false,
            other => {
                return Err(Error::corrupt(format!(
                    "an event at revision {main} has the unknown type {other}"
                )));
            }
        };
        if self.events == self.limits.events() {
            return Err(self.limits.too_many_events());
        }
        self.put = put.then_some((Revision(found.create_revision), found.version, found.lease));
        self.current = main;
        self.events += 1;
        Ok(true)
    }

    /// Checks that a change of revision `main` comes next, and counts it within its transaction.
    fn step_to(&mut self, main: Revision) -> Result<()> {
        let (current, first) = (self.current, self.events == 0);
        if main == current && !first {
            let sub = self.sub.checked_add(1);
            self.sub = sub.ok_or_else(|| Error::corrupt("a transaction has too many changes"))?;
            return Ok(());
        }
        self.sub = 0;
        if main < current && !first {
            return Err(Error::corrupt(format!(
                "its events are out of order: revision {main} follows revision {current}"
            )));
        }
        if main == current.next() && main <= self.last {
            return Ok(());
        }
        Err(self.mismatch(&match main == current.next() {
            true => format!("it goes on with revision {main}"),
            false if first => format!("it begins at revision {main}"),
            false => {
                let (from, to) = (current.next(), main.previous());
                format!("revisions {from} to {to} are missing")
            }
        }))
    }

    /// The general parser: any spelling that is JSON. Key and time are put into `self`.
    fn parse(&mut self) -> Result<Found> {
        let len = self.object()?;
        let object = self.at..self.at + len;
        let wire: WireEvent<'_> = serde_json::from_slice(&self.buf[object.clone()])
            .map_err(|e| self.not_json(&format!("an event cannot be read: {e}")))?;
        let kv = wire.event.kv;
        self.key.clear();
        self.key.extend_from_slice(kv.key.as_bytes());
        self.time.clear();
        self.time.push_str(&wire.time);
        let value = match kv.value {
            // One without escapes stands in the buffer.
            Cow::Borrowed(value) if !value.is_empty() => {
                let from = value.as_ptr().addr() - self.buf.as_ptr().addr();
                self.unescaped.clear();
                from..from + value.len()
            }
            value => {
                self.unescaped = value.into_owned().into_bytes();
                0..0
            }
        };
        Ok(Found {
            kind: wire.event.kind,
            value,
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: kv.lease,
            end: object.end,
            ..Found::default()
        })
    }

    fn mismatch(&self, is: &str) -> Error {
        Reason::NameMismatch.error(format!(
            "its name promises revisions {} to {}, but {is}",
            self.start, self.last
        ))
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

    /// What the scan takes, the general parser reads the same way: events in Go's spelling, with
    /// bytes changed, put in and left out.
    #[test]
    fn the_scan_and_the_parser_agree() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        let spelled = [
            r#"{"etcdEvent":{"kv":{"key":"YQ==","create_revision":5,"mod_revision":17,"version":2,"value":"Yg==","lease":-71}},"time":"2026-11-20T01:02:03Z"}"#,
            r#"{"etcdEvent":{"type":1,"kv":{"key":"Y2M=","mod_revision":9223372036854775807}},"time":""}"#,
        ];
        let (mut taken, mut passed_on) = (0, 0);
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
            let Some(found) = (Scan { b: &b, at: 0 }).event() else {
                passed_on += 1;
                continue;
            };
            taken += 1;
            let shown = String::from_utf8_lossy(&b);
            let text = |r: &Range<usize>| std::str::from_utf8(&b[r.clone()]).unwrap();
            let wire: WireEvent<'_> =
                serde_json::from_slice(&b[..found.end]).unwrap_or_else(|e| panic!("{e}: {shown}"));
            let kv = &wire.event.kv;
            assert_eq!(wire.event.kind, found.kind, "{shown}");
            assert_eq!(kv.key, text(&found.key), "{shown}");
            assert_eq!(kv.create_revision, found.create_revision, "{shown}");
            assert_eq!(kv.mod_revision, found.mod_revision, "{shown}");
            assert_eq!(kv.version, found.version, "{shown}");
            assert_eq!(kv.value, text(&found.value), "{shown}");
            assert_eq!(kv.lease, found.lease, "{shown}");
            assert_eq!(wire.time, text(&found.time), "{shown}");
        }
        assert!(taken > 20_000 && passed_on > 20_000, "{taken} {passed_on}");
    }
}
