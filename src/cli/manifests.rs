//! `deltafold manifests install|namespace|cleanup|crds|samples`: their arguments, and YAML.

use super::{Output, print, print_json};
use crate::controller::manifests;
use crate::controller::manifests::{CleanupOptions, InstallOptions};
use crate::error::Result;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

/// Print what is applied to a cluster: the controller, its resource definitions, samples
///
/// YAML for kubectl, or with --output json a List. Nothing is sent anywhere.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  The controller and all that it needs:
      deltafold manifests install --image registry.example/deltafold:0.1.0 |
          kubectl apply --server-side -f -
  The controller with rights in two namespaces alone, and images of one registry:
      deltafold manifests install --watch-namespace etcd-a,etcd-b --allowed-image-prefix registry.example/etcd
  A policy to begin with:
      deltafold manifests samples > samples.yaml")]
pub(super) struct ManifestsArgs {
    #[command(subcommand)]
    command: ManifestsCommand,
}

#[derive(Debug, Subcommand)]
enum ManifestsCommand {
    /// The controller: namespace, resource definitions, rights, admission policies, two replicas
    Install(InstallOptions),
    /// What Jobs need in a namespace of policies, and a NetworkPolicy for them
    Namespace(NamespaceArgs),
    /// A Job that removes once what the controller of version 0.1 made at run time
    Cleanup(CleanupOptions),
    /// The resource definitions alone
    Crds,
    /// Policies for a local volume, S3, Azure and Google Cloud Storage, and a task of each type
    Samples,
}

#[derive(Debug, Args)]
struct NamespaceArgs {
    /// The namespace
    #[arg(value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    name: String,
}

impl ManifestsArgs {
    pub(super) fn run(&self, output: Output) -> Result<()> {
        let objects = |documents: Vec<manifests::Document>| -> Vec<Value> {
            documents.into_iter().map(|d| d.object).collect()
        };
        let (yaml, objects) = match &self.command {
            ManifestsCommand::Install(options) => (
                manifests::install_yaml(options)?,
                objects(manifests::install(options)?),
            ),
            ManifestsCommand::Namespace(args) => (
                manifests::namespace_yaml(&args.name)?,
                objects(manifests::namespace(&args.name)),
            ),
            ManifestsCommand::Cleanup(options) => (
                manifests::cleanup_yaml(options)?,
                objects(manifests::cleanup(options)),
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
