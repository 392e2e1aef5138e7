//! Reads delta snapshots: a JSON array of watch events, one event at a time.
//!
//! The reader holds one event in memory. It checks that the revisions are in order and without gaps, from the first to
//! the last of the delta's name. It does not know what came before the delta.
//!
//! The format is that of etcd-backup-restore: `{"etcdEvent":{"type":1?,"kv":{…}},"time":…}`. Fields of zero
//! value are left out, and byte strings are base64 in the standard alphabet.

mod scan;

#[cfg(test)]
mod tests;

use crate::backup::name::SnapshotName;
use crate::base::limits::Limits;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Change, KeyValue, Revision};
use base64_simd::STANDARD;
use chrono::{DateTime, Utc};
use memchr::{memchr2, memchr3};
use scan::{EventScanner, RawEvent, TYPE_DELETE, TYPE_PUT};
use serde::Deserialize;
use std::borrow::Cow;
use std::io::Read;
use std::ops::Range;

/// The size of the buffer in bytes, unless an event is longer.
const CHUNK: usize = 256 << 10;
/// The size of the buffer at first: most deltas are small.
const FIRST_CHUNK: usize = 16 << 10;
/// An event that needs a larger buffer (bytes) is a long one: see [`DeltaReader::before_long_event`].
const LONG: usize = 1 << 20;
/// The most bytes that a time in RFC 3339 can have.
const LONGEST_TIME: usize = 64;

/// One event of a delta. The value of a put is still base64, so that values which are not kept need not be
/// decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// The revision of the transaction that made the change.
    pub main: Revision,
    /// The number of the change within the transaction, from 0.
    pub sub: u32,
    /// The change: a put or a deletion.
    pub change: Change<'a>,
    /// When the snapshotter received the event, in RFC 3339.
    pub time: &'a str,
}

impl Event<'_> {
    /// Parses the time.
    ///
    /// # Errors
    /// `CorruptSnapshot` if it is not a time in RFC 3339.
    pub fn instant(&self) -> Result<DateTime<Utc>> {
        DateTime::parse_from_rfc3339(self.time)
            .map(|t| t.with_timezone(&Utc))
            .map_err(|e| {
                Error::corrupt(format!(
                    "the event at revision {} has the invalid time \"{}\": {e}",
                    self.main, self.time
                ))
            })
    }
}

#[derive(Deserialize)]
struct WireEvent<'a> {
    #[serde(borrow, rename = "etcdEvent")]
    event: WireEtcdEvent<'a>,
    #[serde(borrow, default)]
    time: Cow<'a, str>,
}

#[derive(Deserialize)]
struct WireEtcdEvent<'a> {
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

/// Reads the events of one delta from its uncompressed payload.
pub struct DeltaReader<'l, R> {
    src: R,
    /// The first and the last revision of the delta's name.
    start: Revision,
    last: Revision,
    /// `buf[at..end]` was read and is not yet parsed.
    buf: Vec<u8>,
    at: usize,
    end: usize,
    position: Position,
    /// The revision of the event that was read last, and its number within the transaction.
    current: Revision,
    sub: u32,
    /// The number of events that were read.
    events: u64,
    key: Vec<u8>,
    /// The base64 of the value, as a range of `buf`. If the JSON string has escapes, `unescaped` holds it
    /// instead.
    value: Range<usize>,
    unescaped: Vec<u8>,
    time: String,
    /// The create revision, version and lease of a put; `None` for a deletion.
    put: Option<(Revision, i64, i64)>,
    damaged: bool,
    limits: Limits,
    before_long_event: Option<BeforeLongEvent<'l>>,
}

/// Called before memory is allocated for a long event.
type BeforeLongEvent<'l> = Box<dyn FnMut() -> Result<()> + 'l>;

#[derive(PartialEq)]
enum Position {
    BeforeArray,
    /// Before the first element, or after an element.
    InArray {
        first: bool,
    },
    Ended,
}

