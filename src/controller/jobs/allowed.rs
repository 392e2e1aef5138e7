//! What policies and tasks may ask for beyond their own namespace: folders and networks of nodes, foreign images, root.
//!
//! Pure: flags and an object to sentences. The controller refuses with them, and `manifests` makes the expressions of
//! the admission policies from the same rules. Each rule is written twice, in Rust and in CEL; a test on a real API
//! server holds both against the same objects.

use super::super::api::{CopyBackupsConfig, EtcdBackupPolicy, EtcdBackupTask, StoreSpec};
use super::Settings;
use crate::base::flag_values::yes_or_no;
use clap::Args;
use serde::{Deserialize, Serialize};

/// What policies and tasks may ask for. Nothing of this is allowed by default: whoever may write a policy would
/// otherwise have rights on nodes or of other accounts.
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
    /// A prefix is complete up to a /, : or @ of the image: registry.example/team allows registry.example/team/etcd:1
    /// and registry.example/team:1, but not registry.example/team-b/etcd:1. Without this flag, all Jobs use the
    /// controller's default image for Jobs.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', value_parser = image_prefix)]
    pub allowed_image_prefix: Vec<String>,
}

/// Reads a prefix of images.
fn image_prefix(s: &str) -> Result<String, String> {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"._-/:@".contains(&b);
    let ends_well = s.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '/');
    match s.bytes().all(fits) && ends_well && !s.starts_with('/') {
        true => Ok(s.to_owned()),
        false => Err(
            "not the beginning of an image's name: give a registry and a path, such as registry.example/team"
                .to_owned(),
        ),
    }
}

/// Whether an image is below a prefix: the prefix is all of it, or ends before a `/`, or before the `:` or `@` of its
/// tag or digest. The `:` of a port is no end: another port is another registry.
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

/// [`is_below`] for any of `prefixes`, a list.
const IS_BELOW: &str = "prefixes.exists(p, image == p || image.startsWith(p + '/') || \
    p.endsWith('/') && image.startsWith(p) || \
    (image.startsWith(p + ':') || image.startsWith(p + '@')) && !image.substring(size(p)).contains('/'))";

/// Something that an object may not do unless a flag allows it.
struct Rule<K> {
    is_allowed: fn(&Allowed) -> bool,
    /// Whether an object does it
    does: fn(&K) -> bool,
    /// The same in CEL
    cel: &'static str,
    /// The field, and the flag that would allow it
    message: &'static str,
}

const POLICY_RULES: [Rule<EtcdBackupPolicy>; 5] = [
    Rule {
        is_allowed: |a| a.allow_host_path,
        does: |p| has_host_path(&p.spec.store),
        cel: "object.spec.?store.?volume.?hostPath.hasValue()",
        message: "spec.store.volume.hostPath: folders of nodes are not allowed; --allow-host-path of the controller would allow them",
    },
    Rule {
        is_allowed: |a| a.allow_host_network,
        does: |p| p.spec.job_template.host_network,
        cel: "object.spec.?jobTemplate.?hostNetwork.orValue(false)",
        message: "spec.jobTemplate.hostNetwork: the network of nodes is not allowed; --allow-host-network of the controller would allow it",
    },
    Rule {
        is_allowed: |a| a.allow_service_account,
        does: |p| p.spec.job_template.service_account_name.is_some(),
        cel: "object.spec.?jobTemplate.?serviceAccountName.hasValue()",
        message: "spec.jobTemplate.serviceAccountName: other ServiceAccounts are not allowed; --allow-service-account of the controller would allow them",
    },
    Rule {
        is_allowed: |a| a.allow_tolerations,
        does: |p| !p.spec.job_template.tolerations.is_empty(),
        cel: "size(object.spec.?jobTemplate.?tolerations.orValue([])) > 0",
        message: "spec.jobTemplate.tolerations: tolerations are not allowed; --allow-tolerations of the controller would allow them",
    },
    Rule {
        is_allowed: |a| a.allow_priority_class,
        does: |p| p.spec.job_template.priority_class_name.is_some(),
        cel: "object.spec.?jobTemplate.?priorityClassName.hasValue()",
        message: "spec.jobTemplate.priorityClassName: PriorityClasses are not allowed; --allow-priority-class of the controller would allow them",
    },
];

const FOREIGN_IMAGE: &str = "spec.jobTemplate.image: no other image is allowed than that of --job-image; --allowed-image-prefix of the controller would allow it";

