//! Whose backup the target is: the source's, from the first copy on.
//!
//! The object that tells it (`ops::identity`) is written before any snapshot; a target that is another
//! cluster's is refused.

use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::identity::{IDENTITY, read};

/// It has some hundred bytes.
const MOST_BYTES: u64 = 1 << 20;

/// Makes the target the backup of the source's cluster; a dry run only looks whether it may. A source that does
/// not tell changes nothing.
///
/// # Errors
/// `OtherCluster` where the target is another cluster's: neither `take_over` is set, nor has the source's
/// cluster taken that one's place; `Configuration` where either object holds something else; those of both
/// stores.
pub(super) fn carry(from: &Context, to: &Context, take_over: bool, dry_run: bool) -> Result<()> {
    let (Some(source), Some(bytes)) = (
        read(&from.store)?,
        from.store.read_small(IDENTITY, MOST_BYTES)?,
    ) else {
        return Ok(());
    };
    let mut recorded = read(&to.store)?;
    if recorded.is_none() && !dry_run {
        to.store.create_small(IDENTITY, &bytes)?;
        // Another first copy may have been faster, and some servers take a condition and ignore it.
        recorded = read(&to.store)?;
    }
    let Some(target) = recorded else {
        return Ok(());
    };
    if source.cluster_id == target.cluster_id {
        return Ok(());
    }
    let follows = source.former_cluster_ids.contains(&target.cluster_id);
    if take_over || follows {
        if dry_run {
            return Ok(());
        }
        tracing::warn!(
            cluster_id = source.cluster_id,
            former = target.cluster_id,
            "{} is the backup of the source's cluster from now on",
            to.store.url()
        );
        let bytes = match follows {
            true => bytes,
            false => source.after(&target).bytes()?,
        };
        return to.store.replace_small(IDENTITY, &bytes);
    }
    Err(Reason::OtherCluster.error(format!(
        "{} is the backup of cluster {}, and {} that of {}: nothing was copied. Check --from and --to; if the one cluster has taken the other's place, say so once with --take-over",
        to.store.url(),
        target.cluster(),
        from.store.url(),
        source.cluster()
    )))
}
