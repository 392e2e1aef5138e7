//! What commands that need a live etcd print at 80 columns, with colour and without: nobody changes it unseen.

use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::golden;
use crate::support::{copy_dir, deltafold, fixtures_dir};
use std::path::Path;

/// The name of a case, its arguments, and what starts its etcd.
type Case<'a> = (&'a str, &'a str, &'a dyn Fn(&Path) -> Etcd);

const CM: &str = "/registry/configmaps/shop/cm-";

fn put(etcd: &Etcd, key: &str, value: &str) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let put = async { etcd.kv().await.put(key, value, None).await };
    runtime.block_on(put).unwrap();
}

/// An etcd with three keys.
fn etcd(folder: &Path) -> Etcd {
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.join("data"));
    for n in 1..=3 {
        put(&etcd, &format!("{CM}{n}"), "value");
    }
    etcd
}

/// Runs a command of deltafold on the etcd and the folder's store.
fn run(folder: &Path, etcd: &Etcd, args: &[&str]) {
    let mut command = deltafold();
    command.args(args).args(["--store", "store"]);
    command.args(["--endpoints", etcd.endpoint()]);
    let output = command.current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// The same etcd and its full snapshot.
fn with_full(folder: &Path) -> Etcd {
    let etcd = etcd(folder);
    run(folder, &etcd, &["snapshot", "full"]);
    etcd
}

/// One change more, which is not saved.
fn with_change(folder: &Path) -> Etcd {
    let etcd = with_full(folder);
    put(&etcd, &format!("{CM}1"), "another value");
    etcd
}

fn with_delta(folder: &Path) -> Etcd {
    let etcd = with_change(folder);
    run(folder, &etcd, &["snapshot", "delta"]);
    etcd
}

/// The etcd, and a verification that is recorded.
fn verified(folder: &Path) -> Etcd {
    let etcd = with_delta(folder);
    run(folder, &etcd, &["verify"]);
    etcd
}

/// The etcd beside the backup of another cluster.
fn with_other_backup(folder: &Path) -> Etcd {
    copy_dir(&fixtures_dir().join("kubernetes"), &folder.join("store"));
    etcd(folder)
}

#[test]
fn outputs_are_as_recorded() {
    let cases: &[Case<'_>] = &[
        (
            "full",
            "snapshot full --store store --endpoints ENDPOINT",
            &etcd,
        ),
        (
            "delta",
            "snapshot delta --store store --endpoints ENDPOINT",
            &with_change,
        ),
        (
            "delta-nothing",
            "snapshot delta --store store --endpoints ENDPOINT",
            &with_full,
        ),
        (
            "unreachable",
            "snapshot full --store store --endpoints http://127.0.0.1:1",
            &etcd,
        ),
        (
            "verify",
            "verify --store store --endpoints ENDPOINT",
            &with_delta,
        ),
        (
            "verify-behind",
            "verify --store store --endpoints ENDPOINT",
            &with_change,
        ),
        (
            "verify-differs",
            "verify --store store --endpoints ENDPOINT",
            &with_other_backup,
        ),
        ("status", "status --store store", &verified),
        (
            "maintain",
            "maintain --defrag always --endpoints ENDPOINT",
            &with_delta,
        ),
        (
            "maintain-dry-run",
            "maintain --defrag always --dry-run --endpoints ENDPOINT",
            &with_delta,
        ),
        ("maintain-nothing", "maintain --endpoints ENDPOINT", &etcd),
        (
            "apply",
            "apply --prefix /registry/configmaps/shop/ --raw-kubernetes --store store --endpoints ENDPOINT",
            &with_other_backup,
        ),
        (
            "apply-execute",
            "apply --exact-key /registry/configmaps/shop/cm-1 --raw-kubernetes --execute --store store --endpoints ENDPOINT",
            &with_other_backup,
        ),
        (
            "apply-delete-extra",
            "apply --prefix /registry/configmaps/shop/cm- --raw-kubernetes --delete-extra --execute --store store --endpoints ENDPOINT",
            &with_other_backup,
        ),
    ];
    for (name, args, prepare) in cases {
        let args: Vec<&str> = args.split(' ').collect();
        golden::check_live(name, &args, prepare);
    }
}
