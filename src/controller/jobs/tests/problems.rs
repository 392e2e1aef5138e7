//! Tests of the problems that are reported for policies and tasks.

use super::*;

#[test]
fn problems_of_policies() {
    let table: [(MakeSpec, &str, Value, &str); 35] = [
        (
            rich,
            "snapshot.fullSchedule",
            json!("0 3 * *"),
            "it has 4 fields",
        ),
        (
            rich,
            "snapshot.fullSchedule",
            json!("0 0 3 * * *"),
            "this one has 6",
        ),
        (rich, "snapshot.deltaSchedule", json!("0 3 * * 7"), "Sunday"),
        (
            rich,
            "snapshot.timeZone",
            json!("Mars"),
            "unknown time zone",
        ),
        (
            rich,
            "retention.schedule",
            json!("@never"),
            "retention.schedule",
        ),
        (rich, "verify.schedule", json!("0 0 30 2 *"), "never comes"),
        (rich, "maintenance.schedule", json!("x"), "maintenance"),
        (
            rich,
            "maintenance.defrag",
            json!("1.5"),
            "maintenance.defrag",
        ),
        (rich, "compaction.activeDeadline", json!("0s"), "too short"),
        (
            rich,
            "compaction.ageThreshold",
            json!("99999999999999999999s"),
            "age",
        ),
        (
            rich,
            "compaction.activeDeadline",
            json!("365001d"),
            "1000 years",
        ),
        (
            rich,
            "compaction.sizeThreshold",
            json!("99999999999Ti"),
            "sizeThreshold",
        ),
        (
            rich,
            "retention.limit",
            json!(9_999_999_999_i64),
            "out of range",
        ),
        (
            rich,
            "retention.deltaRetention",
            json!("99999999999999999999d"),
            "deltaRetention",
        ),
        (
            rich,
            "retention.restorableWindow",
            json!("5y"),
            "restorableWindow",
        ),
        (
            rich,
            "jobTemplate.metricsScrapeWait",
            json!("5"),
            "metricsScrapeWait",
        ),
        (rich, "jobTemplate.scratchSize", json!("0"), "too small"),
        (rich, "store.url", json!("ftp://x"), "unknown store"),
        (rich, "store.url", json!("s3://"), "scheme://bucket"),
        (
            rich,
            "store.url",
            json!("s3://backups/main/v2"),
            "ends in v2",
        ),
        (
            rich,
            "store.options",
            json!({"2:region": "x"}),
            "name of a setting",
        ),
        (
            rich,
            "store.options",
            json!({"region": "x\ny"}),
            "more than one line",
        ),
        (
            rich,
            "store.options",
            json!({"secret_access_key": "x"}),
            "into the Secret of secretRef",
        ),
        (
            rich,
            "store.options",
            json!({"proxy_url": "http://user:password@proxy"}),
            "into the Secret of secretRef",
        ),
        (
            rich,
            "encryption.recipients",
            json!(["AGE-SECRET-KEY-1"]),
            "X25519",
        ),
        (local, "store.url", json!("file:///etc"), "mounted"),
        (local, "store.url", json!("/secrets/x"), "mounted"),
        // No other spelling of a path replaces the program.
        (local, "store.url", json!("//bin"), "mounted"),
        (local, "store.url", json!("/./bin"), "mounted"),
        (local, "store.url", json!("/bin/."), "mounted"),
        (local, "store.url", json!("/.//secrets//x"), "mounted"),
        (local, "store.url", json!("file:////bin/"), "mounted"),
        (local, "store.url", json!("/."), "mounted"),
        (
            local,
            "store.options",
            json!({"region": "x"}),
            "no settings",
        ),
        (
            following,
            "snapshot.follow.deltaPeriod",
            json!("0s"),
            "too short",
        ),
    ];
    for (base, path, value, expected) in table {
        let problems_found = problems(&policy(&with(&base(), path, &value)));
        assert!(
            problems_found.len() == 1 && problems_found[0].contains(expected),
            "{path} {value}: {problems_found:?}"
        );
        assert!(
            !problems_found[0].contains("AGE-SECRET"),
            "{problems_found:?}"
        );
    }
    // The follower accepts schedules with seconds, which a CronJob does not.
    let seconds = with(&following(), "snapshot.fullSchedule", &json!("0 0 3 * * 7"));
    assert_eq!(problems(&policy(&seconds)), Vec::<String>::new());
}

