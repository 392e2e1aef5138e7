//! `deltafold policy status`: its arguments, and the status of policies as text.
//!
//! It reads the status that the controller has written to the API server.

use super::kubernetes::{ClusterArgs, age, table, wait_for};
use super::text::Text;
use super::{Ended, Output, print_outcome, size};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::base::time::utc;
use crate::controller::api::{
    Condition, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastRun, RestorableWindow, RunState,
    SnapshotStatus, SnapshotsStatus,
};
use crate::error::{Error, Reason};
use crate::kubernetes::UserClient;
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use kube::ResourceExt;
use kube::api::ListParams;
use schemars::JsonSchema;
use serde::Serialize;

/// The conditions of a policy, in the order in which they are shown.
const CONDITIONS: [&str; 4] = [
    "Ready",
    "BackupReady",
    "BackupVerified",
    "CompactionHealthy",
];

/// Show backup policies in Kubernetes
///
/// Installed under the name kubectl-deltafold, the program is a kubectl plugin: `kubectl deltafold policy
/// status`.
#[derive(Debug, Args)]
pub(super) struct PolicyCommand {
    #[command(subcommand)]
    command: PolicySubcommand,
}

#[derive(Debug, Subcommand)]
enum PolicySubcommand {
    Status(StatusArgs),
}

/// Show the status of backup policies
///
/// Without NAME, status prints a table of all policies of the namespace. With NAME, it prints the conditions
/// of the policy with their reasons, its newest snapshots and its last Jobs.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show the policies of all namespaces:
      deltafold policy status --all-namespaces
  Show why a policy is not ready:
      deltafold policy status main --namespace etcd")]
struct StatusArgs {
    /// Name of the policy [default: all policies of the namespace]
    name: Option<String>,
    /// Show the policies of all namespaces
    #[arg(short = 'A', long, value_parser = yes_or_no, conflicts_with = "name")]
    all_namespaces: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The result of `policy status`. The field names are a contract. `status` is the policy's status, unchanged
/// from the API.
#[derive(Debug, JsonSchema, Serialize)]
pub(super) struct PoliciesOutcome {
    /// The policies, sorted by namespace and name; with NAME only that one.
    policies: Vec<PolicyOutcome>,
}

/// A policy and its status.
#[derive(Debug, JsonSchema, Serialize)]
struct PolicyOutcome {
    /// The policy's namespace.
    namespace: String,
    /// The policy's name.
    name: String,
    /// The URL of its store.
    store: String,
    /// Whether the policy is suspended: if so, schedules and thresholds start no Jobs.
    suspended: bool,
    /// The policy's status in the API.
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
            let client = self.cluster.client(false).await?;
            let api = match self.all_namespaces {
                true => client.all::<EtcdBackupPolicy>(),
                false => client.api(),
            };
            match &self.name {
                Some(name) => match client.ask("read the policy", api.get_opt(name)).await? {
                    Some(policy) => Ok(vec![policy]),
                    None => Err(no_policy(&client, name)),
                },
                None => {
                    let params = ListParams::default();
                    let list = client.ask("list the policies", api.list(&params)).await?;
                    Ok(list.items)
                }
            }
        })?;
        policies.sort_by_key(|p| (p.namespace(), p.name_any()));
        let policies: Vec<PolicyOutcome> = policies.iter().map(PolicyOutcome::of).collect();
        let outcome = PoliciesOutcome { policies };
        let now = Utc::now();
        print_outcome(output, &outcome, |o| match (&self.name, &o.policies[..]) {
            (Some(_), [policy]) => details(policy, now),
            _ => overview(&o.policies, self.all_namespaces, now),
        })
    }
}

fn no_policy(client: &UserClient, name: &str) -> Error {
    let namespace = client.namespace();
    Reason::Usage.error(format!(
        "there is no EtcdBackupPolicy {name} in the namespace {namespace}"
    ))
}

/// A table of policies.
fn overview(policies: &[PolicyOutcome], with_namespace: bool, now: DateTime<Utc>) -> String {
    if policies.is_empty() {
        return "no policies\n".to_owned();
    }
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
    let rows = policies.iter().map(|p| row(p, with_namespace, now));
    table(header, rows.collect())
}

/// The row of a policy in the table.
fn row(p: &PolicyOutcome, with_namespace: bool, now: DateTime<Utc>) -> [String; 9] {
    let name = match with_namespace {
        true => format!("{}/{}", p.namespace, p.name),
        false => p.name.clone(),
    };
    let [ready, backup, verified, compaction] = CONDITIONS.map(|type_| {
        let condition = p.condition(type_);
        condition.map_or("-", |c| c.status.as_str()).to_owned()
    });
    let snapshots = p.status.snapshots.as_ref();
    let age_of = |snapshot: Option<&SnapshotStatus>| {
        let time = snapshot.and_then(|s| s.time);
        time.map_or("-".to_owned(), |t| age(t, now))
    };
    let events = snapshots.and_then(|s| s.accumulated_delta_events);
    let window = p.status.restorable_window.as_ref();
    [
        name,
        match p.suspended {
            true => format!("{ready} (suspended)"),
            false => ready,
        },
        backup,
        verified,
        compaction,
        age_of(snapshots.and_then(|s| s.last_full.as_ref())),
        age_of(snapshots.and_then(|s| s.last_delta.as_ref())),
        events.map_or("-".to_owned(), |n| n.to_string()),
        window.map_or("-".to_owned(), |w| times(w).unwrap_or_else(|| revisions(w))),
    ]
}

