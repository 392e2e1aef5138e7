//! The number of requests on a store with many snapshots: no command may ask for the tags of every object, and
//! none may overlook an excluded snapshot because it did not ask.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::gc_history::NOTHING;
use crate::support::history::Compression;
use crate::support::proxy::{Proxy, Traffic};
use crate::support::s3::S3;
use crate::support::tiny_backup::{SMALL_BASE, database, object, put_events, small_database};
use crate::support::{deltafold, run_json, scratch};
use deltafold::store::exclude::EXCLUDE_TAG;
use serde_json::Value;

/// Number of deltas that fill two pages of a listing.
const PAGES: i64 = 1100;
/// A number of deltas at which commands no longer ask for all tags.
const WIDE: i64 = 150;
const PREFIX: &str = "b/p";

/// A store with a full and one delta for each revision after it.
struct Wide {
    server: FakeS3,
    /// When the full was created, in Unix seconds.
    since: i64,
    /// The newest revision.
    last: i64,
}

impl Wide {
    fn new(dialect: Dialect, deltas: i64) -> Self {
        let since = chrono::Utc::now().timestamp() - 90_000;
        let server = FakeS3::start(dialect);
        let last = SMALL_BASE + deltas;
        let wide = Wide {
            server,
            since,
            last,
        };
        wide.put(&wide.full(SMALL_BASE), &small_database(4096));
        for revision in SMALL_BASE + 1..=last {
            wide.delta(revision, revision, 0);
        }
        wide
    }

    /// Returns the name of a full that is created together with the delta of this revision.
    fn full(&self, revision: i64) -> String {
        let created = self.since + 10 * (revision - SMALL_BASE);
        format!("v2/Full-00000000-{revision:08}-{created}")
    }

    fn put(&self, path: &str, payload: &[u8]) {
        self.put_raw(path, object(payload, Compression::None));
    }

    fn put_raw(&self, path: &str, bytes: Vec<u8>) {
        self.server.seed([(format!("{PREFIX}/{path}"), bytes)]);
    }

    fn delta_name(&self, first: i64, last: i64, later: i64) -> String {
        let created = self.since + 10 * (last - SMALL_BASE) + later;
        format!("v2/Incr-{first:08}-{last:08}-{created}")
    }

    fn delta(&self, first: i64, last: i64, later: i64) -> String {
        let name = self.delta_name(first, last, later);
        let events = serde_json::to_vec(&put_events(first..=last)).unwrap();
        self.put(&name, &events);
        name
    }

    fn exclude(&self, path: &str) {
        let tags = [(EXCLUDE_TAG, "true"), ("other", "tag")];
        self.server.set_tags(&format!("{PREFIX}/{path}"), &tags);
    }

    /// Runs a command. Returns the exit code, the outcome, and the requests by kind.
    fn run(&self, command: &str, args: &[&str]) -> (i32, Value, Requests) {
        self.server.forget_requests();
        let mut run = deltafold();
        run.args([command, "--output", "json", "--store", "s3://b/p"])
            .args(args)
            .arg("--temp-dir")
            .arg(scratch::place())
            .envs(self.server.s3().env());
        let (code, outcome, stderr) = run_json(&mut run);
        eprintln!("{stderr}");
        (code, outcome, Requests::of(&self.server.requests()))
    }

    fn snapshots(&self) -> usize {
        let objects = self.server.objects();
        objects.keys().filter(|k| k.contains("/v2/")).count()
    }
}

