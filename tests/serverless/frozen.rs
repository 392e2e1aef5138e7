//! What version 0.1 wrote and accepted works in every later version: `fixtures/frozen`.

use crate::support::frozen::{
    Facts, PROMISE, Side, differences, files, is_frozen, is_same, must_hold, no_fact_is_lost,
    of_schema, then, versions,
};
use crate::support::manifests::documents;
use crate::support::schema::Schema;
use deltafold::Reason;
use deltafold::cli;
use deltafold::controller::api::{EtcdBackupPolicy, EtcdBackupTask, crds};
use deltafold::controller::jobs::{self, Settings};
use deltafold::controller::observe::leases::{LeaseFacts, SnapshotFact};
use deltafold::controller::observe::outcome::TerminationSummary;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn reasons_and_exit_codes() {
    let tell = |r: &Reason| format!("{r}: {}, retry {}", r.exit_code(), r.is_retryable());
    must_hold("reasons.txt", &Reason::ALL.iter().map(tell).collect());
}

/// Returns the names of the schemas in `docs/`.
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

/// One folder for each schema.
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

/// The controller still reads old termination messages in the same way.
#[test]
fn termination_messages() {
    for version in versions() {
        let mut told = BTreeMap::new();
        for (path, text) in files(&version, "termination-message") {
            let t = TerminationSummary::read(&text)
                .unwrap_or_else(|| panic!("{}\n{PROMISE}.", path.display()));
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

/// Returns the objects in a version's file, raw and parsed.
fn resources<T: DeserializeOwned>(version: &Path, file: &str) -> Vec<(Value, T)> {
    let text = fs::read_to_string(version.join("resources").join(file)).unwrap();
    let parse = |then: Value| {
        let parsed = serde_json::from_value(then.clone());
        let parsed = parsed.unwrap_or_else(|e| panic!("{file}: {e}\n{then:#}\n{PROMISE}."));
        (then, parsed)
    };
    documents(&text).into_iter().map(parse).collect()
}

/// Asserts that parsing and serializing again loses nothing.
fn loses_nothing<T: Serialize>((then, parsed): &(Value, T)) {
    let mut lost = Vec::new();
    differences(then, &serde_json::to_value(parsed).unwrap(), "", &mut lost);
    assert!(
        lost.is_empty(),
        "lost:\n  {}\n{PROMISE}.",
        lost.join("\n  ")
    );
}

/// The same objects make the same Jobs with the same schedules. How a Secret reaches a Pod and which account it
/// has may change: the program that creates a Job also runs it.
#[test]
fn policies_and_tasks_make_the_same_jobs() {
    for version in versions() {
        let policies = resources::<EtcdBackupPolicy>(&version, "policies.yaml");
        let tasks = resources::<EtcdBackupTask>(&version, "tasks.yaml");
        policies.iter().for_each(loses_nothing);
        tasks.iter().for_each(loses_nothing);
        let mut made = Map::new();
        for (_, policy) in &policies {
            let name = jobs::policy_name(policy).to_owned();
            let own = tasks.iter().map(|(_, task)| task);
            let own = own.filter(|task| task.spec.policy == name);
            made.insert(name.clone(), made_of(policy, own));
        }
        let mut made = Value::from(made);
        in_order(&mut made);
        let mut before = then(&version, "jobs.json", &made);
        // The account and its rights: all policies of a namespace now share one.
        for objects in before.as_object_mut().unwrap().values_mut() {
            objects[3] = Value::Null;
        }
        let mut taken = 0;
        is_taken(&before, &mut taken);
        assert!(taken > 30, "{taken}");
        without_secrets(&mut before);
        without_secrets(&mut made);
        is_same(&version, "jobs.json", &before, &made);
    }
}

/// Returns everything that is made for a policy and its tasks.
fn made_of<'t>(
    policy: &EtcdBackupPolicy,
    tasks: impl Iterator<Item = &'t EtcdBackupTask>,
) -> Value {
    let settings = Settings::new("deltafold:frozen");
    let mut made = vec![
        json!(jobs::follower(policy, &settings)),
        json!(jobs::leases(policy)),
        json!(jobs::lock_leases(policy)),
        Value::Null,
    ];
    let cron = jobs::cron_jobs(policy, &settings, false);
    made.extend(cron.iter().map(|c| json!(c)));
    for instead in [false, true] {
        let name = jobs::compaction_job_name(policy, 100, 200, 1, instead);
        let none = BTreeMap::new();
        let job = jobs::compaction_job(policy, &settings, &name, instead, none);
        made.push(json!(job));
    }
    made.extend(tasks.map(|task| json!(jobs::task_job(policy, task, &settings))));
    made.into()
}

/// Asserts that the program accepts the command line of each container: an old Job may have a new image.
fn is_taken(value: &Value, taken: &mut usize) {
    let below: Vec<&Value> = match value {
        Value::Object(o) => o.values().collect(),
        Value::Array(all) => all.iter().collect(),
        _ => Vec::new(),
    };
    for value in below {
        is_taken(value, taken);
    }
    let Some(args) = value.get("args").and_then(Value::as_array) else {
        return;
    };
    let args = args.iter().map(|a| a.as_str().unwrap().replace("$$", "$"));
    let mut args: Vec<String> = args.collect();
    // None was ever made for a policy without an etcd.
    if args[0] == "snapshot" && !args.contains(&"--endpoints".to_owned()) {
        return;
    }
    for variable in value["env"].as_array().into_iter().flatten() {
        let name = variable["name"].as_str().unwrap();
        if let Some(flag) = name.strip_prefix("DELTAFOLD_") {
            let text = variable["value"].as_str().unwrap_or("value").to_owned();
            args.push(format!("--{}", flag.to_lowercase().replace('_', "-")));
            args.push(text);
        }
    }
    cli::check(&args).unwrap_or_else(|e| panic!("{args:?}: {e}\n{PROMISE}."));
    *taken += 1;
}

/// Removes Secrets and the account from a Pod.
fn without_secrets(value: &mut Value) {
    const FLAGS: [&str; 8] = [
        "--store-secret",
        "--age-identity",
        "--cacert",
        "--cert",
        "--key",
        "--password-file",
        "--tls-secret",
        "--auth-secret",
    ];
    match value {
        Value::Object(o) => {
            for field in ["env", "serviceAccount", "serviceAccountName"] {
                o.remove(field);
            }
            for field in ["volumes", "volumeMounts"] {
                if let Some(all) = o.get_mut(field).and_then(Value::as_array_mut) {
                    all.retain(|v| !v["name"].as_str().unwrap().starts_with("secret-"));
                }
            }
            if let Some(args) = o.get_mut("args").and_then(Value::as_array_mut) {
                let all: Vec<String> = args.drain(..).map(|a| a.as_str().unwrap().into()).collect();
                let mut all = all.into_iter().peekable();
                while let Some(arg) = all.next() {
                    let value = all.peek().map_or("", String::as_str);
                    match FLAGS.contains(&arg.as_str()) || value.starts_with("secret_dir=") {
                        true => drop(all.next()),
                        false => args.push(arg.into()),
                    }
                }
            }
            o.values_mut().for_each(without_secrets);
        }
        Value::Array(all) => all.iter_mut().for_each(without_secrets),
        _ => {}
    }
}

/// Sorts flags and variables by name.
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
                // The command comes first.
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
                "told_base": facts.annotated_base, "restorable": facts.restorable, "status": facts.revisions(),
            })
        });
        is_frozen(&version, "leases.json", &told.collect());
        let secrets = resources::<Secret>(&version, "secrets.yaml").into_iter();
        let held = secrets.filter_map(|(_, s)| s.metadata.finalizers);
        for finalizers in held {
            assert_eq!(finalizers, ["deltafold.io/in-use"], "{PROMISE}.");
        }
    }
}
