//! `gc` on a real S3 server: tags, versions, object locks and refusals.

use crate::support::denying_proxy::denying;
use crate::support::gc_history::{GcHistory, NOTHING, decided, reasons, snapshots};
use crate::support::made_backups::{BASE, LAST, Objects, objects_of};
use crate::support::minio::Minio;
use crate::support::s3::Kind;
use crate::support::{deltafold, run_json};
use chrono::{TimeDelta, Utc};
use deltafold::store::{Mode, ObjectRetention};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;
use object_store::signer::Method;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;
use tokio::runtime::Runtime;

/// The record of a verification by names.
const RECORD: &str = "deltafold-verified/names.json";

/// A server with a backup that has some history.
struct Server {
    rt: Runtime,
    minio: Minio,
    past: GcHistory,
}

impl Server {
    fn start() -> Self {
        Server {
            rt: Runtime::new().unwrap(),
            minio: Minio::start(),
            past: GcHistory::new(),
        }
    }

    fn fill(&self, bucket: &str, kind: Kind) {
        self.rt
            .block_on(self.minio.s3().create_bucket(bucket, kind));
        let store = self.minio.store(bucket);
        for (path, bytes) in self.past.bucket.objects() {
            let path = ObjectPath::from(format!("p/{path}"));
            self.rt.block_on(store.put(&path, bytes.into())).unwrap();
        }
    }

    fn command(&self, bucket: &str, args: &[&str]) -> (i32, Value, String) {
        let mut c: Command = deltafold();
        c.args(args)
            .args(["--output", "json", "--store", &format!("s3://{bucket}/p")])
            .envs(self.minio.env());
        run_json(&mut c)
    }

