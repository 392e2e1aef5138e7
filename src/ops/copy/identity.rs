//! The cluster of the target: from the first copy on, the target is the backup of the source's cluster.
//!
//! The object that records it (`prefix::identity`) is written before any snapshot. A target of another cluster is
//! refused.

use crate::base::opt::{FROM, TAKE_OVER, TO};
use crate::error::{Reason, Result};
use crate::prefix::Context;
use crate::prefix::identity::{IDENTITY, read};

/// Makes the target the backup of the source's cluster; a dry run only checks whether it may be. If the
/// source does not record its cluster, nothing changes.
///
/// # Errors
/// Fails with `OtherCluster` if the target belongs to another cluster, unless `take_over` is set: what the
/// source says of former clusters proves nothing. Fails with `Configuration` if one of the two objects holds
/// something else, or with an error of either store.
pub(super) fn claim_target(
    from: &Context,
    to: &Context,
    take_over: bool,
    dry_run: bool,
) -> Result<()> {
    let Some(source) = read(&from.store)? else {
        return Ok(());
    };
    let mut recorded = read(&to.store)?;
    if recorded.is_none() && !dry_run {
        to.store.create_small(IDENTITY, &source.bytes()?)?;
        // Another first copy may have been faster, and some servers ignore the condition of a write.
        recorded = read(&to.store)?;
    }
    let Some(target) = recorded else {
        return Ok(());
    };
    if source.is_same_cluster(&target) {
        return Ok(());
    }
    if take_over {
        if dry_run {
            return Ok(());
        }
        tracing::warn!(
            cluster_id = source.cluster_id,
            former = target.cluster_id,
            "{} is the backup of the source's cluster from now on",
            to.store.url()
        );
        let bytes = source.replacing(&target).bytes()?;
        return to.store.replace_small(IDENTITY, &bytes);
    }
    Err(Reason::OtherCluster.error(format!(
        "{} is the backup of cluster {}, but {} is that of cluster {}: nothing was copied. Check {FROM} and {TO}; if the source's cluster has replaced the other, give {TAKE_OVER} once",
        to.store.url(),
        target.describe_cluster(),
        from.store.url(),
        source.describe_cluster()
    )))
}