/// A wrong option, one that the Job sets itself, one that another option excludes, and those that reach beyond the backup.
#[test]
fn args_of_policies_and_tasks_are_checked_as_their_jobs_read_them() {
    let settings = settings();
    for (field, args, expected) in [
        (
            "retention.args",
            json!(["--staging-age=soon"]),
            "--staging-age",
        ),
        (
            "retention.args",
            json!(["--take-over"]),
            "unexpected argument '--take-over' found",
        ),
        (
            "retention.args",
            json!(["--timeout=1s"]),
            "\"--timeout=1s\" cannot be set here",
        ),
        (
            "retention.args",
            json!(["x"]),
            "unexpected argument 'x' found",
        ),
        (
            "retention.args",
            json!(["-oyaml"]),
            "\"-oyaml\" cannot be set here",
        ),
        (
            "retention.args",
            json!(["--", "x"]),
            "\"--\" cannot be set here",
        ),
        (
            "snapshot.args",
            json!(["--store", "s3://other"]),
            "\"--store\" cannot be set here",
        ),
        (
            "compaction.args",
            json!(["--keep-history=all"]),
            "cannot be used multiple times",
        ),
        (
            "verify.args",
            json!(["--etcd-binary=/x"]),
            "\"--etcd-binary=/x\" cannot be set here",
        ),
        (
            "maintenance.args",
            json!(["--quota-backend-bytes"]),
            "a value is required",
        ),
    ] {
        let spec = with(&rich(), field, &args);
        let found = args_problems(&policy(&spec), &settings);
        assert_eq!(found.len(), 1, "{args}: {found:?}");
        let begins = format!("spec.{field}: ");
        assert!(
            found[0].starts_with(&begins) && found[0].contains(expected),
            "{found:?}"
        );
        assert!(
            !found[0].contains('\n') && !found[0].contains("Usage"),
            "{found:?}"
        );
    }
    for (shape, spec) in SHAPES {
        let found = args_problems(&policy(&spec()), &settings);
        assert_eq!(found, Vec::<String>::new(), "{shape}");
    }
    let policy = policy(&rich());
    let problem = |spec: &Value| task_args_problem(&policy, &task(spec), &settings);
    for spec in tasks() {
        assert_eq!(problem(&spec), None);
        let other = problem(&with(&spec, "args", &json!(["--data-dir=/"])));
        assert!(
            other.is_some_and(|p| p.starts_with("spec.args: ")),
            "{spec}"
        );
    }
    let half = with(&tasks()[3], "args", &json!(["--mark-compacted"]));
    let found = problem(&half).unwrap();
    assert!(found.contains("--bump-revision <N>"), "{found}");
    let in_container_before = with(&tasks()[4], "args", &json!(["--quota-backend-bytes=1"]));
    assert!(
        problem(&in_container_before)
            .unwrap()
            .starts_with("spec.args: unexpected")
    );
}

/// The arguments of a task take the place of its policy's.
#[test]
fn args_of_a_task_replace_those_of_its_policy() {
    let policy = policy(&rich());
    let args = |args: Value| {
        let spec = json!({"policy": "main", "type": "GarbageCollection", "args": args});
        let job = task_job(&policy, &task(&spec), &settings()).unwrap();
        let pod = job.spec.unwrap().template.spec.unwrap();
        command_line(&pod.containers[0])
    };
    assert!(args(json!([])).contains(&"--single-writer".to_owned()));
    let own = args(json!(["--log-level=$(HOME)"]));
    assert!(own.contains(&"--log-level=$(HOME)".to_owned()), "{own:?}");
    assert!(!own.contains(&"--single-writer".to_owned()), "{own:?}");
}

#[test]
fn problems_of_tasks() {
    let (rich, local) = (policy(&rich()), policy(&local()));
    let copy = |config: Value| json!({"policy": "main", "type": "CopyBackups", "config": {"copyBackups": config}});
    let claim = json!({"url": "/backups", "volume": {"persistentVolumeClaim": "x"}});
    let table = [
        (
            &rich,
            copy(json!({"targetStore": rich.spec.store})),
            "the same store",
        ),
        (&local, copy(json!({"targetStore": claim})), "the same path"),
        (
            &rich,
            copy(json!({"targetStore": {"url": "x://y"}})),
            "unknown store",
        ),
        (
            &rich,
            copy(json!({"targetStore": {"url": "s3://y"}, "maxBackups": 9_999_999_999_i64})),
            "out of range",
        ),
    ];
    for (policy, spec, expected) in table {
        let problems_found = task_problems(policy, &task(&spec));
        assert!(
            problems_found.len() == 1 && problems_found[0].contains(expected),
            "{spec}: {problems_found:?}"
        );
    }
}
