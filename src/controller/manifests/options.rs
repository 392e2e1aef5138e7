//! The options of `manifests install`.
//!
//! They are arguments of `cli::manifests`; `install` reads them.

use super::{IMAGE, NAMESPACE};
use crate::base::flag_values::yes_or_no;
use crate::controller::jobs::Allowed;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;

/// The options of [`install`](super::install()).
#[derive(Debug, Clone, Args)]
pub struct InstallOptions {
    /// Namespace of the controller
    ///
    /// DELTAFOLD_NAMESPACE also sets --namespace of other commands.
    #[arg(
        short,
        long,
        value_name = "NAMESPACE",
        default_value = NAMESPACE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub namespace: String,
    /// Image of the controller, and of Jobs whose policy does not set one
    #[arg(
        long,
        value_name = "IMAGE",
        default_value = IMAGE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub image: String,
    /// Watch policies in this namespace only; repeatable [default: all]
    ///
    /// The controller gets permissions in these namespaces only. They must exist.
    #[arg(
        long,
        value_name = "NAMESPACE",
        value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub watch_namespace: Vec<String>,
    /// Add permissions for policies and tasks to the Kubernetes roles admin, edit and view
    #[arg(long, value_parser = yes_or_no)]
    pub aggregate_roles: bool,
    /// Port of the API server: the controller's NetworkPolicy allows connections to it; repeatable
    #[arg(
        long,
        value_name = "PORT",
        value_delimiter = ',',
        default_values_t = [443_u16, 6443]
    )]
    pub api_server_port: Vec<u16>,
    /// What policies and tasks may ask for
    #[command(flatten)]
    pub allowed: Allowed,
}
