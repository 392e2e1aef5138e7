//! Lines that users of kubectl and etcdctl type.

use crate::support::{deltafold, fixtures_dir};
use serde_json::Value;

/// Runs a line on the backup of a real cluster. Returns the exit code, standard output and standard error.
fn run(line: &str) -> (i32, String, String) {
    let mut c = deltafold();
    c.args(line.split_whitespace().map(|word| word.replace('_', " ")));
    let store = fixtures_dir().join("kubernetes");
    let out = c.env("DELTAFOLD_STORE", store).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = out.status.code().unwrap();
    (code, text(&out.stdout), text(&out.stderr))
}

fn succeeds(line: &str) -> String {
    let (code, stdout, stderr) = run(line);
    assert_eq!(code, 0, "{line}: {stderr}");
    stdout
}

/// The first columns of a table, without its header.
fn names(table: &str) -> Vec<&str> {
    let lines = table
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with("NAME"));
    lines
        .map(|l| l.split_whitespace().next().unwrap())
        .collect()
}

#[test]
fn objects_are_found_by_the_lines_of_kubectl() {
    let all = succeeds("get pods -A");
    assert!(all.starts_with("NAMESPACE"), "{all}");
    assert_eq!(all, succeeds("get po --all-namespaces"));
    assert_eq!(all, succeeds("get pods --all"));

    for line in [
        "get deploy web-1 -n shop",
        "get deployment/web-1 -n shop",
        "get deploy/shop/web-1",
    ] {
        let one = succeeds(line);
        assert!(one.contains("name: web-1"), "{line}: {one}");
        assert!(!one.contains("managedFields"), "{line}: {one}");
    }
    let one = succeeds("get configmap cm-1 -n shop");
    assert!(one.contains("kind: ConfigMap"), "{one}");
    let managers = succeeds("get configmap cm-1 -n shop --show-managed-fields");
    assert!(managers.contains("managedFields"), "{managers}");
    let clean = succeeds("get configmap cm-1 -n shop --clean");
    assert!(!clean.contains("uid:"), "{clean}");

    let two = succeeds("get cm,secret -n shop");
    let expected = [
        "configmap/cm-1",
        "configmap/cm-2",
        "configmap/kube-root-ca.crt",
        "secret/db",
    ];
    assert_eq!(names(&two), expected, "{two}");
    let two = succeeds("get configmap cm-1 cm-2 -n shop -o name");
    assert_eq!(two, "configmap/cm-1\nconfigmap/cm-2\n");
    let (code, printed, stderr) = run("get configmap cm-1 gone -n shop -o name");
    assert_eq!((code, &*printed), (66, "configmap/cm-1\n"), "{stderr}");
    let all = succeeds("get all -n shop -o name");
    for name in [
        "deployment.apps/web-1",
        "job.batch/once",
        "replicaset.apps/web-1-c664b755d",
    ] {
        assert!(all.lines().any(|line| line == name), "{name} in {all}");
    }
    let all = succeeds("get all -n shop");
    assert!(names(&all).contains(&"deployment.apps/web-1"), "{all}");
    let (code, _, stderr) = run("get pods");
    assert!(code == 64 && stderr.contains("or -A for"), "{stderr}");
}

