//! Encrypted backups: age's reference implementation and deltafold read each other's files, nobody reads
//! anything without the key, no plain text is left anywhere, and damage is distinguished from a wrong key.

use crate::support::etcd::{Etcd, EtcdVersion, etcdutl_status};
use crate::support::follower::Follower;
use crate::support::history::Compression;
use crate::support::keys::{
    Key, args, holds_mark, marks, object, plain_bucket, seal_all, sealed_bucket, sealed_for,
};
use crate::support::made_backups::{BASE, Bucket, LAST, T0, objects_in};
use crate::support::recorded_etcd::with_etcd;
use crate::support::scratch;
use crate::support::tiny_backup::zip;
use crate::support::{deltafold, restore, run_json, succeed};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

fn refused(bucket: &Bucket, command: &str, args: &[&str], code: i32, reason: &str) -> String {
    let before = bucket.objects();
    let (got, json, stderr) = bucket.run(command, args);
    let is = (got, json["reason"].as_str());
    assert_eq!(is, (code, Some(reason)), "{command} {args:?}: {stderr}");
    assert!(
        bucket.objects() == before,
        "{command} {args:?} wrote something"
    );
    json["message"].as_str().unwrap().to_owned()
}

#[test]
fn the_reference_reads_ours_and_we_what_it_wrote() {
    let (a, b, stranger) = (Key::new(), Key::new(), Key::new());
    let plain = plain_bucket();
    let sealed = sealed_bucket(&[&a]);
    for (method, suffix) in [("none", ""), ("same", ".gz"), ("zstd", ".zst")] {
        let made = plain.compact(&["--compression", method]);
        let expected = object(&plain, made["snapshot"].as_str().unwrap());
        // Decrypts with the identity of `a`, and encrypts for `a` and `b`.
        let mut flags = vec!["--compression", method];
        let recipients = [a.reads(), a.writes(), b.writes()].concat();
        flags.extend(args(&recipients));
        let made_sealed = sealed.compact(&flags);
        let name = made_sealed["snapshot"].as_str().unwrap();
        assert!(name.ends_with(&format!("{suffix}.age")), "{name}");
        assert_eq!(made_sealed["hash_kv"], made["hash_kv"]);
        let written = object(&sealed, name);
        for key in [&a, &b] {
            // The plain bytes are the same as without encryption.
            assert!(key.opens(&written).unwrap() == expected, "{method}");
        }
        assert!(stranger.opens(&written).is_err());
        fs::remove_file(sealed.path().join("v2").join(name)).unwrap();
        let name = made["snapshot"].as_str().unwrap();
        fs::remove_file(plain.path().join("v2").join(name)).unwrap();
    }
}