/// The number of requests by kind.
#[derive(Debug)]
struct Requests(BTreeMap<&'static str, usize>);

impl Requests {
    fn of(all: &[String]) -> Self {
        let mut counts = BTreeMap::new();
        for r in all {
            let is = |method: &str| r.starts_with(method);
            let kind = match () {
                () if is("GET ") && r.contains("\"tagging\"") => "tags",
                () if is("GET ") && r.contains("\"list-type\"") => "list",
                () if is("GET ") && r.contains("/v2/") => "get",
                () if is("HEAD ") => "head",
                () if is("DELETE ") => "delete",
                () if is("POST ") && r.contains("\"delete\"") => "delete many",
                () => "other",
            };
            *counts.entry(kind).or_insert(0) += 1;
        }
        Requests(counts)
    }

    fn n(&self, kind: &str) -> usize {
        self.0.get(kind).copied().unwrap_or_default()
    }

    fn all(&self) -> usize {
        self.0.values().sum()
    }

    /// Returns the number of requests other than reads of snapshots.
    fn beside(&self) -> usize {
        self.all() - self.n("get")
    }
}

/// The behaviour of two servers: one reports tag counts in responses to reads, one does not.
fn servers() -> [Dialect; 2] {
    let hides = Dialect {
        hides_tag_counts: true,
        ..Dialect::default()
    };
    [Dialect::default(), hides]
}

/// How many requests a plan may make, however many deltas there are: it lists folders and two pages, and asks
/// for the tags of the base and the newest 64 deltas.
const BOUND: usize = 100;

#[test]
fn a_plan_asks_little_of_a_wide_bucket() {
    for dialect in servers() {
        let wide = Wide::new(dialect, PAGES);
        for (command, args) in [
            ("verify", &["--level", "names"][..]),
            ("status", &["--max-age", "36500d"]),
            ("gc", &["--policy", "exponential"]),
            ("compact", &["--dry-run"]),
            ("compact", &["--dry-run", "--revision", "700"]),
        ] {
            let (code, outcome, requests) = wide.run(command, args);
            assert_eq!(code, 0, "{outcome}");
            assert!(requests.all() <= BOUND, "{command} {args:?}: {requests:?}");
            eprintln!("{command} {args:?}: {requests:?}");
            if command == "status" {
                assert_eq!(requests.n("get"), 1, "it reads the oldest full alone");
            }
        }
        // Tags are learnt from the answers, or by a request for each snapshot that is opened.
        let (_, _, requests) = wide.run("list", &[]);
        assert!(
            requests.n("tags") <= 1,
            "it reads the oldest full alone: {requests:?}"
        );
        let (_, _, requests) = wide.run("list", &["--deep"]);
        let asked = match dialect.hides_tag_counts {
            true => PAGES + 1,
            false => 0,
        };
        assert_eq!(requests.n("tags") as i64, asked, "{requests:?}");
    }
}

/// An operator may exclude a whole bad history. Each reading of tags finds a few of its snapshots.
#[test]
fn hundreds_of_newest_snapshots_may_be_excluded() {
    const EXCLUDED: i64 = 400;
    for dialect in servers() {
        let wide = Wide::new(dialect, WIDE + EXCLUDED);
        for revision in wide.last - EXCLUDED + 1..=wide.last {
            wide.exclude(&wide.delta_name(revision, revision, 0));
        }
        for (command, args, field) in [
            ("status", &["--max-age", "36500d"][..], "latest_revision"),
            ("compact", &["--dry-run"], "revision"),
        ] {
            let (code, outcome, _) = wide.run(command, args);
            let newest = SMALL_BASE + WIDE;
            assert_eq!((code, &outcome[field]), (0, &newest.into()), "{outcome}");
        }
    }
}

#[test]
fn a_compaction_reads_each_delta_and_asks_little_else() {
    let wide = Wide::new(Dialect::default(), WIDE);
    let (code, outcome, requests) = wide.run("compact", &[]);
    assert_eq!(
        (code, &outcome["revision"]),
        (0, &wide.last.into()),
        "{outcome}"
    );
    assert!(requests.n("get") as i64 <= WIDE + 8, "{requests:?}");
    assert!(requests.beside() <= BOUND, "{requests:?}");

    // If the server never reports tag counts, their absence proves nothing: all tags are asked for.
    let wide = Wide::new(servers()[1], WIDE);
    let (code, outcome, requests) = wide.run("compact", &[]);
    assert_eq!(
        (code, &outcome["revision"]),
        (0, &wide.last.into()),
        "{outcome}"
    );
    assert!(requests.n("tags") as i64 >= WIDE, "{requests:?}");
}

/// Returns the longest sequence of requests that each began after the response to the one before.
fn one_after_the_other(traffic: &Traffic) -> usize {
    let ended = traffic.requests.iter().filter_map(|r| Some((r.ended?, r)));
    let mut ended: Vec<_> = ended.collect();
    ended.sort_by_key(|(end, _)| *end);
    let (mut depth, mut last) = (0, None);
    for (end, request) in ended {
        if last.is_none_or(|last| request.began >= last) {
            eprintln!("{request}");
            (depth, last) = (depth + 1, Some(end));
        }
    }
    depth
}

#[test]
fn few_requests_of_a_compaction_stand_one_after_the_other() {
    let few = Wide::new(Dialect::default(), 3);
    let proxy = Proxy::start(few.server.s3().endpoint());
    // Long enough to show which requests run concurrently, even on a busy machine.
    proxy.delay(Duration::from_millis(150));
    let mut run = deltafold();
    run.args(["compact", "--output", "json", "--store", "s3://b/p"])
        .arg("--temp-dir")
        .arg(scratch::place())
        .envs(S3::new(&proxy.url()).env());
    let (code, outcome, stderr) = run_json(&mut run);
    assert_eq!(code, 0, "{outcome}: {stderr}");
    // Six: one lists the snapshots, one the notes (concurrently with tags), two read, one writes the result, and one looks
    // at the records again.
    assert!(one_after_the_other(&proxy.take()) <= 6);
}

/// One page shows all of a small prefix, so that its layout costs nothing.
#[test]
fn a_small_prefix_is_listed_by_one_request() {
    let few = Wide::new(Dialect::default(), 3);
    let (code, outcome, requests) = few.run("list", &[]);
    assert_eq!(code, 0, "{outcome}");
    assert_eq!(requests.n("list"), 1, "{requests:?}");
}

#[test]
fn a_copy_puts_and_reads_each_snapshot_once() {
    let wide = Wide::new(Dialect::default(), WIDE);
    wide.server.forget_requests();
    let mut run = deltafold();
    run.args(["copy", "--output", "json", "--from", "s3://b/p"])
        .args(["--to", "s3://b/q"])
        .envs(wide.server.s3().env());
    let (code, outcome, stderr) = run_json(&mut run);
    assert_eq!(
        (code, &outcome["copied"]),
        (0, &(WIDE + 1).into()),
        "{stderr}"
    );
    let requests = Requests::of(&wide.server.requests());
    assert_eq!(requests.n("get") as i64, WIDE + 1, "{requests:?}");
    assert_eq!(requests.n("tags"), 0, "{requests:?}");
    let puts = requests.n("other") as i64;
    assert!((WIDE..WIDE + BOUND as i64).contains(&puts), "{requests:?}");
    let rest = requests.n("head") + requests.n("delete") + requests.n("list");
    assert!(rest <= BOUND, "{requests:?}");
}

#[test]
fn what_is_excluded_is_never_used() {
    for dialect in servers() {
        let wide = Wide::new(dialect, WIDE);
        // An excluded damaged delta of three revisions, and an excluded damaged full: by their names, a chain
        // could use them.
        let delta = wide.delta_name(80, 82, 1);
        let full = wide.full(120);
        for path in [&delta, &full] {
            wide.put_raw(path, b"not a snapshot".to_vec());
        }
        wide.exclude(&full);
        wide.exclude(&delta);
        let dir = scratch::folder().unwrap();
        let to = dir.path().join("db");
        let restored = wide.run("restore", &["--to-snapshot", to.to_str().unwrap()]);
        assert_eq!(restored.0, 0, "{}", restored.1);
        assert_eq!(restored.1["revision"], wide.last);
        let now = chrono::Utc::now().to_rfc3339();
        for args in [&["--revision", "110"][..], &["--time", &now, "--or-newest"]] {
            let key = "/registry/a";
            let (code, outcome, _) = wide.run("get", &[&[key], args].concat());
            assert_eq!(code, 0, "{outcome}");
        }
        let (code, outcome, _) = wide.run("history", &["/registry/a"]);
        assert_eq!(code, 0, "{outcome}");
        let (code, outcome, _) = wide.run("verify", &["--level", "fold"]);
        assert_eq!(code, 0, "{outcome}");
        let (code, outcome, _) = wide.run("compact", &[]);
        assert_eq!(
            (code, &outcome["revision"]),
            (0, &wide.last.into()),
            "{outcome}"
        );
        assert_eq!(outcome["base"], wide.full(SMALL_BASE)[3..]);
        let deltas: Vec<&str> = outcome["deltas"]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| d.as_str().unwrap())
            .collect();
        assert_eq!(deltas.len() as i64, WIDE);
        assert!(!deltas.contains(&&delta[3..]));
    }
}

