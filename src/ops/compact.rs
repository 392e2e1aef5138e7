//! Compaction: the newest full and the deltas after it become one new full.
//!
//! scan → choose a timeline and a chain → fold → lay out, compress and upload → verify → publish.

use crate::backup::codec::{self, CompressionChoice};
use crate::backup::frame::FrameWriter;
use crate::backup::{Compression, Kind, SnapshotName};
use crate::base::TextValue;
use crate::base::flag_values::yes_or_no;
use crate::error::{Error, Result};
use crate::kubernetes::SnapshotLeases;
use crate::mvcc::{Fold, HashKv, KeepHistory, KeyRange, Revision};
use crate::ops::fold::Source;
use crate::ops::fold::publish::{Both, Packed, Packer, give_name, refuse_plain};
use crate::ops::fold::rebuild::{Leases, Rebuild};
use crate::ops::options::State;
use crate::ops::parallel::side_by_side;
use crate::ops::report::{Clock, Report};
use crate::ops::scan::{Depth, Scan, scan};
use crate::ops::snapshot_leases::{self, News};
use crate::ops::tags::{FEW, without_excluded};
use crate::ops::{Context, free_space};
use crate::telemetry::progress::Step;
use chrono::Utc;
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

/// What to compact, and how.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// What is kept: the latest revision alone, if nothing is said.
    #[command(flatten)]
    pub history: History,
    /// Compression of the new snapshot: same (as the newest snapshot), none, gzip, zlib, lzw, zstd or zstd:LEVEL
    #[arg(long, value_name = "METHOD", default_value = "same")]
    pub compression: CompressionChoice,
    /// Only show what would be folded
    #[arg(long, value_parser = yes_or_no)]
    pub dry_run: bool,
    /// The revision or time to fold up to, and the timeline.
    #[command(flatten)]
    pub state: State,
    /// The Leases that shall tell how far the backup is then.
    #[arg(skip)]
    pub leases: Option<SnapshotLeases>,
}

impl Options {
    fn keep_history(&self) -> KeepHistory {
        let given = self.history.keep_history.as_ref();
        let given = given.and_then(TextValue::value);
        given.unwrap_or(KeepHistory::Latest)
    }
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// A new full is there (or would be, in a dry run).
    Succeeded,
    /// Nothing is newer than the base.
    NothingToDo,
}

/// What was done. The fields are a contract: `docs/compact-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// The name, without its folder, of the full snapshot that now holds `revision`: the one written, or the
    /// base if there was nothing to do. null if a dry run would fold.
    pub snapshot: Option<String>,
    /// The name, without its folder, of the full snapshot that the deltas were folded into.
    pub base: String,
    /// The names, without their folders, of the delta snapshots that were folded, in order.
    pub deltas: Vec<String>,
    /// How many events of the deltas were folded; those that the base holds already are not counted. null if
    /// a dry run would fold.
    pub events: Option<u64>,
    /// The revision folded to.
    pub revision: Revision,
    /// The compacted revision of `snapshot`: states before it cannot be read from it. -1 if it holds all
    /// history. null if a dry run would fold.
    pub compact_revision: Option<Revision>,
    /// How many keys are alive at `revision`. null if a dry run would fold.
    pub live_keys: Option<u64>,
    /// etcd's HashKV of `snapshot` at `revision`: what `etcdctl endpoint hashkv` says of an etcd that serves
    /// it. null if a dry run would fold.
    pub hash_kv: Option<u32>,
    /// The ID of the timeline that was folded.
    pub timeline: String,
    /// Bytes read from the store, the reading back of what was written included.
    pub bytes_read: u64,
    /// Size in the store, in bytes, of `snapshot`; 0 if nothing had to be written.
    pub bytes_written: u64,
    /// Users, roles, members, alarms and leases are as of this revision, since deltas hold only keys.
    pub metadata_revision: Revision,
    /// The compression of `snapshot`, or in a dry run the one it would have.
    pub compression: Compression,
    /// Whether only a plan was made.
    pub dry_run: bool,
}

/// Runs a compaction.
///
/// # Errors
/// Any reason but `Usage`; nothing is visible in the store then but, at worst, a staging object.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let clock = Clock::start();
    without_excluded(|| {
        Run {
            ctx,
            options,
            clock: clock.clone(),
        }
        .run()
    })
}

struct Run<'a> {
    ctx: &'a Context,
    options: &'a Options,
    clock: Clock,
}

