//! The flags of metrics, and the metrics endpoint and file of an operation that ends.
//!
//! `snapshot`, `compact`, `copy`, `verify`, `maintain` and `gc` use them. The metrics themselves are in
//! `telemetry::metrics`.

use super::Ended;
use crate::base::{Cancel, duration};
use crate::error::{Error, Result};
use crate::telemetry::endpoint::{BindAddress, MetricsServer, serve};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::textfile::{self, Textfile};
use clap::Args;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Where metrics are served and written.
#[derive(Debug, Args)]
#[command(next_help_heading = "Metrics")]
pub(super) struct MetricsArgs {
    /// Serve /metrics (Prometheus), /healthz and /readyz on this address, such as 127.0.0.1:8080, or :8080
    /// for all interfaces
    #[arg(long, value_name = "ADDRESS")]
    metrics_bind_address: Option<BindAddress>,
    /// Keep serving metrics for this time after the work has ended, or until a signal arrives
    #[arg(long, requires = "metrics_bind_address", value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    metrics_scrape_wait: Duration,
    /// Write the metrics to this file for the textfile collector of node exporter, even if the command fails
    #[arg(long, value_name = "FILE")]
    metrics_file: Option<PathBuf>,
}

impl MetricsArgs {
    /// Starts the endpoint, if --metrics-bind-address is given.
    pub(super) fn serve(
        &self,
        metrics: &Metrics,
        cancel: &Cancel,
    ) -> Result<Option<MetricsServer>> {
        let address = self.metrics_bind_address.as_ref();
        address
            .map(|address| serve(address, metrics, &Handle::current(), cancel))
            .transpose()
    }

    /// Starts to rewrite the file regularly for a continuous operation, if --metrics-file is given.
    pub(super) fn keep_file(&self, metrics: &Metrics) -> Result<Option<Textfile>> {
        let Some(file) = &self.metrics_file else {
            return Ok(None);
        };
        textfile::check(file)?;
        let kept = Textfile::keep(file.clone(), metrics, &Handle::current());
        Ok(Some(kept))
    }

    /// Runs an operation that ends, including printing its report, and records its result. Keeps the endpoint
    /// open for --metrics-scrape-wait afterwards.
    pub(super) fn around(
        &self,
        operation: &'static str,
        cancel: &Cancel,
        run: impl FnOnce(&Metrics) -> Ended,
    ) -> Ended {
        let metrics = Metrics::new();
        // Check the file first: do not start an operation that cannot report its metrics.
        if let Some(file) = &self.metrics_file {
            textfile::check(file)?;
        }
        let server = self.serve(&metrics, cancel)?;
        if let Some(server) = &server {
            server.set_ready(true);
        }
        let started = Instant::now();
        let result = run(&metrics);
        let failure = match &result {
            Ok(failure) => failure.as_ref().map(Error::reason),
            Err(e) => Some(e.reason()),
        };
        metrics.job_ended(operation, started.elapsed(), failure);
        if let Some(file) = &self.metrics_file {
            textfile::write_or_warn(file, &metrics);
        }
        if let Some(server) = server
            && !self.metrics_scrape_wait.is_zero()
        {
            let seconds = self.metrics_scrape_wait.as_secs_f64();
            if let Err(e) = &result {
                // The failure itself is printed only after the wait.
                tracing::warn!("{operation} failed: {e}");
            }
            tracing::info!(
                seconds,
                "{operation} has ended; serving its metrics for a while"
            );
            server.wait_for_scrape(self.metrics_scrape_wait, cancel);
        }
        result
    }
}