    fn gc(&self, bucket: &str, args: &[&str]) -> Value {
        let at_once: &[&str] = match args.contains(&"--purge-after") {
            true => &[],
            false => &["--purge-after", "0s"],
        };
        let args = [&["gc"], &NOTHING[..], at_once, args].concat();
        let (code, result, stderr) = self.command(bucket, &args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        result
    }

    fn objects(&self, bucket: &str) -> Objects {
        let all = self.rt.block_on(objects_of(&*self.minio.store(bucket)));
        let below =
            |(path, bytes): (String, Vec<u8>)| Some((path.strip_prefix("p/")?.to_owned(), bytes));
        all.into_iter().filter_map(below).collect()
    }

    /// Verifies by names, and asserts that the result is recorded.
    fn verify(&self, bucket: &str) {
        let (_, result, stderr) = self.command(bucket, &["verify", "--level", "names"]);
        assert_eq!(result["recorded"], RECORD, "{stderr}");
    }

    /// Returns all versions and deletion markers by path.
    fn versions(&self, bucket: &str) -> Vec<deltafold::store::ObjectVersion> {
        let s3 = self.minio.s3();
        let store = s3.open(&format!("s3://{bucket}/p"), self.rt.handle());
        store
            .versions(&[
                "v2",
                "deltafold-removed",
                "deltafold-locks",
                "deltafold-verified",
            ])
            .unwrap()
    }
}

#[test]
fn on_a_server_tags_exclude_and_versions_are_purged() {
    let server = Server::start();
    let p = &server.past;
    let newest = BTreeSet::from([p.full(2100, 1), p.delta(2101, LAST, 0)]);

    // A plain bucket: removal by tag, back again, and at once.
    server.fill("plain", Kind::Plain);
    let removed = decided(
        &server.gc("plain", &["--purge-after", "1d", "--apply"]),
        "Remove",
    );
    assert_eq!(removed.len(), 6);
    for path in &removed {
        let tags = server
            .rt
            .block_on(server.minio.tags("plain", &format!("p/{path}")));
        assert_eq!(
            tags,
            [("x-etcd-snapshot-exclude".to_owned(), "true".to_owned())]
        );
    }
    assert!(
        !server
            .objects("plain")
            .keys()
            .any(|k| k.ends_with(".exclude"))
    );
    let again = server.gc("plain", &["--purge-after", "1d"]);
    assert_eq!(reasons(&again)[&p.full(1499, 7)], "Removed");
    let (code, back, stderr) = server.command("plain", &["undelete", "--all"]);
    assert_eq!(
        (code, back["snapshots"].as_array().unwrap().len()),
        (0, 6),
        "{stderr}"
    );
    let tags = server.rt.block_on(
        server
            .minio
            .tags("plain", &format!("p/{}", p.full(1499, 7))),
    );
    assert!(tags.is_empty(), "{tags:?}");
    // Another tool's tag on the newest full: what that full superseded is needed.
    let bad = format!("p/{}", p.full(2100, 1));
    let set = server
        .minio
        .set_tag("plain", &bad, "x-etcd-snapshot-exclude", "true");
    server.rt.block_on(set);
    let told = reasons(&server.gc("plain", &[]));
    assert_eq!(told[&p.delta(1801, 2100, 3)], "NewestChain");
    server
        .rt
        .block_on(server.minio.set_tag("plain", &bad, "other", "tag"));
    server.gc("plain", &["--apply"]);
    assert_eq!(snapshots(&server.objects("plain")), newest);

    // A versioned bucket: objects hidden by an earlier plain deletion are purged, too, when they are old
    // enough.
    server.fill("versions", Kind::Versioned);
    let hidden = p.delta(BASE + 1, 1100, 9);
    let path = ObjectPath::from(format!("p/{hidden}"));
    server
        .rt
        .block_on(server.minio.store("versions").delete(&path))
        .unwrap();
    server.verify("versions");
    server.verify("versions");
    let done = server.gc("versions", &["--apply"]);
    assert_eq!(done["hidden_bytes"], 0);
    let versions = server.versions("versions");
    let of = |path: &str| versions.iter().filter(|v| v.path == path).count();
    assert_eq!(of(RECORD), 2, "one was overwritten a moment ago");
    assert_eq!(of(&p.full(BASE, 10)), 0, "{versions:?}");
    assert_eq!(of(&hidden), 2, "it was deleted a moment ago");
    std::thread::sleep(Duration::from_millis(1100));
    let done = server.gc("versions", &["--apply", "--staging-age", "1s"]);
    assert_eq!(
        decided(&done, "Delete")
            .iter()
            .filter(|p| p.starts_with(&hidden))
            .count(),
        2
    );
    let versions = server.versions("versions");
    let records: Vec<_> = versions.iter().filter(|v| v.path == RECORD).collect();
    assert!(
        matches!(records[..], [record] if record.is_latest && !record.is_delete_marker),
        "{records:?}"
    );
    let of_v2: BTreeSet<_> = versions
        .iter()
        .filter(|v| v.path.starts_with("v2/"))
        .collect::<Vec<_>>()
        .iter()
        .map(|v| v.path.clone())
        .collect();
    assert_eq!(of_v2, newest);
}

#[test]
fn what_is_locked_is_reported_and_left() {
    let server = Server::start();
    let p = &server.past;
    server.fill("locked", Kind::Locked);
    let store = server.minio.s3().open("s3://locked/p", server.rt.handle());
    server.verify("locked");
    let until = Utc::now() + TimeDelta::days(2);
    let locked = p.full(1499, 7);
    let retention = ObjectRetention {
        mode: Mode::Governance,
        until,
    };
    store.retain(&locked, None, &retention).unwrap();
    // The delta after it has a legal hold, which only a person can lift.
    let held = p.delta(1101, 1499, 8);
    let place = format!("p/{held}");
    let hold = |state: &str| {
        use base64::Engine as _;
        use md5::Digest as _;
        let body = format!("<LegalHold><Status>{state}</Status></LegalHold>");
        let sum = md5::Md5::digest(body.as_bytes());
        let sum = base64::engine::general_purpose::STANDARD.encode(sum);
        server.rt.block_on(server.minio.s3().must(
            Method::PUT,
            ("locked", &place),
            &[("legal-hold", "")],
            &[("content-md5", &sum)],
            &body,
        ));
    };
    hold("ON");
    let fate = |result: &Value, path: &str| {
        let objects = result["objects"].as_array().unwrap();
        let o = objects.iter().find(|o| o["path"] == path).unwrap();
        (
            o["fate"].as_str().unwrap_or("-").to_owned(),
            o["locked_until"].clone(),
        )
    };
    let dry = server.gc("locked", &[]);
    let (what, when) = fate(&dry, &locked);
    let when: chrono::DateTime<Utc> = when.as_str().unwrap().parse().unwrap();
    assert_eq!(what, "Locked");
    assert!(
        (when - until).abs() <= TimeDelta::seconds(1),
        "{when} {until}"
    );
    let done = server.gc("locked", &["--apply"]);
    assert_eq!(fate(&done, &locked).0, "Locked");
    assert_eq!(fate(&done, &held), ("Locked".to_owned(), Value::Null));
    // Earlier objects of a locked one's chain wait: the rest must not look complete.
    assert_eq!(fate(&done, &p.delta(BASE + 1, 1100, 9)).0, "Waiting");
    assert_eq!(fate(&done, &p.full(BASE, 10)).0, "Waiting");
    assert_eq!(fate(&done, &p.delta(1801, 2100, 3)).0, "Done");
    assert_eq!(done["totals"]["left"]["objects"], 4);
    let left = snapshots(&server.objects("locked"));
    let expected = [
        p.full(BASE, 10),
        p.delta(BASE + 1, 1100, 9),
        held.clone(),
        locked.clone(),
        p.full(2100, 1),
        p.delta(2101, LAST, 0),
    ];
    assert_eq!(left, BTreeSet::from(expected));
    // When the hold is lifted, the chain is removed.
    hold("OFF");
    let done = server.gc("locked", &["--apply"]);
    assert_eq!(fate(&done, &held).0, "Done");
    assert_eq!(snapshots(&server.objects("locked")).len(), 3);
}

/// A user who may not list versions must not hide locked objects behind deletion markers.
#[test]
fn what_is_locked_is_left_where_versions_cannot_be_looked_at() {
    let server = Server::start();
    let p = &server.past;
    let locked = p.full(1499, 7);
    let retention = ObjectRetention {
        mode: Mode::Compliance,
        until: Utc::now() + TimeDelta::days(2),
    };
    type Denied = fn(&str) -> bool;
    let cases: [(&str, Denied); 2] = [
        ("unlisted", |line| line.contains("versions=")),
        ("unknown", |line| {
            line.contains("versions=") || line.contains("versioning=")
        }),
    ];
    for (bucket, denied) in cases {
        server.fill(bucket, Kind::Locked);
        let url = format!("s3://{bucket}/p");
        let store = server.minio.s3().open(&url, server.rt.handle());
        store.retain(&locked, None, &retention).unwrap();
        let role = denying(server.minio.endpoint(), denied);
        for apply in [&[][..], &["--apply"]] {
            let mut c: Command = deltafold();
            c.args(
                [
                    &["gc", "--output", "json", "--store", &url],
                    &NOTHING[..],
                    &["--purge-after", "0s"],
                    apply,
                ]
                .concat(),
            )
            .envs(role.env());
            let (code, result, stderr) = run_json(&mut c);
            assert_eq!(code, 0, "{bucket} {apply:?}: {stderr}");
            let objects = result["objects"].as_array().unwrap();
            let fate = |path: &str| {
                let o = objects.iter().find(|o| o["path"] == path).unwrap();
                o["fate"].as_str().unwrap_or("-").to_owned()
            };
            assert_eq!(fate(&locked), "Locked", "{bucket} {apply:?}: {result:#}");
            if !apply.is_empty() {
                // It exists as a version, whether or not that can be seen.
                assert_eq!(fate(&p.delta(1801, 2100, 3)), "Hidden", "{bucket}");
                assert_eq!(result["totals"]["deleted"]["bytes"], result["hidden_bytes"]);
            }
        }
        let left = snapshots(&server.objects(bucket));
        assert!(left.contains(&locked), "{bucket}: {left:?}");
        assert!(
            !left.contains(&p.delta(1801, 2100, 3)),
            "{bucket}: {left:?}"
        );
    }
}

/// A locked chain is meant to be used: it is not excluded either.
#[test]
fn what_is_locked_is_not_excluded() {
    let server = Server::start();
    let p = &server.past;
    server.fill("locked", Kind::Locked);
    let store = server.minio.s3().open("s3://locked/p", server.rt.handle());
    let locked = p.full(1499, 7);
    let retention = ObjectRetention {
        mode: Mode::Governance,
        until: Utc::now() + TimeDelta::days(2),
    };
    store.retain(&locked, None, &retention).unwrap();
    for apply in [
        &["--purge-after", "1d"][..],
        &["--purge-after", "1d", "--apply"],
    ] {
        let told = server.gc("locked", apply);
        let objects = told["objects"].as_array().unwrap();
        let o = objects.iter().find(|o| o["path"] == *locked).unwrap();
        assert_eq!(
            (&o["decision"], &o["fate"]),
            (&"Remove".into(), &"Locked".into())
        );
    }
    let tags = |path: &str| {
        let key = format!("p/{path}");
        server.rt.block_on(server.minio.tags("locked", &key)).len()
    };
    assert_eq!(tags(&locked), 0);
    assert_eq!(tags(&p.delta(1801, 2100, 3)), 1);
}

/// A snapshot that was excluded because it is broken must not make others look superfluous.
#[test]
fn nothing_is_removed_where_tags_must_not_be_read() {
    let server = Server::start();
    let p = &server.past;
    server.fill("tags", Kind::Plain);
    let bad = format!("p/{}", p.full(2100, 1));
    let set = server
        .minio
        .set_tag("tags", &bad, "x-etcd-snapshot-exclude", "true");
    server.rt.block_on(set);
    let before = snapshots(&server.objects("tags"));
    let role = denying(server.minio.endpoint(), |line| line.contains("tagging="));
    let run = |args: &[&str]| {
        let mut c: Command = deltafold();
        c.args(
            [
                &["gc", "--output", "json", "--store", "s3://tags/p"],
                &NOTHING[..],
                args,
            ]
            .concat(),
        )
        .envs(role.env());
        run_json(&mut c)
    };
    let (code, told, stderr) = run(&[]);
    assert_eq!(code, 0, "{stderr}");
    let warnings = told["warnings"].to_string();
    assert!(warnings.contains("s3:GetObjectTagging"), "{warnings}");
    let (code, told, stderr) = run(&["--apply"]);
    assert_eq!(
        (code, &told["reason"]),
        (77, &"PermissionDenied".into()),
        "{stderr}"
    );
    assert_eq!(snapshots(&server.objects("tags")), before);
}
