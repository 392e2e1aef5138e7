//! `deltafold verify --etcd-binary`: a restore drill starts a real etcd on what was folded, and leaves nothing behind.

use super::verify_bucket::{command, two_deltas, verify};
use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion, Signal};
use crate::support::made_backups::{FIXTURE, LAST, T0};
use crate::support::process::Process;
use crate::support::recorded_etcd::{with_etcd, with_options};
use crate::support::scratch;
use crate::support::{
    copy_fixture, deltafold, expected, fixture_names, run_json, that_start_on, tools,
};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn drill(store: &Path, etcd: &Path, temp: &Path, args: &[&str]) -> (i32, Value) {
    let mut all = vec!["--etcd-binary", etcd.to_str().unwrap()];
    all.extend(["--temp-dir", temp.to_str().unwrap()]);
    all.extend(args);
    verify(store, &all)
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

/// Writes a program that is not etcd.
fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_real_etcd_holds_what_is_folded() {
    let temp = scratch::folder().unwrap();
    for name in fixture_names() {
        let store = copy_fixture(&name);
        let e = expected(&name);
        for &version in that_start_on(&e.etcd_version) {
            let (code, json) = drill(store.path(), &tools::etcd(version), temp.path(), &[]);
            assert_eq!(code, 0, "{name} {version}: {json:#}");
            let drill = &json["drills"][0];
            assert_eq!(drill["etcd_version"], version.as_str(), "{name}");
            assert_eq!(
                drill["hash_kv"], json["chains"][0]["hash_kv"],
                "{name} {version}"
            );
            assert_eq!(drill["revision"], e.last_revision);
            assert_eq!(json["level"], "fold");
            assert!(is_empty(temp.path()));
        }
    }
}

#[test]
fn each_timeline_has_its_drill() {
    let temp = scratch::folder().unwrap();
    let b = two_deltas();
    b.altered_delta(1600, 1700, 12);
    let etcd = tools::etcd(EtcdVersion::V3_6);
    let (code, json) = drill(b.path(), &etcd, temp.path(), &["--all-chains"]);
    assert_eq!(code, 0, "{json:#}");
    let revisions: Vec<&Value> = json["drills"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| &d["revision"])
        .collect();
    assert_eq!(revisions, [&Value::from(LAST), &Value::from(1700)]);
    // What cannot be folded is not drilled.
    b.put(
        &format!("v2/Incr-00001600-00001700-{}.gz", T0 + 12),
        b"damaged",
    );
    let (code, json) = drill(b.path(), &etcd, temp.path(), &["--all-chains"]);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"CorruptSnapshot".into()),
        "{json:#}"
    );
}

#[test]
fn a_backup_with_users_is_drilled_as_one_of_them() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 20, 100);
        world.wait(async {
            let mut auth = world.etcd.client().await.auth_client();
            auth.user_add("root", "secret", None).await.unwrap();
            auth.role_add("root").await.unwrap();
            auth.user_grant_role("root", "root").await.unwrap();
            auth.auth_enable().await.unwrap();
        });
        world.etcd.log_in("root", "secret");
        world
            .snapshot("full", &["--user", "root:secret"])
            .succeeded();
        let temp = scratch::folder().unwrap();
        let etcd = tools::etcd(EtcdVersion::V3_6);
        let store = Path::new(&world.prefix.url);
        let (code, json) = drill(store, &etcd, temp.path(), &[]);
        assert_eq!(
            (code, &json["reason"]),
            (77, &"Unauthenticated".into()),
            "{json:#}"
        );
        assert!(
            json["message"].as_str().unwrap().contains("--user"),
            "{json:#}"
        );
        let (code, json) = drill(store, &etcd, temp.path(), &["--user", "root:secret"]);
        assert_eq!(code, 0, "{json:#}");
        assert!(is_empty(temp.path()));
    });
}

/// After a compaction, two chains end at one revision, with different history.
#[test]
fn a_compacted_backup_is_drilled() {
    for saved_first in [0, 50] {
        with_etcd(EtcdVersion::V3_6, |world| {
            world.put_many("/a/", saved_first, 10);
            world.snapshot("full", &[]).succeeded();
            world.put_many("/a/", 50, 20);
            world.delta(&[]);
            let store = Path::new(&world.prefix.url);
            let run = |args: &[&str]| {
                let mut command = deltafold();
                command.args(args).args(["--output", "json", "--store"]);
                let (code, json, _) = run_json(command.arg(store));
                assert_eq!(code, 0, "{saved_first} {args:?}: {json:#}");
            };
            run(&["compact"]);
            let temp = scratch::folder().unwrap();
            let etcd = tools::etcd(EtcdVersion::V3_6);
            let verified = |deltas: usize| {
                for more in [&["--all-chains"][..], &[]] {
                    let args = [&["--level", "fold"], more].concat();
                    let (code, json) = drill(store, &etcd, temp.path(), &args);
                    assert_eq!(code, 0, "{saved_first}: {json:#}");
                    let newest = json["chains"].as_array().unwrap().last().unwrap();
                    assert_eq!(newest["deltas"], deltas, "{json:#}");
                    let drill = &json["drills"][0];
                    assert_eq!(drill["succeeded"], true, "{json:#}");
                    assert_eq!(drill["hash_kv"], newest["hash_kv"], "{json:#}");
                    assert_eq!(drill["revision"], world.revision(), "{json:#}");
                }
                run(&["status"]);
            };
            verified(0);
            world.put_many("/a/", 5, 30);
            world.delta(&[]);
            verified(1);
        });
    }
}

