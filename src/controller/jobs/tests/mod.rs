//! Tests of the objects of a policy: sample specs, names, owners, deadlines and Leases.
//!
//! `pods` tests how Pods look, `fields` that no field is ignored, `problems` the checks of specs.

mod fields;
mod pods;
mod problems;

use super::super::api::{EtcdBackupPolicySpec, EtcdBackupTask, EtcdBackupTaskSpec, crds};
use super::*;
use crate::cli;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

/// A function that returns the spec of a policy.
type MakeSpec = fn() -> Value;

/// Returns a spec with all fields that can be set together.
fn rich() -> Value {
    json!({
        "etcd": {
            "endpoints": ["https://etcd-0:2379", "https://etcd-1:2379"],
            "tlsSecretRef": {"name": "etcd-client"},
            "authSecretRef": {"name": "etcd-user"},
        },
        "store": {
            "url": "s3://backups/etcd-main",
            "secretRef": {"name": "s3"},
            "options": {"region": "eu-central-1"},
        },
        "encryption": {
            "recipients": ["age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"],
            "identitySecretRef": {"name": "age"},
        },
        "snapshot": {
            "fullSchedule": "0 3 * * *",
            "deltaSchedule": "*/5 * * * *",
            "timeZone": "Europe/Berlin",
            "compression": "zstd",
            "leasePrefix": "main",
            "args": ["--take-over"],
        },
        "compaction": {
            "activeDeadline": "2h",
            "keepHistory": "100",
            "args": ["--threads=1"],
            "resources": {"limits": {"memory": "2Gi"}},
        },
        "retention": {
            "policy": "Limit",
            "limit": 5,
            "deltaRetention": "2w",
            "restorableWindow": "3d",
            "schedule": "11 */6 * * *",
            "args": ["--single-writer", "--staging-age", "48h"],
        },
        "verify": {"schedule": "0 5 * * *", "level": "fold", "againstCluster": true, "args": ["--all-chains"]},
        "maintenance": {"schedule": "0 4 * * 0", "defrag": "0.5", "args": ["--quota-backend-bytes=8589934592"]},
        "jobTemplate": {
            "image": "registry.example/deltafold:1",
            "imagePullPolicy": "Always",
            "resources": {"limits": {"memory": "1Gi"}},
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"key": "etcd", "operator": "Exists"}],
            "priorityClassName": "backups",
            "labels": {"team": "storage"},
            "metricsScrapeWait": "90s",
            "scratchSize": "20Gi",
            "maxDatabaseSize": "6Gi",
        },
    })
}

/// Returns a spec with a follower and little else.
fn following() -> Value {
    json!({
        "etcd": {"endpoints": ["http://etcd-0:2379"]},
        "store": {"url": "s3://backups/etcd-main"},
        "snapshot": {"follow": {"deltaPeriod": "1m", "deltaBytes": "64Mi"}},
    })
}

/// Returns a spec with a local store and without an etcd.
fn local() -> Value {
    json!({
        "store": {
            "url": "file:///backups/etcd-main",
            "volume": {"persistentVolumeClaim": "backups"},
        },
        "verify": {"schedule": "0 5 * * *", "drill": {"etcdImage": "registry.example/etcd:3.6"}},
        "retention": {},
    })
}

/// Returns a spec whose store cannot keep locks.
fn swift() -> Value {
    json!({
        "etcd": {"endpoints": ["http://etcd-0:2379"]},
        "store": {"url": "swift://backups/etcd-main", "secretRef": {"name": "swift"}},
        "snapshot": {"follow": {}, "fullSchedule": "0 3 * * *"},
        "maintenance": {"schedule": "0 4 * * *", "defrag": "always"},
    })
}

const SHAPES: [(&str, MakeSpec); 4] = [
    ("rich", rich),
    ("following", following),
    ("local", local),
    ("swift", swift),
];

fn policy(spec: &Value) -> EtcdBackupPolicy {
    let spec: EtcdBackupPolicySpec = serde_json::from_value(spec.clone()).unwrap();
    let mut policy = EtcdBackupPolicy::new("main", spec);
    policy.metadata.namespace = Some("backup".to_owned());
    policy.metadata.uid = Some("0c0ffee0-policy".to_owned());
    policy
}

fn task(spec: &Value) -> EtcdBackupTask {
    let spec: EtcdBackupTaskSpec = serde_json::from_value(spec.clone()).unwrap();
    let mut task = EtcdBackupTask::new("now", spec);
    task.metadata.namespace = Some("backup".to_owned());
    task.metadata.uid = Some("1234567890-task".to_owned());
    task
}