#[test]
fn without_the_key_there_is_nothing_but_names() {
    let (key, other) = (Key::new(), Key::new());
    let bucket = sealed_bucket(&[&key]);
    let base = format!("v2/Full-00000000-{BASE:08}-{T0}.gz.age");
    let listed = bucket.list(&[]);
    for s in listed["snapshots"].as_array().unwrap() {
        assert_eq!(s["encrypted"], true, "{s}");
        assert!(s["name"].as_str().unwrap().ends_with(".gz.age"), "{s}");
        assert_eq!(s["compression"], "gzip");
    }
    assert_eq!(listed["latest_revision"], LAST);
    let (code, text, _) = {
        let mut c = deltafold();
        let out = c
            .args(["list", "--store"])
            .arg(bucket.path())
            .output()
            .unwrap();
        (
            out.status.code(),
            String::from_utf8(out.stdout).unwrap(),
            (),
        )
    };
    assert_eq!(code, Some(0));
    assert_eq!(text.matches("encrypted").count(), 3, "{text}");

    let nowhere = scratch::folder().unwrap();
    let dir = nowhere.path().join("data").to_str().unwrap().to_owned();
    let file = nowhere.path().join("file").to_str().unwrap().to_owned();
    let commands: [(&str, &[&str]); 8] = [
        ("compact", &[]),
        (
            "get",
            &["--prefix", "/registry/", "--time", "2026-11-21T01:31:28Z"],
        ),
        ("restore", &["--data-dir", &dir]),
        ("restore", &["--to-snapshot", &file]),
        ("get", &["--prefix", "/registry/"]),
        ("history", &["/registry/a"]),
        ("diff", &["--from", "800", "--to", "900"]),
        ("export", &[]),
    ];
    for (command, flags) in commands {
        for wrong in [None, Some(&other)] {
            let mut flags = flags.to_vec();
            let reads = wrong.map(Key::reads).unwrap_or_default();
            flags.extend(args(&reads).iter().filter(|a| !a.is_empty()));
            let said = refused(&bucket, command, &flags, 77, "CannotDecrypt");
            // History and a time begin with deltas.
            let begins_with_delta = command == "history" || flags.contains(&"--time");
            let named = if begins_with_delta { ".age" } else { &base };
            assert!(said.matches(named).count() == 1, "{command}: {said}");
            assert!(said.contains("--age-identity"), "{command}: {said}");
        }
    }
    let deep = bucket.list(&["--deep"]);
    let problems = deep["problems"].as_array().unwrap().iter();
    let problems: Vec<&Value> = problems
        .filter(|p| p["reason"] == "CannotDecrypt")
        .collect();
    assert_eq!(problems.len(), 3, "{deep}");
    assert_eq!(nowhere.path().read_dir().unwrap().count(), 0);

    // With the key, every command does the same as without encryption.
    let plain = plain_bucket();
    for (command, flags) in [
        ("get", &["--prefix", "/registry/"][..]),
        ("diff", &["--from", "800", "--to", "900"]),
        ("list", &["--deep"]),
    ] {
        let reads = key.reads();
        let with_key = [flags, &args(&reads)].concat();
        let (code, sealed, stderr) = bucket.run(command, &with_key);
        assert_eq!(code, 0, "{command}: {stderr}");
        let (_, open, _) = plain.run(command, flags);
        for field in [
            "keys",
            "kvs",
            "changes",
            "restorable",
            "problems",
            "latest_revision",
        ] {
            assert_eq!(sealed[field], open[field], "{command} {field}");
        }
    }
}

#[test]
fn no_plain_text_comes_behind_what_is_encrypted() {
    let key = Key::new();
    let bucket = sealed_bucket(&[&key]);
    let reads = key.reads();
    for dry_run in [&[][..], &["--dry-run"]] {
        let flags = [&args(&reads)[..], dry_run].concat();
        let said = refused(&bucket, "compact", &flags, 78, "Configuration");
        assert!(said.contains("--age-recipient"), "{said}");
    }
    // So it is in a mixed prefix.
    let mixed = plain_bucket();
    let name = mixed
        .names()
        .into_iter()
        .find(|n| n.contains("1500"))
        .unwrap();
    let path = mixed.path().join("v2").join(&name);
    fs::write(
        mixed.path().join(format!("v2/{name}.age")),
        sealed_for(&[&key], &fs::read(&path).unwrap()),
    )
    .unwrap();
    fs::remove_file(path).unwrap();
    let allows = ["--allow-plaintext"];
    let flags = [&args(&reads)[..], &allows].concat();
    refused(&mixed, "compact", &flags, 78, "Configuration");
    let both = key.both();
    assert!(
        mixed.compact(&[&args(&both)[..], &allows].concat())["snapshot"]
            .as_str()
            .unwrap()
            .ends_with(".gz.age")
    );
}

