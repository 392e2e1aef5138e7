//! The user that owns the data directory, such as etcd's, attacks the user that restores into it, such as root.

use crate::support::disk::in_a_mount_namespace;
use crate::support::{copy_fixture, deltafold, run_json, scratch};
use serde_json::json;
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
    let aside = "../../../rootonly/x";
    let wal = root.path().join("wal");
    type Plant = Box<dyn Fn()>;
    let journal = |content: serde_json::Value| -> Plant {
        let staging = staging.clone();
        Box::new(move || {
            fs::create_dir_all(staging.join("new/member/snap")).unwrap();
            fs::create_dir_all(staging.join("member/snap")).unwrap();
            for member in ["new/member", "member"] {
                fs::write(staging.join(member).join("snap/db"), "theirs").unwrap();
            }
            fs::write(staging.join("journal"), content.to_string()).unwrap();
        })
    };
    let (of_link, of_tree) = ((staging.clone(), secret.clone()), staging.clone());
    let tree = secret.clone();
    let plants: [(&str, Plant); 4] = [
        (
            "a name in a folder of root",
            journal(json!({"aside": aside, "wal": null})),
        ),
        (
            "a file of root",
            journal(json!({"aside": "bad-1", "wal": [wal, "../rootonly/shadow"]})),
        ),
        (
            "a tree of root",
            Box::new(move || {
                fs::create_dir_all(&of_tree).unwrap();
                fs::write(of_tree.join("wal-dir"), tree.to_str().unwrap()).unwrap();
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
    assert_eq!(restore().1["status"], "NotNeeded");
}
