//! Which privileged features policies and tasks may use: folders and the network of nodes, other
//! ServiceAccounts, other images, root, tolerations, priority classes.
//!
//! Checks a policy or a task against the controller's flags and returns a sentence for each violation. `decide`
//! refuses such objects. The Helm chart has the same rules in CEL, as admission policies
//! (jobs/helm/deltafold/templates/admission.yaml); a test on a real API server compares both.

use super::super::api::{CopyBackupsConfig, EtcdBackupPolicy, EtcdBackupTask, StoreSpec};
use super::Settings;
use crate::base::flag_values::yes_or_no;
use crate::base::opt;
use clap::Args;
use serde::{Deserialize, Serialize};

/// The features that policies and tasks may use. None is allowed by default: otherwise, every user who may
/// write a policy would gain rights on nodes, or the rights of other ServiceAccounts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[command(next_help_heading = "Features allowed to policies and tasks")]
pub struct Allowed {
    /// Allow stores in folders of the node (volume.hostPath)
    #[arg(long, value_parser = yes_or_no)]
    pub allow_host_path: bool,
    /// Allow Pods to use the network of their node (jobTemplate.hostNetwork)
    #[arg(long, value_parser = yes_or_no)]
    pub allow_host_network: bool,
    /// Allow policies to use any ServiceAccount of their namespace (jobTemplate.serviceAccountName)
    #[arg(long, value_parser = yes_or_no)]
    pub allow_service_account: bool,
    /// Allow restores to run as root (restore.runAsUser: 0)
    #[arg(long, value_parser = yes_or_no)]
    pub allow_root: bool,
    /// Allow tolerations (jobTemplate.tolerations)
    #[arg(long, value_parser = yes_or_no)]
    pub allow_tolerations: bool,
    /// Allow policies to set a PriorityClass (jobTemplate.priorityClassName)
    #[arg(long, value_parser = yes_or_no)]
    pub allow_priority_class: bool,
    /// Allow images with this prefix (jobTemplate.image), such as registry.example/team; repeatable
    ///
    /// A prefix matches whole parts of an image name only, up to a /, : or @: registry.example/team allows
    /// registry.example/team/etcd:1 and registry.example/team:1, but not registry.example/team-b/etcd:1.
    /// Without this flag, a policy that sets another image than the controller's default image for Jobs is
    /// refused.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', value_parser = image_prefix)]
    pub allowed_image_prefix: Vec<String>,
}

/// Parses a value of `--allowed-image-prefix`.
fn image_prefix(s: &str) -> Result<String, String> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"._-/:@".contains(&b);
    let ends_well = s.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '/');
    if s.bytes().all(fits) && ends_well && !s.starts_with('/') {
        Ok(s.to_owned())
    } else {
        Err(
            "invalid image prefix: give a registry and a path, such as registry.example/team"
                .to_owned(),
        )
    }
}

/// Returns whether a prefix covers an image: it is the whole image, or ends before a `/`, or before the `:`
/// or `@` of the tag or digest. It must not end before the `:` of a port, because another port is another
/// registry.
fn is_below(image: &str, prefix: &str) -> bool {
    let Some(rest) = image.strip_prefix(prefix) else {
        return false;
    };
    match rest.chars().next() {
        None | Some('/') => true,
        _ if prefix.ends_with('/') => true,
        Some(':' | '@') => !rest.contains('/'),
        Some(_) => false,
    }
}

/// A request that is refused unless a flag allows it.
struct Rule<K> {
    is_allowed: fn(&Allowed) -> bool,
    /// Whether the object makes the request
    is_requested: fn(&K) -> bool,
    /// The refusal, with the field and the flag
    message: &'static str,
}

