//! `deltafold policy status`: its arguments, and how policies are, in words.

use super::kubernetes::{ClusterArgs, age, table, wait_for};
use super::text::Text;
use super::{Ended, Output, print_outcome, size};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::controller::api::{
    Condition, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastRun, RunState, SnapshotStatus,
};
use crate::error::Reason;
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use kube::ResourceExt;
use kube::api::ListParams;
use schemars::JsonSchema;
use serde::Serialize;

/// The conditions, in the order in which they are told.
const CONDITIONS: [&str; 4] = [
    "Ready",
    "BackupReady",
    "BackupVerified",
    "CompactionHealthy",
];

/// How the backup policies are that the controller in Kubernetes looks after
///
/// Linked as kubectl-deltafold this program is a plugin: kubectl deltafold policy status.
#[derive(Debug, Args)]
pub(super) struct PolicyCommand {
    #[command(subcommand)]
    command: PolicySubcommand,
}

#[derive(Debug, Subcommand)]
enum PolicySubcommand {
    Status(StatusArgs),
}

/// Whether backups are in time, verified, and compacted; of one policy with the reasons
#[derive(Debug, Args)]
struct StatusArgs {
    /// The policy [default: all of the namespace, in a table]
    name: Option<String>,
    /// Of all namespaces
    #[arg(short = 'A', long, value_parser = yes_or_no, conflicts_with = "name")]
    all_namespaces: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// What is printed. The fields are a contract; `status` is that of the API.
#[derive(Debug, JsonSchema, Serialize)]
pub(super) struct PoliciesOutcome {
    /// The policies, by namespace and name; of one that was named, that one.
    policies: Vec<PolicyOutcome>,
}

#[derive(Debug, JsonSchema, Serialize)]
struct PolicyOutcome {
    /// Where it is.
    namespace: String,
    /// Its name.
    name: String,
    /// The URL of its store.
    store: String,
    /// Whether nothing is started by schedule or threshold.
    suspended: bool,
    /// The status that the controller wrote, as the API has it.
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    status: EtcdBackupPolicyStatus,
}

impl PolicyOutcome {
    fn of(policy: &EtcdBackupPolicy) -> Self {
        PolicyOutcome {
            namespace: policy.namespace().unwrap_or_default(),
            name: policy.name_any(),
            store: policy.spec.store.url.clone(),
            suspended: policy.spec.suspend,
            status: policy.status.clone().unwrap_or_default(),
        }
    }

    fn condition(&self, type_: &str) -> Option<&Condition> {
        self.status.condition(type_)
    }
}

impl PolicyCommand {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        match &self.command {
            PolicySubcommand::Status(args) => args.run(cancel, output),
        }
    }
}

impl StatusArgs {
    fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let mut policies = wait_for(cancel, async {
            let person = self.cluster.person(false).await?;
            let api = match self.all_namespaces {
                true => person.all::<EtcdBackupPolicy>(),
                false => person.api(),
            };
            match &self.name {
                Some(name) => {
                    let found = person.ask("read the policy", api.get_opt(name)).await?;
                    let missing = || {
                        let namespace = person.namespace();
                        let what = format!(
                            "there is no EtcdBackupPolicy {name} in the namespace {namespace}"
                        );
                        Reason::Usage.error(what)
                    };
                    found.map(|p| vec![p]).ok_or_else(missing)
                }
                None => {
                    let params = ListParams::default();
                    let list = person.ask("list the policies", api.list(&params)).await?;
                    Ok(list.items)
                }
            }
        })?;
        policies.sort_by_key(|p| (p.namespace(), p.name_any()));
        let policies: Vec<PolicyOutcome> = policies.iter().map(PolicyOutcome::of).collect();
        let outcome = PoliciesOutcome { policies };
        let now = Utc::now();
        print_outcome(output, &outcome, |o| match (&self.name, &o.policies[..]) {
            (Some(_), [policy]) => whole(policy, now),
            _ => all(&o.policies, self.all_namespaces, now),
        })
    }
}