/// Returns a task of each type, with all fields that can be set together.
fn tasks() -> Vec<Value> {
    vec![
        json!({"policy": "main", "type": "OnDemandSnapshot",
            "config": {"onDemandSnapshot": {"type": "full", "final": true}}, "args": ["--take-over"]}),
        json!({"policy": "main", "type": "OnDemandCompaction",
            "config": {"onDemandCompaction": {"revision": 77, "keepHistory": "latest"}}}),
        json!({"policy": "main", "type": "CopyBackups", "config": {"copyBackups": {
            "sourceStore": {
                "url": "gs://old/etcd-main",
                "secretRef": {"name": "gcs"},
                "options": {"base_url": "https://gcs"},
            },
            "targetStore": {
                "url": "file:///copies",
                "secretRef": {"name": "none"},
                "volume": {"hostPath": "/srv/copies"},
            },
            "maxBackups": 3,
            "maxBackupAge": 30,
            "waitForFinalSnapshot": {"enabled": true, "timeout": "1h"},
        }}}),
        json!({"policy": "main", "type": "Restore", "config": {"restore": {
            "claimName": "data-etcd-0",
            "subPath": "etcd/data",
            "revision": 41,
            "name": "a",
            "initialCluster": "a=http://10.0.0.1:2380",
            "initialClusterToken": "restored",
            "initialAdvertisePeerUrls": "http://10.0.0.1:2380",
            "runAsUser": 1000,
        }}, "args": ["--bump-revision=1000", "--mark-compacted"]}),
        json!({"policy": "main", "type": "Verify",
            "config": {"verify": {"level": "names", "againstCluster": true}}}),
        json!({"policy": "main", "type": "Maintenance",
            "config": {"maintenance": {"defrag": "always"}}}),
        json!({"policy": "main", "type": "GarbageCollection",
            "config": {"garbageCollection": {"allowShrink": true}}}),
    ]
}

fn settings() -> Settings {
    Settings {
        check_command: cli::check,
        ..Settings::new("deltafold:test")
    }
}

/// Returns all Pods of a policy, each with a description: its CronJobs, follower, threshold Jobs and tasks.
fn pods(policy: &EtcdBackupPolicy) -> Vec<(String, PodTemplateSpec)> {
    let settings = settings();
    let mut pods = Vec::new();
    for job in cron_jobs(policy, &settings, Postponed::default()).unwrap() {
        let spec = job.spec.job_template.spec.unwrap();
        pods.push((job.metadata.name.unwrap(), spec.template));
    }
    if let Some(d) = follower(policy, &settings).unwrap() {
        pods.push((d.metadata.name.unwrap(), d.spec.template));
    }
    for instead in [false, true] {
        if instead && policy.spec.etcd.is_none() {
            continue;
        }
        let none = BTreeMap::new();
        let job = compaction_job(policy, &settings, "job", instead, none).unwrap();
        pods.push((format!("threshold {instead}"), job.spec.unwrap().template));
    }
    let every = tasks().into_iter().chain([
        json!({"policy": "main", "type": "OnDemandSnapshot",
            "config": {"onDemandSnapshot": {"type": "delta"}}}),
        json!({"policy": "main", "type": "OnDemandCompaction"}),
        json!({"policy": "main", "type": "Verify"}),
        json!({"policy": "main", "type": "Restore",
            "config": {"restore": {"claimName": "data", "time": "2026-11-20T12:00:00Z", "name": "b"}}}),
        json!({"policy": "main", "type": "CopyBackups", "config": {"copyBackups": {
            "sourceStore": {"url": "s3://old", "secretRef": {"name": "s3"}},
            "waitForFinalSnapshot": {"enabled": true}}}}),
    ]);
    for spec in every {
        let task = task(&spec);
        let lacks_etcd = needs_etcd(&task) && policy.spec.etcd.is_none();
        if !lacks_etcd && task_problems(policy, &task).is_empty() {
            let job = task_job(policy, &task, &settings).unwrap();
            pods.push((format!("task {spec}"), job.spec.unwrap().template));
        }
    }
    pods
}

fn containers(pod: &PodSpec) -> Vec<&Container> {
    let before = pod.init_containers.iter().flatten();
    before.chain(&pod.containers).collect()
}

/// Returns the arguments of a container as the kubelet passes them on.
fn command_line(container: &Container) -> Vec<String> {
    let args = container.args.iter().flatten();
    args.map(|a| a.replace("$$", "$")).collect()
}

fn with(spec: &Value, path: &str, value: &Value) -> Value {
    let mut spec = spec.clone();
    let mut at = &mut spec;
    for part in path.split('.') {
        at = &mut at[part];
    }
    assert_ne!(&*at, value, "{path}");
    *at = value.clone();
    spec
}

