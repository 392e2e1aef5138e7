//! Tests of Pods: command lines, confinement, resources, Secrets.

use super::*;

#[test]
fn the_program_accepts_every_command_line() {
    let mut commands = BTreeSet::new();
    for (shape, spec) in SHAPES {
        let policy = policy(&spec());
        assert_eq!(problems(&policy), Vec::<String>::new(), "{shape}");
        for (what, template) in pods(&policy) {
            for container in containers(&template.spec.unwrap()) {
                let args = command_line(container);
                cli::check(&args).unwrap_or_else(|e| panic!("{shape} {what} {args:?}: {e}"));
                commands.insert(args[0].clone());
            }
        }
    }
    let all = [
        "compact",
        "copy",
        "copy-program",
        "gc",
        "maintain",
        "restore",
        "snapshot",
        "verify",
    ];
    assert_eq!(commands, all.map(str::to_owned).into());
}

/// A maintenance uses the store for its lock only.
#[test]
fn a_maintenance_gets_no_identity() {
    let mut seen = 0;
    for (what, template) in pods(&policy(&rich())) {
        let pod = template.spec.unwrap();
        let args = command_line(containers(&pod)[0]);
        if args[0] == "maintain" {
            let has_identity = args.iter().any(|arg| arg.starts_with("--age-"));
            assert!(!has_identity, "{what}: {args:?}");
            seen += 1;
        }
    }
    assert_eq!(seen, 2, "by schedule and by a task");
}

/// Every Pod has the security settings of jobs/*.yaml, and each container that works mounts all volumes.
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
                let mounts = c.volume_mounts.iter().flatten();
                let mounted: BTreeSet<&str> = mounts.clone().map(|m| m.name.as_str()).collect();
                if COPY_CONTAINERS.contains(&c.name.as_str()) {
                    // Another image gets neither a Secret nor the backup.
                    assert_eq!(mounted, ["scratch"].into(), "{shape} {what}");
                } else {
                    assert_eq!(c.command, Some(vec!["deltafold".to_owned()]));
                    assert_eq!(mounted, volumes, "{shape} {what}");
                }
                for m in mounts {
                    let is_secret = m.mount_path.starts_with("/secrets/");
                    assert!(!is_secret || m.read_only == Some(true), "{shape} {what}");
                }
                // Every path in the arguments is mounted.
                let args = command_line(c);
                for path in args.iter().filter(|a| a.starts_with('/')) {
                    let mut mounts = c.volume_mounts.iter().flatten();
                    let is_there = mounts.any(|m| path.starts_with(&m.mount_path));
                    let is_of_image = path == "/usr/local/bin/etcd" || path == TERMINATION_LOG;
                    assert!(is_there || is_of_image, "{shape} {what} {path}");
                }
                let leases = ["--snapshot-lease-prefix", "--lock-lease"];
                renews |= args.iter().any(|a| leases.contains(&a.as_str()));
            }
            assert_eq!(pod.automount_service_account_token, Some(renews), "{what}");
        }
    }
}