/// The base holds the NOSPACE alarm of its cluster: the drill disarms it, and `restore` says how.
#[test]
fn an_alarm_of_the_backup_does_not_fail_the_drill() {
    let small = EtcdOptions {
        quota_backend_bytes: 8 << 20,
        ..EtcdOptions::default()
    };
    with_options(EtcdVersion::V3_6, &small, |world| {
        let value = vec![b'x'; 1 << 20];
        world.wait(async {
            let mut kv = world.etcd.kv().await;
            while kv.put("/wasted", value.as_slice(), None).await.is_ok() {}
        });
        world.snapshot("full", &[]).succeeded();
        let temp = scratch::folder().unwrap();
        let etcd = tools::etcd(EtcdVersion::V3_6);
        let store = Path::new(&world.prefix.url);
        let (code, json) = drill(store, &etcd, temp.path(), &[]);
        assert_eq!(code, 0, "{json:#}");
        let data = temp.path().join("data");
        let mut restore = deltafold();
        restore.args(["restore", "--output", "json", "--store"]);
        restore.arg(store).arg("--data-dir").arg(&data);
        let (code, json, _) = run_json(&mut restore);
        assert_eq!(code, 0, "{json:#}");
        let warnings = json["warnings"].to_string();
        assert!(warnings.contains("etcdctl alarm disarm"), "{warnings}");
    });
}

#[test]
fn an_etcd_that_lies_dies_or_hangs_fails_the_drill() {
    let (folder, temp) = (scratch::folder().unwrap(), scratch::folder().unwrap());
    let store = copy_fixture(FIXTURE);
    let etcd = tools::etcd(EtcdVersion::V3_6);
    // The data of another etcd, with more revisions than needed.
    let other = folder.path().join("other");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let etcd = Etcd::start(EtcdVersion::V3_6, &other);
        let mut kv = etcd.kv().await;
        for i in 0..2300 {
            kv.put(format!("/k/{}", i % 50), "x", None).await.unwrap();
        }
        etcd.stop();
    });
    let etcd = etcd.display();
    let other = other.display();
    let cases = [
        (
            "dies",
            "echo these are my last words >&2; exit 7".to_owned(),
            "these are my last words",
        ),
        (
            "hangs",
            "exec sleep 1000".to_owned(),
            "not healthy within 2 s",
        ),
        // A grandchild that outlives its parent unless the whole process group is ended.
        (
            "hides",
            "sleep 1000 & wait".to_owned(),
            "not healthy within 2 s",
        ),
        (
            "lies",
            format!("shift 2; exec {etcd} --data-dir {other} \"$@\""),
            "other data",
        ),
        // It has a cluster with the right ID and no keys.
        (
            "forgets",
            format!("rm -rf \"$2\"; exec {etcd} \"$@\""),
            "revision",
        ),
    ];
    for (name, text, said) in cases {
        let script = script(folder.path(), name, &format!("#!/bin/sh\n{text}\n"));
        let begun = Instant::now();
        let timeout = if name == "lies" || name == "forgets" {
            "60s"
        } else {
            "2s"
        };
        let (code, json) = drill(
            store.path(),
            &script,
            temp.path(),
            &["--drill-timeout", timeout],
        );
        assert_eq!(
            (code, &json["reason"]),
            (65, &"DrillFailed".into()),
            "{name}: {json:#}"
        );
        let message = json["message"].as_str().unwrap();
        assert!(message.contains(said), "{name}: {message}");
        assert_eq!(json["drills"][0]["succeeded"], false);
        // The folded state is good nevertheless.
        assert!(json["chains"][0]["hash_kv"].is_u64());
        assert!(is_empty(temp.path()), "{name}");
        // The grandchild is killed, but its end is not ours to wait for.
        wait_until("no etcd is left", || !anybody_uses(temp.path()));
        assert!(begun.elapsed() < Duration::from_secs(120), "{name}");
    }
    // A verification without a drill does not hide that the drill failed; a drill that succeeds does.
    let status = || {
        let mut command = deltafold();
        command.args([
            "status",
            "--max-age",
            "1000w",
            "--output",
            "json",
            "--store",
        ]);
        run_json(command.arg(store.path()))
    };
    let (code, json) = verify(store.path(), &["--level", "fold"]);
    assert_eq!((code, &json["recorded"]), (0, &Value::Null), "{json:#}");
    let warning = json["warnings"][0].as_str().unwrap();
    assert!(warning.contains("--etcd-binary"), "{warning}");
    let (code, json, _) = status();
    assert_eq!(
        (code, &json["reason"]),
        (65, &"DrillFailed".into()),
        "{json:#}"
    );
    let (code, json) = drill(
        store.path(),
        &tools::etcd(EtcdVersion::V3_6),
        temp.path(),
        &[],
    );
    assert_eq!((code, json["recorded"].is_string()), (0, true), "{json:#}");
    let (code, json, _) = status();
    assert_eq!(code, 0, "{json:#}");

    let nobody = script(folder.path(), "nobody", "#!/no/such/interpreter\n");
    let (code, json) = drill(store.path(), &nobody, temp.path(), &[]);
    assert_eq!(
        (code, &json["reason"]),
        (78, &"Configuration".into()),
        "{json:#}"
    );
    assert!(is_empty(temp.path()));
}

