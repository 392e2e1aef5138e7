//! `deltafold policy status`: its arguments, and how policies are, in words.

use super::kubernetes::{ClusterArgs, age, table, wait_for};
use super::{Output, print_outcome, size};
use crate::base::Cancel;
use crate::base::flag::yes_or_no;
use crate::controller::api::{
    Condition, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastRun, RunState, SnapshotStatus,
};
use crate::error::{Error, Reason, Result};
use chrono::{DateTime, Utc};
use clap::{Args, Subcommand};
use kube::ResourceExt;
use kube::api::ListParams;
use serde::Serialize;
use std::fmt::Write;

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
#[derive(Debug, Serialize)]
struct PoliciesOutcome {
    policies: Vec<PolicyOutcome>,
}

#[derive(Debug, Serialize)]
struct PolicyOutcome {
    namespace: String,
    name: String,
    store: String,
    suspended: bool,
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
        self.status.conditions.iter().find(|c| c.type_ == type_)
    }
}

impl PolicyCommand {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Result<()> {
        match &self.command {
            PolicySubcommand::Status(args) => args.run(cancel, output),
        }
    }
}

impl StatusArgs {
    fn run(&self, cancel: &Cancel, output: Output) -> Result<()> {
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
                        Error::new(Reason::Usage, what)
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
    ];
    table(header, rows.collect())
}

/// One policy, with all that is known.
fn whole(p: &PolicyOutcome, now: DateTime<Utc>) -> String {
    let mut s = String::new();
    let suspended = match p.suspended {
        true => ", suspended",
        false => "",
    };
    // Writing to a String cannot fail.
    let _ = writeln!(s, "{}/{}{suspended}", p.namespace, p.name);
    let _ = writeln!(s, "  store               {}", p.store);
    if p.status.conditions.is_empty() {
        let _ = writeln!(s, "  no controller has looked at it yet");
    }
    let known = CONDITIONS.iter().filter_map(|type_| p.condition(type_));
    let others = p.status.conditions.iter();
    let others = others.filter(|c| !CONDITIONS.contains(&c.type_.as_str()));
    for c in known.chain(others) {
        let since = age(c.last_transition_time, now);
        let _ = writeln!(
            s,
            "  {:18}  {} for {since} [{}]: {}",
            c.type_,
            c.status.as_str(),
            c.reason,
            c.message
        );
    }
    if let Some(snapshots) = &p.status.snapshots {
        let kinds = [
            ("last full", &snapshots.last_full),
            ("last delta", &snapshots.last_delta),
        ];
        for (what, snapshot) in kinds {
            if let Some(snapshot) = snapshot {
                let _ = writeln!(s, "  {what:18}  {}", of_snapshot(snapshot, now));
            }
        }
        let events = snapshots.accumulated_delta_events;
        let bytes = snapshots.accumulated_delta_size;
        if events.is_some() || bytes.is_some() {
            let events = events.map(|n| format!("{n} events"));
            let bytes = bytes.and_then(|n| u64::try_from(n).ok()).map(size);
            let parts: Vec<String> = events.into_iter().chain(bytes).collect();
            let _ = writeln!(s, "  since the full      {}", parts.join(", "));
        }
    }
    if let Some(window) = &p.status.restorable_window {
        let (first, last) = (window.first_revision, window.last_revision);
        let _ = writeln!(s, "  restorable          revisions {first} to {last}");
    }
    if let Some(c) = &p.status.last_compaction {
        let what = match c.full_snapshot {
            true => ", a full snapshot instead",
            false => "",
        };
        let run = of_run(&c.run, now);
        let _ = writeln!(s, "  last compaction     {run}; {}{what}", c.trigger);
    }
    for (what, run) in [
        ("last verification", &p.status.last_verification),
        ("last restoration", &p.status.last_restoration),
        ("last maintenance", &p.status.last_defragmentation),
    ] {
        if let Some(run) = run {
            let _ = writeln!(s, "  {what:18}  {}", of_run(run, now));
        }
    }
    if !p.status.active_jobs.is_empty() {
        let jobs = p.status.active_jobs.join(", ");
        let _ = writeln!(s, "  running             {jobs}");
    }
    s
}

fn of_snapshot(snapshot: &SnapshotStatus, now: DateTime<Utc>) -> String {
    let name = snapshot.name.as_deref().unwrap_or("of a name unknown");
    let mut s = format!("{name}, to revision {}", snapshot.end_revision);
    if let Some(bytes) = snapshot.size.and_then(|n| u64::try_from(n).ok()) {
        // Writing to a String cannot fail.
        let _ = write!(s, ", {}", size(bytes));
    }
    if let Some(time) = snapshot.time {
        let _ = write!(s, ", {} ago", age(time, now));
    }
    s
}

fn of_run(run: &LastRun, now: DateTime<Utc>) -> String {
    let state = match run.state {
        RunState::Running => "running",
        RunState::Succeeded => "succeeded",
        RunState::Failed => "failed",
    };
    let mut s = state.to_owned();
    // Writing to a String cannot fail.
    let _ = match (run.completion_time, run.start_time) {
        (Some(at), _) => write!(s, " {} ago", age(at, now)),
        (None, Some(at)) => write!(s, ", begun {} ago", age(at, now)),
        (None, None) => Ok(()),
    };
    if let Some(revision) = run.revision {
        let _ = write!(s, ", to revision {revision}");
    }
    if let Some(reason) = &run.reason {
        let _ = write!(s, " [{reason}]");
    }
    if let Some(message) = &run.message {
        let _ = write!(s, ": {message}");
    }
    s
}
