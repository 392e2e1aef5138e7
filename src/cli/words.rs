//! Words of kubectl, etcdctl, git, restic and etcd-backup-restore, and what they are called here.
//!
//! `advice` looks them up in command lines that are refused.

/// Commands and what to say of them. Words separated by spaces share a sentence; `snapshot_restore` is a subcommand.
#[rustfmt::skip]
const COMMANDS: [(&str, &str); 24] = [
    ("describe show cat view dump checkout", "`deltafold get OBJECT --time TIME` shows an object as it was, and `deltafold history OBJECT` what happened to it"),
    ("events", "`deltafold get events -n NAMESPACE` shows the Events of a moment"),
    ("logs", "etcd has no logs of containers: `deltafold log` shows what changed, and `deltafold get events` the Events"),
    ("blame reflog", "`deltafold history OBJECT` shows every version of an object, and who wrote it"),
    ("find grep ls-files", "`deltafold search WORD` finds objects and keys by their names, at all times"),
    ("changes watch audit", "`deltafold log --since 2h` shows what was created, changed and deleted"),
    ("rollout", "`deltafold history OBJECT` shows the versions, and `deltafold recover OBJECT --revision N --overwrite` goes back to one"),
    ("rollback undo revert undelete", "`deltafold recover OBJECT --revision N` brings an object back as it was"),
    ("api-resources api-versions", "`deltafold explore` shows the kinds of a backup with their numbers; `deltafold get KIND -A` lists one"),
    ("top stats", "`deltafold status` and `deltafold list` show what a store holds"),
    ("edit create delete patch scale annotate label replace put del rm", "a backup is only read: `deltafold recover` brings objects back into a cluster, and `deltafold apply` keys into an etcd"),
    ("ui web browse mount dashboard", "`deltafold explore` shows a backup in a browser"),
    ("snapshots versions", "`deltafold list` shows the snapshots of a store"),
    ("forget prune", "`deltafold gc` removes what a policy does not keep"),
    ("check fsck", "`deltafold verify` reads a backup and proves it; `deltafold store check` tries a store"),
    ("backup", "`deltafold snapshot full` takes a snapshot, and `deltafold snapshot follow` keeps a backup up to date"),
    ("init", "a store needs no preparation: `deltafold snapshot full --store URL` begins it"),
    ("tag unlock", "`deltafold pin` keeps snapshots that `gc` would remove"),
    ("snapshot_restore", "that is `deltafold restore --snapshot FILE --data-dir DIR`, or with --store URL"),
    ("snapshot_status", "that is `deltafold verify --snapshot FILE`; of a store, `deltafold status`"),
    ("snapshot_create snapshot_take", "that is `deltafold snapshot full`"),
    ("defrag compaction", "that is `deltafold maintain --defrag`; `deltafold compact` folds deltas into a full"),
    ("server", "etcd-backup-restore's `server` is `deltafold snapshot follow`, with `deltafold gc` and `deltafold compact` beside it: docs/migration.md"),
    ("initialize", "etcd-backup-restore's `initialize` is `deltafold restore --if-needed sanity`: docs/migration.md"),
];

/// Flags and what to say of them.
#[rustfmt::skip]
const FLAGS: [(&str, &str); 15] = [
    ("context kubeconfig cluster as", "this command reads a backup and no cluster: --store or --snapshot names it, and `recover` has --context"),
    ("rev resource-version version", "a point in the history is --revision N, or --time TIME"),
    ("keys-only", "`deltafold export --prefix P` prints a line a key; `deltafold get KIND -o name` the names of objects"),
    ("print-value-only", "--raw prints the bytes of a value"),
    ("from-key range count-only limit", "--prefix P selects keys; `deltafold export` prints one a line, for head, wc and grep"),
    ("write-out", "the format is --output, such as -o json"),
    ("field-selector show-labels show-kind", "-l selects by labels; -o json and jq select by fields"),
    ("watch follow", "a backup does not change while it is read: `deltafold log --since 5m` shows the last changes"),
    ("template", "use -o json, and jq"),
    ("repo repository bucket store-container store-prefix storage-provider", "the store is one URL, such as --store s3://BUCKET/PREFIX: docs/migration.md"),
    ("target output-dir", "`deltafold restore` writes to --data-dir"),
    ("schedule delta-snapshot-period", "`deltafold snapshot follow` has --full-schedule and --delta-period: docs/migration.md"),
    ("garbage-collection-policy garbage-collection-period max-backups keep-last", "that is a policy of `deltafold gc`: docs/migration.md"),
    ("embedded-etcd-quota-bytes etcd-connection-timeout snapstore-temp-directory max-parallel-chunk-uploads use-etcd-wrapper", "a flag of etcd-backup-restore: docs/migration.md has what replaces it"),
    ("since-time after before", "the span is --since and --until"),
];

fn find(table: &[(&str, &'static str)], word: &str) -> Option<&'static str> {
    let has = |words: &str| words.split(' ').any(|known| known == word);
    let found = table.iter().find(|(words, _)| has(words));
    found.map(|(_, advice)| *advice)
}

/// Returns what a command of another tool is here. `path` is the command before it, if it is a subcommand.
pub(super) fn command(path: &[&str], word: &str) -> Option<&'static str> {
    find(&COMMANDS, &[path, &[word]].concat().join("_"))
}

/// Returns what a flag of another tool is here.
pub(super) fn flag(word: &str) -> Option<&'static str> {
    find(&FLAGS, word.trim_start_matches('-'))
}
