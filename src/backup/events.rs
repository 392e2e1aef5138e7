//! Writes the payload of a delta snapshot: a JSON array of watch events, as etcd-backup-restore spells it.
//!
//! The bytes are those of Go's encoding/json: `{"etcdEvent":{"type":1?,"kv":{…}},"time":…}`, fields of zero
//! value left out, a comma and nothing else between events. `delta` reads it; which events make one delta is
//! for others to say.

use crate::mvcc::{Change, Revision};
use base64_simd::STANDARD;
use chrono::{DateTime, Datelike, Timelike, Utc};
use std::io::{self, Write};

/// What is gathered before it is handed on, in bytes.
const CHUNK: usize = 256 << 10;

/// One change, as a watch told it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventRef<'a> {
    /// The transaction that made the change; of a put it stands for the record's own `mod_revision`.
    pub main: Revision,
    /// What changed.
    pub change: Change<'a>,
}

/// Appends one event, with neither comma nor bracket: see [`EventsWriter::push_encoded`].
///
/// `time` is when the event was seen. Of a leap second its last nanosecond is written: Go reads no 60.
pub fn encode_event(out: &mut Vec<u8>, event: &EventRef<'_>, time: DateTime<Utc>) {
    let text = |out: &mut Vec<u8>, name: &[u8], raw: &[u8]| {
        out.extend_from_slice(name);
        STANDARD.encode_append(raw, out);
        out.push(b'"');
    };
    match &event.change {
        Change::Put(kv) | Change::PutBase64(kv) => {
            text(out, b"{\"etcdEvent\":{\"kv\":{\"key\":\"", kv.key);
            field(out, b",\"create_revision\":", kv.create_revision.0);
            field(out, b",\"mod_revision\":", event.main.0);
            field(out, b",\"version\":", kv.version);
            if kv.value.is_empty() {
            } else if let Change::PutBase64(_) = event.change {
                out.extend_from_slice(b",\"value\":\"");
                out.extend_from_slice(kv.value);
                out.push(b'"');
            } else {
                text(out, b",\"value\":\"", kv.value);
            }
            field(out, b",\"lease\":", kv.lease);
        }
        Change::Delete { key } => {
            text(out, b"{\"etcdEvent\":{\"type\":1,\"kv\":{\"key\":\"", key);
            field(out, b",\"mod_revision\":", event.main.0);
        }
    }
    out.extend_from_slice(b"}},\"time\":\"");
    instant(out, time);
    out.extend_from_slice(b"\"}");
}

/// A number with its name, unless it is zero.
fn field(out: &mut Vec<u8>, name: &[u8], n: i64) {
    if n != 0 {
        out.extend_from_slice(name);
        if n < 0 {
            out.push(b'-');
        }
        digits(out, n.unsigned_abs(), 1);
    }
}

/// A number in decimal, with zeros before it up to `width` digits.
fn digits(out: &mut Vec<u8>, mut n: u64, width: usize) {
    let mut text = [b'0'; 20];
    let mut at = text.len();
    while n > 0 {
        at -= 1;
        text[at] = b'0' + (n % 10) as u8;
        n /= 10;
    }
    out.extend_from_slice(&text[at.min(text.len() - width)..]);
}

/// RFC 3339 in UTC, with as many digits behind the point as there are: Go's `time.RFC3339Nano`.
fn instant(out: &mut Vec<u8>, time: DateTime<Utc>) {
    let (date, clock) = (time.date_naive(), time.time());
    // Go writes years 0 to 9999, and no clock has others.
    digits(out, date.year().clamp(0, 9999) as u64, 4);
    for (separator, n) in [
        (b'-', date.month()),
        (b'-', date.day()),
        (b'T', clock.hour()),
        (b':', clock.minute()),
        (b':', clock.second()),
    ] {
        out.push(separator);
        digits(out, n.into(), 2);
    }
    let nanoseconds = clock.nanosecond().min(999_999_999);
    if nanoseconds > 0 {
        out.push(b'.');
        digits(out, nanoseconds.into(), 9);
        while out.ends_with(b"0") {
            out.pop();
        }
    }
    out.push(b'Z');
}

/// Writes the events of one delta, in the order in which they are given: by revision, and within a
/// transaction as it made them.
pub struct EventsWriter<W> {
    dst: W,
    buf: Vec<u8>,
    events: u64,
}