#[test]
fn names_owners_and_labels() {
    let policy = policy(&rich());
    let settings = settings();
    let postponed = Postponed {
        maintenance: true,
        retention: false,
    };
    let jobs = cron_jobs(&policy, &settings, postponed).unwrap();
    let names_and_suspension: Vec<(String, bool)> = jobs
        .iter()
        .map(|j| {
            let name = j.metadata.name.clone().unwrap();
            (name, j.spec.suspend.unwrap())
        })
        .collect();
    let expected = [
        ("main-full", false),
        ("main-delta", false),
        ("main-gc", false),
        ("main-verify", false),
        ("main-maintain", true),
    ];
    assert_eq!(
        names_and_suspension,
        expected.map(|(n, s)| (n.to_owned(), s))
    );
    assert_eq!(
        lease_names(&policy),
        ("main-full-snap".to_owned(), "main-delta-snap".to_owned())
    );
    let job_name = |attempt, instead| compaction_job_name(&policy, 10, 20, attempt, instead);
    assert_eq!(job_name(0, false), job_name(0, false));
    assert_ne!(job_name(0, false), job_name(1, false));
    assert!(job_name(0, false).starts_with("main-compact-") && job_name(0, false).len() == 21);
    assert!(job_name(0, true).starts_with("main-fullsnap-"));
    let now = task(&tasks()[0]);
    assert_eq!(task_job_name(&now), "now-12345678");
    let job = task_job(&policy, &now, &settings).unwrap();
    let owners = job.metadata.owner_references.unwrap();
    assert_eq!(
        (owners[0].kind.as_str(), owners.len()),
        ("EtcdBackupTask", 1)
    );
    assert_eq!(owners[0].controller, Some(true));
    let labels = job.spec.unwrap().template.metadata.unwrap().labels.unwrap();
    let expected = json!({
        "app.kubernetes.io/name": "deltafold",
        "app.kubernetes.io/managed-by": "deltafold",
        "deltafold.io/policy": "main",
        "deltafold.io/work": "task",
        "deltafold.io/task": "now",
        "deltafold.io/task-type": "OnDemandSnapshot",
        "team": "storage",
    });
    assert_eq!(json!(labels), expected);
}

fn compaction_container(policy: &EtcdBackupPolicy) -> Container {
    let job = compaction_job(policy, &settings(), "job", false, BTreeMap::new()).unwrap();
    let template = job.spec.unwrap().template;
    template.spec.unwrap().containers.remove(0)
}

/// Returns all values of a flag.
fn values<'c>(container: &'c Container, flag: &str) -> Vec<&'c str> {
    let args = container.args.as_deref().unwrap_or_default();
    let pairs = args.iter().zip(args.iter().skip(1));
    pairs
        .filter(|(f, _)| *f == flag)
        .map(|(_, v)| v.as_str())
        .collect()
}

#[test]
fn a_store_without_locks_gets_lock_leases() {
    let policy = policy(&swift());
    let names: Vec<String> = lock_leases(&policy)
        .into_iter()
        .map(|l| l.metadata.name.unwrap())
        .collect();
    assert_eq!(
        names,
        ["main-follow-lock", "main-gc-lock", "main-maintain-lock"]
    );
    for (what, template) in pods(&policy) {
        let pod = template.spec.unwrap();
        for lease in values(&pod.containers[0], "--lock-lease") {
            assert!(names.iter().any(|n| n == lease), "{what}");
        }
    }
    assert_eq!(lock_leases(&super::tests::policy(&rich())), []);
}

#[test]
fn deadlines_of_jobs() {
    let settings = settings();
    let policy = policy(&rich());
    let deadline = |job: Job| job.spec.unwrap().active_deadline_seconds;
    let compaction =
        |instead| compaction_job(&policy, &settings, "x", instead, BTreeMap::new()).unwrap();
    assert_eq!(deadline(compaction(false)), Some(7200));
    assert_eq!(deadline(compaction(true)), Some(3 * 3600));
    let job = compaction(false);
    assert_eq!(job.spec.unwrap().ttl_seconds_after_finished, Some(86_400));
    let task_deadline = |spec: &Value| deadline(task_job(&policy, &task(spec), &settings).unwrap());
    assert_eq!(task_deadline(&tasks()[2]), Some(25 * 3600));
    let no_timeout = with(
        &tasks()[2],
        "config.copyBackups.waitForFinalSnapshot",
        &json!({"enabled": true}),
    );
    // Seven days to wait, and a day to copy.
    assert_eq!(task_deadline(&no_timeout), Some(8 * 86_400));
    // Longer deadlines would overflow: Kubernetes counts nanoseconds.
    let long = json!({"enabled": true, "timeout": "365000d"});
    let long = with(
        &tasks()[2],
        "config.copyBackups.waitForFinalSnapshot",
        &long,
    );
    assert!(task_problems(&policy, &task(&long)).is_empty());
    assert_eq!(task_deadline(&long), Some(100 * 365 * 86_400));
}

#[test]
fn a_namespace_has_one_service_account() {
    let (account, binding) = account("backup");
    let labels = json!({
        "app.kubernetes.io/name": "deltafold",
        "app.kubernetes.io/managed-by": "deltafold",
    });
    let metadata = json!({"name": "deltafold-jobs", "namespace": "backup", "labels": labels});
    assert_eq!(json!(account.metadata), metadata);
    assert_eq!(account.automount_service_account_token, Some(false));
    assert_eq!(json!(binding.metadata), metadata);
    let role = json!({
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "deltafold-jobs",
    });
    assert_eq!(json!(binding.role_ref), role);
    assert_eq!(
        json!(binding.subjects),
        json!([{"kind": "ServiceAccount", "name": "deltafold-jobs", "namespace": "backup"}])
    );
    assert_eq!(service_account_name(&policy(&rich())), "deltafold-jobs");
    let name = json!("own");
    let own = policy(&with(&rich(), "jobTemplate.serviceAccountName", &name));
    assert_eq!(service_account_name(&own), "own");
}
