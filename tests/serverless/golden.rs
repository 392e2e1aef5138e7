//! What commands print at 80 columns, with colour and without: nobody changes it unseen.

use crate::support::golden::{self, Folder};
use crate::support::made_backups::{BASE, Bucket};
use crate::support::terminal::Terminal;
use crate::support::{copy_dir, deltafold, fixtures_dir};
use serde_json::json;
use std::fs;
use std::path::Path;

/// The arguments of a command, and what its folder holds.
type Case<'a> = (&'a str, &'a str, &'a dyn Fn(&Path));

/// A backup of a small Kubernetes cluster: a full and five deltas.
fn kubernetes(folder: &Path) {
    copy_dir(&fixtures_dir().join("kubernetes"), &folder.join("store"));
}

/// The same backup without one of its deltas.
fn with_gap(folder: &Path) {
    kubernetes(folder);
    let missing = "store/v2/Incr-00000446-00000505-1795228279.gz";
    fs::remove_file(folder.join(missing)).unwrap();
}

/// A full and deltas of one revision each; the last one deletes a key.
fn with_deletion(folder: &Path) {
    let bucket = Bucket::with_base();
    for n in 1..=30 {
        bucket.delta(BASE + n, BASE + n, n);
    }
    let mut events = bucket.events(BASE + 31, BASE + 31);
    let key = events[0]["etcdEvent"]["kv"]["key"].clone();
    events[0]["etcdEvent"] = json!({"type": 1, "kv": {"key": key, "mod_revision": BASE + 31}});
    events.truncate(1);
    bucket.delta_of(BASE + 31, BASE + 31, 31, &events);
    copy_dir(bucket.path(), &folder.join("store"));
}

/// A backup with two chains.
fn compacted(folder: &Path) {
    kubernetes(folder);
    let mut compact = deltafold();
    compact
        .args(["compact", "--store", "store"])
        .current_dir(folder);
    assert!(compact.output().unwrap().status.success());
}

fn with_empty_copy(folder: &Path) {
    kubernetes(folder);
    fs::create_dir(folder.join("copy")).unwrap();
}

fn nothing(_: &Path) {}

fn empty(folder: &Path) {
    fs::create_dir(folder.join("store")).unwrap();
}

const CM: &str = "/registry/configmaps/shop/cm-1";

