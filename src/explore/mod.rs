//! Explore: a page that shows a backup at any moment, for a browser on this machine.
//!
//! The page is served as soon as the backup is listed, read-only and on loopback. Meanwhile the index is made; what the
//! page shows is computed from it.
//!
//! - [`run`]: reads the backup in the background, and serves until it is cancelled
//! - `index`: every version of every key; `kinds`: which object a key is
//! - `views`: what the page shows, as pure functions of the index
//! - `store`: the backup as a whole
//! - `api`: the routes; `guard`: who may ask
//! - `page/`: the page, which the program contains

mod api;
mod guard;
mod index;
mod kinds;
mod store;
mod views;

use crate::base::Cancel;
use crate::error::{Error, Reason, Result};
use crate::objects::EncryptionKeys;
use crate::objects::key::EtcdPrefixes;
use crate::prefix::open::BackupLocation;
use crate::prefix::scan::{Depth, scan};
use crate::prefix::set_aside::{Purpose, decide_again};
use crate::telemetry::connection_limit::{LimitedListener, Limits};
use crate::telemetry::endpoint::BindAddress;
use api::Shared;
use axum::middleware::from_fn_with_state;
use guard::{Token, guard};
use index::Index;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;

/// More idle connections than these, or longer ones, keep nobody from the page.
const LIMITS: Limits = Limits {
    connections: 64,
    idle_timeout: Duration::from_secs(600),
};

/// The options of `explore`.
#[derive(Debug, Clone)]
pub struct Options {
    /// The port on the loopback address; 0 for any free one.
    pub port: u16,
    /// The ID of the timeline; `None` for the newest.
    pub timeline: Option<String>,
    /// What the API server's keys begin with, without a slash at the end.
    pub prefixes: EtcdPrefixes,
}

/// Serves the page of a backup until it is cancelled. `announce` gets the address, with its token.
///
/// # Errors
/// `NoSnapshots` if there is nothing to show; `Configuration` if the port is in use; `PermissionDenied`; the error of
/// opening the store; `Io`. A backup that cannot be read for another reason is shown on the page.
pub fn run(
    backup: BackupLocation,
    options: &Options,
    keys: EncryptionKeys,
    handle: &Handle,
    cancel: &Cancel,
    announce: impl FnOnce(&str) -> Result<()>,
) -> Result<()> {
    refuse_empty(&backup)?;
    let token = Arc::new(Token::random()?);
    let _entered = handle.enter();
    let (listener, address) = BindAddress::loopback(options.port).listen("the page")?;
    let address = format!("http://{address}/#token={}", token.text());
    let shared = Arc::new(Shared {
        backup,
        keys,
        overview: OnceLock::new(),
        index: OnceLock::new(),
    });
    let router = api::routes()
        .layer(from_fn_with_state(token, guard))
        .with_state(shared.clone());
    announce(&address)?;
    let options = options.clone();
    if !matches!(shared.backup, BackupLocation::File(..)) {
        let shared = shared.clone();
        handle.spawn_blocking(move || _ = shared.overview.set(store::overview(&shared.backup)));
    }
    handle.spawn_blocking(move || {
        let index = read(&shared.backup, &options);
        match &index {
            Ok(index) => tracing::info!(keys = index.keys.len(), "the backup has been read"),
            Err(e) => tracing::error!(reason = e.reason().as_str(), "{e}"),
        }
        let _ = shared.index.set(index);
    });
    let served = handle.block_on(
        cancel.or(async { axum::serve(LimitedListener::new(listener, LIMITS), router).await }),
    );
    match served {
        // A signal is the normal end.
        Err(e) if e.reason() == Reason::Terminated => Ok(()),
        Err(e) => Err(e),
        Ok(ended) => ended.map_err(|e| Error::io("serve the page", e)),
    }
}

/// Fails if the backup cannot be listed, or has no snapshot: a page would show nothing.
fn refuse_empty(backup: &BackupLocation) -> Result<()> {
    match backup {
        BackupLocation::File(..) => Ok(()),
        BackupLocation::Prefix(ctx) => scan(ctx, Depth::Names).map(drop),
    }
}

/// Reads the backup.
fn read(backup: &BackupLocation, options: &Options) -> Result<Index> {
    decide_again([backup.context()], Purpose::Read, || {
        Index::read(backup, options.timeline.as_deref(), &options.prefixes)
    })
}