const POLICY_RULES: [Rule<EtcdBackupPolicy>; 5] = [
    Rule {
        is_allowed: |a| a.allow_host_path,
        is_requested: |p| has_host_path(&p.spec.store),
        message: "spec.store.volume.hostPath: folders of nodes are not allowed; to allow them, start the controller with {allow-host-path}",
    },
    Rule {
        is_allowed: |a| a.allow_host_network,
        is_requested: |p| p.spec.job_template.host_network,
        message: "spec.jobTemplate.hostNetwork: the network of nodes is not allowed; to allow it, start the controller with {allow-host-network}",
    },
    Rule {
        is_allowed: |a| a.allow_service_account,
        is_requested: |p| p.spec.job_template.service_account_name.is_some(),
        message: "spec.jobTemplate.serviceAccountName: other ServiceAccounts are not allowed; to allow them, start the controller with {allow-service-account}",
    },
    Rule {
        is_allowed: |a| a.allow_tolerations,
        is_requested: |p| !p.spec.job_template.tolerations.is_empty(),
        message: "spec.jobTemplate.tolerations: tolerations are not allowed; to allow them, start the controller with {allow-tolerations}",
    },
    Rule {
        is_allowed: |a| a.allow_priority_class,
        is_requested: |p| p.spec.job_template.priority_class_name.is_some(),
        message: "spec.jobTemplate.priorityClassName: PriorityClasses are not allowed; to allow them, start the controller with {allow-priority-class}",
    },
];

const OTHER_IMAGE: &str = "spec.jobTemplate.image: images other than the controller's {job-image} are not allowed; to allow them, start the controller with {allowed-image-prefix}";

const OTHER_ETCD_IMAGE: &str = "spec.verify.drill.etcdImage: images of other registries are not allowed; to allow them, start the controller with {allowed-image-prefix}";

const TASK_RULES: [Rule<EtcdBackupTask>; 3] = [
    Rule {
        is_allowed: |a| a.allow_host_path,
        is_requested: |t| copy_config(t).is_some_and(|c| c.source_store.iter().any(has_host_path)),
        message: "spec.config.copyBackups.sourceStore.volume.hostPath: folders of nodes are not allowed; to allow them, start the controller with {allow-host-path}",
    },
    Rule {
        is_allowed: |a| a.allow_host_path,
        is_requested: |t| copy_config(t).is_some_and(|c| c.target_store.iter().any(has_host_path)),
        message: "spec.config.copyBackups.targetStore.volume.hostPath: folders of nodes are not allowed; to allow them, start the controller with {allow-host-path}",
    },
    Rule {
        is_allowed: |a| a.allow_root,
        is_requested: |t| {
            let config = t.spec.config.as_ref();
            let restore = config.and_then(|c| c.restore.as_ref());
            restore.is_some_and(|r| r.run_as_user == Some(0))
        },
        message: "spec.config.restore.runAsUser: user 0 is not allowed; to allow it, start the controller with {allow-root}",
    },
];

fn has_host_path(store: &StoreSpec) -> bool {
    let volume = store.volume.as_ref();
    volume.is_some_and(|v| v.host_path.is_some())
}

fn copy_config(task: &EtcdBackupTask) -> Option<&CopyBackupsConfig> {
    task.spec.config.as_ref()?.copy_backups.as_ref()
}

impl Allowed {
    /// Returns the requests of a policy that are not allowed: a sentence for each, with the field and the
    /// flag.
    pub fn problems(&self, policy: &EtcdBackupPolicy, settings: &Settings) -> Vec<String> {
        let mut problems = self.violations(&POLICY_RULES, policy);
        let drill = policy.spec.verify.as_ref().and_then(|v| v.drill.as_ref());
        let images = [
            (policy.spec.job_template.image.as_deref(), OTHER_IMAGE),
            (drill.map(|d| d.etcd_image.as_str()), OTHER_ETCD_IMAGE),
        ];
        for (image, refusal) in images {
            let mut prefixes = self.allowed_image_prefix.iter();
            if let Some(image) = image
                && image != settings.image
                && !prefixes.any(|prefix| is_below(image, prefix))
            {
                problems.push(opt::fill(refusal).into_owned());
            }
        }
        problems
    }

    /// Returns the requests of a task that are not allowed: a sentence for each, with the field and the flag.
    pub fn task_problems(&self, task: &EtcdBackupTask) -> Vec<String> {
        self.violations(&TASK_RULES, task)
    }