fn all(policies: &[PolicyOutcome], with_namespace: bool, now: DateTime<Utc>) -> String {
    if policies.is_empty() {
        return "no policies\n".to_owned();
    }
    let rows = policies.iter().map(|p| {
        let name = match with_namespace {
            true => format!("{}/{}", p.namespace, p.name),
            false => p.name.clone(),
        };
        let [ready, backup, verified, compaction] = CONDITIONS.map(|type_| {
            let condition = p.condition(type_);
            condition.map_or("-", |c| c.status.as_str()).to_owned()
        });
        let snapshots = p.status.snapshots.as_ref();
        let of = |s: Option<&SnapshotStatus>| {
            let time = s.and_then(|s| s.time);
            time.map_or("-".to_owned(), |t| age(t, now))
        };
        let events = snapshots.and_then(|s| s.accumulated_delta_events);
        [
            name,
            match p.suspended {
                true => format!("{ready} (suspended)"),
                false => ready,
            },
            backup,
            verified,
            compaction,
            of(snapshots.and_then(|s| s.last_full.as_ref())),
            of(snapshots.and_then(|s| s.last_delta.as_ref())),
            events.map_or("-".to_owned(), |n| n.to_string()),
            p.status
                .restorable_window
                .as_ref()
                .map_or("-".to_owned(), |w| {
                    format!("{} to {}", w.first_revision, w.last_revision)
                }),
        ]
    });
    let header = [
        "NAME",
        "READY",
        "BACKUP",
        "VERIFIED",
        "COMPACTION",
        "LAST FULL",
        "LAST DELTA",
        "EVENTS",
        "RESTORABLE",
    ];
    table(header, rows.collect())
}

/// One policy, with all that is known.
fn whole(p: &PolicyOutcome, now: DateTime<Utc>) -> String {
    let mut text = Text::with_labels(19);
    let suspended = match p.suspended {
        true => ", suspended",
        false => "",
    };
    text.line(format_args!("{}/{}{suspended}", p.namespace, p.name));
    text.field("store", &p.store);
    if p.status.conditions.is_empty() {
        text.line("  no controller has looked at it yet");
    }
    let known = CONDITIONS.iter().filter_map(|type_| p.condition(type_));
    let others = p.status.conditions.iter();
    let others = others.filter(|c| !CONDITIONS.contains(&c.type_.as_str()));
    for c in known.chain(others) {
        let (status, since) = (c.status.as_str(), age(c.last_transition_time, now));
        let said = format!("{status} for {since} [{}]: {}", c.reason, c.message);
        text.field(&c.type_, said);
    }
    if let Some(snapshots) = &p.status.snapshots {
        let told = |s: &Option<SnapshotStatus>| s.as_ref().map(|s| of_snapshot(s, now));
        text.maybe("last full", told(&snapshots.last_full));
        text.maybe("last delta", told(&snapshots.last_delta));
        let events = snapshots.accumulated_delta_events;
        let events = events.map(|n| format!("{n} events"));
        let bytes = snapshots.accumulated_delta_size;
        let bytes = bytes.and_then(|n| u64::try_from(n).ok()).map(size);
        if events.is_some() || snapshots.accumulated_delta_size.is_some() {
            let parts: Vec<String> = events.into_iter().chain(bytes).collect();
            text.field("since the full", parts.join(", "));
        }
    }
    if let Some(window) = &p.status.restorable_window {
        let (first, last) = (window.first_revision, window.last_revision);
        text.field("restorable", format_args!("revisions {first} to {last}"));
    }
    if let Some(c) = &p.status.last_compaction {
        let what = match c.full_snapshot {
            true => ", a full snapshot instead",
            false => "",
        };
        let run = of_run(&c.run, now);
        text.field(
            "last compaction",
            format_args!("{run}; {}{what}", c.trigger),
        );
    }
    let told = |run: &Option<LastRun>| run.as_ref().map(|r| of_run(r, now));
    text.maybe("last verification", told(&p.status.last_verification));
    text.maybe("last restoration", told(&p.status.last_restoration));
    text.maybe("last maintenance", told(&p.status.last_defragmentation));
    if !p.status.active_jobs.is_empty() {
        text.field("running", p.status.active_jobs.join(", "));
    }
    text.end()
}

fn of_snapshot(snapshot: &SnapshotStatus, now: DateTime<Utc>) -> String {
    let name = snapshot.name.as_deref().unwrap_or("of a name unknown");
    let bytes = snapshot.size.and_then(|n| u64::try_from(n).ok());
    let bytes = bytes.map(|n| format!(", {}", size(n)));
    let time = snapshot.time.map(|t| format!(", {} ago", age(t, now)));
    format!(
        "{name}, to revision {}{}{}",
        snapshot.end_revision,
        bytes.unwrap_or_default(),
        time.unwrap_or_default()
    )
}

fn of_run(run: &LastRun, now: DateTime<Utc>) -> String {
    let state = match run.state {
        RunState::Running => "running",
        RunState::Succeeded => "succeeded",
        RunState::Failed => "failed",
    };
    let time = match (run.completion_time, run.start_time) {
        (Some(at), _) => Some(format!(" {} ago", age(at, now))),
        (None, Some(at)) => Some(format!(", begun {} ago", age(at, now))),
        (None, None) => None,
    };
    let revision = run.revision.map(|r| format!(", to revision {r}"));
    let reason = run.reason.as_ref().map(|r| format!(" [{r}]"));
    let message = run.message.as_ref().map(|m| format!(": {m}"));
    let parts = [Some(state.to_owned()), time, revision, reason, message];
    parts.into_iter().flatten().collect()
}
