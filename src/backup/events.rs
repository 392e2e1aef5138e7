//! Writes the payload of a delta snapshot: a JSON array of watch events in the format of etcd-backup-restore.
//!
//! The bytes are those of Go's encoding/json: `{"etcdEvent":{"type":1?,"kv":{…}},"time":…}`, without fields of zero
//! value, and with a comma and nothing else between events. `delta` reads the format.

use crate::mvcc::{Change, Revision};
use base64_simd::STANDARD;
use chrono::{DateTime, Datelike, Timelike, Utc};
use std::io::{self, Write};

/// The number of bytes that are gathered before they are written.
const CHUNK: usize = 256 << 10;

/// One change, as a watch of etcd delivers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventRef<'a> {
    /// The revision of the transaction that made the change. It is written as `mod_revision`, whatever the
    /// record of a put has there.
    pub main: Revision,
    /// The change: a put or a deletion.
    pub change: Change<'a>,
}

/// Appends one event without a comma or bracket: see [`EventsWriter::push_encoded`].
///
/// `time` is when the event was received. A time within a leap second is written as the last nanosecond
/// before it, since Go does not read a second 60.
pub fn encode_event(out: &mut Vec<u8>, event: &EventRef<'_>, time: DateTime<Utc>) {
    let base64_field = |out: &mut Vec<u8>, name: &[u8], raw: &[u8]| {
        out.extend_from_slice(name);
        STANDARD.encode_append(raw, out);
        out.push(b'"');
    };
    match &event.change {
        Change::Put(kv) | Change::PutBase64(kv) => {
            base64_field(out, b"{\"etcdEvent\":{\"kv\":{\"key\":\"", kv.key);
            number_field(out, b",\"create_revision\":", kv.create_revision.0);
            number_field(out, b",\"mod_revision\":", event.main.0);
            number_field(out, b",\"version\":", kv.version);
            if kv.value.is_empty() {
            } else if let Change::PutBase64(_) = event.change {
                out.extend_from_slice(b",\"value\":\"");
                out.extend_from_slice(kv.value);
                out.push(b'"');
            } else {
                base64_field(out, b",\"value\":\"", kv.value);
            }
            number_field(out, b",\"lease\":", kv.lease);
        }
        Change::Delete { key } => {
            base64_field(out, b"{\"etcdEvent\":{\"type\":1,\"kv\":{\"key\":\"", key);
            number_field(out, b",\"mod_revision\":", event.main.0);
        }
    }
    out.extend_from_slice(b"}},\"time\":\"");
    write_time(out, time);
    out.extend_from_slice(b"\"}");
}

/// Appends a number with its name, unless it is zero.
fn number_field(out: &mut Vec<u8>, name: &[u8], n: i64) {
    if n != 0 {
        out.extend_from_slice(name);
        if n < 0 {
            out.push(b'-');
        }
        digits(out, n.unsigned_abs(), 1);
    }
}

/// Appends a number in decimal, padded with zeros to `width` digits.
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

/// Appends a time in RFC 3339 in UTC without trailing zeros: Go's `time.RFC3339Nano`.
fn write_time(out: &mut Vec<u8>, time: DateTime<Utc>) {
    let (date, clock) = (time.date_naive(), time.time());
    // Go writes the years 0 to 9999 only.
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

/// Writes the events of one delta. The caller gives them in order of their revisions, and within a
/// transaction in the order in which it made them.
pub struct EventsWriter<W> {
    dst: W,
    buf: Vec<u8>,
    events: u64,
}

impl<W: Write> EventsWriter<W> {
    /// Creates a writer. The payload begins with the first event.
    pub fn new(dst: W) -> Self {
        EventsWriter {
            dst,
            buf: Vec::new(),
            events: 0,
        }
    }

    /// Returns the number of events that were written so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Writes an event that was received at `time`.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn push(&mut self, event: &EventRef<'_>, time: DateTime<Utc>) -> io::Result<()> {
        self.separate();
        self.events += 1;
        encode_event(&mut self.buf, event, time);
        self.flush_from(CHUNK)
    }

    /// Writes `count` events that [`encode_event`] has encoded, with commas between them.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn push_encoded(&mut self, events: &[u8], count: u64) -> io::Result<()> {
        self.separate();
        self.events += count;
        if events.len() < CHUNK {
            self.buf.extend_from_slice(events);
            return self.flush_from(CHUNK);
        }
        self.flush_from(0)?;
        self.dst.write_all(events)
    }

    /// Writes the separator before the next event.
    fn separate(&mut self) {
        self.buf.push(if self.events == 0 { b'[' } else { b',' });
    }

    /// Writes the gathered bytes if there are at least `least` of them.
    fn flush_from(&mut self, least: usize) -> io::Result<()> {
        if self.buf.len() < least {
            return Ok(());
        }
        self.dst.write_all(&self.buf)?;
        self.buf.clear();
        // Release the memory of a long event.
        self.buf.shrink_to(2 * CHUNK);
        Ok(())
    }

    /// Ends the payload and returns the writer. A payload without events is `[]`, which no reader accepts as
    /// a delta.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        let end: &[u8] = if self.events == 0 { b"[]" } else { b"]" };
        self.buf.extend_from_slice(end);
        self.flush_from(0)?;
        Ok(self.dst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mvcc::KeyValue;

    #[test]
    fn zeros_are_left_out_and_times_are_those_of_go() {
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
    fn events_are_separated_by_commas_in_brackets() {
        assert_eq!(
            EventsWriter::new(Vec::new()).finish().unwrap(),
            b"[]".as_slice()
        );
        let long = vec![b'x'; CHUNK];
        let mut w = EventsWriter::new(Vec::new());
        for (events, count) in [(b"{1},{2}".as_slice(), 2), (&long, 1), (b"{3}", 1)] {
            w.push_encoded(events, count).unwrap();
        }
        assert_eq!(w.events(), 4);
        let out = w.finish().unwrap();
        assert_eq!(out, [b"[{1},{2},", &long[..], b",{3}]"].concat());
    }
}
