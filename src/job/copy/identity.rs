//! Whose backup the target is: the source's, from the first copy on.
//!
//! The object that tells it is written before any snapshot; a target that is another cluster's is refused.

use crate::error::{Error, Reason, Result};
use crate::job::Context;
use serde_json::Value;

/// The object that tells whose backup a prefix is.
const IDENTITY: &str = "deltafold-identity.json";
const MOST_BYTES: u64 = 64 << 10;

/// Makes the target the backup of the source's cluster. A source that does not tell changes nothing.
///
/// # Errors
/// `OtherCluster` where the target is another cluster's and `take_over` is not set; those of both stores.
pub(super) fn carry(from: &Context, to: &Context, take_over: bool) -> Result<()> {
    let Some(ours) = from.store.read_small(IDENTITY, MOST_BYTES)? else {
        return Ok(());
    };
    let Some(theirs) = to.store.read_small(IDENTITY, MOST_BYTES)? else {
        to.store.create_small(IDENTITY, &ours)?;
        return Ok(());
    };
    let (source, target) = (cluster(&ours), cluster(&theirs));
    if source == target {
        return Ok(());
    }
    if take_over {
        tracing::warn!(
            ?source,
            ?target,
            "the target is another cluster's from now on"
        );
        return to.store.replace_small(IDENTITY, &ours);
    }
    Err(Error::new(
        Reason::OtherCluster,
        format!(
            "{} is the backup of cluster {}, {} that of {}: choose another --to, or give --take-over if the one replaces the other",
            to.store.url(),
            target.unwrap_or_default(),
            from.store.url(),
            source.unwrap_or_default()
        ),
    ))
}

fn cluster(identity: &[u8]) -> Option<String> {
    let identity: Value = serde_json::from_slice(identity).ok()?;
    Some(identity.get("clusterId")?.as_str()?.to_owned())
}
