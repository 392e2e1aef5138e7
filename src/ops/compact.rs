//! The operation `compact`: folds the newest full and the deltas after it into one new full, and
//! publishes it.
//!
//! Steps: scan the backup, choose a timeline and a chain, fold, lay out the new database, compress and upload
//! it, verify, complete the upload, which names it. Deletes nothing: `gc` removes what the new full supersedes, and
//! the uploads of killed runs.

use crate::backup::catalog::{V2, Wall};
use crate::backup::codec::{self, CompressionChoice};
use crate::backup::frame::FrameWriter;
use crate::backup::{Compression, Kind, SnapshotName};
use crate::base::TextValue;
use crate::base::flag_values::yes_or_no;
use crate::base::opt::TEMP_DIR;
use crate::base::parallel::side_by_side;
use crate::error::{Error, Reason, Result};
use crate::fold::publish::{Packer, TeeWriter, UnnamedSnapshot, names_are_taken, refuse_plaintext};
use crate::fold::rebuild::{Leases, Rebuild};
use crate::kubernetes::SnapshotLeases;
use crate::mvcc::{Fold, HashKv, KeepHistory, KeyRange, Revision};
use crate::ops::options::StateOptions;
use crate::ops::report::{Report, ReportBuilder};
use crate::ops::snapshot_leases::{self, News};
use crate::prefix::newcomers::withdraw;
use crate::prefix::open::State;
use crate::prefix::scan::{Depth, scan};
use crate::prefix::set_aside::{Purpose, decide_again, refuse_excluded_deltas};
use crate::prefix::{Context, free_space, timeline_records};
use crate::telemetry::progress::Step;
use chrono::{DateTime, Utc};
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a new full snapshot keeps of older revisions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// History to keep: latest, all, or a number of revisions; for `deltafold compact` also a duration such as
    /// 90s, 1h30m or 7d
    #[arg(long, value_name = "HISTORY")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_history: Option<TextValue<KeepHistory>>,
}

/// The options of `compact`.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Which history is kept. Default: only the latest revision.
    #[command(flatten)]
    pub history: History,
    /// Compression of the new snapshot: same (as the newest snapshot), none, gzip, zstd or zstd:LEVEL; gzip is written for
    /// zlib and lzw
    #[arg(long, value_name = "METHOD", default_value = "same")]
    pub compression: CompressionChoice,
    /// Only show what would be folded
    #[arg(long, value_parser = yes_or_no)]
    pub dry_run: bool,
    /// The revision or time to fold up to, and the timeline.
    #[command(flatten)]
    pub state: StateOptions,
    /// The snapshot Leases to renew after the compaction; `None` to renew none.
    #[arg(skip)]
    pub leases: Option<SnapshotLeases>,
}

impl Options {
    fn keep_history(&self) -> KeepHistory {
        let text = self.history.keep_history.as_ref();
        text.and_then(TextValue::value)
            .unwrap_or(KeepHistory::Latest)
    }
}

/// The result of a compaction. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Compacted {
    /// The name, without its folder, of the full snapshot that now holds `revision`: the new one, or
    /// the base if there was nothing to do. null in a dry run that would fold.
    pub snapshot: Option<String>,
    /// The name, without its folder, of the base: the full snapshot into which the deltas were folded.
    pub base: String,
    /// The names, without their folders, of the delta snapshots that were folded, in order.
    pub deltas: Vec<String>,
    /// How many events of the deltas were folded. Events that the base already holds are not counted.
    /// null in a dry run that would fold.
    pub events: Option<u64>,
    /// The newest revision of the fold.
    pub revision: Revision,
    /// The moment that was asked for; null if none was.
    pub as_of: Option<DateTime<Utc>>,
    /// The compacted revision of `snapshot`: older states cannot be read from it. -1 if it holds all
    /// history. null in a dry run that would fold.
    pub compact_revision: Option<Revision>,
    /// How many keys are alive at `revision`. null in a dry run that would fold.
    pub live_keys: Option<u64>,
    /// etcd's HashKV of `snapshot` at `revision`: what `etcdctl endpoint hashkv` prints for an etcd
    /// that serves it. null in a dry run that would fold.
    pub hash_kv: Option<u32>,
    /// The ID of the timeline that was folded.
    pub timeline: String,
    /// Bytes read from the store.
    pub bytes_read: u64,
    /// Size of `snapshot` in the store, in bytes; 0 if nothing had to be written.
    pub bytes_written: u64,
    /// The users, roles, members, alarms and leases in `snapshot` are those of this revision, because deltas
    /// hold only keys.
    pub metadata_revision: Revision,
    /// The compression of `snapshot`; in a dry run, the one that it would have.
    pub compression: Compression,
    /// Whether this was a dry run.
    pub dry_run: bool,
}