fn revisions(w: &RestorableWindow) -> String {
    format!("{} to {}", w.first_revision, w.last_revision)
}

/// The times of a window; `None` if the Leases do not have them.
fn times(w: &RestorableWindow) -> Option<String> {
    Some(format!("{} to {}", utc(w.first_time?), utc(w.last_time?)))
}

/// One policy: conditions with reasons, snapshots, and the last Jobs.
fn details(p: &PolicyOutcome, now: DateTime<Utc>) -> String {
    let mut text = Text::with_labels(19);
    let suspended = match p.suspended {
        true => ", suspended",
        false => "",
    };
    text.line(format_args!("{}/{}{suspended}", p.namespace, p.name));
    text.field("store", &p.store);
    if p.status.conditions.is_empty() {
        text.line("  not yet processed by a controller");
    }
    let known = CONDITIONS.iter().filter_map(|type_| p.condition(type_));
    let others = p.status.conditions.iter();
    let others = others.filter(|c| !CONDITIONS.contains(&c.type_.as_str()));
    for c in known.chain(others) {
        let (status, duration) = (c.status.as_str(), age(c.last_transition_time, now));
        text.field(
            &c.type_,
            format_args!("{status} for {duration} [{}]: {}", c.reason, c.message),
        );
    }
    if let Some(snapshots) = &p.status.snapshots {
        add_snapshots(snapshots, now, &mut text);
    }
    if let Some(window) = &p.status.restorable_window {
        let times = times(window).map(|times| format!(", {times}"));
        let (revisions, times) = (revisions(window), times.unwrap_or_default());
        text.field("restorable", format_args!("revisions {revisions}{times}"));
    }
    if let Some(c) = &p.status.last_compaction {
        let instead = match c.full_snapshot {
            true => ", a full snapshot instead",
            false => "",
        };
        let job = job_text(&c.run, now);
        text.field(
            "last compaction",
            format_args!("{job}; {}{instead}", c.trigger),
        );
    }
    let job = |job: &Option<LastRun>| job.as_ref().map(|j| job_text(j, now));
    text.maybe("last verification", job(&p.status.last_verification));
    text.maybe("last restoration", job(&p.status.last_restoration));
    text.maybe("last maintenance", job(&p.status.last_defragmentation));
    if !p.status.active_jobs.is_empty() {
        text.field("running", p.status.active_jobs.join(", "));
    }
    text.end()
}

/// Adds the newest snapshots, and the deltas since the newest full.
fn add_snapshots(snapshots: &SnapshotsStatus, now: DateTime<Utc>, text: &mut Text) {
    let snapshot = |s: &Option<SnapshotStatus>| s.as_ref().map(|s| snapshot_text(s, now));
    text.maybe("last full", snapshot(&snapshots.last_full));
    text.maybe("last delta", snapshot(&snapshots.last_delta));
    let (events, bytes) = (
        snapshots.accumulated_delta_events,
        snapshots.accumulated_delta_size,
    );
    if events.is_none() && bytes.is_none() {
        return;
    }
    let events = events.map(|n| count(n, "event"));
    let bytes = bytes.and_then(|n| u64::try_from(n).ok()).map(size);
    let parts: Vec<String> = events.into_iter().chain(bytes).collect();
    text.field("since the full", parts.join(", "));
}

fn snapshot_text(snapshot: &SnapshotStatus, now: DateTime<Utc>) -> String {
    let name = snapshot.name.as_deref().unwrap_or("name unknown");
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

fn job_text(job: &LastRun, now: DateTime<Utc>) -> String {
    let state = match job.state {
        RunState::Running => "running",
        RunState::Succeeded => "succeeded",
        RunState::Failed => "failed",
    };
    let time = match (job.completion_time, job.start_time) {
        (Some(at), _) => Some(format!(" {} ago", age(at, now))),
        (None, Some(at)) => Some(format!(", started {} ago", age(at, now))),
        (None, None) => None,
    };
    let revision = job.revision.map(|r| format!(", to revision {r}"));
    let reason = job.reason.as_ref().map(|r| format!(" [{r}]"));
    let message = job.message.as_ref().map(|m| format!(": {m}"));
    let parts = [Some(state.to_owned()), time, revision, reason, message];
    parts.into_iter().flatten().collect()
}
