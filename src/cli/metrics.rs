//! Metrics for Prometheus: the flags, and how a job that ends is measured.

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

/// Where metrics are served.
#[derive(Debug, Args)]
#[command(next_help_heading = "Metrics")]
pub(super) struct MetricsArgs {
    /// Serve /metrics (Prometheus), /healthz and /readyz here: 127.0.0.1:8080, or :8080 for all addresses
    #[arg(long, value_name = "ADDRESS")]
    metrics_bind_address: Option<BindAddress>,
    /// How long a run that has ended goes on serving its metrics; a signal ends it at once
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    metrics_scrape_wait: Duration,
    /// Write the metrics to this file, for node exporter's textfile collector; also when the run fails
    #[arg(long, value_name = "FILE")]
    metrics_file: Option<PathBuf>,
}

impl MetricsArgs {
    /// Opens the endpoint, if one is asked for.
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

    /// Begins to write the file of a process that goes on, if one is asked for.
    pub(super) fn keep_file(&self, metrics: &Metrics) -> Result<Option<Textfile>> {
        let Some(file) = &self.metrics_file else {
            return Ok(None);
        };
        textfile::check(file)?;
        let kept = Textfile::keep(file.clone(), metrics, &Handle::current());
        Ok(Some(kept))
    }

    /// Runs a job that ends, report printed and all, and holds the endpoint open for a while after it.
    pub(super) fn around(
        &self,
        job: &'static str,
        cancel: &Cancel,
        run: impl FnOnce(&Metrics) -> Ended,
    ) -> Ended {
        let metrics = Metrics::new();
        // Before anything else: a job that nobody could look at should not have begun.
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
        metrics.job_ended(job, started.elapsed(), failure);
        if let Some(file) = &self.metrics_file {
            textfile::write_or_warn(file, &metrics);
        }
        if let Some(server) = server
            && !self.metrics_scrape_wait.is_zero()
        {
            let seconds = self.metrics_scrape_wait.as_secs_f64();
            if let Err(e) = &result {
                // What is printed for it comes after the wait.
                tracing::warn!("{job} failed: {e}");
            }
            tracing::info!(seconds, "{job} has ended; its metrics stay for a while");
            server.wait_for_scrape(self.metrics_scrape_wait, cancel);
        }
        result
    }
}