#[test]
fn outputs_are_as_recorded() {
    let get = format!("get {CM} --store store --revision 300");
    let history = format!("history {CM} --store store");
    let cases: &[Case<'_>] = &[
        ("list", "list --store store", &kubernetes),
        ("list-deep", "list --deep --store store", &kubernetes),
        ("list-gap", "list --store store", &with_gap),
        ("list-long", "list --store store", &with_deletion),
        ("list-empty", "list --store store", &empty),
        ("verify", "verify --store store", &kubernetes),
        (
            "verify-fold",
            "verify --level fold --all-chains --store store",
            &kubernetes,
        ),
        ("verify-gap", "verify --store store", &with_gap),
        (
            "verify-gap-all-chains",
            "verify --all-chains --store store",
            &with_gap,
        ),
        (
            "restore",
            "restore --store store --data-dir etcd",
            &kubernetes,
        ),
        (
            "restore-dry-run",
            "restore --store store --data-dir etcd --dry-run",
            &kubernetes,
        ),
        (
            "restore-member",
            "restore --store store --data-dir etcd --wal-dir wal --name a --initial-cluster a=http://10.0.0.1:2380,b=http://10.0.0.2:2380,c=http://10.0.0.3:2380 --initial-cluster-token restored-1 --initial-advertise-peer-urls http://10.0.0.1:2380 --bump-revision 1000000000 --mark-compacted",
            &kubernetes,
        ),
        (
            "restore-to-snapshot",
            "restore --store store --to-snapshot etcd.db",
            &kubernetes,
        ),
        (
            "restore-gap",
            "restore --store store --data-dir etcd",
            &with_gap,
        ),
        (
            "restore-out-of-range",
            "restore --store store --data-dir etcd --revision 9999",
            &kubernetes,
        ),
        ("compact", "compact --store store", &kubernetes),
        (
            "compact-dry-run",
            "compact --store store --dry-run",
            &kubernetes,
        ),
        ("get", &get, &kubernetes),
        (
            "get-no-match",
            "get --prefix /nothing/ --store store",
            &kubernetes,
        ),
        (
            "get-table",
            "get configmaps -n shop --time 2026-11-21T02:31:00Z --store store",
            &kubernetes,
        ),
        ("get-no-kind", "get gadget/a --store store", &kubernetes),
        ("get-no-key", "get /nothing --store store", &kubernetes),
        ("history", &history, &kubernetes),
        (
            "history-object",
            "history configmap/shop/cm-3 --store store",
            &kubernetes,
        ),
        (
            "history-no-key",
            "history /nothing --store store",
            &kubernetes,
        ),
        ("deleted", "deleted --since 550 --store store", &kubernetes),
        (
            "deleted-nothing",
            "deleted secrets --since 550 --store store",
            &kubernetes,
        ),
        (
            "log",
            "log -n shop --since 590 --until 605 --store store",
            &kubernetes,
        ),
        ("search", "search cm-3 --store store", &kubernetes),
        ("diff", "diff --from 550 --store store", &kubernetes),
        (
            "diff-deleted",
            "diff leases --from 770 --store store",
            &with_deletion,
        ),
        (
            "diff-no-match",
            "diff --from 300 --prefix /nothing/ --store store",
            &kubernetes,
        ),
        (
            "export-no-match",
            "export --prefix /nothing/ --store store",
            &kubernetes,
        ),
        ("copy", "copy --from store --to copy", &kubernetes),
        (
            "copy-dry-run",
            "copy --from store --to copy --dry-run",
            &with_empty_copy,
        ),
        (
            "copy-no-folder",
            "copy --from store --to copy --dry-run",
            &kubernetes,
        ),
        ("list-compacted", "list --store store", &compacted),
        (
            "gc-nothing",
            "gc --store store --policy limit --limit 1 --restorable-window 0s",
            &kubernetes,
        ),
        (
            "gc-dry-run",
            "gc --store store --policy limit --limit 1 --restorable-window 0s",
            &compacted,
        ),
        (
            "gc",
            "gc --store store --policy limit --limit 1 --restorable-window 0s --apply",
            &compacted,
        ),
        (
            "pin",
            "pin Full-00000000-00000275-1795228239.gz --store store",
            &kubernetes,
        ),
        ("store-check", "store check --store store", &kubernetes),
        ("status-empty", "status --store store", &empty),
        ("no-store", "list", &nothing),
        ("unknown-flag", "list --stroe store", &nothing),
        ("missing-folder", "list --store store", &nothing),
    ];
    for (name, args, prepare) in cases {
        let args: Vec<&str> = args.split(' ').collect();
        golden::check(name, &args, prepare);
    }
}

/// Shows a verification of a backup with a gap on a terminal.
fn on_terminal(env: &[(&str, &str)]) -> String {
    let folder = Folder::new();
    with_gap(folder.path());
    let mut command = deltafold();
    command.args(["verify", "--store", "store"]);
    command
        .current_dir(folder.path())
        .env("TERM", "xterm-256color");
    command.envs(env.iter().copied());
    let (code, shown) = Terminal::start(&mut command).end();
    assert_eq!(code, 65, "{shown}");
    shown
}

#[test]
fn a_terminal_has_colour_unless_it_is_not_wanted() {
    let red = "\u{1b}[1m\u{1b}[31mfailed";
    let shown = on_terminal(&[]);
    assert!(shown.contains(red), "{shown}");
    for plain in [("NO_COLOR", "1"), ("TERM", "dumb"), ("CLICOLOR", "0")] {
        let shown = on_terminal(&[plain]);
        let is_coloured = shown.contains("\u{1b}[1m") || shown.contains("\u{1b}[3");
        assert!(!is_coloured, "{plain:?}: {shown}");
        assert!(shown.contains("failed: the newest chain"), "{shown}");
    }
    assert!(on_terminal(&[("TERM", "dumb"), ("CLICOLOR_FORCE", "1")]).contains(red));
}

#[test]
fn a_terminal_shows_each_finding_once() {
    let shown = on_terminal(&[("NO_COLOR", "1")]);
    let words = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words.matches("have a gap").count(), 1, "{shown}");
    assert!(
        words.contains("error: 1 error: see above [RevisionGap]"),
        "{shown}"
    );
    // A progress bar is drawn over itself, and cleared before the result.
    let last = |l: &str| l.rsplit("\u{1b}[2K").next().map(|l| l.chars().count());
    let widths = shown.split(['\n', '\r']).filter_map(last);
    assert!(widths.into_iter().all(|width| width <= 80), "{shown}");
}