/// After a change of keys, old snapshots need the old key.
#[test]
fn every_snapshot_is_opened_by_the_identity_that_fits() {
    let (old, new) = (Key::new(), Key::new());
    let bucket = Bucket::with_base();
    seal_all(bucket.path(), &[&old]);
    let delta = bucket.delta(BASE + 1, LAST, 6);
    let path = bucket.path().join("v2").join(&delta);
    let sealed = sealed_for(&[&new], &fs::read(&path).unwrap());
    fs::write(bucket.path().join(format!("v2/{delta}.age")), sealed).unwrap();
    fs::remove_file(path).unwrap();
    let (olds, news) = (old.reads(), new.reads());
    for (identity, unreadable) in [(&olds, format!("{delta}.age")), (&news, "Full-".to_owned())] {
        let listed = bucket.list(&[&["--deep"], &args(identity)[..]].concat());
        let problem = &listed["problems"][0];
        assert_eq!(problem["reason"], "CannotDecrypt", "{listed}");
        assert!(problem.to_string().contains(&unreadable), "{problem}");
    }
    let all = [olds.to_vec(), news.to_vec(), new.writes().to_vec()].concat();
    let made = bucket.compact(&args(&all));
    let name = made["snapshot"].as_str().unwrap();
    assert!(old.opens(&object(&bucket, name)).is_err());
    assert!(new.opens(&object(&bucket, name)).is_ok());
    // Both keys in one file, by the variable.
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("both");
    fs::write(
        &file,
        format!("# two\n{}\n\n{}\n", old.secret(), new.secret()),
    )
    .unwrap();
    for value in [
        file.display().to_string(),
        format!("{},{}", old.file().display(), new.file().display()),
    ] {
        let mut c = deltafold();
        c.args(["list", "--deep", "--output", "json", "--store"]);
        c.arg(bucket.path()).env("DELTAFOLD_AGE_IDENTITY", value);
        let json = succeed(&mut c);
        assert_eq!(json["problems"], json!([]));
    }
}

#[test]
fn files_are_read_and_written_encrypted() {
    let key = Key::new();
    let reads = key.reads();
    let reads = args(&reads);
    let bucket = plain_bucket();
    let made = bucket.compact(&["--compression", "none"]);
    let plain = object(&bucket, made["snapshot"].as_str().unwrap());
    let folder = scratch::folder().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let packed = [
        ("none", plain.clone()),
        ("gzip", Compression::Gzip.pack(&plain)),
        ("lzw", Compression::Lzw.pack(&plain)),
        ("zip", zip(&plain)),
    ];
    let get = |file: &str, flags: &[&str]| {
        let mut c = deltafold();
        c.args([
            "get",
            "--prefix",
            "/",
            "--output",
            "json",
            "--snapshot",
            file,
        ]);
        run_json(c.args(flags))
    };
    let expected = bucket.succeeds("get", &["--prefix", "/"]);
    assert!(
        !expected["keys"].as_array().unwrap().is_empty(),
        "{expected}"
    );
    for (name, bytes) in packed {
        // The format is recognised by its bytes, except LZW.
        let file = path(&match name {
            "lzw" => "lzw.Z.age".to_owned(),
            _ => format!("{name}.backup"),
        });
        fs::write(&file, sealed_for(&[&key], &bytes)).unwrap();
        let (code, json, stderr) = get(&file, &reads);
        assert_eq!(code, 0, "{name}: {stderr}");
        assert_eq!(json["keys"], expected["keys"], "{name}");
        let (code, json, _) = get(&file, &[]);
        assert_eq!((code, json["reason"].as_str()), (77, Some("CannotDecrypt")));
        assert!(json["message"].as_str().unwrap().contains(&file), "{json}");
        let mut bad = fs::read(&file).unwrap();
        let last = bad.len() - 1;
        bad[last] ^= 1;
        fs::write(&file, bad).unwrap();
        let (code, json, _) = get(&file, &reads);
        assert_eq!(
            (code, json["reason"].as_str()),
            (65, Some("CorruptSnapshot")),
            "{name}"
        );
    }

    // Now writing. A file whose name ends in .age needs recipients, and recipients need such a name.
    let to = |file: &str, flags: &[&str]| {
        bucket.run("restore", &[&["--to-snapshot", file], flags].concat())
    };
    let writes = key.writes();
    let (open, sealed) = (path("open.db"), path("sealed.db.age"));
    let (code, _, stderr) = to(&open, &[]);
    assert_eq!(code, 0, "{stderr}");
    let (code, _, stderr) = to(&sealed, &args(&writes));
    assert_eq!(code, 0, "{stderr}");
    assert!(key.opens(&fs::read(&sealed).unwrap()).unwrap() == fs::read(&open).unwrap());
    assert_eq!(
        etcdutl_status(EtcdVersion::V3_5, Path::new(&open))["revision"],
        LAST
    );
    let (code, json, _) = to(&path("other.age"), &[]);
    assert_eq!(
        (code, json["reason"].as_str()),
        (78, Some("Configuration")),
        "{json}"
    );
    let (code, json, _) = to(&path("other.db"), &args(&writes));
    assert_eq!(
        (code, json["reason"].as_str()),
        (64, Some("Usage")),
        "{json}"
    );
    assert!(!folder.path().join("other.age").exists() && !folder.path().join("other.db").exists());
}

