//! `deltafold manifests install|crds|samples`: their arguments, and YAML.

use super::{Output, print, print_json};
use crate::controller::manifests;
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
  A policy to begin with:
      deltafold manifests samples > samples.yaml")]
pub(super) struct ManifestsArgs {
    #[command(subcommand)]
    command: ManifestsCommand,
}

#[derive(Debug, Subcommand)]
enum ManifestsCommand {
    Install(InstallArgs),
    /// The resource definitions alone
    Crds,
    /// Policies for a local volume, S3, Azure and Google Cloud Storage, and a task of each type
    Samples,
}

/// The controller: namespace, resource definitions, rights, two replicas
#[derive(Debug, Args)]
struct InstallArgs {
    /// Where the controller runs
    #[arg(
        short,
        long,
        value_name = "NAMESPACE",
        default_value = manifests::NAMESPACE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    namespace: String,
    /// Its image, and that of the Jobs whose policy names none
    #[arg(
        long,
        value_name = "IMAGE",
        default_value = manifests::IMAGE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    image: String,
}

impl ManifestsArgs {
    pub(super) fn run(&self, output: Output) -> Result<()> {
        let objects = |documents: Vec<manifests::Document>| -> Vec<Value> {
            documents.into_iter().map(|d| d.object).collect()
        };
        let (yaml, objects) = match &self.command {
            ManifestsCommand::Install(args) => (
                manifests::install_yaml(&args.namespace, &args.image)?,
                objects(manifests::install(&args.namespace, &args.image)?),
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