impl<'l, R: Read> DeltaReader<'l, R> {
    /// Reads a payload, which must hold the revisions that `name` gives.
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
            before_long_event: None,
        }
    }

    /// Limits the size of an event and the number of events, since a small compressed object can unpack to
    /// any size.
    pub fn within(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Calls `wait` before memory is allocated for an event of more than 1 MiB. A caller that reads several
    /// deltas at once can wait there, so that no two of them hold such an event. An error of `wait` ends the
    /// reading.
    pub fn before_long_event(mut self, wait: impl FnMut() -> Result<()> + 'l) -> Self {
        self.before_long_event = Some(Box::new(wait));
        self
    }

    /// Returns whether the buffer holds, or held shortly before, an event of more than 1 MiB.
    pub fn holds_long_event(&self) -> bool {
        self.buf.len() > LONG
    }

    /// Returns whether reading the source failed. If it did, damaged bytes explain every other error, too.
    pub fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// Returns the number of events that were read so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Reads more bytes into the buffer. Returns false at the end of the payload.
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
                0 => FIRST_CHUNK,
                _ if len < CHUNK => CHUNK,
                // Growing by half limits how often a long event is copied.
                _ => (self.end + self.end / 2).min(longest.saturating_add(CHUNK)),
            };
            if size > LONG
                && let Some(wait) = &mut self.before_long_event
            {
                wait()?;
            }
            self.buf.reserve_exact(size - len);
            self.buf.resize(size, 0);
        } else if self.buf.len() > LONG && self.end < CHUNK / 2 {
            // Release the memory of a long event.
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

    /// Returns the next byte that is not white space and leaves it in place; `None` at the end of the
    /// payload.
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
            "its content is not a JSON array of events: {what}, after event {} (revision {})",
            self.events, self.current
        ))
    }

    /// Moves to the first byte of the next event. Returns false at the end of the array.
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
                    return Err(self.not_json("an element is not an object"));
                }
            }
            (None, _) => return Err(self.not_json("it ends without \"]\"")),
            _ => return Err(self.not_json("an element is not an object, or a comma is missing")),
        }
        self.position = Position::InArray { first: false };
        Ok(true)
    }

    /// Returns the length of the JSON object that begins at `self.at`.
    fn object(&mut self) -> Result<usize> {
        let (mut i, mut depth, mut in_string) = (0usize, 0u32, false);
        loop {
            let rest = &self.buf[self.at + i..self.end];
            let next = if in_string {
                memchr2(b'"', b'\\', rest)
            } else {
                memchr3(b'"', b'{', b'}', rest)
            };
            match next.map(|n| (n, rest[n])) {
                // The byte after a backslash does not end the string.
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

    /// Returns the next event; `None` at the end of the payload, if the delta held every revision of its
    /// name.
    ///
    /// # Errors
    /// `CorruptSnapshot`; `NameMismatch` if revisions of the name are missing; `TooLarge`; errors of the
    /// source.
    #[allow(clippy::should_implement_trait)] // the event borrows from the reader, which an Iterator cannot express
    pub fn next(&mut self) -> Result<Option<Event<'_>>> {
        match self.advance() {
            Ok(false) => Ok(None),
            Ok(true) => Ok(Some(self.event())),
            Err(e) => Err(self.explain(e)),
        }
    }

    /// Returns the cause of an error about the events of this delta. It reads on to the end, where the source
    /// checks its hash: if that fails, damaged bytes are the cause.
    pub fn explain(&mut self, e: Error) -> Error {
        // A payload that is too large is not read to its end.
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
                    // A plain read failure does not explain the error about the events.
                    return if damage.reason() == Reason::Io {
                        e
                    } else {
                        damage
                    };
                }
            }
        }
    }

    /// Returns the event that was read last.
    fn event(&self) -> Event<'_> {
        let change = match self.put {
            Some((create_revision, version, lease)) => Change::PutBase64(KeyValue {
                key: &self.key,
                create_revision,
                mod_revision: self.current,
                version,
                value: if self.unescaped.is_empty() {
                    &self.buf[self.value.clone()]
                } else {
                    &self.unescaped
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

    /// Reads the next event into `self`. Returns false at the end.
    fn advance(&mut self) -> Result<bool> {
        if !self.next_element()? {
            return match self.current == self.last {
                true => Ok(false),
                false if self.events == 0 => Err(self.mismatch("it holds no events")),
                false => Err(self.mismatch(&format!("it ends at revision {}", self.current))),
            };
        }
        let scanned = EventScanner::new(&self.buf[..self.end], self.at).event();
        // What is not UTF-8 is left to the parser, so that the error does not depend on where a buffer ends.
        let scanned = scanned.and_then(|raw| {
            let time = std::str::from_utf8(&self.buf[raw.time.clone()]).ok()?;
            Some((time, raw))
        });
        let raw = match scanned {
            Some((time, raw)) => {
                self.time.clear();
                self.time.push_str(time);
                self.unescaped.clear();
                self.key.clear();
                self.key.extend_from_slice(&self.buf[raw.key.clone()]);
                raw
            }
            None => self.parse()?,
        };
        self.at = raw.end;
        self.value = raw.value;
        if self.time.len() > LONGEST_TIME {
            return Err(self.not_json("the time of an event is too long"));
        }
        let main = Revision(raw.mod_revision);

        self.advance_to(main)?;
        let key = STANDARD.decode_inplace(&mut self.key).map_err(|e| {
            Error::corrupt(format!(
                "the key of an event at revision {main} is not base64: {e}"
            ))
        })?;
        let len = key.len();
        self.key.truncate(len);
        if self.key.is_empty() {
            return Err(Error::corrupt(format!(
                "an event at revision {main} has no key"
            )));
        }
        let put = match raw.kind {
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
        self.put = put.then_some((Revision(raw.create_revision), raw.version, raw.lease));
        self.current = main;
        self.events += 1;
        Ok(true)
    }

    /// Checks that a change of revision `main` may come next, and numbers it within its transaction.
    fn advance_to(&mut self, main: Revision) -> Result<()> {
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
            true => format!("it continues with revision {main}"),
            false if first => format!("it begins at revision {main}"),
            false => {
                let (from, to) = (current.next(), main.previous());
                format!("revisions {from} to {to} are missing")
            }
        }))
    }

    /// Reads an event with the general parser, which accepts every spelling that JSON allows. The key and the
    /// time go into `self`.
    fn parse(&mut self) -> Result<RawEvent> {
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
            // A string without escapes is borrowed from the buffer.
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
        Ok(RawEvent {
            kind: wire.event.kind,
            value,
            create_revision: kv.create_revision,
            mod_revision: kv.mod_revision,
            version: kv.version,
            lease: kv.lease,
            end: object.end,
            ..RawEvent::default()
        })
    }

    fn mismatch(&self, actual: &str) -> Error {
        Reason::NameMismatch.error(format!(
            "its name promises revisions {} to {}, but {actual}",
            self.start, self.last
        ))
    }
}