const TASK_RULES: [Rule<EtcdBackupTask>; 3] = [
    Rule {
        is_allowed: |a| a.allow_host_path,
        does: |t| copy_of(t).is_some_and(|c| c.source_store.iter().any(has_host_path)),
        cel: "object.spec.?config.?copyBackups.?sourceStore.?volume.?hostPath.hasValue()",
        message: "spec.config.copyBackups.sourceStore.volume.hostPath: folders of nodes are not allowed; --allow-host-path of the controller would allow them",
    },
    Rule {
        is_allowed: |a| a.allow_host_path,
        does: |t| copy_of(t).is_some_and(|c| c.target_store.iter().any(has_host_path)),
        cel: "object.spec.?config.?copyBackups.?targetStore.?volume.?hostPath.hasValue()",
        message: "spec.config.copyBackups.targetStore.volume.hostPath: folders of nodes are not allowed; --allow-host-path of the controller would allow them",
    },
    Rule {
        is_allowed: |a| a.allow_root,
        does: |t| {
            let config = t.spec.config.as_ref();
            let restore = config.and_then(|c| c.restore.as_ref());
            restore.is_some_and(|r| r.run_as_user == Some(0))
        },
        cel: "object.spec.?config.?restore.?runAsUser.orValue(1) == 0",
        message: "spec.config.restore.runAsUser: user 0 is not allowed; --allow-root of the controller would allow it",
    },
];

fn has_host_path(store: &StoreSpec) -> bool {
    let volume = store.volume.as_ref();
    volume.is_some_and(|v| v.host_path.is_some())
}

fn copy_of(task: &EtcdBackupTask) -> Option<&CopyBackupsConfig> {
    task.spec.config.as_ref()?.copy_backups.as_ref()
}

/// A rule as an admission policy has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Validation {
    /// A CEL expression on `object`: true if the object is allowed
    pub expression: String,
    /// The sentence that refuses it otherwise
    pub message: &'static str,
}

impl Allowed {
    /// What a policy asks for and is not allowed: a sentence for each, with the field and the flag.
    pub fn problems(&self, policy: &EtcdBackupPolicy, settings: &Settings) -> Vec<String> {
        let mut found = self.broken(&POLICY_RULES, policy);
        let image = policy.spec.job_template.image.as_deref();
        let prefixes = &self.allowed_image_prefix;
        if let Some(image) = image
            && image != settings.image
            && !prefixes.iter().any(|prefix| is_below(image, prefix))
        {
            found.push(FOREIGN_IMAGE.to_owned());
        }
        found
    }

    /// What a task asks for and is not allowed: a sentence for each, with the field and the flag.
    pub fn task_problems(&self, task: &EtcdBackupTask) -> Vec<String> {
        self.broken(&TASK_RULES, task)
    }

    fn broken<K>(&self, rules: &[Rule<K>], object: &K) -> Vec<String> {
        let forbidden = rules.iter().filter(|rule| !(rule.is_allowed)(self));
        let broken = forbidden.filter(|rule| (rule.does)(object));
        broken.map(|rule| rule.message.to_owned()).collect()
    }

    /// The rules of [`problems`](Self::problems) for the API server, if Jobs have this image.
    pub fn policy_validations(&self, job_image: &str) -> Vec<Validation> {
        let mut all = self.validations(&POLICY_RULES);
        let own = quoted(job_image);
        let mut expression = format!("object.spec.?jobTemplate.?image.orValue({own}) == {own}");
        if !self.allowed_image_prefix.is_empty() {
            let prefixes: Vec<String> = self
                .allowed_image_prefix
                .iter()
                .map(|p| quoted(p))
                .collect();
            // CEL has no `let`: a list of one names a value.
            let named = IS_BELOW.replace("prefixes", &format!("[{}]", prefixes.join(",")));
            expression += &format!(" || [object.spec.jobTemplate.image].exists(image, {named})");
        }
        all.push(Validation {
            expression,
            message: FOREIGN_IMAGE,
        });
        all
    }

    /// The rules of [`task_problems`](Self::task_problems) for the API server; none if all is allowed.
    pub fn task_validations(&self) -> Vec<Validation> {
        self.validations(&TASK_RULES)
    }

    fn validations<K>(&self, rules: &[Rule<K>]) -> Vec<Validation> {
        let forbidden = rules.iter().filter(|rule| !(rule.is_allowed)(self));
        let validations = forbidden.map(|rule| Validation {
            expression: format!("!({})", rule.cel),
            message: rule.message,
        });
        validations.collect()
    }
}