/// The lines that `get` takes name the same objects in every command that reads.
#[test]
fn names_are_the_same_everywhere() {
    let keys = |line: &str| -> Vec<String> {
        let lines = succeeds(line);
        let keys = lines.lines().map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            line["key"].as_str().unwrap().to_owned()
        });
        keys.collect()
    };
    let cm = "/registry/configmaps/shop/cm-1";
    for line in [
        "export cm/shop/cm-1",
        "export configmap cm-1 -n shop",
        "export /registry/configmaps/shop/cm-1",
        "export --prefix /registry/configmaps/shop/cm-1",
    ] {
        assert_eq!(keys(line), [cm], "{line}");
    }
    let two = keys("export cm,secret -n shop");
    assert!(
        two.contains(&cm.to_owned()) && two.contains(&"/registry/secrets/shop/db".to_owned()),
        "{two:?}"
    );
    let all = keys("export -n shop");
    assert!(all.len() > two.len() && all.iter().all(|key| key.contains("/shop/")));
    assert_eq!(keys("export deploy").len(), keys("export deploy -A").len());
    let labelled = keys("export pods -l app=web-1");
    assert!(!labelled.is_empty() && labelled.len() < keys("export pods").len());

    for line in ["history deploy web-1 -n shop", "history deploy/shop/web-1"] {
        let history: Value = serde_json::from_str(&succeeds(&format!("{line} -o json"))).unwrap();
        assert_eq!(history["key"], "/registry/deployments/shop/web-1", "{line}");
    }
    let text = succeeds("history deploy -n shop");
    for name in ["web-1", "web-2"] {
        let heading = format!("/registry/deployments/shop/{name}");
        assert!(text.lines().any(|line| line == heading), "{text}");
    }
    for (line, expected) in [
        ("history deploy -n shop -o json", 2),
        ("history deploy -A -l app=web-1 -o json", 1),
        ("history cm/shop/cm-1 cm/shop/cm-3 -o json", 2),
        ("history --prefix /registry/configmaps/shop/cm- -o json", 2),
    ] {
        let printed = succeeds(line);
        let histories: Vec<Value> = serde_json::Deserializer::from_str(&printed)
            .into_iter()
            .collect::<Result<_, _>>()
            .unwrap();
        assert_eq!(histories.len(), expected, "{line}");
        for history in histories {
            assert_eq!(history["status"], "Succeeded", "{line}");
            assert!(!history["versions"].as_array().unwrap().is_empty());
        }
    }
    let (code, _, stderr) = run("history --prefix=");
    assert!(
        code != 0 && stderr.contains("at most 100"),
        "{code} {stderr}"
    );

    let changed = |line: &str| -> Vec<String> {
        let diff: Value = serde_json::from_str(&succeeds(&format!("{line} -o json"))).unwrap();
        let changes = diff["changes"].as_array().unwrap().iter();
        changes
            .map(|c| c["key"].as_str().unwrap().to_owned())
            .collect()
    };
    for line in [
        "diff deploy/shop/web-3 --from 275 --to 590",
        "diff deploy web-3 -n shop --from 275 --to 590",
    ] {
        let (code, _, stderr) = run(line);
        assert_eq!(code, 0, "{line}: {stderr}");
    }
    let all = changed("diff --from 300");
    let omitted = |key: &String| key.contains("/events/") || key.contains("leases/");
    assert!(!all.iter().any(omitted), "{all:?}");
    let every = changed("diff --from 300 --prefix=");
    assert!(every.iter().any(omitted), "{every:?}");
    assert!(changed("diff leases --from 300").iter().all(omitted));
    let text = succeeds("diff --from 300");
    assert!(text.contains("--prefix '' lists them"), "{text}");
    let result: Value = serde_json::from_str(&succeeds("diff --from 300 -o json")).unwrap();
    let counted = &result["omitted"];
    let counted = counted["events"].as_u64().unwrap() + counted["leases"].as_u64().unwrap();
    assert_eq!(counted as usize, every.len() - all.len());

    let deleted = succeeds("deleted cm -n shop");
    assert!(deleted.contains("configmap/shop/cm-3"), "{deleted}");
    assert!(!deleted.contains("pod/"), "{deleted}");
}

/// `get` says when an object was deleted, and its command brings the object back.
#[test]
fn what_was_deleted_is_told_with_the_command_that_brings_it_back() {
    for line in ["get configmap/shop/cm-3", "get cm cm-1 cm-3 -n shop"] {
        let (code, _, stderr) = run(line);
        assert_eq!(code, 66, "{line}: {stderr}");
        assert!(
            stderr.contains("deleted at revision 598 (2026-11-21"),
            "{line}: {stderr}"
        );
        let (_, command) = stderr.trim_end().rsplit_once(": deltafold ").unwrap();
        let command = command.strip_suffix(" [KeyNotFound]").unwrap();
        assert!(command.starts_with("recover configmap/shop/cm-3 --revision 597"));
        let object = succeeds(&format!("{command} -o yaml"));
        assert!(object.contains("name: cm-3"), "{object}");
        assert!(!object.contains("uid:"), "{object}");
    }
    let (code, _, stderr) = run("get configmap/shop/never");
    assert!(code == 66 && stderr.contains("check the name"), "{stderr}");
}

