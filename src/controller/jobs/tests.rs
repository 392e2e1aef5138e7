use super::super::api::{EtcdBackupPolicySpec, EtcdBackupTaskSpec, crds};
use super::*;
use crate::cli;
use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};

/// Makes a spec.
type Make = fn() -> Value;

/// With all that a policy can have, but for what excludes it.
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
        },
        "compaction": {
            "activeDeadline": "2h",
            "keepHistory": "100",
            "resources": {"limits": {"memory": "2Gi"}},
        },
        "retention": {
            "policy": "Limit",
            "limit": 5,
            "deltaRetention": "2w",
            "restorableWindow": "3d",
            "purgeAfter": "2d",
            "schedule": "11 */6 * * *",
        },
        "verify": {"schedule": "0 5 * * *", "level": "fold", "againstCluster": true},
        "maintenance": {"schedule": "0 4 * * 0", "compactKeep": "1w", "defrag": "0.5"},
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

/// One that follows, and has next to nothing else.
fn following() -> Value {
    json!({
        "etcd": {"endpoints": ["http://etcd-0:2379"]},
        "store": {"url": "s3://backups/etcd-main"},
        "snapshot": {"follow": {"deltaPeriod": "1m", "deltaBytes": "64Mi"}},
    })
}

/// One whose store is a claim, as beside etcd-druid: no etcd.
fn local() -> Value {
    json!({
        "store": {
            "url": "file:///backups/etcd-main",
            "volume": {"persistentVolumeClaim": "backups"},
        },
        "verify": {"schedule": "0 5 * * *"},
        "retention": {},
    })
}

/// A store that keeps no locks.
fn swift() -> Value {
    json!({
        "etcd": {"endpoints": ["http://etcd-0:2379"]},
        "store": {"url": "swift://backups/etcd-main", "secretRef": {"name": "swift"}},
        "snapshot": {"follow": {}, "fullSchedule": "0 3 * * *"},
        "maintenance": {"schedule": "0 4 * * *", "defrag": "always"},
    })
}

const SHAPES: [(&str, Make); 4] = [
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

/// One of each type, with all that it can have.
fn tasks() -> Vec<Value> {
    vec![
        json!({"policy": "main", "type": "OnDemandSnapshot",
            "config": {"onDemandSnapshot": {"type": "full", "final": true, "takeOver": true}}}),
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
            "bumpRevision": 1000,
            "markCompacted": true,
            "ifNeeded": "full",
            "runAsUser": 1000,
        }}}),
        json!({"policy": "main", "type": "Verify",
            "config": {"verify": {"level": "names", "againstCluster": true}}}),
        json!({"policy": "main", "type": "Maintenance",
            "config": {"maintenance": {"compactKeep": "1000", "defrag": "always"}}}),
    ]
}

fn settings() -> Settings {
    Settings::new("deltafold:test")
}

