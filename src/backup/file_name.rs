//! The names of plain snapshot files: when the snapshot was taken, and which files belong to one series.
//!
//! The files are those of etcdctl, k3s, kOps, Talos, OpenShift and of people's own scripts. Contents are not read.

use super::SnapshotName;
use chrono::{DateTime, NaiveDate, NaiveTime, TimeDelta, Utc};
use std::ops::Range;

/// Endings of names that are not those of snapshots: of files beside them, or of ones that are still being written.
const OTHERS: [&str; 15] = [
    ".part",
    ".tmp",
    ".partial",
    ".tar",
    ".tar.gz",
    ".tgz",
    ".sha256",
    ".sha512",
    ".md5",
    ".json",
    ".yaml",
    ".meta",
    ".log",
    ".txt",
    ".rkestate",
];
/// Endings that snapshots have even without a time.
const SNAPSHOTS: [&str; 8] = [
    ".db",
    ".db.gz",
    ".db.zst",
    ".db.zip",
    ".db.age",
    ".snapshot",
    KOPS[0],
    KOPS[1],
];
/// What may follow the time in a name of a snapshot, as k3s, RKE1 and Talos write it.
const AFTER_TIME: [&str; 8] = [
    "",
    ".zip",
    ".gz",
    ".zst",
    ".age",
    ".snap",
    ".snap.zst",
    ".snap.age",
];
/// The names of kOps' files, which are in a folder for each snapshot.
pub(crate) const KOPS: [&str; 2] = ["etcd.backup.gz", "etcd.backup"];

/// The time in a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameTime {
    /// The time. A date stands for its last second.
    pub at: DateTime<Utc>,
    /// Whether the name has a date alone.
    pub is_date: bool,
    /// Whether the name tells the zone. Otherwise it is taken for UTC.
    pub has_zone: bool,
    /// Where the time is in the name, in bytes.
    pub range: Range<usize>,
}

impl NameTime {
    /// Returns whether the time has not come yet, by a clock that may be wrong by minutes. A date has come if it has
    /// begun somewhere on earth.
    pub(crate) fn is_future(&self, now: DateTime<Utc>) -> bool {
        /// How far clocks may differ.
        const SKEW: TimeDelta = TimeDelta::minutes(5);
        /// A date lasts a day, and begins 14 hours earlier in the first zone.
        const BEFORE_END: TimeDelta = TimeDelta::hours(24 + 14);
        self.at > now + if self.is_date { BEFORE_END } else { SKEW }
    }
}

/// Returns the last time in a path: Unix seconds, RFC 3339 in its usual spellings, a date with hours and minutes, or a
/// date.
pub fn time_in(path: &str) -> Option<NameTime> {
    let bytes = path.as_bytes();
    let (mut found, mut at) = (None, 0);
    while at < bytes.len() {
        let is_start = bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_digit());
        match is_start.then(|| time_at(path, at)).flatten() {
            Some(time) => {
                at = time.range.end;
                found = Some(time);
            }
            None => at += 1,
        }
    }
    found
}

/// Returns the time in the name of a file at the end of a path. kOps' files have it in their folder's name.
pub(crate) fn time_of_file(path: &str) -> Option<NameTime> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let in_folder = path.rsplit('/').nth(1).filter(|_| KOPS.contains(&name));
    time_in(in_folder.unwrap_or(name))
}

/// A text that is read from the front.
#[derive(Clone, Copy)]
struct Rest<'t>(&'t str);