    fn violations<K>(&self, rules: &[Rule<K>], object: &K) -> Vec<String> {
        let violated = self
            .active(rules)
            .filter(|rule| (rule.is_requested)(object));
        violated
            .map(|rule| opt::fill(rule.message).into_owned())
            .collect()
    }

    /// Returns the rules that still apply: those whose flag was not given.
    fn active<'r, K>(&self, rules: &'r [Rule<K>]) -> impl Iterator<Item = &'r Rule<K>> {
        rules.iter().filter(|rule| !(rule.is_allowed)(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::jobs::flags::flags;
    use clap::{Command, FromArgMatches};
    use serde_json::{Value, json};

    fn policy(mut spec: Value) -> EtcdBackupPolicy {
        spec["store"]["url"] = "/b".into();
        EtcdBackupPolicy::new("p", serde_json::from_value(spec).unwrap())
    }

    fn task(config: Value) -> EtcdBackupTask {
        let spec = json!({"policy": "p", "type": "Verify", "config": config});
        EtcdBackupTask::new("t", serde_json::from_value(spec).unwrap())
    }

    fn parsed(args: &[&str]) -> Result<Allowed, clap::Error> {
        let command = Allowed::augment_args(Command::new("x").no_binary_name(true));
        Allowed::from_arg_matches(&command.try_get_matches_from(args)?)
    }

    fn all() -> Allowed {
        parsed(&[
            "--allow-host-path",
            "--allow-host-network",
            "--allow-service-account",
            "--allow-root",
            "--allow-tolerations",
            "--allow-priority-class",
            "--allowed-image-prefix=a,registry.example/team",
        ])
        .unwrap()
    }

    /// Asserts that without flags an object has exactly one problem, which starts with the field and names a
    /// flag; and that this flag alone, but not all others together, removes the problem.
    fn assert_only_its_flag_allows(field: &str, problems: impl Fn(&Allowed) -> Vec<String>) {
        let refused = problems(&Allowed::default());
        assert_eq!(refused.len(), 1, "{field}: {refused:?}");
        let message = &refused[0];
        assert!(message.starts_with(&format!("{field}: ")), "{message}");
        let option = message.split([' ', ';']).rfind(|w| w.starts_with("allow"));
        let flag = &*format!("--{}", option.unwrap());
        let with_value = format!("{flag}=a");
        let only_it = if flag.contains("prefix") {
            parsed(&[&with_value])
        } else {
            parsed(&[flag])
        };
        assert_eq!(problems(&only_it.unwrap()), Vec::<String>::new(), "{flag}");
        let all_flags = flags(&all()).unwrap();
        let others = all_flags
            .iter()
            .filter(|f| f.starts_with("--allow-") && *f != flag);
        let others: Vec<&str> = others.map(String::as_str).collect();
        assert_eq!(problems(&parsed(&others).unwrap()).len(), 1, "{flag}");
    }

    #[test]
    fn each_request_is_refused_until_its_flag_is_given() {
        let settings = Settings::new("deltafold:1");
        let spec = |name: &str, value: Value| policy(json!({"jobTemplate": {name: value}}));
        let on_node = json!({"volume": {"hostPath": "/"}});
        let copy = |side: &str| json!({"copyBackups": {side: {"url": "/c", "volume": {"hostPath": "/c"}}}});
        let policies = [
            (
                policy(json!({"store": on_node})),
                "spec.store.volume.hostPath",
            ),
            (
                spec("hostNetwork", true.into()),
                "spec.jobTemplate.hostNetwork",
            ),
            (
                spec("serviceAccountName", "".into()),
                "spec.jobTemplate.serviceAccountName",
            ),
            (
                spec("tolerations", json!([{}])),
                "spec.jobTemplate.tolerations",
            ),
            (
                spec("priorityClassName", "x".into()),
                "spec.jobTemplate.priorityClassName",
            ),
            (spec("image", "a/b:1".into()), "spec.jobTemplate.image"),
            (
                policy(
                    json!({"verify": {"schedule": "@daily", "drill": {"etcdImage": "a/etcd:1"}}}),
                ),
                "spec.verify.drill.etcdImage",
            ),
        ];
        let tasks = [
            (
                task(copy("sourceStore")),
                "spec.config.copyBackups.sourceStore.volume.hostPath",
            ),
            (
                task(copy("targetStore")),
                "spec.config.copyBackups.targetStore.volume.hostPath",
            ),
            (
                task(json!({"restore": {"claimName": "c", "runAsUser": 0}})),
                "spec.config.restore.runAsUser",
            ),
        ];
        for (policy, field) in &policies {
            assert_only_its_flag_allows(field, |a| a.problems(policy, &settings));
        }
        for (task, field) in &tasks {
            assert_only_its_flag_allows(field, |a| a.task_problems(task));
        }
    }

    #[test]
    fn requests_within_the_namespace_are_allowed() {
        let settings = Settings::new("deltafold:1");
        for spec in [
            json!({}),
            json!({"store": {"volume": {"persistentVolumeClaim": "c"}}}),
            json!({"jobTemplate": {"image": "deltafold:1", "hostNetwork": false, "tolerations": [],
                "nodeSelector": {"a": "b"}, "imagePullPolicy": "Always"}}),
        ] {
            let problems = Allowed::default().problems(&policy(spec), &settings);
            assert_eq!(problems, Vec::<String>::new());
        }
        for config in [
            json!({}),
            json!({"restore": {"claimName": "c", "runAsUser": 1}}),
            json!({"copyBackups": {"targetStore": {"url": "/c", "volume": {"persistentVolumeClaim": "c"}}}}),
        ] {
            let problems = Allowed::default().task_problems(&task(config));
            assert_eq!(problems, Vec::<String>::new());
        }
    }

    #[test]
    fn an_image_prefix_covers_whole_path_components() {
        for (image, prefix) in [
            ("registry.example/team", "registry.example/team"),
            ("registry.example/team/x", "registry.example/team"),
            ("registry.example/team/x:1", "registry.example/team/"),
            ("registry.example/team:1", "registry.example/team"),
            ("registry.example/team@sha256:00", "registry.example/team"),
            (
                "registry.example/team:1@sha256:00",
                "registry.example/team:1",
            ),
            ("registry.example:5000/x", "registry.example:5000"),
            ("deltafold:1", "deltafold"),
        ] {
            assert!(is_below(image, prefix), "{image} {prefix}");
        }
        for (image, prefix) in [
            ("registry.example/team-evil/x", "registry.example/team"),
            ("registry.example/team.evil", "registry.example/team"),
            ("registry.example/team_evil", "registry.example/team"),
            ("registry.example/teams", "registry.example/team"),
            ("registry.example/team", "registry.example/team/"),
            ("registry.example/team:1", "registry.example/team/"),
            ("registry.example/team:10", "registry.example/team:1"),
            ("registry.example.evil/x", "registry.example"),
            ("registry.example:5000/x", "registry.example"),
            ("registry.example@evil/x", "registry.example"),
            ("evil/registry.example/team/x", "registry.example/team"),
            ("Registry.example/team/x", "registry.example/team"),
            ("", "a"),
        ] {
            assert!(!is_below(image, prefix), "{image} {prefix}");
        }
        for prefix in ["", "a ", "a'", "a\"", "a\\", "a:", "a@", "a-", "/a", "a,,b"] {
            let flag = format!("--allowed-image-prefix={prefix}");
            assert!(parsed(&[&flag]).is_err(), "{prefix:?}");
        }
    }

    #[test]
    fn flags_and_fields_round_trip() {
        let args = flags(&all()).unwrap();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        assert_eq!(parsed(&args).unwrap(), all());
        let fields = serde_json::to_value(all()).unwrap();
        assert_eq!(fields.as_object().unwrap().len(), 7);
        assert_eq!(serde_json::from_value::<Allowed>(fields).unwrap(), all());
        assert_eq!(
            serde_json::from_str::<Allowed>("{}").unwrap(),
            Allowed::default()
        );
        assert_eq!(parsed(&[]).unwrap(), Allowed::default());
        assert!(flags(&Allowed::default()).unwrap().is_empty());
    }
}
