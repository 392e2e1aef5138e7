//! Scans a prefix: lists it, reads contents if names leave doubt, and sorts the snapshots into timelines.
//!
//! It decides nothing about chains or retention, and writes nothing to the store.

use crate::backup::catalog::{NOTES, SNAPSHOTS, V1, V2};
use crate::backup::file_name::{is_hidden, is_snapshot_file, newest_pattern};
use crate::backup::timeline::{self, Evidence, NamesOnly, Timeline, Timelines};
use crate::backup::trust::{self, Untrusted};
use crate::backup::{Catalog, ListedObject, SnapshotName};
use crate::base::opt::{AGE_IDENTITY, AGE_RECIPIENT, ALLOW_PLAINTEXT, SNAPSHOT, STORE};
use crate::base::{shell, shorten};
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::prefix::Context;
pub use crate::prefix::contents::Contents;
pub(crate) use crate::prefix::contents::read_contents;
use crate::prefix::open::DatabaseFile;
use crate::prefix::set_aside::{Purpose, SetAside};
use crate::store::{ObjectInfo, Store, open};
use std::collections::BTreeMap;

/// The message if the store does not let this user read tags.
pub const TAGS_UNREADABLE: &str = "the store does not permit to read object tags, so snapshots that a tag excludes look usable: allow s3:GetObjectTagging (on Azure, reading tags)";

/// Which contents a scan reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// No contents: names are believed.
    Names,
    /// The contents of snapshots whose names do not tell their timeline.
    Doubtful,
    /// The contents of all snapshots.
    All,
}

/// The result of a scan.
pub struct Scan {
    /// The snapshots.
    pub catalog: Catalog,
    /// Their timelines.
    pub timelines: Timelines,
    /// The snapshots whose names do not tell their timeline, as indexes in ascending order.
    pub doubtful: Vec<usize>,
    /// The results of reading snapshots.
    pub contents: Contents,
    /// The snapshots that are not trusted because they are not encrypted.
    pub untrusted: Untrusted,
    /// The snapshots that the operation has opened and set aside.
    pub(crate) damaged: BTreeMap<usize, Error>,
    /// The timelines without these; empty if there are none.
    intact: Vec<Timeline>,
    depth: Depth,
}

impl Scan {
    /// A scan by names alone.
    #[cfg(test)]
    pub(crate) fn of_names(catalog: Catalog) -> Result<Scan> {
        Ok(Scan {
            timelines: Timelines::build(&catalog, &NamesOnly)?,
            catalog,
            doubtful: Vec::new(),
            contents: Contents::default(),
            untrusted: Untrusted::default(),
            damaged: BTreeMap::new(),
            intact: Vec::new(),
            depth: Depth::Names,
        })
    }

    /// Returns whether contents tell what the timelines on the two sides of a wall have in common.
    pub(crate) fn knows_paths(&self) -> bool {
        self.depth == Depth::All || self.catalog.walls.is_empty()
    }

    /// Scans the same snapshots again, and reads all of them.
    ///
    /// # Errors
    /// As [`scan`].
    pub(crate) fn with_paths(&self, ctx: &Context) -> Result<Scan> {
        sort(ctx, self.catalog.clone(), Depth::All, |_| Ok(()))
    }

    /// Scans the same snapshots again as if the newest walls without a full behind them did not exist.
    ///
    /// # Errors
    /// As [`scan`].
    pub(crate) fn across_walls_without_full(&self, ctx: &Context) -> Result<Scan> {
        let mut catalog = self.catalog.clone();
        let without = self.timelines.without_full(&self.catalog);
        catalog.walls.retain(|w| !without.contains(&w));
        sort(ctx, catalog, self.depth, |_| Ok(()))
    }

    /// Returns a timeline without the snapshots that are known to be damaged.
    pub(crate) fn intact<'a>(&'a self, timeline: &'a Timeline) -> &'a Timeline {
        let intact = self.intact.iter().find(|t| t.id == timeline.id);
        intact.unwrap_or(timeline)
    }

    /// Returns the error of a damaged snapshot of a timeline, if it has one.
    pub(crate) fn damage_in(&self, timeline: &Timeline) -> Option<&Error> {
        self.all_damage_in(timeline).next().map(|(_, e)| e)
    }

