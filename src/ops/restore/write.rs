//! Writes what is rebuilt: a member's database, or a plain snapshot file; then syncs and verifies it.

use super::output::{Failed, Output, Unnamed, create, sync_along, sync_beside};
use crate::backup::frame::{FrameReader, FrameWriter};
use crate::base::read_all::for_each_piece;
use crate::base::temp::TempFile;
use crate::base::{Cancel, ReadAt};
use crate::bolt::Layout;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Fold, KeyRange, Revision};
use crate::ops::fold::publish::{HashingWriter, TeeWriter};
use crate::ops::fold::rebuild::{Leases, Rebuild, Rebuilt};
use crate::ops::{Context, free_space};
use crate::store::Sealed;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// What a fold came to.
pub(super) struct Written {
    pub(super) rebuilt: Rebuilt,
    pub(super) events: u64,
    pub(super) revision: Revision,
    pub(super) bytes: u64,
}

/// Folds a plan's source. Gives the layout and the number of events, too.
fn fold(ctx: &Context, rebuild: &Rebuild<'_>) -> Result<(Fold<'static>, Layout, u64)> {
    let detach = rebuild.leases == Leases::Drop;
    let source = rebuild.source;
    let (mut fold, events) = source.fold(ctx, rebuild.compact, KeyRange::All, detach)?;
    let layout = rebuild.measure(ctx, &mut fold)?;
    Ok((fold, layout, events))
}

/// Writes a member's database.
pub(super) fn database(
    ctx: &Context,
    rebuild: &Rebuild<'_>,
    path: &Path,
) -> Result<Written, Failed> {
    let what = format!("write {}", path.display());
    let failed = |e| Failed::Target(Error::io(&what, e));
    let file = create(path).map_err(failed)?;
    sync_along(&file, &what, |grown| {
        let mut out = Output::new(&file, &what, Some(grown));
        let streamed = rebuild.stream(ctx, &mut out);
        let streamed = streamed.map_err(|e| out.whose(e))?;
        let head = streamed.as_ref().map(|(_, layout, _)| layout.head());
        let (rebuilt, layout, events) = match streamed {
            Some(streamed) => streamed,
            None => {
                let (fold, layout, events) = fold(ctx, rebuild)?;
                let dir = path.parent().unwrap_or(path);
                free_space::check(dir, layout.bytes(), "the new database")
                    .map_err(Failed::Target)?;
                let rebuilt = rebuild.write(ctx, fold, &layout, &mut out);
                (rebuilt.map_err(|e| out.whose(e))?, layout, events)
            }
        };
        out.flush().map_err(failed)?;
        drop(out);
        if let Some(head) = head {
            file.write_all_at(&head, 0).map_err(failed)?;
        }
        let again = File::open(path).and_then(TempFile::plain).map_err(failed)?;
        let verify = || rebuild.verify(ctx.database_file(again), &rebuilt.hash, &layout);
        sync_beside(&file, &what, verify).map_err(of_whom)?;
        Ok(Written {
            rebuilt,
            events,
            revision: rebuild.revision(),
            bytes: layout.bytes(),
        })
    })
}

/// Writes a plain snapshot: the database, and its SHA-256.
///
/// One that is encrypted is in the temporary directory, too, in a sealed file, to be verified: nobody but the
/// recipients can read the other.
pub(super) fn snapshot(
    ctx: &Context,
    rebuild: &Rebuild<'_>,
    unnamed: &Unnamed,
    dir: &Path,
) -> Result<Written, Failed> {
    let (fold, layout, events) = fold(ctx, rebuild)?;
    let encrypts = ctx.keys.encrypts();
    for dir in [Some(dir), encrypts.then_some(&*ctx.temp_dir)] {
        let room = dir.map(|dir| free_space::check(dir, layout.bytes(), "the new snapshot"));
        room.transpose().map_err(Failed::Target)?;
    }
    let what = format!("write a snapshot to {}", dir.display());
    let failed = |e| Failed::Target(Error::io(&what, e));
    let out = HashingWriter {
        inner: Output::new(&unnamed.file, &what, None),
        hash: encrypts.then(Sha256::new),
    };
    let plain = encrypts.then(|| ctx.temp_file()).transpose();
    let mut both = TeeWriter::new(
        plain.map_err(Failed::Target)?,
        FrameWriter::new(ctx.keys.encrypt(out).map_err(Failed::Target)?),
        None,
    );
    let written = rebuild.write(ctx, fold, &layout, &mut both);
    let (plain, framed) = both.into_parts().map_err(failed)?;
    let out = framed.finish().and_then(Sealed::finish).map_err(failed)?;
    let HashingWriter {
        inner: mut out,
        hash: sum,
    } = out;
    let rebuilt = written.map_err(|e| out.whose(e))?;
    out.flush().map_err(failed)?;
    drop(out);
    let verify = || {
        let mut again = unnamed.file.try_clone().map_err(|e| Error::io(&what, e))?;
        again.rewind().map_err(read_back)?;
        match (plain, sum) {
            (Some(plain), Some(sum)) => {
                rebuild.verify(ctx.database_file(plain), &rebuilt.hash, &layout)?;
                check_sum(again, sum, ctx.store.cancel())
            }
            _ => {
                let bytes = layout.bytes();
                let head = Head {
                    file: &again,
                    bytes,
                };
                rebuild.verify(head, &rebuilt.hash, &layout)?;
                // The hash behind the database is checked at the end.
                let frame = FrameReader::new(again);
                for_each_piece(frame, ctx.store.cancel(), read_back, |_| Ok(()))
            }
        }
    };
    sync_beside(&unnamed.file, &what, verify).map_err(of_whom)?;
    Ok(Written {
        rebuilt,
        events,
        revision: rebuild.revision(),
        bytes: layout.bytes(),
    })
}

fn read_back(e: io::Error) -> Error {
    Error::io("read the snapshot back", e)
}

/// Reads a file and compares its sum with that of what was written.
fn check_sum(file: File, written: Sha256, cancel: &Cancel) -> Result<()> {
    let mut sum = Sha256::new();
    for_each_piece(file, cancel, read_back, |piece| {
        sum.update(piece);
        Ok(())
    })?;
    match sum.finalize() == written.finalize() {
        true => Ok(()),
        false => Err(Reason::Io
            .error("the snapshot reads back differently from what was written: check the disk")),
    }
}

/// If what was written does not add up: a full that contradicts itself is the candidate's fault.
fn of_whom(e: Error) -> Failed {
    match e.reason().is_bad_data() {
        true => Failed::Candidate(e),
        false => Failed::Target(e),
    }
}

/// The beginning of a file.
struct Head<'f> {
    file: &'f File,
    bytes: u64,
}

impl ReadAt for Head<'_> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        ReadAt::read_exact_at(self.file, buf, offset)
    }
    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}