#[test]
fn formats_are_those_of_kubectl() {
    let yaml = succeeds("get deploy web-1 -n shop -o yaml");
    assert!(yaml.starts_with("apiVersion: apps/v1\n"), "{yaml}");
    for flag in [
        "-o json",
        "-ojson",
        "-o=json",
        "--output json",
        "--output=json",
    ] {
        let json = succeeds(&format!("get deploy web-1 -n shop {flag}"));
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["kind"], "Deployment", "{flag}");
        assert_eq!(json["metadata"].get("managedFields"), None, "{flag}");
    }
    let list: Value = serde_json::from_str(&succeeds("get deploy -n shop -o json")).unwrap();
    assert_eq!(
        (&list["kind"], list["items"].as_array().unwrap().len()),
        (&"List".into(), 2)
    );
    let result: Value =
        serde_json::from_str(&succeeds("get deploy web-1 -n shop -o result")).unwrap();
    assert_eq!(result["keys"][0]["key"], "/registry/deployments/shop/web-1");
    for line in ["list -o json", "ls -o json", "list --output json"] {
        let listed: Value = serde_json::from_str(&succeeds(line)).unwrap();
        assert_eq!(listed["latest_revision"], 628, "{line}");
    }

    for (line, way) in [
        ("get deploy -n shop -o jsonpath={.metadata.name}", "jq"),
        ("get deploy -n shop -o custom-columns=A:.kind", "jq"),
        ("get deploy -n shop -o go-template={{.kind}}", "jq"),
        ("get deploy -n shop -o tables", "wide"),
        ("list -o yaml", "for `deltafold get`"),
    ] {
        let (code, _, stderr) = run(line);
        assert_eq!(code, 64, "{line}: {stderr}");
        assert!(stderr.contains(way), "{line}: {stderr}");
    }
    let wide = succeeds("get pods -n shop -o wide");
    assert!(wide.lines().next().unwrap().contains("IP"), "{wide}");
    let events = succeeds("get events -n shop");
    let header: Vec<&str> = events.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(
        header,
        ["NAME", "TYPE", "REASON", "OBJECT", "MESSAGE", "AGE"],
        "{events}"
    );
    assert!(events.contains("pod/web-1-"), "{events}");
}

/// What other tools call something is said, and nothing is guessed that is only similar.
#[test]
fn words_of_other_tools_are_known() {
    for (line, says) in [
        ("server --store-container x", "snapshot follow"),
        ("initialize", "restore --if-needed"),
        ("describe pod web-1", "deltafold get OBJECT"),
        ("logs web-1", "deltafold log"),
        ("events", "get events"),
        ("find web-1", "deltafold search"),
        ("search", "<WORD>"),
        ("show web-1", "deltafold get OBJECT"),
        ("rollout undo deploy/web-1", "recover OBJECT"),
        ("api-resources", "deltafold explore"),
        ("snapshots", "deltafold list"),
        ("forget", "deltafold gc"),
        ("snapshot restore x.db", "restore --snapshot"),
        ("snapshot status x.db", "verify --snapshot"),
        ("snapshot create", "snapshot full"),
        ("defrag", "deltafold maintain"),
        ("get pods -A --context x", "reads a backup and no cluster"),
        ("get foo --rev 5", "--revision N"),
        ("get --prefix= --keys-only", "-o name"),
        ("get foo --print-value-only", "--raw"),
        ("list --storage-provider S3", "one URL"),
        ("gc --max-backups 3", "deltafold gc"),
        ("restore --embedded-etcd-quota-bytes 5", "docs/migration.md"),
    ] {
        let (code, _, stderr) = run(line);
        assert_eq!(code, 64, "{line}: {stderr}");
        let told = stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(told.contains(says), "{line}: {stderr}");
        for guess in ["--allow-plaintext-below", "'pin'"] {
            assert!(!stderr.contains(guess), "{line}: {stderr}");
        }
    }
    // One or two letters are a slip.
    for (line, meant) in [
        ("histroy x", "history"),
        ("get x --revison 5", "--revision"),
    ] {
        let (_, _, stderr) = run(line);
        assert!(stderr.contains(meant), "{line}: {stderr}");
    }
    let (code, _, stderr) = run("get configmap/shop/cm-settings");
    assert!(code == 66 && !stderr.contains("did you mean"), "{stderr}");
    let (code, _, stderr) = run("get deployment/shop/web-11");
    assert_eq!(code, 66);
    assert!(stderr.contains("did you mean web-1?"), "{stderr}");
}