    /// Returns the error of a snapshot of a timeline that no key opens, if there is one.
    pub(crate) fn sealed_in(&self, timeline: &Timeline) -> Option<&Error> {
        let mut damaged = self.all_damage_in(timeline).map(|(_, e)| e);
        damaged.find(|e| SetAside::of(e) == Some(SetAside::Sealed))
    }

    /// Returns the damaged snapshots of a timeline, with their errors.
    pub(crate) fn all_damage_in(
        &self,
        timeline: &Timeline,
    ) -> impl Iterator<Item = (usize, &Error)> {
        let whole = self.timelines.by_id(&timeline.id).ok();
        let damaged = self.damaged.iter().map(|(i, e)| (*i, e));
        damaged.filter(move |(i, _)| whole.is_some_and(|whole| whole.member(*i).is_some()))
    }

    /// Returns whether the name of a snapshot does not tell its timeline.
    pub fn is_doubtful(&self, snapshot: usize) -> bool {
        self.doubtful.binary_search(&snapshot).is_ok()
    }

    /// Fails if the newest state seems to depend on untrusted snapshots.
    ///
    /// # Errors
    /// `Untrusted`.
    pub fn refuse_untrusted(&self, ctx: &Context) -> Result<()> {
        let (untrusted, which) = (&self.untrusted, &self.untrusted.refused);
        if which.is_empty() {
            Ok(())
        } else {
            Err(untrusted_error(&ctx.store, &self.catalog, untrusted, which))
        }
    }

    /// Adds the untrusted snapshots to a failure that may have come of ignoring them.
    pub(crate) fn explain_untrusted(&self, ctx: &Context, e: Error) -> Error {
        let may_be_the_cause = matches!(
            e.reason(),
            Reason::NoSnapshots
                | Reason::OutOfRange
                | Reason::RevisionGap
                | Reason::NoSuchTimeline
                | Reason::KeyNotFound
        );
        if !may_be_the_cause || self.untrusted.is_empty() {
            return e;
        }
        let all: Vec<usize> = self.untrusted.all().collect();
        untrusted_error(&ctx.store, &self.catalog, &self.untrusted, &all).at(e.to_string())
    }

    /// Returns a warning about ignored snapshots, if there are any.
    pub(crate) fn untrusted_warning(&self) -> Option<String> {
        let is_intact = |i: &usize| !self.damaged.contains_key(i);
        untrusted_warning(&self.catalog, self.untrusted.all().filter(is_intact))
    }
}

/// Scans the prefix of the context.
///
/// # Errors
/// `NoSnapshots` if the prefix has no snapshot; errors of the store; `Io`, `NoSpace`. A damaged snapshot is
/// not an error here: [`Contents::unreadable`] holds it.
pub fn scan(ctx: &Context, depth: Depth) -> Result<Scan> {
    scan_with(ctx, depth, |_| Ok(()))
}

/// Lists the prefix and sorts the names into a catalog. Reads no contents.
///
/// # Errors
/// Errors of the store.
pub(crate) fn by_names(store: &Store) -> Result<Catalog> {
    let mut catalog = Catalog::from_listing(list_folders(store, &SNAPSHOTS)?);
    catalog.add_notes(&list_folders(store, &NOTES)?);
    Ok(catalog)
}

/// Lists the objects in these folders.
///
/// # Errors
/// Errors of the store.
pub(crate) fn list_folders(store: &Store, folders: &[&str]) -> Result<Vec<ListedObject>> {
    let listing = store.list(folders)?.into_iter();
    let listed = listing.map(|(path, bytes)| ListedObject { path, bytes });
    Ok(listed.collect())
}

/// Scans as [`scan`] does, and calls `check_full` for every full that is read.
///
/// # Errors
/// As [`scan`]. A full for which `check_full` fails with bad data counts as unreadable.
pub(crate) fn scan_with(
    ctx: &Context,
    depth: Depth,
    check_full: impl Fn(&Database<DatabaseFile>) -> Result<()> + Sync,
) -> Result<Scan> {
    let listed = list_prefix(ctx)?;
    let mut catalog = Catalog::from_listing(listed.objects);
    if catalog.snapshots.is_empty() {
        return Err(no_snapshots_error(ctx, &catalog, listed.page));
    }
    ctx.trust.mark(&mut catalog);
    if !listed.has_notes {
        catalog.add_notes(&list_folders(&ctx.store, &NOTES)?);
    }
    sort(ctx, catalog, depth, check_full)
}

