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
