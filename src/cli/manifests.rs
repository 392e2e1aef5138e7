//! `deltafold manifests install|namespace|crds|samples`: their arguments, and YAML or JSON.
//!
//! `controller::manifests` makes the objects.

use super::{Output, print, print_json};
use crate::controller::manifests;
use crate::controller::manifests::InstallOptions;
use crate::error::Result;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

/// Print manifests for Kubernetes: the controller, its resource definitions, samples
///
/// Prints YAML for kubectl, or with --output json a List. Nothing is sent to a cluster.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Install the controller:
      deltafold manifests install --image registry.example/deltafold:0.1.0 |
          kubectl apply --server-side -f -
  Install a controller for two namespaces only, and allow images of one registry:
      deltafold manifests install --watch-namespace etcd-a,etcd-b \\
          --allowed-image-prefix registry.example/etcd | kubectl apply --server-side -f -
  Write sample policies to a file:
      deltafold manifests samples > samples.yaml")]
pub(super) struct ManifestsArgs {
    #[command(subcommand)]
    command: ManifestsCommand,
}

#[derive(Debug, Subcommand)]
enum ManifestsCommand {
    /// Print the YAML that installs the controller with two replicas: namespace, custom resource definitions,
    /// RBAC, admission policies
    Install(InstallOptions),
    /// Print what Jobs need in a namespace: ServiceAccount, RoleBinding and NetworkPolicy
    Namespace(NamespaceArgs),
    /// Print the resource definitions only
    Crds,
    /// Print sample policies for a local volume, S3, Azure and Google Cloud, and a sample task of each type
    Samples,
}

#[derive(Debug, Args)]
struct NamespaceArgs {
    /// Namespace
    #[arg(value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    name: String,
}

/// The objects of documents, without comments.
fn objects(documents: Vec<manifests::Document>) -> Vec<Value> {
    documents.into_iter().map(|d| d.object).collect()
}

impl ManifestsArgs {
    pub(super) fn run(&self, output: Output) -> Result<()> {
        let (yaml, objects) = match &self.command {
            ManifestsCommand::Install(options) => (
                manifests::install_yaml(options)?,
                objects(manifests::install(options)?),
            ),
            ManifestsCommand::Namespace(args) => (
                manifests::namespace_yaml(&args.name)?,
                objects(manifests::namespace(&args.name)),
            ),
            ManifestsCommand::Crds => (manifests::crds_yaml()?, objects(manifests::definitions()?)),
            ManifestsCommand::Samples => (manifests::samples_yaml(), manifests::samples()?),
        };
        match output {
            Output::Text => print(&yaml),
            Output::Json => {
                print_json(&json!({"apiVersion": "v1", "kind": "List", "items": objects}))
            }
        }
    }
}