/// What a prefix lists.
struct Listed {
    objects: Vec<ListedObject>,
    /// Whether the notes are among the objects.
    has_notes: bool,
    /// The first paths below the prefix, if they were listed.
    page: Option<Vec<String>>,
}

/// Lists the snapshots of a prefix. One page of all that is in the prefix of an object store tells the most: often it is
/// complete.
fn list_prefix(ctx: &Context) -> Result<Listed> {
    let mut listed = Listed {
        objects: Vec::new(),
        has_notes: false,
        page: None,
    };
    if ctx.store.requests().is_some() {
        match ctx.store.first_page("") {
            Ok((page, is_all)) => {
                let is_ours = |path: &str| {
                    let folder = path.split('/').next();
                    let mut ours = SNAPSHOTS.iter().chain(&NOTES);
                    ours.any(|ours| folder == Some(ours))
                };
                let nameable = page.iter().filter(|o| !o.is_odd);
                listed.page = Some(nameable.map(|o| o.path.clone()).collect());
                if is_all {
                    listed.has_notes = true;
                    let ours = page.into_iter().filter(|o| is_ours(&o.path));
                    let ours =
                        ours.map(|ObjectInfo { path, bytes, .. }| ListedObject { path, bytes });
                    listed.objects = ours.collect();
                    return Ok(listed);
                }
            }
            // A user may be permitted to list these folders alone.
            Err(e) if e.reason() == Reason::PermissionDenied => {}
            Err(e) => return Err(e),
        }
    }
    listed.objects = list_folders(&ctx.store, &SNAPSHOTS)?;
    Ok(listed)
}

/// Reads contents as far as names leave doubt, and sorts the snapshots into timelines.
fn sort(
    ctx: &Context,
    mut catalog: Catalog,
    depth: Depth,
    check_full: impl Fn(&Database<DatabaseFile>) -> Result<()> + Sync,
) -> Result<Scan> {
    let damaged = ctx.marks.apply(ctx, &mut catalog);
    let doubtful = timeline::doubtful(&catalog);
    let to_read: Vec<usize> = match depth {
        Depth::Names => Vec::new(),
        Depth::Doubtful => doubtful.clone(),
        Depth::All => catalog.usable().collect(),
    };
    // Who tells what is wrong goes on past what the store does not hand out.
    let goes_on = ctx.marks.purpose() == Purpose::Verify;
    let is_damage = |e: &Error| {
        if goes_on {
            e.reason().is_of_one_object()
        } else {
            e.reason().is_unreadable()
        }
    };
    let contents = read_contents(ctx, &catalog, to_read, &doubtful, is_damage, check_full)?;
    let evidence: &dyn Evidence = match depth {
        Depth::Names => &NamesOnly,
        _ => &contents,
    };
    let timelines = Timelines::build(&catalog, evidence)?;
    let with_damage = timelines.all.iter().filter(|_| !damaged.is_empty());
    let intact = with_damage.map(|t| t.part(|i| !damaged.contains_key(&i)));
    let intact = intact.collect();
    Ok(Scan {
        damaged,
        intact,
        untrusted: trust::untrusted(&catalog),
        catalog,
        timelines,
        doubtful,
        contents,
        depth,
    })
}

/// Returns the error for snapshots that are not encrypted although keys are given.
pub(crate) fn untrusted_error(
    store: &Store,
    catalog: &Catalog,
    untrusted: &Untrusted,
    which: &[usize],
) -> Error {
    let url = store.url();
    let cure = if untrusted.all_plain {
        let copy = shell::command(["deltafold", "copy", "--from", url, "--to", "STORE"]);
        format!(
            "nothing there is encrypted: copy it to a new prefix with `{copy}`, with {AGE_RECIPIENT}"
        )
    } else {
        "remove or exclude those that are not yours".to_owned()
    };
    Reason::Untrusted.error(format!(
        "keys are given, and these snapshots of {url} are not encrypted, so anybody who can write there may have made them: {}; {cure}, or count them with {ALLOW_PLAINTEXT}",
        paths(catalog, which.iter().copied()),
    ))
}

