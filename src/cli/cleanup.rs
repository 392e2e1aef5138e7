//! `deltafold cleanup`: its arguments, and its result as text.
//!
//! The operation itself is `controller::cleanup`.

use super::kubernetes::wait_for;
use super::text::Text;
use super::{Ended, Output, print_outcome};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::controller::cleanup::{ObjectName, Options, Outcome, run};
use crate::kubernetes::UserClient;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;

/// Remove leftovers of the controller of version 0.1
///
/// Removes the finalizer deltafold.io/in-use from Secrets, and the Roles, RoleBindings and ServiceAccounts
/// deltafold-POLICY that no Pod, Job, CronJob or Deployment uses. Run it once after the upgrade of the
/// controller. If an object cannot be removed yet, the result says why: run it again later. It does not read
/// the contents of Secrets.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what would be removed:
      deltafold cleanup --dry-run
  Run it as a Job in the cluster, with its own ServiceAccount:
      deltafold manifests cleanup | kubectl apply --server-side -f -")]
pub(super) struct CleanupArgs {
    /// Clean up this namespace; repeatable [default: all]
    ///
    /// DELTAFOLD_NAMESPACE also sets --namespace of other commands.
    #[arg(short, long, value_name = "NAMESPACE", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    namespace: Vec<String>,
    /// Context of the kubeconfig [default: the current context]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    context: Option<String>,
    /// Only show what would be removed
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
            let client = UserClient::connect(self.context.as_deref(), None, false).await?;
            run(&client, &options).await
        })?;
        print_outcome(output, &outcome, to_text)
    }
}

fn to_text(outcome: &Outcome) -> String {
    let would = match outcome.dry_run {
        true => "would have ",
        false => "",
    };
    let mut text = Text::new();
    for (done, objects) in [
        ("released", &outcome.released),
        ("deleted", &outcome.deleted),
        ("disowned", &outcome.disowned),
    ] {
        for object in objects {
            text.line(format_args!("{would}{done} {}", full_name(object)));
        }
    }
    for left in &outcome.left {
        text.line(format_args!(
            "left {}: {}",
            full_name(&left.object),
            left.reason
        ));
    }
    match text.end() {
        text if text.is_empty() => "nothing to clean up\n".to_owned(),
        text => text,
    }
}

fn full_name(object: &ObjectName) -> String {
    format!("{} {}/{}", object.kind, object.namespace, object.name)
}
