//! What version 0.1 wrote and took works in every later version: `fixtures/frozen`.

use crate::support::frozen::{
    Facts, PROMISE, Side, differences, files, is_frozen, must_hold, no_fact_is_lost, of_flags,
    of_schema, versions,
};
use crate::support::manifests::documents;
use crate::support::schema::Schema;
use deltafold::Reason;
use deltafold::controller::api::{EtcdBackupPolicy, EtcdBackupTask, crds};
use deltafold::controller::jobs::{self, SecretKeys, Settings};
use deltafold::controller::leases::{LeaseFacts, SnapshotFact};
use deltafold::controller::outcome::Told;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn flags_variables_and_defaults() {
    must_hold("flags.txt", &of_flags());
}

#[test]
fn reasons_and_exit_codes() {
    let tell = |r: &Reason| format!("{r}: {}, retry {}", r.exit_code(), r.is_retryable());
    must_hold("reasons.txt", &Reason::ALL.iter().map(tell).collect());
}

/// The names of the schemas in `docs/`.
fn schemas() -> Vec<String> {
    let docs = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")).unwrap();
    let names = docs.map(|f| f.unwrap().file_name().into_string().unwrap());
    let schemas = names.filter_map(|n| n.strip_suffix(".schema.json").map(str::to_owned));
    schemas.collect()
}

#[test]
fn fields_of_results() {
    let of = |name: &String| of_schema(name, &Schema::json(name), Side::Output);
    must_hold("schemas.txt", &schemas().iter().flat_map(of).collect());
}

/// A folder for each schema.
#[test]
fn results_are_still_as_documented() {
    let mut seen = 0;
    for name in schemas() {
        let folder = match name.strip_suffix("-result") {
            Some(command) => format!("results/{command}"),
            None => name.clone(),
        };
        let schema = Schema::of_older(&name);
        for (path, text) in versions().iter().flat_map(|v| files(v, &folder)) {
            let value: Value = serde_json::from_str(&text).unwrap();
            let (is_valid, path) = (schema.is_valid(&value), path.display());
            assert!(
                is_valid,
                "{path} is no more as docs/{name}.schema.json has it.\n{PROMISE}."
            );
            seen += 1;
        }
    }
    assert!(seen > 150, "{seen}");
}

/// The controller reads of a message what it read then.
#[test]
fn termination_messages() {
    for version in versions() {
        let mut told = BTreeMap::new();
        for (path, text) in files(&version, "termination-message") {
            let t = Told::read(&text).unwrap_or_else(|| panic!("{}\n{PROMISE}.", path.display()));
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let t = json!({
                "exit_code": t.exit_code, "reason": t.reason, "message": t.message,
                "revision": t.revision, "finished_at": t.finished_at,
            });
            told.insert(name, t);
        }
        is_frozen(&version, "told.json", &json!(told));
    }
}

#[test]
fn fields_rules_and_columns_of_resources() {
    let now: Vec<Value> = crds().iter().map(|crd| json!(crd)).collect();
    let facts = of_crds(&now);
    for version in versions() {
        let text = fs::read_to_string(version.join("crds.yaml")).unwrap();
        no_fact_is_lost("crds.yaml", &of_crds(&documents(&text)), &facts);
    }
}

fn of_crds(crds: &[Value]) -> Facts {
    let mut facts = Facts::new();
    for crd in crds {
        let spec = &crd["spec"];
        let kind = spec["names"]["kind"].as_str().unwrap();
        facts.insert(format!("{kind} is {} {}", spec["group"], spec["scope"]));
        for (what, name) in spec["names"].as_object().unwrap() {
            facts.insert(format!("{kind} {what} {name}"));
        }
        for version in spec["versions"].as_array().unwrap() {
            let at = format!("{kind} {}", version["name"].as_str().unwrap());
            for what in ["served", "storage", "subresources"] {
                facts.insert(format!("{at} {what} {}", version[what]));
            }
            for column in version["additionalPrinterColumns"].as_array().unwrap() {
                let (name, path) = (&column["name"], &column["jsonPath"]);
                facts.insert(format!("{at} column {name} {path}"));
            }
            let schema = &version["schema"]["openAPIV3Schema"];
            facts.extend(of_schema(&at, schema, Side::Input));
        }
    }
    facts
}

/// Objects of a version's file, as they are there and as they are read.
fn resources<T: DeserializeOwned>(version: &Path, file: &str) -> Vec<(Value, T)> {
    let text = fs::read_to_string(version.join("resources").join(file)).unwrap();
    let parse = |then: Value| {
        let parsed = serde_json::from_value(then.clone());
        let parsed = parsed.unwrap_or_else(|e| panic!("{file}: {e}\n{then:#}\n{PROMISE}."));
        (then, parsed)
    };
    documents(&text).into_iter().map(parse).collect()
}