/// Returns a warning about untrusted snapshots that are ignored, if there are any.
pub(crate) fn untrusted_warning(
    catalog: &Catalog,
    untrusted: impl Iterator<Item = usize>,
) -> Option<String> {
    let untrusted: Vec<usize> = untrusted.collect();
    let first = *untrusted.first()?;
    let is_encrypted = catalog.snapshots[first].name.is_encrypted;
    let paths = paths(catalog, untrusted.into_iter());
    Some(if is_encrypted {
        format!(
            "ignored, since no key is given and these are encrypted: {paths}; new snapshots are not: if you encrypt this backup, give {AGE_RECIPIENT} and {AGE_IDENTITY}"
        )
    } else {
        format!("ignored, since keys are given and these are not encrypted: {paths}")
    })
}

fn paths(catalog: &Catalog, which: impl Iterator<Item = usize>) -> String {
    let paths: Vec<&str> = which.map(|i| catalog.snapshots[i].path.as_str()).collect();
    shorten::line(&paths, ", ", shorten::IN_LIST)
}

/// Returns the error for a prefix without snapshots, with a hint at the likely mistake. `page` has the first paths below
/// the prefix, if they are known.
pub(crate) fn no_snapshots_error(
    ctx: &Context,
    catalog: &Catalog,
    page: Option<Vec<String>>,
) -> Error {
    let url = ctx.store.url();
    if !catalog.foreign.is_empty() {
        return Reason::NoSnapshots.error(format!(
            "{url} holds {} objects in {V1}/ and {V2}/, and none is a snapshot: check {STORE}",
            catalog.foreign.len()
        ));
    }
    let listed = || ctx.store.first_paths().unwrap_or_default();
    let paths = page.unwrap_or_else(listed);
    let has = |is: fn(&str) -> bool| paths.iter().any(|p| !p.contains('/') && is(p));
    let message = if has(|name| name.parse::<SnapshotName>().is_ok()) {
        let above = url.trim_end_matches('/').rsplit_once('/');
        let above = above.map_or_else(String::new, |(above, _)| format!(": {above}"));
        format!(
            "{url} holds snapshots directly: give the folder above it, which holds {V2}/{above}"
        )
    } else if let Some(pattern) = newest_pattern(paths.iter().map(String::as_str)) {
        let pattern = format!("{}/{pattern}", url.trim_end_matches('/'));
        let pattern = shell::word(&pattern);
        format!(
            "{url} holds plain snapshot files, and no fulls and deltas: read the newest with {SNAPSHOT} {pattern}, or import them with `deltafold copy --from-snapshots {pattern} --to STORE`"
        )
    } else {
        let layout = url.trim_end_matches('/').rsplit_once('/');
        let above = layout.filter(|(_, layout)| [V1, V2].contains(layout));
        let above = above.map(|(above, _)| above.to_owned());
        let meant = above.or_else(|| open::likely_folder(url));
        let meant = meant.map(|d| format!("; did you mean {d}?"));
        let meant = meant.or_else(|| backups_below(&paths)).unwrap_or_default();
        let name = url.trim_end_matches('/').rsplit('/').next();
        let file = name.filter(|name| is_snapshot_file(name));
        let file = file.map_or(String::new(), |_| {
            format!("; a single snapshot file is given with {SNAPSHOT}")
        });
        format!(
            "{url} holds no snapshots (looked for {V2}/ and {V1}/ below it): check {STORE}{meant}{file}"
        )
    };
    Reason::NoSnapshots.error(message)
}

/// Whether the first paths of a prefix tell that it holds plain snapshot files.
pub(crate) fn has_plain_snapshots(paths: &[String]) -> bool {
    paths.iter().any(|path| is_snapshot_file(path))
}

/// Returns the folders of backups above these paths, in words; `None` if there are none.
fn backups_below(paths: &[String]) -> Option<String> {
    let mut backups = BTreeMap::new();
    for path in paths.iter().filter(|path| !is_hidden(path)) {
        let chain = [V2, V1].map(|layout| path.split_once(&format!("/{layout}/")));
        if let Some((above, _)) = chain.into_iter().flatten().next() {
            backups.insert(above, "fulls and deltas");
        } else if let Some((folder, _)) = path.split_once('/')
            && is_snapshot_file(&path[folder.len() + 1..])
        {
            backups.insert(folder, "plain snapshot files");
        }
    }
    let backups: Vec<String> = backups
        .iter()
        .map(|(at, of)| format!("{at} ({of})"))
        .collect();
    let backups = shorten::line(&backups, ", ", "");
    (!backups.is_empty()).then(|| format!("; below it: {backups}"))
}
