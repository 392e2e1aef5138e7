//! Reads a stream to its end, piece by piece.

use super::Cancel;
use crate::error::{Error, Result};
use std::io::{self, Read};

/// The maximum size of a piece in bytes.
const PIECE: usize = 64 << 10;

/// Calls `each` for every piece of the stream, of at most 64 KiB. `explain` turns a read error into ours.
///
/// # Errors
/// The errors of `explain` and `each`; `Terminated`.
pub fn for_each_piece(
    mut stream: impl Read,
    cancel: &Cancel,
    explain: impl Fn(io::Error) -> Error,
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut buf = [0; PIECE];
    loop {
        cancel.check()?;
        match stream.read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(n) => each(&buf[..n])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(explain(e)),
        }
    }
}