/// What is read and written again has lost nothing.
fn loses_nothing<T: Serialize>((then, parsed): &(Value, T)) {
    let mut lost = Vec::new();
    differences(then, &serde_json::to_value(parsed).unwrap(), "", &mut lost);
    assert!(
        lost.is_empty(),
        "lost:\n  {}\n{PROMISE}.",
        lost.join("\n  ")
    );
}

#[test]
fn policies_and_tasks_make_the_same_jobs() {
    for version in versions() {
        let policies = resources::<EtcdBackupPolicy>(&version, "policies.yaml");
        let tasks = resources::<EtcdBackupTask>(&version, "tasks.yaml");
        policies.iter().for_each(loses_nothing);
        tasks.iter().for_each(loses_nothing);
        let keys = |s: Secret| s.data.unwrap_or_default().into_keys().collect();
        let secrets = resources::<Secret>(&version, "secrets.yaml").into_iter();
        let secrets = secrets.map(|(_, s)| (s.metadata.name.clone().unwrap(), keys(s)));
        let secrets: SecretKeys = secrets.collect();
        let mut made = Map::new();
        for (_, policy) in &policies {
            let name = jobs::name_of(policy).to_owned();
            let own = tasks.iter().map(|(_, task)| task);
            let own = own.filter(|task| task.spec.policy == name);
            made.insert(name.clone(), made_of(policy, own, &secrets));
        }
        let mut made = Value::from(made);
        in_order(&mut made);
        is_frozen(&version, "jobs.json", &made);
    }
}

/// All that is made for a policy and its tasks.
fn made_of<'t>(
    policy: &EtcdBackupPolicy,
    tasks: impl Iterator<Item = &'t EtcdBackupTask>,
    secrets: &SecretKeys,
) -> Value {
    let settings = Settings::new("deltafold:frozen");
    let mut made = vec![
        json!(jobs::follower(policy, &settings, secrets)),
        json!(jobs::leases(policy)),
        json!(jobs::lock_leases(policy)),
        json!(jobs::access(policy)),
    ];
    let cron = jobs::cron_jobs(policy, &settings, secrets, false);
    made.extend(cron.iter().map(|c| json!(c)));
    for instead in [false, true] {
        let name = jobs::compaction_job_name(policy, 100, 200, 1, instead);
        let none = BTreeMap::new();
        let job = jobs::compaction_job(policy, &settings, secrets, &name, instead, none);
        made.push(json!(job));
    }
    made.extend(tasks.map(|task| json!(jobs::task_job(policy, task, &settings, secrets))));
    made.into()
}

/// Flags and variables by name: their order tells nothing.
fn in_order(value: &mut Value) {
    match value {
        Value::Object(o) => {
            if let Some(args) = o.get_mut("args").and_then(Value::as_array_mut) {
                let mut flags = Vec::<Vec<Value>>::new();
                for arg in args.drain(..) {
                    let is_value = !arg.as_str().unwrap().starts_with("--");
                    match flags.last_mut() {
                        Some(last) if is_value => last.push(arg),
                        _ => flags.push(vec![arg]),
                    }
                }
                // The command stands first.
                flags[1..].sort_by_key(|flag| flag[0].to_string());
                *args = flags.concat();
            }
            if let Some(env) = o.get_mut("env").and_then(Value::as_array_mut) {
                env.sort_by_key(|variable| variable["name"].to_string());
            }
            o.values_mut().for_each(in_order);
        }
        Value::Array(all) => all.iter_mut().for_each(in_order),
        _ => {}
    }
}

#[test]
fn leases_and_finalizers() {
    for version in versions() {
        let leases = resources::<Lease>(&version, "snapshot-leases.yaml");
        let told = leases.chunks(2).map(|pair| {
            let facts = LeaseFacts::read(Some(&pair[0].1), Some(&pair[1].1));
            let tell = |f: &SnapshotFact| {
                let kind = f.kind.map(|k| format!("{k:?}"));
                json!({
                    "revision": f.revision, "start_revision": f.start_revision, "name": f.name,
                    "bytes": f.bytes, "time": f.time, "renewed": f.renewed, "kind": kind,
                })
            };
            json!({
                "full": facts.full.as_ref().map(tell), "delta": facts.delta.as_ref().map(tell),
                "accumulated_events": facts.accumulated_events, "accumulated_bytes": facts.accumulated_bytes,
                "told_base": facts.told_base, "restorable": facts.restorable, "status": facts.status(),
            })
        });
        is_frozen(&version, "leases.json", &told.collect());
        let secrets = resources::<Secret>(&version, "secrets.yaml").into_iter();
        let held = secrets.filter_map(|(_, s)| s.metadata.finalizers);
        for finalizers in held {
            assert_eq!(finalizers, [jobs::FINALIZER], "{PROMISE}.");
        }
    }
}
