//! A store with ten hours of history for `gc`, and helpers that read the report of a `gc` run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use chrono::Utc;
use serde_json::Value;

use super::made_backups::{BASE, Bucket, LAST, Objects};

pub const HOUR: i64 = 3600;

/// Arguments of a retention policy that keeps no full.
pub const NOTHING: [&str; 11] = [
    "--allow-shrink",
    "--restorable-window",
    "0s",
    "--policy",
    "exponential",
    "--keep-hourly",
    "0",
    "--keep-daily",
    "0",
    "--keep-weekly",
    "0",
];

/// Arguments of a policy that keeps the newest full alone.
pub const NEWEST_FULL: [&str; 7] = [
    "--allow-shrink",
    "--policy",
    "limit",
    "--limit",
    "1",
    "--restorable-window",
    "0s",
];

/// Arguments of a policy that keeps a restorable window alone.
pub fn window_alone(window: &str) -> Vec<&str> {
    [
        &["--allow-shrink", "--restorable-window", window],
        &NOTHING[3..],
    ]
    .concat()
}

fn now() -> i64 {
    Utc::now().timestamp()
}

/// Ten hours of the fixture's history. Each name comes with its age in hours.
pub struct GcHistory {
    pub bucket: Bucket,
    pub now: i64,
}

impl GcHistory {
    /// Fulls at revision 746 (10 h old), 1499 (7 h), 2100 (1 h), deltas between them, and one delta to 2252
    /// (now).
    pub fn new() -> Self {
        let made = Bucket::with_base();
        made.delta(BASE + 1, 1100, 1);
        made.delta(1101, 1499, 2);
        made.delta(1500, 1800, 3);
        made.delta(1801, 2100, 4);
        made.delta(2101, LAST, 5);
        let full = |to: i64| {
            let folded = Bucket::of(&made.objects());
            let to = to.to_string();
            let done = folded.compact(&["--revision", &to, "--compression", "gzip"]);
            let name = done["snapshot"].as_str().expect("a name");
            fs::read(folded.path().join("v2").join(name)).expect("the full")
        };
        // A minute ago, so that tests can write newer snapshots.
        let now = now() - 60;
        let old = made.objects();
        let bytes = |start: i64| {
            let prefix = format!("v2/Incr-{start:08}-");
            let delta = old.iter().find(|o| o.0.starts_with(&prefix));
            delta.expect("a delta").1.clone()
        };
        let base = old.iter().find(|o| o.0.contains("Full"));
        let base = base.expect("the base").1;
        let mut objects = Objects::new();
        for (last, ago, content) in [
            (BASE, 10, base.clone()),
            (1499, 7, full(1499)),
            (2100, 1, full(2100)),
        ] {
            let name = format!("v2/Full-00000000-{last:08}-{}.gz", now - ago * HOUR);
            objects.insert(name, content);
        }
        for (start, last, ago) in [
            (BASE + 1, 1100, 9),
            (1101, 1499, 8),
            (1500, 1800, 6),
            (1801, 2100, 3),
            (2101, LAST, 0),
        ] {
            let created = now - ago * HOUR;
            let name = format!("v2/Incr-{start:08}-{last:08}-{created}.gz");
            objects.insert(name, bytes(start));
        }
        GcHistory {
            bucket: Bucket::of(&objects),
            now,
        }
    }

    pub fn full(&self, last: i64, ago: i64) -> String {
        format!("v2/Full-00000000-{last:08}-{}.gz", self.now - ago * HOUR)
    }

    pub fn delta(&self, start: i64, last: i64, ago: i64) -> String {
        format!("v2/Incr-{start:08}-{last:08}-{}.gz", self.now - ago * HOUR)
    }
}

/// Returns the reasons of a report by path.
pub fn reasons(result: &Value) -> BTreeMap<String, String> {
    let text = |v: &Value| v.as_str().expect("a text").to_owned();
    let objects = result["objects"].as_array().expect("objects").iter();
    objects
        .map(|o| (text(&o["path"]), text(&o["reason"])))
        .collect()
}

/// Returns the paths with this decision.
pub fn decided(result: &Value, decision: &str) -> BTreeSet<String> {
    let objects = result["objects"].as_array().expect("objects").iter();
    objects
        .filter(|o| o["decision"] == decision)
        .map(|o| o["path"].as_str().expect("a path").to_owned())
        .collect()
}

/// Returns the paths of the snapshots among the objects.
pub fn snapshots(objects: &Objects) -> BTreeSet<String> {
    let is = |p: &&String| p.starts_with("v2/") || p.starts_with("v1/");
    objects.keys().filter(is).cloned().collect()
}