/// Folds the newest chain, and publishes the result as a new full.
///
/// # Errors
/// Fails with any reason except `Usage`. After a failure, the backup is unchanged, except perhaps for an
/// unfinished upload.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Compacted>> {
    let clock = ReportBuilder::start();
    decide_again([ctx], Purpose::Restore, || {
        Compaction {
            ctx,
            options,
            clock: clock.clone(),
        }
        .run()
    })
}

/// The number of names that are tried: if a name is taken, that of one second later is next.
const NAMES_TRIED: i64 = 10;

/// A compaction under way.
struct Compaction<'a> {
    ctx: &'a Context,
    options: &'a Options,
    clock: ReportBuilder,
}

impl Compaction<'_> {
    fn run(mut self) -> Result<Report<Compacted>> {
        let scan = scan(self.ctx, Depth::Doubtful)?;
        let request = &self.options.state.request();
        let source = if self.options.dry_run {
            State::open(self.ctx, &scan, request)?
        } else {
            State::open_to_fold(self.ctx, &scan, request)?
        };
        self.clock.warnings.extend(source.warnings.iter().cloned());
        if source.is_folded() {
            return self.nothing_to_do(&source);
        }
        refuse_plaintext(self.ctx)?;
        let encoding = self.resolve_compression(&source)?;
        self.warn_about_space(&source);
        if self.options.dry_run {
            refuse_excluded_deltas(self.ctx, source.deltas())?;
            let outcome = self.outcome(&source, encoding);
            return Ok(self.clock.report(outcome));
        }
        let newest = self.newest_name(&source)?;
        let mut new_name = SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            last: source.revision,
            created: newest_input_time(&source) + 1,
            compression: encoding.compression,
            is_final: newest.is_final,
            is_encrypted: self.ctx.keys.encrypts(),
        };
        let (events, folded, bytes) = self.fold_and_write(&source, encoding, &mut new_name)?;
        tracing::info!(
            snapshot = %new_name,
            revision = source.revision.0,
            events,
            hash_kv = folded.hash,
            bytes,
            "{}",
            if bytes == 0 { "an identical full snapshot already exists" } else { "wrote a full snapshot" }
        );
        if scan
            .catalog
            .snapshots
            .iter()
            .any(|s| s.excluded && s.name == new_name)
        {
            self.clock.warn(format!(
                "the result {new_name} already exists, but is excluded: as long as it is, every run folds the same snapshots again. Remove its exclusion, or delete it"
            ));
        }
        let mut outcome = self.outcome(&source, encoding);
        outcome.snapshot = Some(new_name.to_string());
        outcome.events = Some(events);
        outcome.bytes_written = bytes;
        self.add_hash(&mut outcome, &folded);
        let news = News {
            full: true,
            ..News::default()
        };
        self.renew_leases(news);
        Ok(self.clock.report(outcome))
    }

    /// Returns the record of the history that has begun after the inputs, if there is one: the result belongs before it.
    fn next_wall(&self, source: &State) -> Result<Option<Wall>> {
        let walls = timeline_records::list(&self.ctx.store)?;
        Ok(Wall::first_after(&walls, newest_input_time(source)).cloned())
    }

    /// Returns the report if no snapshot is newer than the base.
    fn nothing_to_do(mut self, source: &State) -> Result<Report<Compacted>> {
        let hash = source.hash_of_base(self.ctx)?;
        let compression = self.newest_name(source)?.compression.into();
        let mut outcome = self.outcome(source, compression);
        outcome.snapshot = Some(source.base_name());
        outcome.events = Some(0);
        self.add_hash(&mut outcome, &hash);
        // An earlier run may have failed to renew the Leases.
        self.renew_leases(News::default());
        Ok(self.clock.ended(outcome, false, None))
    }

    fn renew_leases(&mut self, news: News) {
        let leases = self.options.leases.as_ref();
        if let Some(leases) = leases.filter(|_| !self.options.dry_run) {
            let warnings = snapshot_leases::renew(self.ctx, leases, news);
            self.clock.warnings.extend(warnings);
        }
    }

    /// Warns if the temporary directory may be too small. If it certainly is, the fold fails later.
    fn warn_about_space(&mut self, source: &State) {
        let needed = source.temp_bytes();
        let free = free_space::free_bytes(&self.ctx.temp_dir).unwrap_or(u64::MAX);
        if free < needed {
            self.clock.warn(format!(
                "the temporary directory {} has {free} bytes free, and up to about {needed} may be needed: choose another with {TEMP_DIR} if the run fails",
                self.ctx.temp_dir.display()
            ));
        }
    }

    fn resolve_compression(&mut self, source: &State) -> Result<codec::Encoding> {
        let newest = self.newest_name(source)?.compression;
        let encoding = self.options.compression.resolve(newest);
        if !encoding.compression.is_read_by_others() {
            self.clock.warn(format!(
                "{} is deltafold's own addition to the format: etcd-backup-restore cannot read this snapshot",
                encoding.compression
            ));
        }
        Ok(encoding)
    }

    fn newest_name<'s>(&self, source: &'s State) -> Result<&'s SnapshotName> {
        source
            .newest_name()
            .ok_or_else(|| Error::internal("a snapshot in the store has no name"))
    }

    /// Returns an outcome before anything is written.
    fn outcome(&self, source: &State, encoding: codec::Encoding) -> Compacted {
        Compacted {
            snapshot: None,
            base: source.base_name(),
            deltas: source.deltas().map(|s| s.name.to_string()).collect(),
            events: None,
            revision: source.revision,
            as_of: self.options.state.point.time,
            compact_revision: None,
            live_keys: None,
            hash_kv: None,
            timeline: source.timeline.clone(),
            bytes_read: self.ctx.store.bytes_read(),
            bytes_written: 0,
            metadata_revision: source.base.metadata_revision,
            compression: encoding.compression,
            dry_run: self.options.dry_run,
        }
    }

    /// Adds the HashKV, the live keys and the compacted revision to an outcome.
    fn add_hash(&self, outcome: &mut Compacted, hash: &HashKv) {
        outcome.hash_kv = Some(hash.hash);
        outcome.live_keys = Some(hash.live_keys);
        outcome.compact_revision = Some(hash.compact_revision);
    }

    /// Folds the chain and writes the result under the first free name from `name` on, and updates `name`. Returns the
    /// number of events, the hash, and the bytes that were written: 0 if the same snapshot exists already.
    ///
    /// # Errors
    /// `Conflict` if no such name lies before the history that has begun after the inputs.
    fn fold_and_write(
        &self,
        source: &State,
        encoding: codec::Encoding,
        name: &mut SnapshotName,
    ) -> Result<(u64, HashKv, u64)> {
        let compact = source.compact_revision(self.ctx, self.options.keep_history())?;
        let wall = self.next_wall(source)?;
        let (first, tried) = Wall::names_before(wall.as_ref(), name.created, NAMES_TRIED);
        name.created = first;
        while name.created < first + tried {
            let (fold, events) = source.fold(self.ctx, compact, KeyRange::All, false)?;
            let (unnamed, folded) = self.write(source, compact, fold, name, encoding)?;
            if let Some(bytes) = unnamed.complete(self.ctx, name)? {
                // A history that began meanwhile may not have seen this name.
                if let Some(wall) = self.next_wall(source)?
                    && wall.second <= name.created
                {
                    let why = format!("{} was written", wall.path);
                    return Err(withdraw(self.ctx, &format!("{V2}/{name}"), &why));
                }
                return Ok((events, folded, bytes));
            }
            // An upload is bound to its name, so all is written again. That is rare.
            tracing::warn!("{name} is taken by another snapshot: trying the next name");
            name.created += 1;
        }
        name.created = first;
        Err(match wall {
            Some(wall) if tried < NAMES_TRIED => Reason::Conflict.error(format!(
                "the name {V2}/{name} is taken, and there is no other one before {}, with which another history begins: exclude or delete the snapshot of that name if it is damaged",
                wall.path
            )),
            _ => names_are_taken(self.ctx, name, NAMES_TRIED),
        })
    }

    /// Writes the new database: lays it out, compresses and uploads it, and verifies it concurrently
    /// with the upload.
    fn write(
        &self,
        source: &State,
        compact: Revision,
        mut fold: Fold<'_>,
        name: &SnapshotName,
        encoding: codec::Encoding,
    ) -> Result<(UnnamedSnapshot, HashKv)> {
        let rebuild = Rebuild {
            source,
            compact,
            leases: Leases::AsRecorded,
            replaced: BTreeMap::new(),
            meta: BTreeMap::new(),
        };
        let layout = rebuild.measure(self.ctx, &mut fold)?;
        free_space::check(&self.ctx.temp_dir, layout.bytes(), "the new database")?;

        let failed = |e| Error::io("write the new snapshot", e);
        let mut both = TeeWriter::new(
            Some(self.ctx.temp_file()?),
            FrameWriter::new(Packer::to_store(self.ctx, name, encoding, layout.bytes())?),
            Some(Step::new(
                format!("write {}", name.label()),
                Some(layout.bytes()),
            )),
        );
        let folded = rebuild.write(self.ctx, fold, &layout, &mut both)?.hash;
        let (file, stream) = both.into_parts().map_err(failed)?;
        let file = file.ok_or_else(|| Error::internal("the new database has no file"))?;
        let verify = || rebuild.verify(self.ctx.database_file(file), &folded, &layout);
        let upload = || stream.finish().map_err(failed)?.uploaded();
        let (verified, unnamed) = side_by_side(self.ctx.threads, verify, upload);
        let unnamed = unnamed?;
        verified?;
        Ok((unnamed, folded))
    }
}

/// Returns the creation time of the newest input, in seconds since 1970.
fn newest_input_time(source: &State) -> i64 {
    let inputs = source.inputs();
    let created = inputs.map(|s| s.name.created);
    created.max().unwrap_or_default()
}
