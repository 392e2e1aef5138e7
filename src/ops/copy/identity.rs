//! The cluster of the target: from the first copy on, the target is the backup of the source's cluster.
//!
//! The object that records it (`ops::identity`) is written before any snapshot. A target of another
//! cluster is refused. Called by `ops::copy::copier`.

use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::identity::{IDENTITY, read};

/// The largest identity object that is read, in bytes.
const MOST_BYTES: u64 = 1 << 20;

/// Makes the target the backup of the source's cluster; a dry run only checks whether it may be. If the
/// source does not record its cluster, nothing changes.
///
/// # Errors
/// Fails with `OtherCluster` if the target belongs to another cluster, unless `take_over` is set or the
/// source's cluster has taken that one's place; `Configuration` if one of the two objects holds
/// something else; or an error of either store.
pub(super) fn claim_target(
    from: &Context,
    to: &Context,
    take_over: bool,
    dry_run: bool,
) -> Result<()> {
    let (Some(source), Some(bytes)) = (
        read(&from.store)?,
        from.store.read_small(IDENTITY, MOST_BYTES)?,
    ) else {
        return Ok(());
    };
    let mut recorded = read(&to.store)?;
    if recorded.is_none() && !dry_run {
        to.store.create_small(IDENTITY, &bytes)?;
        // Another first copy may have been faster, and some servers ignore the condition of a write.
        recorded = read(&to.store)?;
    }
    let Some(target) = recorded else {
        return Ok(());
    };
    if source.cluster_id == target.cluster_id {
        return Ok(());
    }
    let is_successor = source.former_cluster_ids.contains(&target.cluster_id);
    if take_over || is_successor {
        if dry_run {
            return Ok(());
        }
        tracing::warn!(
            cluster_id = source.cluster_id,
            former = target.cluster_id,
            "{} is the backup of the source's cluster from now on",
            to.store.url()
        );
        let bytes = match is_successor {
            true => bytes,
            false => source.replacing(&target).bytes()?,
        };
        return to.store.replace_small(IDENTITY, &bytes);
    }
    Err(Reason::OtherCluster.error(format!(
        "{} is the backup of cluster {}, but {} is that of cluster {}: nothing was copied. Check --from and --to; if the source's cluster has replaced the other, give --take-over once",
        to.store.url(),
        target.describe_cluster(),
        from.store.url(),
        source.describe_cluster()
    )))
}