/// All Pods that are made for a policy.
fn pods(policy: &EtcdBackupPolicy) -> Vec<(String, PodTemplateSpec)> {
    let settings = settings();
    let mut pods = Vec::new();
    for job in cron_jobs(policy, &settings, false) {
        let spec = job.spec.job_template.spec.unwrap();
        pods.push((job.metadata.name.unwrap(), spec.template));
    }
    if let Some(d) = follower(policy, &settings) {
        pods.push((d.metadata.name.unwrap(), d.spec.template));
    }
    for instead in [false, true] {
        if instead && policy.spec.etcd.is_none() {
            continue;
        }
        let none = BTreeMap::new();
        let job = compaction_job(policy, &settings, "job", instead, none);
        pods.push((format!("threshold {instead}"), job.spec.unwrap().template));
    }
    let every = tasks().into_iter().chain([
        json!({"policy": "main", "type": "OnDemandSnapshot",
            "config": {"onDemandSnapshot": {"type": "delta", "takeOver": true}}}),
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
        if task_problems(policy, &task).is_empty() {
            let job = task_job(policy, &task, &settings);
            pods.push((format!("task {spec}"), job.spec.unwrap().template));
        }
    }
    pods
}

fn containers(pod: &PodSpec) -> Vec<&Container> {
    let before = pod.init_containers.iter().flatten();
    before.chain(&pod.containers).collect()
}

/// The arguments as kubelet gives them.
fn command_line(container: &Container) -> Vec<String> {
    let args = container.args.iter().flatten();
    args.map(|a| a.replace("$$", "$")).collect()
}

#[test]
fn the_program_takes_every_command_line() {
    let mut seen = BTreeSet::new();
    for (shape, spec) in SHAPES {
        let policy = policy(&spec());
        assert_eq!(problems(&policy), Vec::<String>::new(), "{shape}");
        for (what, template) in pods(&policy) {
            for container in containers(&template.spec.unwrap()) {
                let args = command_line(container);
                cli::check(&args).unwrap_or_else(|e| panic!("{shape} {what} {args:?}: {e}"));
                seen.insert(args[0].clone());
            }
        }
    }
    let all = [
        "compact", "copy", "gc", "maintain", "restore", "snapshot", "verify",
    ];
    assert_eq!(seen, all.map(str::to_owned).into());
}

/// As jobs/*.yaml, and every volume is mounted, and only what is there.
#[test]
fn every_pod_is_confined() {
    for (shape, spec) in SHAPES {
        for (what, template) in pods(&policy(&spec())) {
            let pod = template.spec.unwrap();
            let security = pod.security_context.as_ref().unwrap();
            assert_eq!(security.run_as_non_root, Some(true));
            let profile = security.seccomp_profile.as_ref().unwrap();
            assert_eq!(profile.type_, "RuntimeDefault");
            assert_eq!(pod.enable_service_links, Some(false));
            let volumes: BTreeSet<&str> = pod
                .volumes
                .iter()
                .flatten()
                .map(|v| v.name.as_str())
                .collect();
            let mut renews = false;
            for c in containers(&pod) {
                let security = c.security_context.as_ref().unwrap();
                assert_eq!(security.read_only_root_filesystem, Some(true));
                assert_eq!(security.allow_privilege_escalation, Some(false));
                let capabilities = security.capabilities.as_ref().unwrap();
                assert_eq!(capabilities.drop, Some(vec!["ALL".to_owned()]));
                assert_eq!(c.command, Some(vec!["deltafold".to_owned()]));
                let mounts = c.volume_mounts.iter().flatten();
                let mounted: BTreeSet<&str> = mounts.clone().map(|m| m.name.as_str()).collect();
                assert_eq!(mounted, volumes, "{shape} {what}");
                for m in mounts {
                    let is_secret = m.mount_path.starts_with("/secrets/");
                    assert!(!is_secret || m.read_only == Some(true), "{shape} {what}");
                }
                // Whatever an argument names is mounted.
                let args = command_line(c);
                for path in args.iter().filter(|a| a.starts_with('/')) {
                    let mut mounts = c.volume_mounts.iter().flatten();
                    let is_there = mounts.any(|m| path.starts_with(&m.mount_path));
                    assert!(is_there || path == TERMINATION_LOG, "{shape} {what} {path}");
                }
                let leases = ["--snapshot-lease-prefix", "--lock-lease"];
                renews |= args.iter().any(|a| leases.contains(&a.as_str()));
            }
            assert_eq!(pod.automount_service_account_token, Some(renews), "{what}");
        }
    }
}

#[test]
fn the_failure_policy_is_that_of_the_documents() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/exit-codes.md");
    let text = std::fs::read_to_string(path).unwrap();
    let yaml = text.split_once("```yaml\n").unwrap().1;
    let yaml = yaml.split_once("```").unwrap().0;
    let documented: Value = yaml_serde::from_str(yaml).unwrap();
    for (shape, spec) in SHAPES {
        let policy = policy(&spec());
        let settings = settings();
        let job = compaction_job(&policy, &settings, "x", false, BTreeMap::new());
        let spec = serde_json::to_value(job.spec.unwrap()).unwrap();
        let mut rules = spec["podFailurePolicy"].clone();
        // What Kubernetes takes it for where nothing is said.
        let pattern = &mut rules["rules"][1]["onPodConditions"][0];
        assert_eq!(
            pattern.as_object_mut().unwrap().remove("status"),
            Some(json!("True"))
        );
        assert_eq!(rules, documented["podFailurePolicy"], "{shape}");
        assert_eq!(spec["backoffLimit"], documented["backoffLimit"]);
        assert_eq!(spec["template"]["spec"]["restartPolicy"], "Never");
    }
}

