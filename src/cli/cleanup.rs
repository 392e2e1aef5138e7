//! `deltafold cleanup`: its arguments, and its outcome in words.

use super::kubernetes::wait_for;
use super::{Ended, Output, print_outcome};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::controller::cleanup::{ObjectName, Options, Outcome, run};
use crate::kubernetes::UserClient;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;

/// Remove once what the controller of version 0.1 made at run time
///
/// That is the finalizer deltafold.io/in-use of Secrets, and the Roles, RoleBindings and ServiceAccounts
/// deltafold-POLICY that no Pod, Job, CronJob or Deployment uses any more. Run it after the upgrade of the
/// controller. It tells what is left and why; run it again then. It reads no contents of Secrets.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  What would be removed?
      deltafold cleanup --dry-run
  As a Job in the cluster, with rights of its own:
      deltafold manifests cleanup | kubectl apply --server-side -f -")]
pub(super) struct CleanupArgs {
    /// A namespace to clean up; may be given again [default: all]
    #[arg(short, long, value_name = "NAMESPACE", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    namespace: Vec<String>,
    /// The context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    context: Option<String>,
    /// Change nothing, and tell what would be done
    #[arg(long, value_parser = yes_or_no)]
    dry_run: bool,
}

impl CleanupArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let options = Options {
            namespaces: self.namespace.clone(),
            dry_run: self.dry_run,
        };
        let outcome = wait_for(cancel, async {
            let person = UserClient::connect(self.context.as_deref(), None, false).await?;
            run(&person, &options).await
        })?;
        print_outcome(output, &outcome, in_words)
    }
}

fn in_words(outcome: &Outcome) -> String {
    let would = match outcome.dry_run {
        true => "would have ",
        false => "",
    };
    let said = |what: &str, items: &[ObjectName]| {
        let lines = items
            .iter()
            .map(|item| format!("{would}{what} {}\n", full_name(item)));
        lines.collect::<String>()
    };
    let left = outcome.left.iter();
    let left = left.map(|left| format!("left {}: {}\n", full_name(&left.object), left.reason));
    let text = said("released", &outcome.released)
        + &said("deleted", &outcome.deleted)
        + &said("disowned", &outcome.disowned)
        + &left.collect::<String>();
    match text.is_empty() {
        true => "nothing to clean up\n".to_owned(),
        false => text,
    }
}

fn full_name(item: &ObjectName) -> String {
    format!("{} {}/{}", item.kind, item.namespace, item.name)
}