/// A string literal of CEL, which has JSON's escapes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
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

    /// A sentence names its field, and a flag that there is; the flag alone allows it.
    #[test]
    fn each_thing_is_refused_until_its_flag_is_given() {
        let settings = Settings::new("deltafold:1");
        let spec = |name: &str, value: Value| policy(json!({"jobTemplate": {name: value}}));
        let on_node = json!({"volume": {"hostPath": "/"}});
        let of_copy = |side: &str| json!({"copyBackups": {side: {"url": "/c", "volume": {"hostPath": "/c"}}}});
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
        ];
        let tasks = [
            (
                task(of_copy("sourceStore")),
                "spec.config.copyBackups.sourceStore.volume.hostPath",
            ),
            (
                task(of_copy("targetStore")),
                "spec.config.copyBackups.targetStore.volume.hostPath",
            ),
            (
                task(json!({"restore": {"claimName": "c", "runAsUser": 0}})),
                "spec.config.restore.runAsUser",
            ),
        ];
        let policies = policies.iter().map(|(policy, field)| {
            let found = |a: &Allowed| a.problems(policy, &settings);
            (
                Box::new(found) as Box<dyn Fn(&Allowed) -> Vec<String>>,
                *field,
            )
        });
        let tasks = tasks.iter().map(|(task, field)| {
            let found = |a: &Allowed| a.task_problems(task);
            (
                Box::new(found) as Box<dyn Fn(&Allowed) -> Vec<String>>,
                *field,
            )
        });
        let flags_of_all = flags(&all());
        for (found, field) in policies.chain(tasks) {
            let said = found(&Allowed::default());
            assert_eq!(said.len(), 1, "{field}: {said:?}");
            assert!(said[0].starts_with(&format!("{field}: ")), "{}", said[0]);
            let flag = said[0].split([' ', ';']).rfind(|w| w.starts_with("--"));
            let flag = flag.unwrap();
            let with_value = format!("{flag}=a");
            let only = match flag.contains("prefix") {
                true => parsed(&[&with_value]),
                false => parsed(&[flag]),
            };
            assert_eq!(found(&only.unwrap()), Vec::<String>::new(), "{flag}");
            let others: Vec<&str> = flags_of_all
                .iter()
                .map(String::as_str)
                .filter(|f| f.starts_with("--allow-") && *f != flag)
                .collect();
            assert_eq!(found(&parsed(&others).unwrap()).len(), 1, "{flag}");
        }
    }

    #[test]
    fn what_is_usual_is_allowed() {
        let settings = Settings::new("deltafold:1");
        for spec in [
            json!({}),
            json!({"store": {"volume": {"persistentVolumeClaim": "c"}}}),
            json!({"jobTemplate": {"image": "deltafold:1", "hostNetwork": false, "tolerations": [],
                "nodeSelector": {"a": "b"}, "imagePullPolicy": "Always"}}),
        ] {
            let found = Allowed::default().problems(&policy(spec), &settings);
            assert_eq!(found, Vec::<String>::new());
        }
        for config in [
            json!({}),
            json!({"restore": {"claimName": "c", "runAsUser": 1}}),
            json!({"copyBackups": {"targetStore": {"url": "/c", "volume": {"persistentVolumeClaim": "c"}}}}),
        ] {
            let found = Allowed::default().task_problems(&task(config));
            assert_eq!(found, Vec::<String>::new());
        }
    }

    #[test]
    fn a_prefix_of_images_ends_where_a_name_ends() {
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
    fn flags_and_fields_are_the_same() {
        let args = flags(&all());
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
        assert!(flags(&Allowed::default()).is_empty());
    }

    #[test]
    fn the_api_server_is_given_the_rules_that_no_flag_allows() {
        let none = Allowed::default();
        assert_eq!(none.policy_validations("i").len(), 6);
        assert_eq!(none.task_validations().len(), 3);
        // The image always has a rule: any would be allowed otherwise.
        let of_all = all().policy_validations("own\"");
        assert_eq!(of_all.len(), 1);
        assert!(
            of_all[0]
                .expression
                .contains(r#"orValue("own\"") == "own\"""#)
        );
        assert!(
            of_all[0]
                .expression
                .contains(r#"["a","registry.example/team"].exists(p, "#)
        );
        assert_eq!(all().task_validations(), []);
    }
}