impl Rest<'_> {
    fn digits(&self) -> usize {
        self.0.bytes().take_while(u8::is_ascii_digit).count()
    }

    /// Takes a number of this many digits.
    fn number(&mut self, width: usize) -> Option<u32> {
        let (number, rest) = self.0.split_at_checked(width)?;
        let is_number = number.bytes().all(|b| b.is_ascii_digit());
        self.0 = rest;
        is_number.then(|| number.parse().ok()).flatten()
    }

    /// Takes a separator and two of the digits behind it, which must be this many.
    fn separated(&mut self, lengths: &[usize]) -> Option<u32> {
        let is_part = self.one_of("-_.") && lengths.contains(&self.digits());
        is_part.then(|| self.number(2)).flatten()
    }

    /// Takes a fraction of a second, if there is one.
    fn fraction(&mut self) {
        let mut digits = *self;
        if digits.one_of(".,") && digits.digits() > 0 {
            self.0 = &digits.0[digits.digits()..];
        }
    }

    /// Takes one of these characters.
    fn one_of(&mut self, characters: &str) -> bool {
        let rest = self.0.strip_prefix(|c| characters.contains(c));
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }
}

/// Reads the time that begins at this byte of a text, with a digit.
fn time_at(text: &str, start: usize) -> Option<NameTime> {
    let mut rest = Rest(text.get(start..)?);
    let ended = |at, is_date, has_zone, rest: Rest<'_>| NameTime {
        at,
        is_date,
        has_zone,
        range: start..text.len() - rest.0.len(),
    };
    let digits = rest.digits();
    if digits == 10 {
        let seconds = rest.0[..10].parse().ok()?;
        let at = DateTime::from_timestamp(seconds, 0).filter(|_| seconds >= 1_000_000_000)?;
        return Some(ended(at, false, true, Rest(&rest.0[10..])));
    }
    if ![4, 8, 12, 14].contains(&digits) {
        return None;
    }
    let year = rest.number(4).filter(|year| (2001..3000).contains(year))?;
    let (month, day) = match digits {
        4 => (rest.separated(&[2])?, rest.separated(&[2, 4, 6, 8])?),
        _ => (rest.number(2)?, rest.number(2)?),
    };
    let date = NaiveDate::from_ymd_opt(year as i32, month, day)?;
    let before_time = rest;
    let is_joined = digits > 8;
    let Some((time, has_seconds)) = time_of_day(&mut rest, is_joined) else {
        let end = NaiveTime::from_hms_opt(23, 59, 59)?;
        let at = date.and_time(end).and_utc();
        return (!is_joined).then(|| ended(at, true, false, before_time));
    };
    let at = date.and_time(time).and_utc();
    let mut zone = rest;
    if has_seconds {
        zone.fraction();
    }
    Some(match offset(&mut zone) {
        Some(offset) => ended(at - offset, false, true, zone),
        None => ended(at, false, false, rest),
    })
}

/// Takes hours and minutes, and seconds if there are any. `is_joined`: the digits follow those of the date.
fn time_of_day(rest: &mut Rest<'_>, is_joined: bool) -> Option<(NaiveTime, bool)> {
    let mut at = *rest;
    if !is_joined && !at.one_of("Tt_-. ") {
        return None;
    }
    let (hour, minute, second) = match at.digits() {
        6 => (at.number(2)?, at.number(2)?, at.number(2)),
        4 => (at.number(2)?, at.number(2)?, None),
        2 => {
            let hour = at.number(2)?;
            if !at.one_of(":-_.") || at.digits() != 2 {
                return None;
            }
            let minute = at.number(2)?;
            let mut seconds = at;
            let has_seconds = seconds.one_of(":-_.") && seconds.digits() == 2;
            let second = has_seconds.then(|| seconds.number(2)).flatten();
            if second.is_some() {
                at = seconds;
            }
            (hour, minute, second)
        }
        _ => return None,
    };
    let time = NaiveTime::from_hms_opt(hour, minute, second.unwrap_or(0))?;
    *rest = at;
    Some((time, second.is_some()))
}

