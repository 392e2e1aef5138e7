//! What version 0.1 wrote and took works in every later version: `fixtures/frozen`.

use crate::support::frozen::{
    Facts, PROMISE, Side, files, must_hold, no_fact_is_lost, of_flags, of_schema, versions,
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
use serde_json::{Value, json};
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
        for (path, text) in files(&folder) {
            let value: Value = serde_json::from_str(&text).unwrap();
            let (is_valid, path) = (schema.is_valid(&value), path.display());
            assert!(
                is_valid,
                "{path} is no more as docs/{name}.schema.json has it.\n{PROMISE}."
            );
            seen += 1;
        }
    }
    assert!(seen > 100, "{seen}");
}

/// The controller reads of a message what it read then.
#[test]
fn termination_messages() {
    let mut told = BTreeMap::new();
    for (path, text) in files("termination-message") {
        let t = Told::read(&text).unwrap_or_else(|| panic!("{}\n{PROMISE}.", path.display()));
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let t = json!({
            "exit_code": t.exit_code, "reason": t.reason, "message": t.message,
            "revision": t.revision, "finished_at": t.finished_at,
        });
        told.insert(name, t);
    }
    is_frozen("told.json", &json!(told));
}

/// Whether a value that is made of frozen resources is the one that was made then.
#[track_caller]
fn is_frozen(file: &str, now: &Value) {
    for version in versions() {
        let path = version.join(file);
        if std::env::var("DELTAFOLD_TEST_FREEZE").is_ok() && !path.exists() {
            fs::write(&path, serde_json::to_string_pretty(now).unwrap() + "\n").unwrap();
        }
        let then: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let mut other = Vec::new();
        differences(&then, now, "", &mut other);
        let path = path.display();
        assert!(
            other.is_empty(),
            "{path} differs:\n  {}\n{PROMISE}.",
            other.join("\n  ")
        );
    }
}

/// What a value has that another one has not.
fn differences(then: &Value, now: &Value, at: &str, found: &mut Vec<String>) {
    match (then, now) {
        (Value::Object(a), Value::Object(_)) => {
            a.iter()
                .for_each(|(k, v)| differences(v, &now[k], &format!("{at}/{k}"), found));
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            let both = a.iter().zip(b).enumerate();
            both.for_each(|(i, (a, b))| differences(a, b, &format!("{at}/{i}"), found));
        }
        _ if then == now => {}
        _ => found.push(format!("{at}: {then} was, {now} is")),
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

/// Objects of a file of every version.
fn resources<T: DeserializeOwned>(file: &str) -> Vec<(Value, T)> {
    let files = versions()
        .into_iter()
        .map(|v| v.join("resources").join(file));
    let texts = files.map(|f| fs::read_to_string(f).unwrap());
    let objects = texts.flat_map(|text| documents(&text));
    let parse = |then: Value| {
        let parsed = serde_json::from_value(then.clone());
        let parsed = parsed.unwrap_or_else(|e| panic!("{file}: {e}\n{then:#}\n{PROMISE}."));
        (then, parsed)
    };
    objects.map(parse).collect()
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
    let policies = resources::<EtcdBackupPolicy>("policies.yaml");
    let tasks = resources::<EtcdBackupTask>("tasks.yaml");
    policies.iter().for_each(loses_nothing);
    tasks.iter().for_each(loses_nothing);

    let settings = Settings::new("deltafold:frozen");
    let secrets: SecretKeys = resources::<Secret>("secrets.yaml")
        .into_iter()
        .map(|(_, s)| {
            (
                s.metadata.name.unwrap(),
                s.data.unwrap_or_default().into_keys().collect(),
            )
        })
        .collect();
    let mut made = BTreeMap::new();
    for (_, policy) in &policies {
        let mut of_policy = vec![
            json!(jobs::follower(policy, &settings, &secrets)),
            json!(jobs::leases(policy)),
            json!(jobs::lock_leases(policy)),
            json!(jobs::access(policy)),
        ];
        let cron = jobs::cron_jobs(policy, &settings, &secrets, false);
        of_policy.extend(cron.iter().map(|c| json!(c)));
        for instead in [false, true] {
            let name = jobs::compaction_job_name(policy, 100, 200, 1, instead);
            let job =
                jobs::compaction_job(policy, &settings, &secrets, &name, instead, BTreeMap::new());
            of_policy.push(json!(job));
        }
        let name = jobs::name_of(policy);
        let own = tasks.iter().filter(|(_, t)| t.spec.policy == name);
        of_policy.extend(own.map(|(_, t)| json!(jobs::task_job(policy, t, &settings, &secrets))));
        made.insert(name.to_owned(), json!(of_policy));
    }
    let mut made = json!(made);
    in_order(&mut made);
    is_frozen("jobs.json", &made);
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
    let leases = resources::<Lease>("snapshot-leases.yaml");
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
    is_frozen("leases.json", &told.collect());
    for (then, secret) in resources::<Secret>("secrets.yaml") {
        let finalizers = secret.metadata.finalizers.unwrap_or_default();
        let is_held = finalizers.iter().any(|f| f == jobs::FINALIZER);
        assert!(
            is_held || then["metadata"].get("finalizers").is_none(),
            "{then:#}\n{PROMISE}."
        );
    }
}
