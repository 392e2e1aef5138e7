//! The user that owns the data directory, such as etcd's, attacks the user that restores into it, such as root.

use crate::support::disk::{in_a_mount_namespace, wrapped};
use crate::support::{copy_fixture, deltafold, run_json, scratch};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// A user that nothing belongs to.
const NOBODY: u32 = 65_534;

fn give_away(path: &Path) {
    std::os::unix::fs::lchown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path).unwrap() {
            give_away(&entry.unwrap().path());
        }
    }
}

/// Without root a test cannot give files away. In a user namespace, the files of the machine's root are nobody's.
const WITH_THE_MACHINES_FILES: &str = r#"mount --bind /usr "$1" || exit 99; shift; exec "$@""#;

/// Returns a restore for which everything below the data directory belongs to somebody else.
fn as_another_user(command: Command, data: &Path) -> Command {
    if rustix::process::geteuid().is_root() {
        give_away(data);
        return command;
    }
    let staging = data.join(".deltafold-restore");
    if staging.is_symlink() {
        fs::remove_file(&staging).unwrap();
    }
    fs::create_dir_all(&staging).unwrap();
    in_a_mount_namespace(WITH_THE_MACHINES_FILES, &[staging.as_os_str()], &command)
}

#[test]
fn the_owner_of_a_data_directory_cannot_lead_root_out_of_it() {
    let store = copy_fixture("kubernetes");
    let root = scratch::folder().unwrap();
    let (data, secret) = (root.path().join("data"), root.path().join("rootonly"));
    let staging = data.join(".deltafold-restore");
    type Plant = Box<dyn Fn()>;
    let (of_link, of_member) = ((staging.clone(), secret.clone()), staging.clone());
    let plants: [(&str, Plant); 2] = [
        (
            "a member that seems to be a previous one",
            Box::new(move || {
                fs::create_dir_all(of_member.join("member/snap")).unwrap();
                fs::write(of_member.join("member/snap/db"), "theirs").unwrap();
            }),
        ),
        (
            "files through a link",
            Box::new(move || {
                fs::create_dir_all(of_link.0.parent().unwrap()).unwrap();
                std::os::unix::fs::symlink(&of_link.1, &of_link.0).unwrap();
            }),
        ),
    ];
    for (what, plant) in plants {
        let _ = fs::remove_dir_all(&data);
        let _ = fs::remove_dir_all(&secret);
        fs::create_dir_all(secret.join(".deltafold-restore")).unwrap();
        fs::write(secret.join("shadow"), "root's").unwrap();
        plant();
        let mut restore = deltafold();
        restore.args(["restore", "--output", "json", "--store"]);
        restore.arg(store.path()).arg("--data-dir").arg(&data);
        let (code, result, stderr) = run_json(&mut as_another_user(restore, &data));
        assert_eq!(
            (code, &result["reason"]),
            (77, &"PermissionDenied".into()),
            "{what}: {stderr}"
        );
        assert!(
            stderr.contains(staging.to_str().unwrap()),
            "{what}: {stderr}"
        );
        let mut left: Vec<_> = fs::read_dir(&secret)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, [".deltafold-restore", "shadow"], "{what}");
        assert!(!data.join("member").exists(), "{what}");
    }
}

/// `--if-needed` run by root in the directory of etcd's user goes on working.
#[test]
fn a_member_of_another_user_is_replaced_and_kept() {
    let us = rustix::process::geteuid();
    let store = copy_fixture("kubernetes");
    let root = scratch::folder().unwrap();
    let data = root.path().join("data");
    let restore = || {
        let mut c = deltafold();
        c.args([
            "restore",
            "--if-needed",
            "full",
            "--output",
            "json",
            "--store",
        ]);
        c.arg(store.path()).arg("--data-dir").arg(&data);
        run_json(&mut c)
    };
    assert_eq!(restore().1["status"], "Succeeded");
    fs::remove_dir_all(data.join("member/wal")).unwrap();
    // Only root can give files away; for others this is an ordinary replacement.
    let owner = if us.is_root() { NOBODY } else { us.as_raw() };
    if us.is_root() {
        give_away(&data);
    }
    let (code, result, stderr) = restore();
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(result["decision"]["reason"], "WalMissing");
    let kept = result["kept_aside"][0].as_str().unwrap();
    assert_eq!(fs::metadata(kept).unwrap().uid(), owner);
    assert_eq!(restore().1["status"], "NothingToDo");
}

/// A pipe has no writer, so opening it as a file would never end. A link may lead to any file of root.
#[test]
fn the_owner_of_a_data_directory_cannot_hang_root_by_a_pipe_or_mislead_it_by_a_link() {
    let store = copy_fixture("kubernetes");
    let root = scratch::folder().unwrap();
    let (data, secret) = (root.path().join("data"), root.path().join("rootonly"));
    fs::write(&secret, "root's").unwrap();
    let restore = |args: &[&str]| {
        let mut c = deltafold();
        c.args(["restore", "--output", "json", "--store"]);
        c.arg(store.path()).arg("--data-dir").arg(&data).args(args);
        run_json(&mut wrapped(&["timeout", "60"], &[], &c))
    };
    let (code, _, stderr) = restore(&[]);
    assert_eq!(code, 0, "{stderr}");
    let segment = "member/wal/0000000000000000-0000000000000000.wal";
    // etcd would read the newest .snap first.
    let snap = "member/snap/ffffffffffffffff-ffffffffffffffff.snap";
    let dry_run = ["--if-needed", "full", "--dry-run"];
    for name in ["member/snap/db", segment, snap] {
        let path = data.join(name);
        let aside = root.path().join("aside");
        if path.exists() {
            fs::rename(&path, &aside).unwrap();
        }
        for kind in ["pipe", "link"] {
            match kind {
                "pipe" => mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap(),
                _ => std::os::unix::fs::symlink(&secret, &path).unwrap(),
            }
            for args in [&dry_run[..2], &["--if-needed", "sanity"], &dry_run, &[]] {
                let what = format!("{name} is a {kind}, {args:?}");
                let (code, result, stderr) = restore(args);
                // Without --if-needed, a .snap is not read.
                let expected = match args.is_empty() && name == snap {
                    true => (73, "TargetExists"),
                    false => (77, "PermissionDenied"),
                };
                let got = (code, result["reason"].as_str().unwrap_or_default());
                assert_eq!(got, expected, "{what}: {stderr}");
                let is_named = stderr.contains(path.to_str().unwrap());
                assert!(is_named || expected.0 == 73, "{what}: {stderr}");
            }
            fs::remove_file(&path).unwrap();
        }
        if aside.exists() {
            fs::rename(&aside, &path).unwrap();
        }
    }
    assert_eq!(fs::read(&secret).unwrap(), b"root's");
    assert_eq!(restore(&dry_run).1["status"], "NothingToDo");
}