/// Takes `Z`, or an offset such as `+02:00` or `+0200`. What begins with a hyphen and has no colon may be a number.
fn offset(rest: &mut Rest<'_>) -> Option<TimeDelta> {
    if rest.one_of("Z") {
        let ends = !rest.0.starts_with(|c: char| c.is_ascii_alphanumeric());
        return ends.then(TimeDelta::zero);
    }
    let is_east = rest.0.starts_with('+');
    if !rest.one_of("+-") {
        return None;
    }
    let hours = rest.number(2)?;
    if !rest.one_of(":") && !is_east {
        return None;
    }
    let minutes = rest.number(2).filter(|_| rest.digits() == 0)?;
    let offset = TimeDelta::minutes(i64::from(hours * 60 + minutes));
    Some(if is_east { offset } else { -offset })
}

/// Returns whether a path is in a hidden folder, or hidden itself: k3s has files of the same names in `.metadata`.
pub(crate) fn is_hidden(path: &str) -> bool {
    path.split('/').any(|part| part.starts_with('.'))
}

/// Returns whether the ending of a name says that the file is no snapshot, or none yet.
pub(crate) fn is_other_file(name: &str) -> bool {
    OTHERS.iter().any(|ending| name.ends_with(ending))
}

/// Returns whether a path below a folder is that of a plain snapshot, by its name: `NAME`, or kOps' `TIME/etcd.backup.gz`.
pub(crate) fn is_snapshot_file(path: &str) -> bool {
    if is_hidden(path) || is_other_file(path) {
        return false;
    }
    match path.split_once('/') {
        Some((folder, name)) => KOPS.contains(&name) && time_in(folder).is_some(),
        None if path.parse::<SnapshotName>().is_ok() => false,
        None => {
            let after = time_in(path).map(|time| &path[time.range.end..]);
            SNAPSHOTS.iter().any(|ending| path.ends_with(ending))
                || after.is_some_and(|after| AFTER_TIME.contains(&after))
                || path.starts_with("etcd-snapshot-")
        }
    }
}

/// Returns the pattern of the series to which a path belongs: `*` stands for its time. Without a time it is the path.
pub(crate) fn pattern_of(path: &str) -> String {
    if let Some((_, name)) = path.split_once('/') {
        return format!("*/{name}");
    }
    match time_in(path) {
        Some(time) => format!("{}*{}", &path[..time.range.start], &path[time.range.end..]),
        None => path.to_owned(),
    }
}