#[test]
fn a_chain_goes_with_few_requests_unless_its_successor_is_excluded() {
    for dialect in servers() {
        let wide = Wide::new(dialect, PAGES);
        let newer = wide.full(wide.last);
        wide.put(&newer, &database(4096, 8..=wide.last, 10));
        let plan = NOTHING;
        let apply = [&plan[..], &["--apply"]].concat();

        // While the newer full is excluded, the chain before it is the newest one, which gc always keeps. The
        // policy alone would not keep that chain.
        wide.exclude(&newer);
        let (code, outcome, _) = wide.run("gc", &apply);
        assert_eq!(code, 0, "{outcome}");
        assert_eq!(outcome["totals"]["deleted"]["objects"], 1, "{outcome}");
        assert_eq!(wide.snapshots() as i64, PAGES + 1);

        wide.put(&newer, &database(4096, 8..=wide.last, 10));
        let (code, outcome, requests) = wide.run("gc", &plan);
        assert_eq!(code, 0, "{outcome}");
        assert!(requests.all() <= BOUND, "{requests:?}");
        assert_eq!(outcome["totals"]["deleted"]["objects"], PAGES + 1);

        let (code, outcome, requests) = wide.run("gc", &apply);
        assert_eq!(code, 0, "{outcome}");
        assert_eq!(wide.snapshots(), 1);
        // Two for the deltas and one for their full. The object that shows the server's clock goes alone.
        assert_eq!(
            (requests.n("delete many"), requests.n("delete")),
            (3, 1),
            "{requests:?}"
        );
        assert!(requests.all() <= 2 * BOUND, "{requests:?}");
    }
}