impl<W: Write> EventsWriter<W> {
    /// Begins a payload.
    pub fn new(dst: W) -> Self {
        EventsWriter {
            dst,
            buf: Vec::new(),
            events: 0,
        }
    }

    /// Events written so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Writes an event that was seen at `time`.
    ///
    /// # Errors
    /// The writer's.
    pub fn push(&mut self, event: &EventRef<'_>, time: DateTime<Utc>) -> io::Result<()> {
        self.separate();
        encode_event(&mut self.buf, event, time);
        self.hand_on(CHUNK)
    }

    /// Writes an event that [`encode_event`] has made.
    ///
    /// # Errors
    /// The writer's.
    pub fn push_encoded(&mut self, event: &[u8]) -> io::Result<()> {
        self.separate();
        if event.len() < CHUNK {
            self.buf.extend_from_slice(event);
            return self.hand_on(CHUNK);
        }
        self.hand_on(0)?;
        self.dst.write_all(event)
    }

    /// What stands before the next event.
    fn separate(&mut self) {
        self.buf.push(if self.events == 0 { b'[' } else { b',' });
        self.events += 1;
    }

    /// Hands on what was gathered, if it is as much as that.
    fn hand_on(&mut self, least: usize) -> io::Result<()> {
        if self.buf.len() < least {
            return Ok(());
        }
        self.dst.write_all(&self.buf)?;
        self.buf.clear();
        // One long event must not keep its memory.
        self.buf.shrink_to(2 * CHUNK);
        Ok(())
    }

    /// Ends the payload. Of no event at all it is `[]`, which no reader takes for a delta.
    ///
    /// # Errors
    /// The writer's.
    pub fn finish(mut self) -> io::Result<W> {
        let end: &[u8] = if self.events == 0 { b"[]" } else { b"]" };
        self.buf.extend_from_slice(end);
        self.hand_on(0)?;
        Ok(self.dst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mvcc::KeyValue;

    #[test]
    fn zeros_are_left_out_and_times_are_gos() {
        let empty = KeyValue {
            key: b"a",
            create_revision: Revision(0),
            mod_revision: Revision(0),
            version: 0,
            value: b"",
            lease: 0,
        };
        let full = KeyValue {
            create_revision: Revision(7),
            version: 10,
            value: b"<b>",
            lease: i64::MIN,
            ..empty
        };
        let put = |kv| EventRef {
            main: Revision(9),
            change: Change::Put(kv),
        };
        let delete = EventRef {
            main: Revision(i64::MAX),
            change: Change::Delete { key: b"a" },
        };
        for (event, time, expected) in [
            (
                put(empty),
                "2026-11-20T01:02:03Z",
                r#"{"etcdEvent":{"kv":{"key":"YQ==","mod_revision":9}},"time":"2026-11-20T01:02:03Z"}"#,
            ),
            (
                put(full),
                "2026-11-20T01:02:03.120Z",
                r#"{"etcdEvent":{"kv":{"key":"YQ==","create_revision":7,"mod_revision":9,"version":10,"value":"PGI+","lease":-9223372036854775808}},"time":"2026-11-20T01:02:03.12Z"}"#,
            ),
            (
                delete,
                "2016-12-31T23:59:60.5Z",
                r#"{"etcdEvent":{"type":1,"kv":{"key":"YQ==","mod_revision":9223372036854775807}},"time":"2016-12-31T23:59:59.999999999Z"}"#,
            ),
            (
                delete,
                "0999-01-01T00:00:00.000000001Z",
                r#"{"etcdEvent":{"type":1,"kv":{"key":"YQ==","mod_revision":9223372036854775807}},"time":"0999-01-01T00:00:00.000000001Z"}"#,
            ),
        ] {
            let mut out = Vec::new();
            encode_event(&mut out, &event, time.parse().unwrap());
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn brackets_and_commas() {
        assert_eq!(
            EventsWriter::new(Vec::new()).finish().unwrap(),
            b"[]".as_slice()
        );
        let long = vec![b'x'; CHUNK];
        let mut w = EventsWriter::new(Vec::new());
        for event in [b"{1}".as_slice(), &long, b"{2}"] {
            w.push_encoded(event).unwrap();
        }
        assert_eq!(w.events(), 3);
        let out = w.finish().unwrap();
        assert_eq!(out, [b"[{1},", &long[..], b",{2}]"].concat());
    }
}