#[test]
fn tables_are_those_of_kubectl() {
    let one = succeeds("get deploy web-1 -n shop -o wide");
    assert!(
        one.starts_with("NAMESPACE") || one.starts_with("NAME"),
        "{one}"
    );
    assert!(one.contains("READY") && names(&one) == ["web-1"], "{one}");
    assert_eq!(succeeds("get deploy/shop/web-1 -o wide").lines().count(), 2);
    let all = succeeds("get deployments.v1.apps -n shop");
    assert_eq!(names(&all), ["web-1", "web-2"]);
    let bare = succeeds("get deploy -n shop --no-headers");
    assert_eq!(names(&bare).len(), bare.lines().count());
    let sorted = succeeds("get pods -n shop --sort-by .metadata.creationTimestamp --no-headers");
    let by_name = succeeds("get pods -n shop --no-headers");
    let mut rows: Vec<&str> = sorted.lines().collect();
    rows.sort_unstable();
    assert_eq!(rows, by_name.lines().collect::<Vec<_>>());
    let by_number = succeeds("get deploy -n shop --sort-by {.spec.replicas} --no-headers");
    assert_eq!(names(&by_number), ["web-2", "web-1"]);
    let (code, _, stderr) = run("get pods -A -o yaml --sort-by .metadata.name");
    assert!(code == 64 && stderr.contains("tables"), "{stderr}");
}

#[test]
fn small_habits() {
    let version = succeeds("version");
    assert_eq!(version, succeeds("--version"));
    assert!(version.starts_with("deltafold "), "{version}");
    // An answer stands alone; a Pod's log says what was read.
    for line in ["get deploy web-1 -n shop", "list", "log", "search web-1"] {
        let (_, _, stderr) = run(line);
        assert_eq!(stderr, "", "{line}");
    }
    let (_, _, stderr) = run("get deploy web-1 -n shop --log-level info");
    assert!(stderr.contains("INFO"), "{stderr}");
    for command in ["", "restore", "get", "apply", "snapshot follow", "list"] {
        let page = succeeds(&format!("{command} --help"));
        assert!(page.lines().count() <= 100, "{command}: {page}");
        assert!(
            page.contains("Examples:") && page.contains("--help=all"),
            "{page}"
        );
        assert!(!page.contains("[env:"), "{command}: {page}");
        let all = succeeds(&format!("{command} --help=all"));
        assert!(
            all.contains("--log-format") && all.contains("[env: DELTAFOLD_"),
            "{all}"
        );
        let asked = succeeds(&format!("help {command}"));
        assert_eq!(asked, page);
    }
    let (code, _, stderr) = run("get pods -A --time yesterday");
    assert!(code == 64 && stderr.contains("which hour?"), "{stderr}");
    for time in ["yesterday_14:00", "5_minutes", "5m", "5m_ago"] {
        let (code, _, stderr) = run(&format!("get pods -A --time {time} --or-newest"));
        assert_eq!(code, 0, "{time}: {stderr}");
    }
    let (code, stdout, stderr) = run("deleted --since 2020-01-01");
    assert_eq!(
        (code, stdout.contains("oldest state")),
        (0, false),
        "{stdout}"
    );
    assert_eq!(
        stderr.matches("before the oldest state").count(),
        1,
        "{stderr}"
    );
    for line in ["list -A", "status -w json", "history x -X"] {
        let (code, _, stderr) = run(line);
        assert_eq!(code, 64, "{line}");
        assert!(!stderr.contains("'-- -"), "{line}: {stderr}");
    }
}