/// Returns the pattern of the series of the newest snapshot among these paths; `None` if none is one of a snapshot.
pub(crate) fn newest_pattern<'p>(paths: impl IntoIterator<Item = &'p str>) -> Option<String> {
    let snapshots = paths.into_iter().filter(|path| is_snapshot_file(path));
    let newest = snapshots.max_by_key(|path| (time_in(path).map(|time| time.at), *path));
    newest.map(pattern_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_the_names_that_tools_and_people_write() {
        for (name, expected, has_zone) in [
            (
                "etcd-snapshot-server-1-1763600405",
                "2025-11-20T01:00:05Z",
                true,
            ),
            (
                "on-demand-node1-1763600405.zip",
                "2025-11-20T01:00:05Z",
                true,
            ),
            (
                "2026-11-20T14:00:05Z-000001/etcd.backup.gz",
                "2026-11-20T14:00:05Z",
                true,
            ),
            ("2026-11-20T14-00-05Z.db", "2026-11-20T14:00:05Z", true),
            ("20261120T140005Z.db", "2026-11-20T14:00:05Z", true),
            ("2026-11-20T14:00:05.123Z.db", "2026-11-20T14:00:05Z", true),
            ("2026-11-20T14:00:05+02:00.db", "2026-11-20T12:00:05Z", true),
            ("2026-11-20T14:00:05+0200.db", "2026-11-20T12:00:05Z", true),
            ("2026-11-20T14:00:05-02:30.db", "2026-11-20T16:30:05Z", true),
            ("2026-11-20T14:00:05-0001.db", "2026-11-20T14:00:05Z", false),
            (
                "snapshot_2026-11-20_140005.db",
                "2026-11-20T14:00:05Z",
                false,
            ),
            (
                "snapshot_2026-11-20_140005Z.db",
                "2026-11-20T14:00:05Z",
                true,
            ),
            ("snapshot-20261120140005.db", "2026-11-20T14:00:05Z", false),
            ("20261120-140005.db", "2026-11-20T14:00:05Z", false),
            ("db-2026-11-29_07-28", "2026-11-29T07:28:00Z", false),
            ("snapshot-202611290728.db", "2026-11-29T07:28:00Z", false),
            ("etcd-2026-11-29.db", "2026-11-29T23:59:59Z", false),
            ("etcd-2026-11-29-1.db", "2026-11-29T23:59:59Z", false),
            ("etcd-20261129.db.gz", "2026-11-29T23:59:59Z", false),
            ("2026-11-20/1763600405.db", "2025-11-20T01:00:05Z", true),
            (
                "c-abcde-rl-xyz_2026-11-20T14:00:00Z.zip",
                "2026-11-20T14:00:00Z",
                true,
            ),
        ] {
            let found = time_in(name).map(|t| (t.at.to_rfc3339(), t.has_zone));
            let expected = Some((expected.replace('Z', "+00:00"), has_zone));
            assert_eq!(found, expected, "{name}");
        }
        for name in [
            "snapshot.db",
            "0000000001.db",
            "20269920140005.db",
            "202611201400051.db",
            "2026-13-20.db",
            "node-10-0-0-1.db",
            "2026-11.db",
            "2026111.db",
            "20261120ö",
        ] {
            let found = time_in(name);
            assert!(found.is_none_or(|t| t.is_date), "{name}");
        }
        assert!(time_in("20269920140005.db").is_none());
        let of_kops = "s3://b/main/2026-11-20T14:00:05Z-000001/etcd.backup.gz";
        assert!(time_of_file(of_kops).is_some());
        assert!(time_of_file("/srv/2026-11-20/x.db").is_none());
    }

    #[test]
    fn a_date_of_today_is_not_in_the_future() {
        let now: DateTime<Utc> = "2026-11-29T12:00:00Z".parse().unwrap();
        let is_future = |name: &str| time_in(name).unwrap().is_future(now);
        assert!(!is_future("etcd-2026-11-29.db"));
        assert!(!is_future("etcd-2026-11-30.db"));
        assert!(is_future("etcd-2026-12-01.db"));
        assert!(!is_future("etcd-2026-11-29_1204.db"));
        assert!(is_future("etcd-2026-11-29_1206.db"));
    }

    #[test]
    fn names_tell_snapshots_and_their_series() {
        for (name, pattern) in [
            (
                "etcd-snapshot-server-1-1763600405",
                "etcd-snapshot-server-1-*",
            ),
            (
                "pre-upgrade-server-1-1763600405.zip",
                "pre-upgrade-server-1-*.zip",
            ),
            (
                "2026-11-20T14:00:05Z-000001/etcd.backup.gz",
                "*/etcd.backup.gz",
            ),
            ("snapshot_2026-11-20_140005.db", "snapshot_*.db"),
            ("prod-2026-11-20T14:00:05Z.snap.age", "prod-*.snap.age"),
            ("db-2026-11-29_07-28", "db-*"),
            ("x.db", "x.db"),
        ] {
            assert!(is_snapshot_file(name), "{name}");
            assert_eq!(pattern_of(name), pattern);
        }
        for name in [
            "0000000000000002-0000000000013882.snap",
            "Incr-00000001-00000002-1795224681",
            "Full-00000000-00000746-1795224681.gz",
            "app-1763600405.log",
            "static_kuberesources_2026-11-20_140005.tar.gz",
            ".metadata/etcd-snapshot-a-1763600405",
            "2026-11/snapshot_2026-11-20_140005.db",
            "notes",
            "x.db.tmp",
        ] {
            assert!(!is_snapshot_file(name), "{name}");
        }
    }
}