#[test]
fn the_failure_policy_is_documented() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/exit-codes.md");
    let text = std::fs::read_to_string(path).unwrap();
    let yaml = text.split_once("```yaml\n").unwrap().1;
    let yaml = yaml.split_once("```").unwrap().0;
    let documented: Value = yaml_serde::from_str(yaml).unwrap();
    for (shape, spec) in SHAPES {
        let policy = policy(&spec());
        let settings = settings();
        let job = compaction_job(&policy, &settings, "x", false, BTreeMap::new()).unwrap();
        let spec = serde_json::to_value(job.spec.unwrap()).unwrap();
        let mut rules = spec["podFailurePolicy"].clone();
        // The documents leave out the default of `status`.
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

#[test]
fn no_pod_is_without_limits() {
    let text = |q: Option<&Quantity>| q.map(|q| q.0.clone());
    for (make, memory, scratch, storage) in [
        (rich as MakeSpec, ["1Gi", "2Gi"], "20480Mi", "21504Mi"),
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
                // A compaction can have other resources than the template's.
                let limit = text(limits.get("memory")).unwrap();
                assert!(memory.contains(&limit.as_str()), "{name}: {limit}");
                let limit = text(limits.get("ephemeral-storage"));
                assert_eq!(limit.as_deref(), Some(storage), "{name}");
                // Without a request, Kubernetes would request as much as the limit.
                let requests = resources.requests.unwrap();
                let request = text(requests.get("ephemeral-storage"));
                assert_eq!(request.as_deref(), Some("1Gi"), "{name}");
            }
        }
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
fn configured_resources_are_completed_with_defaults() {
    let usual = json!({
        "requests": {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": "2Gi", "ephemeral-storage": "50176Mi"},
    });
    for (configured, expected) in [
        (json!(null), usual),
        (
            json!({}),
            json!({
                "requests": {"memory": "128Mi", "ephemeral-storage": "1Gi"},
                "limits": {"memory": "2Gi", "ephemeral-storage": "50176Mi"},
            }),
        ),
        // A default limit below the request is raised to the request.
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
        spec["jobTemplate"] = json!({"resources": configured});
        for (what, pod) in pods(&policy(&spec)) {
            for container in containers(&pod.spec.unwrap()) {
                assert_eq!(json!(container.resources), expected, "{what} {configured}");
            }
        }
    }
    let mut spec = following();
    spec["jobTemplate"] = json!({"scratchSize": "1Mi"});
    let resources = json!(compaction_container(&policy(&spec)).resources);
    assert_eq!(resources["limits"]["ephemeral-storage"], "1025Mi");
}

#[test]
fn template_labels_do_not_override_own_labels() {
    let labels = json!({"deltafold.io/policy": "other", "app.kubernetes.io/name": "other"});
    let policy = policy(&with(&rich(), "jobTemplate.labels", &labels));
    for (what, template) in pods(&policy) {
        let labels = template.metadata.unwrap().labels.unwrap();
        assert_eq!(labels[LABEL_POLICY], "main", "{what}");
        assert_eq!(labels[LABEL_NAME], NAME, "{what}");
    }
}

/// A Secret is mounted whole, and is never in the environment or an argument. It is optional: without it the
/// Job starts, and reports what is missing.
#[test]
fn secrets_are_optional_mounts() {
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
                    // So an error message with the path names the Secret.
                    let path = mount.mount_path.as_str();
                    assert!(path.ends_with(&format!("/{name}")), "{path}");
                    let is_unused = container.name == CONTAINER_BEFORE && path.contains("etcd-");
                    assert!(is_unused || args.contains(path), "{shape} {what} {path}");
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
    let job = task_job(&policy(&rich()), &task(&spec), &settings()).unwrap();
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
fn user_text_is_not_expanded_as_a_variable() {
    let options = json!({"endpoint": "https://$(AWS_SECRET_ACCESS_KEY)$$"});
    let policy = policy(&with(&rich(), "store.options", &options));
    let container = compaction_container(&policy);
    assert_eq!(
        values(&container, "--store-option"),
        ["endpoint=https://$$(AWS_SECRET_ACCESS_KEY)$$$$"]
    );
}

#[test]
fn the_live_etcd_gets_its_secrets() {
    let jobs = cron_jobs(&policy(&rich()), &settings(), Postponed::default()).unwrap();
    let spec = jobs[0].spec.job_template.spec.clone();
    let container = spec.unwrap().template.spec.unwrap().containers.remove(0);
    let tls = values(&container, "--tls-secret");
    assert_eq!(tls, ["/secrets/etcd-tls/etcd-client"]);
    let auth = values(&container, "--auth-secret");
    assert_eq!(auth, ["/secrets/etcd-auth/etcd-user"]);
}

#[test]
fn a_restored_member_is_a_cluster_of_one_with_the_wanted_owner() {
    let spec = json!({"policy": "main", "type": "Restore",
        "config": {"restore": {"claimName": "data", "name": "b", "runAsUser": 0}}});
    let job = task_job(&policy(&rich()), &task(&spec), &settings()).unwrap();
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