/// Returns whether a process uses that folder, by its arguments or its working directory.
fn anybody_uses(folder: &Path) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|p| p.file_name().to_string_lossy().parse::<u32>().is_ok())
        .any(|p| {
            let args = fs::read(p.path().join("cmdline")).unwrap_or_default();
            let at = fs::read_link(p.path().join("cwd")).unwrap_or_default();
            let args = String::from_utf8_lossy(&args).into_owned();
            let is_ours = args.contains("verify") && args.contains("--output");
            !is_ours && (args.contains(folder.to_str().unwrap()) || at.starts_with(folder))
        })
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "not within a minute: {what}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A drill ended by a signal that can be caught, and by one that cannot: no etcd stays.
#[test]
fn a_signal_leaves_no_etcd_behind() {
    let folder = scratch::folder().unwrap();
    let store = copy_fixture(FIXTURE);
    let etcd = tools::etcd(EtcdVersion::V3_6);
    for (n, signal) in [Signal::TERM, Signal::INT, Signal::KILL]
        .into_iter()
        .enumerate()
    {
        for (kind, start) in [
            // It serves, but does not get healthy: the drill waits.
            (
                "etcd",
                format!(
                    "exec {} --data-dir \"$2\" --listen-client-urls http://127.0.0.1:0 --advertise-client-urls http://127.0.0.1:1 --listen-peer-urls http://127.0.0.1:0",
                    etcd.display()
                ),
            ),
            (
                "hangs",
                "trap '' TERM; while :; do sleep 1; done".to_owned(),
            ),
        ] {
            // A shell's own child does not end with it when we are killed.
            if signal == Signal::KILL && kind == "hangs" {
                continue;
            }
            let temp = scratch::folder().unwrap();
            let ready = folder.path().join(format!("ready-{n}-{kind}"));
            let text = format!("#!/bin/sh\necho $$ > {}\n{start}\n", ready.display());
            let script = script(folder.path(), &format!("{kind}-{n}"), &text);
            let mut c = command(store.path(), &["--etcd-binary", script.to_str().unwrap()]);
            c.arg("--temp-dir").arg(temp.path());
            let log = folder.path().join("log");
            let mut process = Process::spawn(&mut c, &log).unwrap();
            wait_until("the etcd runs", || ready.exists());
            std::thread::sleep(Duration::from_millis(500));
            assert!(anybody_uses(temp.path()), "{kind}");
            process.signal(signal);
            let status = process
                .ended_within(Duration::from_secs(60))
                .expect("an end");
            if signal != Signal::KILL {
                let code = if signal == Signal::INT { 130 } else { 143 };
                assert_eq!(
                    status.code(),
                    Some(code),
                    "{}",
                    fs::read_to_string(&log).unwrap()
                );
                assert!(is_empty(temp.path()), "{kind} {signal:?}");
            }
            wait_until("no etcd is left", || !anybody_uses(temp.path()));
        }
    }
}

/// Anybody could connect to a port, read the decrypted backup, or take the port first and be given the password.
#[test]
fn a_local_user_finds_no_port_of_the_drill() {
    let folder = scratch::folder().unwrap();
    let temp = scratch::folder().unwrap();
    let store = copy_fixture(FIXTURE);
    let etcd = tools::etcd(EtcdVersion::V3_6);
    let flags = folder.path().join("flags");
    let mode = folder.path().join("mode");
    let text = format!(
        "#!/bin/sh\necho \"$@\" > {}\nstat -c %a . > {}\nexec {} \"$@\"\n",
        flags.display(),
        mode.display(),
        etcd.display()
    );
    let script = script(folder.path(), "etcd", &text);
    let (code, json) = drill(store.path(), &script, temp.path(), &[]);
    assert_eq!(code, 0, "{json:#}");
    let flags = fs::read_to_string(flags).unwrap();
    let listens: Vec<&str> = flags.split("--listen-").skip(1).collect();
    assert_eq!(listens.len(), 2, "{flags}");
    for listen in listens {
        assert!(listen.contains("-urls unix://"), "{listen}");
    }
    assert_eq!(fs::read_to_string(mode).unwrap(), "700\n");
    let long = folder.path().join("x".repeat(100));
    fs::create_dir(&long).unwrap();
    let (code, json) = drill(store.path(), &etcd, &long, &[]);
    assert_eq!((code, &json["reason"]), (78, &"Configuration".into()));
}
