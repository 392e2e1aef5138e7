//! Checks before a round copies anything: that the target belongs to the same cluster, and that the requested
//! form is possible.
//!
//! Writes nothing.

use super::Listings;
use super::plan::{CopyReason, Decision, Encryption, Plan, Planned, identity};
use crate::backup::trust::{self, Trust};
use crate::backup::{Catalog, SnapshotName};
use crate::base::opt::{
    AGE_IDENTITY, AGE_RECIPIENT, AGE_RECIPIENTS_FILE, ALLOW_PLAINTEXT, DECRYPT, FROM, TAKE_OVER, TO,
};
use crate::error::{Reason, Result};
use crate::prefix::Context;
use std::collections::{HashMap, HashSet};

/// Fails with `OtherCluster` if the target looks like the backup of another cluster: a mix of two
/// backups cannot be restored. If one of the stores has no cluster recorded, the snapshots decide:
/// those of the same time must have some in common.
pub(super) fn refuse_strangers(from: &Context, to: &Context, listings: &Listings) -> Result<()> {
    let Listings { source, target } = listings;
    if both_recorded(from, to)? || !are_strangers(source, target) {
        return Ok(());
    }
    Err(Reason::OtherCluster.error(format!(
        "{} holds other snapshots of the same time as {}, and they have none in common: it looks like the backup of another cluster. Check {FROM} and {TO}, or give {TAKE_OVER} if both belong to one cluster",
        to.store.url(),
        from.store.url()
    )))
}

/// Fails if the planned snapshots cannot be written with the requested encryption: with `Untrusted` if encrypted snapshots would
/// come to a plain target, `Configuration` if plain ones would come to an encrypted target, or `CannotDecrypt`.
pub(super) fn check_encryption(
    from: &Context,
    to: &Context,
    encryption: Encryption,
    listings: &Listings,
    plan: &Plan,
) -> Result<()> {
    let Listings { source, target } = listings;
    if encryption == Encryption::Encrypt
        && to.trust == Trust::OnlyEncrypted
        && trust::is_plain(target)
    {
        let name = to.store.name(&target.snapshots[0].path);
        return Err(Reason::Untrusted.error(format!(
            "the target holds snapshots and no encrypted one, such as {name}: copy to a new prefix, or give {ALLOW_PLAINTEXT}"
        )));
    }
    if encryption == Encryption::Keep
        && let Some((encrypted, plain)) = plain_beside_encrypted(source, target, plan)
    {
        return Err(Reason::Configuration.error(format!(
            "{} is encrypted but the source is not, so {plain} would be written beside it as plain text: give {AGE_RECIPIENT} or {AGE_RECIPIENTS_FILE} to encrypt it, or {DECRYPT} for plain text",
            to.store.name(&encrypted)
        )));
    }
    for p in plan.objects.iter().filter(|p| p.decision == Decision::Copy) {
        let s = &source.snapshots[p.source];
        if !s.name.is_encrypted || encryption.is_verbatim(&s.name) {
            continue;
        }
        let name = from.store.name(&s.path);
        if !from.keys.decrypts() {
            return Err(Reason::CannotDecrypt.error(format!(
                "{name} is encrypted: give the age identity that decrypts it with {AGE_IDENTITY}"
            )));
        }
    }
    Ok(())
}

/// Returns whether both stores record which cluster they belong to.
fn both_recorded(from: &Context, to: &Context) -> Result<bool> {
    use crate::prefix::identity::read;
    Ok(read(&from.store)?.is_some() && read(&to.store)?.is_some())
}

/// Returns the identities of a store's snapshots, which are the same in every form.
pub(super) fn identities(catalog: &Catalog) -> HashSet<String> {
    let all = catalog.snapshots.iter();
    all.map(|s| identity(&s.path, &s.name)).collect()
}

/// Returns whether the stores have no snapshot in common, although the target's newest is not older
/// than the source's oldest.
fn are_strangers(source: &Catalog, target: &Catalog) -> bool {
    let oldest = source.snapshots.iter().map(|s| s.name.created).min();
    let newest = target.snapshots.iter().map(|s| s.name.created).max();
    match (oldest, newest) {
        (Some(oldest), Some(newest)) if newest >= oldest => {
            identities(source).is_disjoint(&identities(target))
        }
        _ => false,
    }
}

/// Finds a snapshot of the target that was encrypted by an earlier copy, and a planned one that would
/// be written as plain text. If some copies are encrypted, all should be.
fn plain_beside_encrypted(
    source: &Catalog,
    target: &Catalog,
    plan: &Plan,
) -> Option<(String, SnapshotName)> {
    let is_plain_copy = |p: &&Planned| p.decision == Decision::Copy && !p.name.is_encrypted;
    let new = plan.objects.iter().find(is_plain_copy)?;
    let encrypted = target.snapshots.iter().filter(|t| t.name.is_encrypted);
    let encrypted: HashMap<String, &str> = encrypted
        .map(|t| (identity(&t.path, &t.name), t.path.as_str()))
        .collect();
    for p in &plan.objects {
        let s = &source.snapshots[p.source];
        if p.reason == CopyReason::ThereInOtherForm
            && !s.name.is_encrypted
            && let Some(path) = encrypted.get(&identity(&s.path, &s.name))
        {
            return Some(((*path).to_owned(), new.name.clone()));
        }
    }
    None
}