#[test]
fn keys_are_judged_and_secrets_never_shown() {
    let (key, other) = (Key::new(), Key::new());
    let bucket = sealed_bucket(&[&key]);
    let folder = scratch::folder().unwrap();
    let file = |name: &str, text: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let secret = key.secret();
    let lowercase_secret = secret.to_lowercase();
    let recipients = file("recipients", format!("{}\n", key.recipient()).as_bytes());
    let torn = file("torn", format!("{}\n", &secret[..40]).as_bytes());
    let sealed = file("sealed", &sealed_for(&[&other], secret.as_bytes()));
    let empty = file("empty", b"# nothing\n\n");
    let binary = file("binary", &[0xff; 100]);
    let identities = key.file().to_str().unwrap().to_owned();
    let cases: [(&[&str], i32, &str); 13] = [
        (&["--age-identity", &secret], 64, "name of a file"),
        (&["--age-identity", &lowercase_secret], 64, "name of a file"),
        (&["--age-recipients-file", &secret], 64, "name of a file"),
        (&["--age-recipient", &secret], 64, "age-keygen -y"),
        (&["--age-recipient", &lowercase_secret], 64, "age-keygen -y"),
        (&["--age-recipient", "age1nobody"], 64, "age1nobody"),
        (&["--age-recipients-file", &identities], 78, "age-keygen -y"),
        (&["--age-identity", &recipients], 78, "has a recipient"),
        (&["--age-identity", &torn], 78, "not an X25519 identity"),
        (&["--age-identity", &sealed], 78, "encrypted itself"),
        (&["--age-identity", &empty], 78, "no key"),
        (&["--age-identity", &binary], 78, "not a file of age keys"),
        (
            &["--age-identity", "/nowhere/at/all"],
            78,
            "/nowhere/at/all",
        ),
    ];
    let hidden = [
        secret[20..40].to_owned(),
        lowercase_secret[20..40].to_owned(),
    ];
    for (flags, code, says) in cases {
        let mut c = deltafold();
        c.args([
            "list",
            "--deep",
            "--log-level",
            "trace",
            "--log-format",
            "json",
            "--output",
            "json",
            "--store",
        ]);
        let (got, json, stderr) = run_json(c.arg(bucket.path()).args(flags));
        assert_eq!(got, code, "{json}");
        assert!(
            json["message"].as_str().unwrap().contains(says),
            "{says}: {json}"
        );
        for part in &hidden {
            assert!(
                !json.to_string().contains(part) && !stderr.contains(part),
                "{says}"
            );
        }
    }
    // The variable contains the secret instead of a file name.
    let mut c = deltafold();
    c.env("DELTAFOLD_AGE_IDENTITY", &secret)
        .env("DELTAFOLD_AGE_RECIPIENT", &secret);
    let help = c.args(["compact", "--help=all"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(
        help.contains("DELTAFOLD_AGE_IDENTITY") && !help.contains(&hidden[0]),
        "{help}"
    );

    // Encrypted with a passphrase by the library: the reference program asks on a terminal.
    let phrase = age::secrecy::SecretString::from("a phrase".to_owned());
    let mut recipient = age::scrypt::Recipient::new(phrase);
    recipient.set_work_factor(2);
    let by_phrase = age::encrypt(&recipient, b"anything").unwrap();
    let base = bucket
        .names()
        .into_iter()
        .find(|n| n.starts_with("Full"))
        .unwrap();
    let right = object(&bucket, &base);
    bucket.put(&format!("v2/{base}"), &by_phrase);
    let reads = key.reads();
    let said = refused(&bucket, "compact", &args(&reads), 77, "CannotDecrypt");
    assert!(
        said.contains("passphrase") && said.contains(&base),
        "{said}"
    );
    bucket.put(&format!("v2/{base}"), &right);

    // Anyone who can read the file has the key.
    for (mode, warns) in [(0o600, false), (0o440, false), (0o644, true)] {
        fs::set_permissions(key.file(), fs::Permissions::from_mode(mode)).unwrap();
        let mut c = deltafold();
        c.args(["list", "--log-format", "text", "--store"])
            .arg(bucket.path());
        let out = c.args(args(&reads)).output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(
            stderr.contains("can be read by every user"),
            warns,
            "{mode:o}: {stderr}"
        );
    }
}

#[test]
fn an_etcd_is_saved_compacted_and_restored() {
    let key = Key::new();
    let (both, writes, reads) = (key.both(), key.writes(), key.reads());
    let (both, writes, reads) = (args(&both), args(&writes), args(&reads));
    let marks = marks();
    with_etcd(EtcdVersion::V3_6, |world| {
        let mark = marks[0].clone();
        world.put("/a", mark.clone());
        world.put_many("/many/", 200, 2000);
        // A first full needs no identity, nor does any later full.
        let trace = |flags: &[&'static str]| [flags, &["--log-level", "trace"]].concat();
        let first = world.snapshot(
            "full",
            &[&trace(&["--compression", "none"])[..], &writes].concat(),
        );
        let mut logs = vec![first.succeeded().log];
        world.put("/b", mark.clone());
        logs.push(world.snapshot("full", &writes).succeeded().log);
        world.put("/c", mark.clone());
        // A delta must read the snapshots before it, which needs the identity.
        let refused = world.snapshot("delta", &writes);
        assert_eq!(
            (refused.code, refused.reason()),
            (77, "CannotDecrypt"),
            "{}",
            refused.log
        );
        // Without a recipient, no unencrypted snapshot is written beside the encrypted ones.
        for kind in ["full", "delta"] {
            let refused = world.snapshot(kind, &reads);
            assert_eq!(
                (refused.code, refused.reason()),
                (78, "Configuration"),
                "{kind}"
            );
        }
        assert_eq!(world.prefix.names().len(), 2);
        logs.push(world.delta(&[&trace(&[])[..], &both].concat()).log);
        assert_eq!(world.prefix.last_saved(), world.revision());
        let flags = [&trace(&["--delta-period", "1s"])[..], &both].concat();
        let mut follower = Follower::start(&world.prefix, &world.endpoints(), &flags);
        for i in 0..3 {
            let revision = world.put(format!("/followed/{i}"), mark.clone());
            follower.wait_saved(&world.prefix, revision);
        }
        logs.push(follower.terminate().succeeded().log);
        let names = world.prefix.names();
        assert!(
            names.len() > 4 && names.iter().all(|n| n.is_encrypted),
            "{names:?}"
        );
        let store = Path::new(&world.prefix.url).to_owned();
        for (path, bytes) in objects_in(&store) {
            assert!(!holds_mark(&bytes, &marks), "{path}");
            assert!(
                bytes.starts_with(b"age-encryption.org/v1\n") || !path.starts_with("v2/"),
                "{path}"
            );
        }
        for log in logs {
            assert!(!holds_mark(log.as_bytes(), &marks), "{log}");
            assert!(!log.contains(&key.secret()));
        }

        let revision = world.revision();
        let mut c = deltafold();
        c.args(["compact", "--output", "json", "--store"])
            .arg(&store);
        let made = succeed(c.args(&both));
        assert_eq!(made["revision"], revision);
        let theirs = world.wait(world.etcd.hash_kv(revision));
        let data = world.folder().join("restored");
        let (code, json, stderr) = restore(&store, &data, &reads);
        assert_eq!(code, 0, "{stderr}");
        let restored = Etcd::start(EtcdVersion::V3_6, &data);
        let ours = world.wait(restored.hash_kv(revision));
        assert_eq!(
            (ours.hash, json["hash_kv"].as_u64()),
            (theirs.hash, Some(theirs.hash.into()))
        );
    });
}

/// Nothing encrypted is written beside what is plain. A copy to a new prefix is the way.
#[test]
fn a_plain_prefix_is_moved_to_age_by_a_copy() {
    let key = Key::new();
    let (both, writes, reads) = (key.both(), key.writes(), key.reads());
    let (both, writes, reads) = (args(&both), args(&writes), args(&reads));
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put("/a", "1");
        world.snapshot("full", &[]).succeeded();
        world.put("/a", "2");
        world.delta(&[]);
        let plain = world.prefix.url.clone();
        let to = world.folder().join("encrypted");
        let mut c = deltafold();
        c.args(["copy", "--output", "json", "--from", &plain, "--to"])
            .arg(&to);
        let (code, copied, stderr) = run_json(c.args(&writes));
        assert_eq!((code, copied["copied"].as_u64()), (0, Some(2)), "{stderr}");

        // In the old prefix, the error has the way out.
        world.put("/a", "3");
        let refused = world.snapshot("delta", &writes);
        assert_eq!((refused.code, refused.reason()), (65, "Untrusted"));
        let message = refused.json["message"].as_str().unwrap();
        assert!(message.contains("`deltafold copy --from"), "{message}");

        // The next delta continues the copy. Every snapshot of the new prefix is encrypted.
        world.prefix.url = to.to_str().unwrap().to_owned();
        world.delta(&both);
        assert_eq!(world.prefix.last_saved(), world.revision());
        let names = world.prefix.names();
        assert!(
            names.len() == 3 && names.iter().all(|n| n.is_encrypted),
            "{names:?}"
        );
        let data = world.folder().join("restored");
        let (code, json, stderr) = restore(&to, &data, &reads);
        assert_eq!(code, 0, "{stderr}");
        let theirs = world.wait(world.etcd.hash_kv(world.revision()));
        assert_eq!(json["hash_kv"].as_u64(), Some(theirs.hash.into()));
    });
}

/// A follower whose keys do not suffice ends at once. Without keys the flags say that the backup is not encrypted: what is
/// there counts for nothing, and a warning tells.
#[test]
fn a_follower_without_its_key_ends_at_once() {
    let key = Key::new();
    let (writes, reads) = (key.writes(), key.reads());
    with_etcd(EtcdVersion::V3_7, |world| {
        world.put("/a", "1");
        world.snapshot("full", &args(&writes)).succeeded();
        world.put("/b", "2");
        for (flags, code, reason) in [
            (args(&writes), 77, "CannotDecrypt"),
            (args(&reads), 78, "Configuration"),
        ] {
            let mut follower = Follower::start(&world.prefix, &world.endpoints(), &flags);
            let ended = follower.wait();
            assert_eq!(
                (ended.code, ended.reason()),
                (code, reason),
                "{}",
                ended.log
            );
        }
        let taken = world.snapshot("delta", &[]).succeeded();
        assert_eq!(
            taken.json["full_reason"], "CorruptSnapshot",
            "{}",
            taken.json
        );
        let warnings = taken.json["warnings"].to_string();
        assert!(warnings.contains("give --age-recipient"), "{warnings}");
    });
}
