//! A fast scanner for events in the spelling of Go's encoding/json.
//!
//! It reads nothing else: any other spelling goes to the general parser.

use memchr::memchr;
use std::ops::Range;

pub(super) const TYPE_PUT: i64 = 0;
pub(super) const TYPE_DELETE: i64 = 1;

/// An event as ranges of a buffer, with its strings still encoded.
#[derive(Debug, Default, PartialEq)]
pub(super) struct RawEvent {
    pub(super) kind: i64,
    pub(super) key: Range<usize>,
    pub(super) create_revision: i64,
    pub(super) mod_revision: i64,
    pub(super) version: i64,
    pub(super) value: Range<usize>,
    pub(super) lease: i64,
    pub(super) time: Range<usize>,
    /// The position after the event.
    pub(super) end: usize,
}

/// Scans one event. A method returns `None` if the event is spelled in another way, or if the buffer ends
/// within it.
pub(super) struct EventScanner<'a> {
    b: &'a [u8],
    at: usize,
}

impl<'a> EventScanner<'a> {
    /// Scans `b` from position `at` on.
    pub(super) fn new(b: &'a [u8], at: usize) -> Self {
        EventScanner { b, at }
    }

    fn literal(&mut self, text: &[u8]) -> Option<()> {
        self.b
            .get(self.at..)?
            .starts_with(text)
            .then(|| self.at += text.len())
    }

    /// Returns the text up to the next quote, and skips the quote.
    fn text(&mut self) -> Option<Range<usize>> {
        let from = self.at;
        let to = from + memchr(b'"', self.b.get(from..)?)?;
        self.at = to + 1;
        Some(from..to)
    }

    /// Returns the number after `name`, or 0 if `name` does not follow.
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
        let is_canonical = self.at > from && (self.b[from] != b'0' || self.at == from + 1);
        // serde_json does not read -0 as an integer.
        (is_canonical && !(negative && n == 0)).then_some(if negative { -n } else { n })
    }

    /// Scans the event.
    pub(super) fn event(mut self) -> Option<RawEvent> {
        let mut raw = RawEvent::default();
        self.literal(b"{\"etcdEvent\":{")?;
        if self.literal(b"\"type\":1,").is_some() {
            raw.kind = TYPE_DELETE;
        }
        self.literal(b"\"kv\":{\"key\":\"")?;
        raw.key = self.text()?;
        raw.create_revision = self.number(b",\"create_revision\":")?;
        raw.mod_revision = self.number(b",\"mod_revision\":")?;
        raw.version = self.number(b",\"version\":")?;
        if self.literal(b",\"value\":\"").is_some() {
            raw.value = self.text()?;
        }
        raw.lease = self.number(b",\"lease\":")?;
        self.literal(b"}},\"time\":\"")?;
        raw.time = self.text()?;
        self.literal(b"}")?;
        raw.end = self.at;
        // Escapes are left to the general parser.
        let is_plain = |r: &Range<usize>| memchr(b'\\', &self.b[r.clone()]).is_none();
        let has_control = self.b[raw.time.clone()].iter().any(|&x| x < b' ');
        let is_valid =
            is_plain(&raw.key) && is_plain(&raw.value) && is_plain(&raw.time) && !has_control;
        is_valid.then_some(raw)
    }
}
