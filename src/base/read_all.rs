//! Reading a stream to its end, piece by piece.

use super::Cancel;
use crate::error::{Error, Result};
use std::io::{self, Read};

/// Bytes of a piece, at most.
const PIECE: usize = 256 << 10;

/// Hands all that is read to `each`. `failed` explains a failure to read.
///
/// # Errors
/// What `failed` and `each` return; `Terminated`.
pub fn for_each_piece(
    mut from: impl Read,
    cancel: &Cancel,
    failed: impl Fn(io::Error) -> Error,
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut buf = vec![0; PIECE];
    loop {
        cancel.check()?;
        match from.read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(n) => each(&buf[..n])?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }
}
