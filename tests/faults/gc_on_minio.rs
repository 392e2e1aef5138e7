//! `gc` on a real S3 server: tags, versions, object locks and refusals.

use crate::support::gc_history::{GcHistory, NOTHING, reasons, snapshots};
use crate::support::made_backups::{BASE, LAST, Objects, objects_of};
use crate::support::minio::Minio;
use crate::support::proxy::Proxy;
use crate::support::s3::{Kind, S3};
use crate::support::{deltafold, run_json};
use chrono::{DateTime, SecondsFormat, SubsecRound, TimeDelta, Utc};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;
use tokio::runtime::Runtime;

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
        let args = [&["gc"], &NOTHING[..], args].concat();
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

    /// Locks an object for two days.
    fn lock(&self, bucket: &str, path: &str) -> DateTime<Utc> {
        let until = (Utc::now() + TimeDelta::days(2)).trunc_subsecs(0);
        let text = until.to_rfc3339_opts(SecondsFormat::Secs, true);
        let (s3, key) = (self.minio.s3(), format!("p/{path}"));
        self.rt.block_on(s3.retain(bucket, &key, &text));
        until
    }
}

#[test]
fn tags_exclude_and_in_a_versioned_bucket_a_deletion_hides() {
    let server = Server::start();
    let p = &server.past;
    let newest = BTreeSet::from([p.full(2100, 1), p.delta(2101, LAST, 0)]);
    server.fill("plain", Kind::Plain);
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
    let done = server.gc("plain", &["--apply"]);
    assert_eq!(done["hidden_bytes"], 0);
    assert_eq!(snapshots(&server.objects("plain")), newest);

    server.fill("versions", Kind::Versioned);
    let done = server.gc("versions", &["--apply"]);
    assert_eq!(done["freed_bytes"], 0);
    assert_eq!(done["totals"]["deleted"]["bytes"], done["hidden_bytes"]);
    assert_eq!(snapshots(&server.objects("versions")), newest);
    assert_eq!(server.gc("versions", &["--apply"])["status"], "NothingToDo");
}

#[test]
fn what_is_locked_is_reported_and_left() {
    let server = Server::start();
    let p = &server.past;
    server.fill("locked", Kind::Locked);
    let locked = p.full(1499, 7);
    let until = server.lock("locked", &locked);
    // The delta after it has a legal hold, which only a person can lift.
    let held = p.delta(1101, 1499, 8);
    let place = format!("p/{held}");
    let hold = |state| {
        let s3 = server.minio.s3();
        server.rt.block_on(s3.hold("locked", &place, state));
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
    let (code, listed, stderr) = server.command("locked", &["list"]);
    assert_eq!(code, 0, "{stderr}");
    for snapshot in listed["snapshots"].as_array().unwrap() {
        let told = snapshot["locked_until"].as_str();
        let told: Option<DateTime<Utc>> = told.map(|t| t.parse().unwrap());
        assert_eq!(told, (snapshot["path"] == locked).then_some(until));
    }
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
    assert_eq!(fate(&done, &p.delta(1801, 2100, 3)).0, "Hidden");
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
    assert_eq!(fate(&done, &held).0, "Hidden");
    assert_eq!(snapshots(&server.objects("locked")).len(), 3);
}

/// A user who may not ask whether the bucket keeps versions must not hide locked objects.
#[test]
fn what_is_locked_is_left_where_versioning_is_unknown() {
    let server = Server::start();
    let p = &server.past;
    let locked = p.full(1499, 7);
    server.fill("unknown", Kind::Locked);
    server.lock("unknown", &locked);
    let proxy = Proxy::start(server.minio.endpoint());
    proxy.deny(|call| call.query().contains("versioning="));
    let role = S3::new(&proxy.url());
    for apply in [&[][..], &["--apply"]] {
        let mut c: Command = deltafold();
        let store = ["gc", "--output", "json", "--store", "s3://unknown/p"];
        c.args([&store, &NOTHING[..], apply].concat());
        let (code, result, stderr) = run_json(c.envs(role.env()));
        assert_eq!(code, 0, "{apply:?}: {stderr}");
        let objects = result["objects"].as_array().unwrap();
        let fate = |path: &str| {
            let o = objects.iter().find(|o| o["path"] == path).unwrap();
            o["fate"].as_str().unwrap_or("-").to_owned()
        };
        assert_eq!(fate(&locked), "Locked", "{apply:?}: {result:#}");
        if !apply.is_empty() {
            // It exists as a version, whether or not that can be seen.
            assert_eq!(fate(&p.delta(1801, 2100, 3)), "Hidden");
        }
    }
    let left = snapshots(&server.objects("unknown"));
    assert!(left.contains(&locked), "{left:?}");
    assert!(!left.contains(&p.delta(1801, 2100, 3)), "{left:?}");
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
    let proxy = Proxy::start(server.minio.endpoint());
    proxy.deny(|call| call.query().contains("tagging="));
    let role = S3::new(&proxy.url());
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
