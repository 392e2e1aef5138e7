//! The arguments that policies and tasks add to the command line of their Jobs, and why they are refused.
//!
//! An option that few need is not a field: it is given as on the command line, and checked as the Job will read it.

use super::super::api::{EtcdBackupPolicy, EtcdBackupTask};
use super::Settings;
use super::table::Table;
use std::collections::BTreeSet;

/// The flags that `args` may have. All others are set by fields, or reach beyond the backup of the policy: other stores,
/// files of the Pod, identities, and what the controller reads of a Job.
const PERMITTED: &str = "\
all-chains allow-plaintext allow-shrink bandwidth bump-revision command-timeout delta-events dial-timeout \
drill-timeout file-mode if-needed include-excluded keep-daily keep-history keep-hourly keep-monthly keep-weekly \
keepalive-time keepalive-timeout lease-ttl leases log-level mark-compacted max-delta-bytes max-full-age \
no-record parallel quota-backend-bytes requests single-writer staging-age take-over threads timeline";

/// Returns the first flag that is not [`PERMITTED`]. An argument without a dash is the value of a flag.
pub(super) fn not_permitted(args: &[String]) -> Option<&str> {
    let is_permitted = |arg: &str| match arg.strip_prefix("--") {
        Some(flag) => PERMITTED
            .split(' ')
            .any(|name| Some(name) == flag.split('=').next()),
        None => !arg.starts_with('-'),
    };
    let refused = args.iter().find(|arg| !is_permitted(arg));
    refused.map(String::as_str)
}

/// Returns what is wrong with the `args` of a policy that has no other [`problems`](super::problems).
pub fn args_problems(policy: &EtcdBackupPolicy, settings: &Settings) -> Vec<String> {
    let table = Table::new(policy, settings);
    let pods = table.scheduled().into_iter().map(|row| row.pod);
    let pods = pods.chain(table.follower()).chain([table.compaction(None)]);
    let full = policy.spec.etcd.as_ref().map(|_| table.full_snapshot());
    let problems: BTreeSet<String> = pods
        .chain(full)
        .filter_map(|pod| pod.refused_args())
        .collect();
    problems.into_iter().collect()
}

/// Returns what is wrong with the `args` of a task that has no other [`problems`](super::task_problems).
pub fn task_args_problem(
    policy: &EtcdBackupPolicy,
    task: &EtcdBackupTask,
    settings: &Settings,
) -> Option<String> {
    Table::new(policy, settings).task(task).refused_args()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_names_the_flags_that_can_be_given() {
        let guide = include_str!("../../../docs/controller.md");
        let (_, named) = guide.split_once("These options can be given").unwrap();
        let (named, _) = named.split_once("\n\n").unwrap();
        let named: Vec<&str> = named.split("`--").skip(1).collect();
        let flags = named.iter().filter_map(|n| n.split('`').next());
        assert_eq!(flags.collect::<Vec<_>>().join(" "), PERMITTED);
    }
}