impl Run<'_> {
    fn run(mut self) -> Result<Report<Outcome>> {
        let scan = scan(self.ctx, Depth::Doubtful)?;
        // What is not waited for goes on beside the reading and folding.
        let store = &self.ctx.store;
        let writes = !self.options.dry_run;
        let _cleaning = writes.then(|| {
            store.in_background(|store| {
                store.clean_staging(Utc::now());
            })
        });
        let _preparing = (writes && is_delta_newest(&scan)).then(|| store.prepare_naming());
        let request = &self.options.state.request();
        let source = match writes {
            true => Source::open_to_fold(self.ctx, &scan, request)?,
            false => Source::open(self.ctx, &scan, request)?,
        };
        self.clock.warnings.extend(source.warnings.iter().cloned());
        if source.is_folded() {
            let hash = source.hash_of_base(self.ctx)?;
            let compression = self.newest_name(&source)?.compression.into();
            let mut outcome = self.outcome(&source, compression);
            outcome.status = Status::NothingToDo;
            outcome.snapshot = Some(source.base_name());
            outcome.events = Some(0);
            self.fill(&mut outcome, &hash);
            // An earlier run may have failed to.
            self.renew_leases(News::default());
            return Ok(self.clock.report(outcome));
        }

        let inputs = source.inputs();
        let encrypted = inputs.map(|s| &s.name).find(|n| n.is_encrypted);
        refuse_plain(self.ctx, encrypted)?;
        let encoding = self.resolve_compression(&source)?;
        self.warn_about_room(&source);
        if self.options.dry_run {
            self.clock.warnings.extend(source.tags_warning());
            let outcome = self.outcome(&source, encoding);
            return Ok(self.clock.report(outcome));
        }
        if source.deltas().len() > FEW {
            self.ctx.store.find_out_whether_tags_are_told()?;
        }
        let compact = source.compact_revision(self.ctx, self.options.keep_history())?;
        let (fold, events) = source.fold(self.ctx, compact, KeyRange::All, false)?;
        let newest = self.newest_name(&source)?;
        let mut new_name = SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            last: source.target,
            created: newest_input(&source) + 1,
            compression: encoding.compression,
            is_final: newest.is_final,
            is_encrypted: self.ctx.keys.encrypts(),
        };
        let (packed, folded) = self.write(&source, compact, fold, &new_name, encoding)?;
        let bytes = give_name(self.ctx, &packed, &mut new_name)?;
        tracing::info!(
            snapshot = %new_name,
            revision = source.target.0,
            events,
            hash_kv = folded.hash,
            bytes,
            "{}",
            if bytes == 0 { "the very same full snapshot was there already" } else { "wrote a full snapshot" }
        );
        if scan
            .catalog
            .snapshots
            .iter()
            .any(|s| s.excluded && s.name == new_name)
        {
            self.clock.warn(format!(
                "{new_name} was there already and is excluded: it is not used, and the next run folds the same again"
            ));
        }
        let mut outcome = self.outcome(&source, encoding);
        outcome.snapshot = Some(new_name.to_string());
        outcome.events = Some(events);
        outcome.bytes_written = bytes;
        self.fill(&mut outcome, &folded);
        let news = News {
            full: true,
            ..News::default()
        };
        self.renew_leases(news);
        Ok(self.clock.report(outcome))
    }

    fn renew_leases(&mut self, news: News) {
        let leases = self.options.leases.as_ref();
        if let Some(leases) = leases.filter(|_| !self.options.dry_run) {
            let warnings = snapshot_leases::renew(self.ctx, leases, news);
            self.clock.warnings.extend(warnings);
        }
    }

    /// What will certainly not fit is an error where it is known for sure.
    fn warn_about_room(&mut self, source: &Source) {
        let need = source.temp_bytes();
        let free = free_space::free_bytes(&self.ctx.temp_dir).unwrap_or(u64::MAX);
        if free < need {
            self.clock.warn(format!(
                "the temporary directory {} has {free} bytes free; up to about {need} may be needed: choose another with --temp-dir if it fails",
                self.ctx.temp_dir.display()
            ));
        }
    }

    fn resolve_compression(&mut self, source: &Source) -> Result<codec::Encoding> {
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

    fn newest_name<'s>(&self, source: &'s Source) -> Result<&'s SnapshotName> {
        source
            .newest_name()
            .ok_or_else(|| Error::internal("a store's snapshot without a name"))
    }

    fn outcome(&self, source: &Source, encoding: codec::Encoding) -> Outcome {
        Outcome {
            status: Status::Succeeded,
            snapshot: None,
            base: source.base_name(),
            deltas: source.deltas().map(|s| s.name.to_string()).collect(),
            events: None,
            revision: source.target,
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

    fn fill(&self, outcome: &mut Outcome, hash: &HashKv) {
        outcome.hash_kv = Some(hash.hash);
        outcome.live_keys = Some(hash.live_keys);
        outcome.compact_revision = Some(hash.compact_revision);
    }

    /// Lays the new database out, compresses and uploads it on the way, and verifies it.
    fn write(
        &self,
        source: &Source,
        compact: Revision,
        mut fold: Fold<'_>,
        name: &SnapshotName,
        encoding: codec::Encoding,
    ) -> Result<(Packed, HashKv)> {
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
        let mut both = Both::new(
            Some(self.ctx.temp_file()?),
            FrameWriter::new(Packer::named(self.ctx, name, encoding)?),
            Some(Step::new(format!("write {name}"), Some(layout.bytes()))),
        );
        let folded = rebuild.write(self.ctx, fold, &layout, &mut both)?.hash;
        let (file, stream) = both.into_parts().map_err(failed)?;
        let file = file.ok_or_else(|| Error::internal("a database without a file"))?;
        let verify = || rebuild.verify(self.ctx.spool(file), &folded, &layout);
        let stage = || stream.finish().map_err(failed)?.finish();
        let (verified, packed) = side_by_side(self.ctx.threads, verify, stage);
        let packed = packed?;
        verified?;
        Ok((packed, folded))
    }
}

/// Whether there is likely something to fold.
fn is_delta_newest(scan: &Scan) -> bool {
    let newest = scan.catalog.usable().last();
    newest.is_some_and(|i| scan.catalog.snapshots[i].name.kind == Kind::Incr)
}

/// When the newest of all inputs was taken, in seconds since 1970.
fn newest_input(source: &Source) -> i64 {
    let inputs = source.inputs();
    let created = inputs.map(|s| s.name.created);
    created.max().unwrap_or_default()
}
