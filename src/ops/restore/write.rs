//! Writing a restored state: a member's database or a plain snapshot file, which is then synced and
//! verified.

use super::output::{Output, WriteFailure, sync_along, sync_beside};
use crate::backup::frame::{FrameReader, FrameWriter};
use crate::base::ReadAt;
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::bolt::Layout;
use crate::datadir::install::Dir;
use crate::error::{Error, Result};
use crate::fold::publish::{HashingWriter, TeeWriter};
use crate::fold::rebuild::{Leases, Rebuild, Rebuilt};
use crate::mvcc::{Fold, KeyRange, Revision};
use crate::ops::plain_target::{Unnamed, read_back_error};
use crate::prefix::{Context, free_space};
use crate::store::EncryptingWriter;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Write};
use std::iter;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A database that was written and verified.
pub(super) struct WrittenDatabase {
    pub(super) rebuilt: Rebuilt,
    /// Events of deltas that were folded.
    pub(super) events: u64,
    /// The newest revision.
    pub(super) revision: Revision,
    /// Size of the database.
    pub(super) bytes: u64,
}

/// Folds the source of `rebuild`. Returns the fold, the new database's layout, and the number of
/// events.
fn fold(ctx: &Context, rebuild: &Rebuild<'_>) -> Result<(Fold<'static>, Layout, u64)> {
    let detach = rebuild.leases == Leases::Drop;
    let source = rebuild.source;
    let (mut fold, events) = source.fold(ctx, rebuild.compact, KeyRange::All, detach)?;
    let layout = rebuild.measure(ctx, &mut fold)?;
    Ok((fold, layout, events))
}

/// Writes a member's database to a new file in `dir`.
pub(super) fn database(
    ctx: &Context,
    rebuild: &Rebuild<'_>,
    dir: &Dir,
    name: &str,
) -> Result<WrittenDatabase, WriteFailure> {
    let path = &dir.path().join(name);
    let action = format!("write {}", path.display());
    let failed = |e| WriteFailure::Target(Error::io(&action, e));
    let file = dir.create(name).map_err(WriteFailure::Target)?;
    sync_along(&file, &action, |sync_requests| {
        let out = Output::new(&file, &action, Some(sync_requests));
        let (rebuilt, layout, events) = fill_database(ctx, rebuild, path, &file, out, &action)?;
        let written = file.try_clone().and_then(TempFile::plain).map_err(failed)?;
        let verify = || rebuild.verify(ctx.database_file(written), &rebuilt.hash, &layout);
        sync_beside(&file, &action, verify).map_err(classify_verification)?;
        Ok(WrittenDatabase {
            rebuilt,
            events,
            revision: rebuild.revision(),
            bytes: layout.bytes(),
        })
    })
}

/// Writes the database: streamed if the rebuild allows it, otherwise after a fold in memory.
fn fill_database(
    ctx: &Context,
    rebuild: &Rebuild<'_>,
    path: &Path,
    file: &File,
    mut out: Output<'_>,
    action: &str,
) -> Result<(Rebuilt, Layout, u64), WriteFailure> {
    let failed = |e| WriteFailure::Target(Error::io(action, e));
    let streamed = rebuild.stream(ctx, &mut out);
    let streamed = streamed.map_err(|e| out.classify(e))?;
    if let Some((rebuilt, layout, events)) = streamed {
        out.flush().map_err(failed)?;
        drop(out);
        // The meta pages are known only when all else is written.
        file.write_all_at(&layout.head(), 0).map_err(failed)?;
        return Ok((rebuilt, layout, events));
    }
    let (fold, layout, events) = fold(ctx, rebuild)?;
    let dir = path.parent().unwrap_or(path);
    free_space::check(dir, layout.bytes(), "the new database").map_err(WriteFailure::Target)?;
    let rebuilt = rebuild.write(ctx, fold, &layout, &mut out);
    let rebuilt = rebuilt.map_err(|e| out.classify(e))?;
    out.flush().map_err(failed)?;
    Ok((rebuilt, layout, events))
}

/// Writes a plain snapshot: the database, and its SHA-256 after it.
///
/// An encrypted snapshot can be read by its recipients only. To be verified, its content is also
/// written to a sealed file in the temporary directory.
pub(super) fn snapshot(
    ctx: &Context,
    rebuild: &Rebuild<'_>,
    unnamed: &Unnamed,
    dir: &Path,
) -> Result<WrittenDatabase, WriteFailure> {
    let (fold, layout, events) = fold(ctx, rebuild)?;
    let encrypts = ctx.keys.encrypts();
    let temp_dir = encrypts.then_some(&*ctx.temp_dir);
    for dir in iter::once(dir).chain(temp_dir) {
        free_space::check(dir, layout.bytes(), "the new snapshot").map_err(WriteFailure::Target)?;
    }
    let action = format!("write a snapshot to {}", dir.display());
    let failed = |e| WriteFailure::Target(Error::io(&action, e));
    let out = HashingWriter {
        inner: Output::new(&unnamed.file, &action, None),
        hash: encrypts.then(Sha256::new),
    };
    let plain = encrypts.then(|| ctx.temp_file()).transpose();
    let mut both = TeeWriter::new(
        plain.map_err(WriteFailure::Target)?,
        FrameWriter::new(ctx.keys.encrypt(out).map_err(WriteFailure::Target)?),
        None,
    );
    let written = rebuild.write(ctx, fold, &layout, &mut both);
    let (plain, framed) = both.into_parts().map_err(failed)?;
    let out = framed
        .finish()
        .and_then(EncryptingWriter::finish)
        .map_err(failed)?;
    let HashingWriter {
        inner: mut out,
        hash: sum,
    } = out;
    let rebuilt = written.map_err(|e| out.classify(e))?;
    out.flush().map_err(failed)?;
    drop(out);
    let verify = || match (plain, sum) {
        (Some(plain), Some(sum)) => {
            rebuild.verify(ctx.database_file(plain), &rebuilt.hash, &layout)?;
            unnamed.check_sum(sum, ctx.store.cancel())
        }
        _ => verify_plain(ctx, rebuild, unnamed.reader()?, &rebuilt, &layout),
    };
    sync_beside(&unnamed.file, &action, verify).map_err(classify_verification)?;
    Ok(WrittenDatabase {
        rebuilt,
        events,
        revision: rebuild.revision(),
        bytes: layout.bytes(),
    })
}

/// Verifies a plain snapshot file: its database, and the SHA-256 after it.
fn verify_plain(
    ctx: &Context,
    rebuild: &Rebuild<'_>,
    file: File,
    rebuilt: &Rebuilt,
    layout: &Layout,
) -> Result<()> {
    let database = Prefix {
        file: &file,
        bytes: layout.bytes(),
    };
    rebuild.verify(database, &rebuilt.hash, layout)?;
    // The frame checks the SHA-256 when it reaches the end.
    let frame = FrameReader::new(file);
    for_each_piece(frame, ctx.store.cancel(), read_back_error, |_| Ok(()))
}

/// Classifies a failed verification: bad data is the candidate's fault, since its base contradicts
/// itself.
fn classify_verification(e: Error) -> WriteFailure {
    if e.reason().is_bad_data() {
        WriteFailure::Candidate(e)
    } else {
        WriteFailure::Target(e)
    }
}

/// The first bytes of a file: the database of a snapshot, without its SHA-256.
struct Prefix<'f> {
    file: &'f File,
    bytes: u64,
}

impl ReadAt for Prefix<'_> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        ReadAt::read_exact_at(self.file, buf, offset)
    }
    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}