/// All that is made for a policy.
fn made(policy: &EtcdBackupPolicy) -> Value {
    let settings = settings();
    let job = |instead| {
        let none = BTreeMap::new();
        compaction_job(policy, &settings, "job", instead, none)
    };
    json!({
        "cron": cron_jobs(policy, &settings, false),
        "follower": follower(policy, &settings),
        "account": service_account_name(policy),
        "leases": leases(policy),
        "compaction": job(false),
        "instead": job(true),
        "tasks": tasks().iter().map(|t| task_job(policy, &task(t), &settings)).collect::<Vec<_>>(),
    })
}

/// Paths of what a schema's objects hold, down to where it is no object of ours any more.
fn leaves(schema: &Value, at: &str, found: &mut BTreeSet<String>) {
    const KUBERNETES: [&str; 2] = ["resources", "tolerations"];
    let name = at.rsplit('.').next().unwrap();
    match schema["properties"].as_object() {
        Some(properties) if !KUBERNETES.contains(&name) => {
            for (key, value) in properties {
                let dot = if at.is_empty() { "" } else { "." };
                leaves(value, &format!("{at}{dot}{key}"), found);
            }
        }
        _ => {
            found.insert(at.to_owned());
        }
    }
}

fn all_leaves(crd: usize) -> BTreeSet<String> {
    let crd = serde_json::to_value(&crds()[crd]).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut found = BTreeSet::new();
    leaves(&schema["properties"]["spec"], "", &mut found);
    found
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
fn every_field_of_a_policy_has_an_effect() {
    let changes: [(Make, &str, Value); 52] = [
        (rich, "etcd.endpoints", json!(["https://etcd-0:2379"])),
        (rich, "etcd.tlsSecretRef.name", json!("other")),
        (rich, "etcd.authSecretRef.name", json!("other")),
        (rich, "store.url", json!("s3://backups/other")),
        (rich, "store.secretRef.name", json!("other")),
        (rich, "store.options", json!({"region": "us-east-1"})),
        (local, "store.volume.persistentVolumeClaim", json!("other")),
        (local, "store.volume.hostPath", json!("/srv")),
        (rich, "encryption.recipients", json!([])),
        (rich, "encryption.identitySecretRef.name", json!("other")),
        (rich, "encryption.allowPlaintextBelow", json!(700)),
        (rich, "encryption.ignoreUntrusted", json!(true)),
        (rich, "snapshot.fullSchedule", json!("1 3 * * *")),
        (rich, "snapshot.deltaSchedule", json!("*/6 * * * *")),
        (following, "snapshot.follow.deltaPeriod", json!("2m")),
        (following, "snapshot.follow.deltaBytes", json!("65Mi")),
        (following, "snapshot.fullSchedule", json!("0 3 * * *")),
        (rich, "snapshot.timeZone", json!("Europe/Paris")),
        (rich, "snapshot.compression", json!("none")),
        (rich, "snapshot.leasePrefix", json!("other")),
        (rich, "compaction.activeDeadline", json!("4h")),
        (rich, "compaction.keepHistory", json!("all")),
        (rich, "compaction.resources", json!({})),
        (rich, "retention.policy", json!("Exponential")),
        (rich, "retention.limit", json!(6)),
        (rich, "retention.deltaRetention", json!("1w")),
        (rich, "retention.restorableWindow", json!("4d")),
        (rich, "retention.purgeAfter", json!("3d")),
        (rich, "retention.schedule", json!("12 */6 * * *")),
        (rich, "verify.schedule", json!("1 5 * * *")),
        (rich, "verify.level", json!("names")),
        (rich, "verify.againstCluster", json!(false)),
        (rich, "maintenance.schedule", json!("1 4 * * 0")),
        (rich, "maintenance.compactKeep", json!("500")),
        (rich, "maintenance.defrag", json!("always")),
        (rich, "jobTemplate.image", json!("other")),
        (rich, "jobTemplate.imagePullPolicy", json!("Never")),
        (rich, "jobTemplate.resources", json!({})),
        (rich, "jobTemplate.serviceAccountName", json!("own")),
        (rich, "jobTemplate.nodeSelector", json!({})),
        (rich, "jobTemplate.tolerations", json!([])),
        (rich, "jobTemplate.priorityClassName", json!("other")),
        (rich, "jobTemplate.labels", json!({"team": "other"})),
        (rich, "jobTemplate.metricsScrapeWait", json!("91s")),
        (rich, "jobTemplate.hostNetwork", json!(true)),
        (rich, "jobTemplate.scratchSize", json!("21Gi")),
        (rich, "jobTemplate.maxDatabaseSize", json!("7Gi")),
        (following, "jobTemplate.maxDatabaseSize", json!("7Gi")),
        (rich, "jobTemplate.maxValueSize", json!("8Mi")),
        (rich, "suspend", json!(true)),
        (following, "suspend", json!(true)),
        (following, "jobTemplate.hostNetwork", json!(true)),
    ];
    // What decides when a Job is made, and not what it is like.
    let of_thresholds = [
        "compaction.enabled",
        "compaction.eventsThreshold",
        "compaction.sizeThreshold",
        "compaction.ageThreshold",
        "compaction.fullSnapshotThreshold",
    ];
    let mut seen: BTreeSet<String> = of_thresholds.map(str::to_owned).into();
    for (base, path, value) in changes {
        let before = made(&policy(&base()));
        let after = made(&policy(&with(&base(), path, &value)));
        assert_ne!(before, after, "{path}");
        seen.insert(path.to_owned());
    }
    assert_eq!(seen, all_leaves(0));
}

#[test]
fn no_pod_is_without_limits() {
    let text = |q: Option<&Quantity>| q.map(|q| q.0.clone());
    for (make, memory, scratch, storage) in [
        (rich as Make, ["1Gi", "2Gi"], "20480Mi", "21504Mi"),
        // Three databases of 16 GiB, and logs.
        (following, ["2Gi"; 2], "49152Mi", "50176Mi"),
        (local, ["2Gi"; 2], "49152Mi", "50176Mi"),
    ] {
        for (name, pod) in pods(&policy(&make())) {
            let spec = pod.spec.unwrap();
            let empty = spec.volumes.iter().flatten();
            let empty = empty.filter_map(|v| v.empty_dir.as_ref());
            let sizes: Vec<_> = empty.map(|e| text(e.size_limit.as_ref())).collect();
            assert_eq!(sizes, [Some(scratch.to_owned())], "{name}");
            let before = spec.init_containers.into_iter().flatten();
            for container in spec.containers.into_iter().chain(before) {
                let resources = container.resources.unwrap();
                let limits = resources.limits.unwrap();
                // A compaction may have its own.
                let limit = text(limits.get("memory")).unwrap();
                assert!(memory.contains(&limit.as_str()), "{name}: {limit}");
                let limit = text(limits.get("ephemeral-storage"));
                assert_eq!(limit.as_deref(), Some(storage), "{name}");
                // A limit without a request is requested.
                let requests = resources.requests.unwrap();
                let request = text(requests.get("ephemeral-storage"));
                assert_eq!(request.as_deref(), Some("1Gi"), "{name}");
            }
        }
    }
    // What waits for the store fits into the scratch volume.
    for (scratch, spool) in [("48Gi", 1_u64 << 30), ("1Gi", 256 << 20)] {
        let mut spec = following();
        spec["jobTemplate"] = json!({"scratchSize": scratch});
        let policy = policy(&spec);
        let pods = pods(&policy);
        let flag = format!(r#""--spool-bytes","{spool}""#);
        let pods = pods.iter().map(|(_, pod)| serde_json::to_string(pod));
        let told = pods.filter(|pod| pod.as_ref().unwrap().contains(&flag));
        assert_eq!(told.count(), 1, "{scratch}");
    }
    let mut spec = following();
    spec["jobTemplate"] = json!({"maxDatabaseSize": "32Gi"});
    for (name, pod) in pods(&policy(&spec)) {
        let pod = serde_json::to_string(&pod).unwrap();
        assert!(pod.contains(r#""sizeLimit":"98304Mi""#), "{name}: {pod}");
        assert!(
            pod.contains(r#""--max-database-bytes","32Gi""#),
            "{name}: {pod}"
        );
    }
}

#[test]
fn what_a_policy_gives_of_resources_stays_and_the_rest_is_filled_in() {
    let usual = json!({
        "requests": {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": "2Gi", "ephemeral-storage": "50176Mi"},
    });
    for (given, made) in [
        (json!(null), usual),
        (
            json!({}),
            json!({
                "requests": {"memory": "128Mi", "ephemeral-storage": "1Gi"},
                "limits": {"memory": "2Gi", "ephemeral-storage": "50176Mi"},
            }),
        ),
        // What is requested stays below the limit, and is not raised to it.
        (
            json!({"requests": {"memory": "4Gi", "ephemeral-storage": "100e9"}}),
            json!({
                "requests": {"memory": "4Gi", "ephemeral-storage": "100e9"},
                "limits": {"memory": "4Gi", "ephemeral-storage": "100e9"},
            }),
        ),
        (
            json!({"limits": {"cpu": "1", "memory": "64Mi", "ephemeral-storage": "512Mi"}}),
            json!({
                "requests": {},
                "limits": {"cpu": "1", "memory": "64Mi", "ephemeral-storage": "512Mi"},
            }),
        ),
    ] {
        let mut spec = following();
        spec["jobTemplate"] = json!({"resources": given});
        for (what, pod) in pods(&policy(&spec)) {
            for container in containers(&pod.spec.unwrap()) {
                assert_eq!(json!(container.resources), made, "{what} {given}");
            }
        }
    }
    let mut spec = following();
    spec["jobTemplate"] = json!({"scratchSize": "1Mi"});
    let made = json!(args_of(&policy(&spec)).resources);
    assert_eq!(made["limits"]["ephemeral-storage"], "1025Mi");
}

#[test]
fn every_field_of_a_task_has_an_effect() {
    let changes = [
        (0, "onDemandSnapshot.type", json!("delta")),
        (0, "onDemandSnapshot.final", json!(false)),
        (0, "onDemandSnapshot.takeOver", json!(false)),
        (1, "onDemandCompaction.revision", json!(78)),
        (1, "onDemandCompaction.keepHistory", json!("all")),
        (2, "copyBackups.sourceStore.url", json!("gs://other")),
        (2, "copyBackups.sourceStore.secretRef.name", json!("other")),
        (2, "copyBackups.sourceStore.options", json!({})),
        (2, "copyBackups.targetStore.url", json!("file:///other")),
        (2, "copyBackups.targetStore.secretRef.name", json!("other")),
        (2, "copyBackups.targetStore.options", json!({"k": "v"})),
        (2, "copyBackups.targetStore.volume.hostPath", json!("/srv")),
        (
            2,
            "copyBackups.targetStore.volume.persistentVolumeClaim",
            json!("claim"),
        ),
        (2, "copyBackups.maxBackups", json!(4)),
        (2, "copyBackups.maxBackupAge", json!(31)),
        (2, "copyBackups.waitForFinalSnapshot.enabled", json!(false)),
        (2, "copyBackups.waitForFinalSnapshot.timeout", json!("2h")),
        (3, "restore.claimName", json!("other")),
        (3, "restore.subPath", json!("other")),
        (3, "restore.revision", json!(42)),
        (3, "restore.time", json!("2026-11-20T12:00:00Z")),
        (3, "restore.name", json!("other")),
        (3, "restore.initialCluster", json!("a=http://other:2380")),
        (3, "restore.initialClusterToken", json!("other")),
        (
            3,
            "restore.initialAdvertisePeerUrls",
            json!("http://o:2380"),
        ),
        (3, "restore.bumpRevision", json!(1001)),
        (3, "restore.markCompacted", json!(false)),
        (3, "restore.ifNeeded", json!("sanity")),
        (3, "restore.runAsUser", json!(1001)),
        (4, "verify.level", json!("fold")),
        (4, "verify.againstCluster", json!(false)),
        (5, "maintenance.compactKeep", json!("1h")),
        (5, "maintenance.defrag", json!("0.1")),
    ];
    let policy = policy(&rich());
    let settings = settings();
    let made = |spec: &Value| {
        let job = task_job(&policy, &task(spec), &settings);
        serde_json::to_value(job).unwrap()
    };
    // The reconciler's.
    let others = ["policy", "type", "ttlSecondsAfterFinished"];
    // Of the source a volume is as of the target.
    let same = ["hostPath", "persistentVolumeClaim"];
    let same = same.map(|v| format!("config.copyBackups.sourceStore.volume.{v}"));
    let mut seen: BTreeSet<String> = others.map(str::to_owned).into();
    seen.extend(same);
    for (base, path, value) in changes {
        let base = &tasks()[base];
        let path = format!("config.{path}");
        assert_ne!(made(base), made(&with(base, &path, &value)), "{path}");
        seen.insert(path);
    }
    assert_eq!(seen, all_leaves(1));
}

#[test]
fn names_and_owners_are_as_agreed() {
    let policy = policy(&rich());
    let settings = settings();
    let jobs = cron_jobs(&policy, &settings, true);
    let told: Vec<(String, bool)> = jobs
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
    assert_eq!(told, expected.map(|(n, s)| (n.to_owned(), s)));
    assert_eq!(
        lease_names(&policy),
        ("main-full-snap".to_owned(), "main-delta-snap".to_owned())
    );
    let of = |attempt, instead| compaction_job_name(&policy, 10, 20, attempt, instead);
    assert_eq!(of(0, false), of(0, false));
    assert_ne!(of(0, false), of(1, false));
    assert!(of(0, false).starts_with("main-compact-") && of(0, false).len() == 21);
    assert!(of(0, true).starts_with("main-fullsnap-"));
    let now = task(&tasks()[0]);
    assert_eq!(task_job_name(&now), "now-12345678");
    let job = task_job(&policy, &now, &settings);
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

#[test]
fn labels_of_the_template_never_override_ours() {
    let labels = json!({"deltafold.io/policy": "other", "app.kubernetes.io/name": "other"});
    let policy = policy(&with(&rich(), "jobTemplate.labels", &labels));
    for (what, template) in pods(&policy) {
        let labels = template.metadata.unwrap().labels.unwrap();
        assert_eq!(labels[LABEL_POLICY], "main", "{what}");
        assert_eq!(labels[LABEL_NAME], NAME, "{what}");
    }
}

fn args_of(policy: &EtcdBackupPolicy) -> Container {
    let job = compaction_job(policy, &settings(), "job", false, BTreeMap::new());
    let template = job.spec.unwrap().template;
    template.spec.unwrap().containers.remove(0)
}

/// In pairs: a flag's values.
fn values<'c>(container: &'c Container, flag: &str) -> Vec<&'c str> {
    let args = container.args.as_deref().unwrap_or_default();
    let pairs = args.iter().zip(args.iter().skip(1));
    pairs
        .filter(|(f, _)| *f == flag)
        .map(|(_, v)| v.as_str())
        .collect()
}

/// Whole, and never in the environment or in an argument. The Job starts without it, and says what it lacks.
#[test]
fn a_secret_is_mounted_whether_it_is_there_or_not() {
    let mut names = BTreeSet::new();
    for (shape, spec) in SHAPES {
        for (what, template) in pods(&policy(&spec())) {
            let pod = template.spec.unwrap();
            for container in containers(&pod) {
                assert_eq!(container.env, None, "{shape} {what}");
                assert_eq!(container.env_from, None, "{shape} {what}");
                let args = command_line(container).join(" ");
                let mounts = container.volume_mounts.iter().flatten();
                for mount in mounts.filter(|m| m.name.starts_with("secret-")) {
                    let mut volumes = pod.volumes.iter().flatten();
                    let volume = volumes.find(|v| v.name == mount.name).unwrap();
                    let secret = volume.secret.as_ref().unwrap();
                    let name = secret.secret_name.clone().unwrap();
                    assert_eq!(secret.optional, Some(true), "{shape} {what}");
                    assert_eq!(secret.default_mode, Some(0o440));
                    assert_eq!(secret.items, None);
                    // A message that names the path names the Secret.
                    let path = mount.mount_path.as_str();
                    assert!(path.ends_with(&format!("/{name}")), "{path}");
                    let other = container.name == CONTAINER_BEFORE && path.contains("etcd-");
                    assert!(other || args.contains(path), "{shape} {what} {path}");
                    names.insert(name);
                }
            }
        }
    }
    let all = [
        "age",
        "etcd-client",
        "etcd-user",
        "gcs",
        "none",
        "s3",
        "swift",
    ];
    assert_eq!(names, all.map(str::to_owned).into());
}

#[test]
fn each_store_of_a_copy_has_its_own_secret() {
    let store = json!({
        "url": "s3://old",
        "secretRef": {"name": "theirs"},
        "options": {"endpoint": "https://$(HOME)"},
    });
    let spec = json!({"policy": "main", "type": "CopyBackups",
        "config": {"copyBackups": {"sourceStore": store}}});
    let job = task_job(&policy(&rich()), &task(&spec), &settings());
    let container = &job.spec.unwrap().template.spec.unwrap().containers[0];
    let from = values(container, "--from-option");
    let expected = [
        "secret_dir=/secrets/source/theirs",
        "endpoint=https://$$(HOME)",
    ];
    assert_eq!(from, expected);
    let to = values(container, "--to-option");
    assert_eq!(to, ["secret_dir=/secrets/target/s3", "region=eu-central-1"]);
}

#[test]
fn nothing_that_a_user_wrote_becomes_a_variable() {
    let options = json!({"endpoint": "https://$(AWS_SECRET_ACCESS_KEY)$$"});
    let policy = policy(&with(&rich(), "store.options", &options));
    let container = args_of(&policy);
    assert_eq!(
        values(&container, "--store-option"),
        ["endpoint=https://$$(AWS_SECRET_ACCESS_KEY)$$$$"]
    );
}

#[test]
fn a_live_etcd_is_reached_by_whole_secrets() {
    let jobs = cron_jobs(&policy(&rich()), &settings(), false);
    let spec = jobs[0].spec.job_template.spec.clone();
    let container = spec.unwrap().template.spec.unwrap().containers.remove(0);
    let tls = values(&container, "--tls-secret");
    assert_eq!(tls, ["/secrets/etcd-tls/etcd-client"]);
    let auth = values(&container, "--auth-secret");
    assert_eq!(auth, ["/secrets/etcd-auth/etcd-user"]);
}

#[test]
fn a_store_that_keeps_no_locks_gets_leases_for_them() {
    let policy = policy(&swift());
    let names: Vec<String> = lock_leases(&policy)
        .into_iter()
        .map(|l| l.metadata.name.unwrap())
        .collect();
    assert_eq!(names, ["main-follow-lock", "main-maintain-lock"]);
    for (what, template) in pods(&policy) {
        let pod = template.spec.unwrap();
        for lease in values(&pod.containers[0], "--lock-lease") {
            assert!(names.iter().any(|n| n == lease), "{what}");
        }
    }
    assert_eq!(lock_leases(&super::tests::policy(&rich())), []);
}

#[test]
fn a_restored_member_is_one_cluster_and_its_users_own() {
    let spec = json!({"policy": "main", "type": "Restore",
        "config": {"restore": {"claimName": "data", "name": "b", "runAsUser": 0}}});
    let job = task_job(&policy(&rich()), &task(&spec), &settings());
    let pod = job.spec.unwrap().template.spec.unwrap();
    let container = &pod.containers[0];
    assert_eq!(
        values(container, "--initial-cluster"),
        ["b=http://localhost:2380"]
    );
    assert_eq!(values(container, "--data-dir"), ["/restore/default.etcd"]);
    let security = pod.security_context.unwrap();
    assert_eq!(security.run_as_user, Some(0));
    assert_eq!(security.run_as_non_root, Some(false));
    assert_eq!(security.fs_group, Some(0));
}

#[test]
fn deadlines_are_what_was_asked_for() {
    let settings = settings();
    let policy = policy(&rich());
    let deadline = |job: Job| job.spec.unwrap().active_deadline_seconds;
    let compaction = |instead| compaction_job(&policy, &settings, "x", instead, BTreeMap::new());
    assert_eq!(deadline(compaction(false)), Some(7200));
    assert_eq!(deadline(compaction(true)), Some(3 * 3600));
    let job = compaction(false);
    assert_eq!(job.spec.unwrap().ttl_seconds_after_finished, Some(86_400));
    let of = |spec: &Value| deadline(task_job(&policy, &task(spec), &settings));
    assert_eq!(of(&tasks()[2]), Some(25 * 3600));
    let for_ever = with(
        &tasks()[2],
        "config.copyBackups.waitForFinalSnapshot",
        &json!({"enabled": true}),
    );
    // Seven days, and a day to copy.
    assert_eq!(of(&for_ever), Some(8 * 86_400));
    // Kubernetes counts nanoseconds.
    let long = json!({"enabled": true, "timeout": "365000d"});
    let long = with(
        &tasks()[2],
        "config.copyBackups.waitForFinalSnapshot",
        &long,
    );
    assert!(task_problems(&policy, &task(&long)).is_empty());
    assert_eq!(of(&long), Some(100 * 365 * 86_400));
}

#[test]
fn what_the_api_server_cannot_see_is_a_problem() {
    let table: [(Make, &str, Value, &str); 40] = [
        (
            rich,
            "snapshot.fullSchedule",
            json!("0 3 * *"),
            "five fields",
        ),
        (rich, "snapshot.fullSchedule", json!("0 0 3 * * *"), "six"),
        (rich, "snapshot.deltaSchedule", json!("0 3 * * 7"), "Sunday"),
        (rich, "snapshot.timeZone", json!("Mars"), "no time zone"),
        (rich, "snapshot.leasePrefix", json!("Main"), "leasePrefix"),
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
            "maintenance.compactKeep",
            json!("99999999999999999999"),
            "compactKeep",
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
            "too large",
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
        (rich, "retention.purgeAfter", json!("a week"), "purgeAfter"),
        (
            rich,
            "jobTemplate.metricsScrapeWait",
            json!("5"),
            "metricsScrapeWait",
        ),
        (rich, "jobTemplate.scratchSize", json!("0"), "too small"),
        (
            rich,
            "jobTemplate.labels",
            json!({"a b": "c"}),
            "no label's key",
        ),
        (
            rich,
            "jobTemplate.labels",
            json!({"a": "-"}),
            "no value of a label",
        ),
        (
            rich,
            "store.url",
            json!("ftp://x"),
            "no store deltafold knows",
        ),
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
            "no setting's name",
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
            "etcd.endpoints",
            json!(["http://etcd:2379"]),
            "without TLS",
        ),
        (
            rich,
            "etcd.endpoints",
            json!(["https://a:1,https://b:1"]),
            "one member",
        ),
        (rich, "etcd.endpoints", json!(["ftp://a:1"]), "neither http"),
        (
            rich,
            "encryption.recipients",
            json!(["AGE-SECRET-KEY-1"]),
            "X25519",
        ),
        (
            rich,
            "store.secretRef.name",
            json!("../../bin"),
            "no Secret's name",
        ),
        (rich, "etcd.tlsSecretRef.name", json!(".."), "tlsSecretRef"),
        (
            rich,
            "etcd.authSecretRef.name",
            json!("a/b"),
            "authSecretRef",
        ),
        (
            rich,
            "encryption.identitySecretRef.name",
            json!("A"),
            "identitySecretRef",
        ),
        (local, "store.url", json!("file:///etc"), "mounted"),
        (local, "store.url", json!("/secrets/x"), "mounted"),
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
    for (base, path, value, says) in table {
        let says = if says == "six" { "here are 6" } else { says };
        let says = if says == "five fields" {
            "it has 4 fields"
        } else {
            says
        };
        let found = problems(&policy(&with(&base(), path, &value)));
        assert!(
            found.len() == 1 && found[0].contains(says),
            "{path} {value}: {found:?}"
        );
        assert!(!found[0].contains("AGE-SECRET"), "{found:?}");
    }
    // A follower is no CronJob: it takes seconds, too.
    let seconds = with(&following(), "snapshot.fullSchedule", &json!("0 0 3 * * 7"));
    assert_eq!(problems(&policy(&seconds)), Vec::<String>::new());
}

#[test]
fn a_task_that_cannot_be_done_is_told_why() {
    let (rich, local) = (policy(&rich()), policy(&local()));
    let copy = |config: Value| json!({"policy": "main", "type": "CopyBackups", "config": {"copyBackups": config}});
    let restore =
        |config: Value| json!({"policy": "main", "type": "Restore", "config": {"restore": config}});
    let claim = json!({"url": "/backups", "volume": {"persistentVolumeClaim": "x"}});
    let table = [
        (&local, tasks()[0].clone(), "live etcd"),
        (&local, tasks()[4].clone(), "live etcd"),
        (&local, tasks()[5].clone(), "live etcd"),
        (&rich, copy(json!({})), "give sourceStore"),
        (
            &rich,
            copy(json!({"targetStore": rich.spec.store})),
            "the same",
        ),
        (&local, copy(json!({"targetStore": claim})), "one path"),
        (
            &rich,
            copy(json!({"targetStore": {"url": "x://y"}})),
            "no store",
        ),
        (
            &rich,
            copy(json!({"targetStore": {"url": "s3://y"}, "maxBackups": 9_999_999_999_i64})),
            "too large",
        ),
        (
            &rich,
            restore(json!({"claimName": "x", "bumpRevision": 1})),
            "belong together",
        ),
        (
            &rich,
            restore(json!({"claimName": "x", "markCompacted": true})),
            "belong together",
        ),
        (
            &rich,
            restore(json!({"claimName": "x", "subPath": "a/../.."})),
            "subPath",
        ),
    ];
    for (policy, spec, says) in table {
        let found = task_problems(policy, &task(&spec));
        assert!(
            found.len() == 1 && found[0].contains(says),
            "{spec}: {found:?}"
        );
    }
}

#[test]
fn a_namespace_has_one_account() {
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
