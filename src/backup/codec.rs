//! Compresses and decompresses snapshots as streams.
//!
//! The output depends on the input, the method and the level alone, never on the number of threads, the sizes
//! of writes or the time. So that threads can work in parallel, the input is cut into blocks of fixed size:
//! gzip writes a member for every 1 MiB (RFC 1952 lets members follow one another, and readers join them), zstd writes
//! a frame for every 4 MiB. LZW and zlib are read, and never written.

use crate::error::{Error, Reason};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::str::FromStr;
use std::sync::{Arc, Mutex, Once, mpsc};

/// How a snapshot is compressed. The suffix of its name tells.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Compression {
    /// Not at all; no suffix
    None,
    /// `.gz`
    Gzip,
    /// `.zlib`
    Zlib,
    /// `.Z`: LZW as in Go's compress/lzw, least significant bit first, 8-bit literals
    Lzw,
    /// `.zst`: deltafold's own addition; etcd-backup-restore cannot read it
    Zstd,
}

impl Compression {
    /// All methods.
    pub const ALL: [Compression; 5] = [
        Compression::None,
        Compression::Gzip,
        Compression::Zlib,
        Compression::Lzw,
        Compression::Zstd,
    ];

    /// Returns the suffix in names, with its dot; empty for `None`.
    pub fn suffix(self) -> &'static str {
        match self {
            Compression::None => "",
            Compression::Gzip => ".gz",
            Compression::Zlib => ".zlib",
            Compression::Lzw => ".Z",
            Compression::Zstd => ".zst",
        }
    }

    /// Returns the method of a suffix with its dot.
    pub fn from_suffix(s: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.suffix() == s)
    }

    /// Returns the name of the method in options and output.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns whether etcd-backup-restore can read the method.
    pub fn is_read_by_others(self) -> bool {
        self != Compression::Zstd
    }
}

/// The zstd levels that a user can choose.
pub const ZSTD_LEVELS: std::ops::RangeInclusive<i32> = 1..=22;
const ZSTD_DEFAULT_LEVEL: i32 = 3;

/// The user's choice of a compression for a new snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CompressionChoice {
    /// The compression of the newest snapshot from which the new one is made.
    #[default]
    Same,
    /// This compression.
    Chosen(Encoding),
}

/// A method and its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoding {
    /// The method.
    pub compression: Compression,
    /// The level for zstd, 1 to 22. The other methods have one level each.
    pub level: i32,
}

impl From<Compression> for Encoding {
    fn from(compression: Compression) -> Self {
        Encoding {
            compression,
            level: ZSTD_DEFAULT_LEVEL,
        }
    }
}

impl CompressionChoice {
    /// Returns the encoding to write if the newest input has the compression `newest`. In place of LZW and zlib that is gzip,
    /// which is logged once.
    pub fn resolve(self, newest: Compression) -> Encoding {
        static SAID: Once = Once::new();
        let encoding = match self {
            CompressionChoice::Same => newest.into(),
            CompressionChoice::Chosen(e) => e,
        };
        match encoding.compression {
            read @ (Compression::Lzw | Compression::Zlib) => {
                SAID.call_once(|| {
                    tracing::warn!(
                        "{read} is read, but not written: new snapshots have gzip, which etcd-backup-restore reads, too"
                    );
                });
                Compression::Gzip.into()
            }
            _ => encoding,
        }
    }
}

impl FromStr for CompressionChoice {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let invalid = |why: &str| {
            Reason::Usage.error(format!(
                "invalid compression \"{s}\" ({why}): use same, none, gzip, zlib, lzw, zstd or zstd:LEVEL (1 to 22)"
            ))
        };
        if s == "same" {
            return Ok(CompressionChoice::Same);
        }
        let (method, level) = s.split_once(':').map_or((s, None), |(m, l)| (m, Some(l)));
        let compression: Compression = method.parse().map_err(|_| invalid("unknown method"))?;
        let mut encoding = Encoding::from(compression);
        if let Some(level) = level {
            if compression != Compression::Zstd {
                return Err(invalid("only zstd takes a level"));
            }
            let level = level.parse().ok().filter(|l| ZSTD_LEVELS.contains(l));
            encoding.level = level.ok_or_else(|| invalid("the level is out of range"))?;
        }
        Ok(CompressionChoice::Chosen(encoding))
    }
}

/// The size of the buffer for compressed bytes, at most and at least.
const BUFFER: usize = 256 << 10;
const SMALLEST_BUFFER: u64 = 4 << 10;
/// The largest window of a zstd stream that is read from a store: 2^23 bytes, twice what [`ZSTD_BLOCK`]
/// needs. A decoder holds the window in memory, and the stream chooses its size.
const ZSTD_WINDOW: u32 = 23;
/// The largest window of a plain snapshot file, which any tool may have packed: 2^27 bytes, as `zstd` itself
/// allows.
const ZSTD_WINDOW_OF_FILES: u32 = 27;

/// A part of the error of zstd for a window that is too large.
const ZSTD_NO_MEMORY: &str = "requires too much memory";

/// Decompresses a stream that any tool may have packed. Bytes after the end of the compressed data are an
/// error.
///
/// # Errors
/// Reading fails with `CorruptSnapshot`, wrapped in a `std::io::Error`.
pub fn decoder<'a, R: Read + Send + 'a>(
    compression: Compression,
    inner: R,
) -> io::Result<Box<dyn Read + Send + 'a>> {
    open_decoder(compression, inner, u64::MAX, ZSTD_WINDOW_OF_FILES)
}

/// Decompresses a snapshot of a store. `bytes` is about the size of the object: a small object needs no large
/// buffer.
///
/// # Errors
/// As [`decoder`].
pub fn decoder_of<'a, R: Read + Send + 'a>(
    compression: Compression,
    inner: R,
    bytes: u64,
) -> io::Result<Box<dyn Read + Send + 'a>> {
    open_decoder(compression, inner, bytes, ZSTD_WINDOW)
}

fn open_decoder<'a, R: Read + Send + 'a>(
    compression: Compression,
    inner: R,
    bytes: u64,
    window_log: u32,
) -> io::Result<Box<dyn Read + Send + 'a>> {
    let capacity = bytes.clamp(SMALLEST_BUFFER, BUFFER as u64) as usize;
    let inner = BufReader::with_capacity(capacity, inner);
    let inner: Box<dyn Read + Send + 'a> = match compression {
        Compression::None => return Ok(Box::new(inner)),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(inner)),
        Compression::Zlib => Box::new(NothingAfter {
            inner: flate2::bufread::ZlibDecoder::new(inner),
            is_at_end: |z| z.get_mut().fill_buf().map(<[u8]>::is_empty),
        }),
        Compression::Lzw => Box::new(LzwDecoder {
            inner,
            decoder: weezl::decode::Decoder::new(weezl::BitOrder::Lsb, 8),
            ended: false,
        }),
        Compression::Zstd => {
            let mut frames = zstd::stream::read::Decoder::with_buffer(inner)?;
            frames.window_log_max(window_log)?;
            Box::new(WindowLimit { frames, window_log })
        }
    };
    Ok(Box::new(Decoder { inner, compression }))
}

/// Turns the errors of a decompressor into `CorruptSnapshot`. Errors of the source stay as they are.
struct Decoder<'a> {
    inner: Box<dyn Read + Send + 'a>,
    compression: Compression,
}

impl Read for Decoder<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.inner.read(out).map_err(|e| {
            let is_of_source =
                e.raw_os_error().is_some() || e.get_ref().is_some_and(|i| i.is::<Error>());
            if is_of_source {
                return e;
            }
            Error::corrupt(format!(
                "its {} compression is damaged: {e}",
                self.compression
            ))
            .into()
        })
    }
}

/// Gives a window that is too large its own error.
struct WindowLimit<D> {
    frames: D,
    window_log: u32,
}

impl<D: Read> Read for WindowLimit<D> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.frames.read(out).map_err(|e| {
            if !e.to_string().contains(ZSTD_NO_MEMORY) {
                return e;
            }
            let log = self.window_log;
            Error::corrupt(format!(
                "its zstd window is larger than {} MiB: pack it again with a smaller one (zstd --long={log})",
                (1_u64 << log) >> 20
            ))
            .into()
        })
    }
}

/// Checks that nothing follows the compressed data, after which the decoder stops.
struct NothingAfter<D> {
    inner: D,
    /// Returns whether the input of the decoder is at its end.
    is_at_end: fn(&mut D) -> io::Result<bool>,
}

impl<D: Read> Read for NothingAfter<D> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        if n == 0 && !out.is_empty() && !(self.is_at_end)(&mut self.inner)? {
            return Err(io::Error::other(
                "bytes follow the end of the compressed data",
            ));
        }
        Ok(n)
    }
}

struct LzwDecoder<R> {
    inner: R,
    decoder: weezl::decode::Decoder,
    ended: bool,
}

impl<R: BufRead> Read for LzwDecoder<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            let input = self.inner.fill_buf()?;
            if self.ended {
                return match input.len() {
                    0 => Ok(0),
                    n => Err(io::Error::other(format!(
                        "{n} bytes or more follow the end of the compressed data"
                    ))),
                };
            }
            let is_at_end = input.is_empty();
            let r = self.decoder.decode_bytes(input, out);
            self.inner.consume(r.consumed_in);
            match r.status {
                Err(e) => return Err(io::Error::other(e.to_string())),
                Ok(weezl::LzwStatus::Done) => self.ended = true,
                Ok(_) if is_at_end && r.consumed_out == 0 => {
                    return Err(io::Error::other("the compressed data has no end marker"));
                }
                Ok(_) => {}
            }
            if r.consumed_out > 0 {
                return Ok(r.consumed_out);
            }
        }
    }
}

/// The number of bytes that are compressed as one block.
const GZIP_BLOCK: usize = 1 << 20;
const ZSTD_BLOCK: usize = 4 << 20;
/// The level of libdeflate whose results are as small as those of zlib's default level.
const GZIP_LEVEL: i32 = 5;

/// A compressing writer: see [`encoder`].
pub struct Encoder<W> {
    out: W,
    block_size: usize,
    block: Vec<u8>,
    /// `None` if nothing is compressed.
    workers: Option<Workers>,
    /// Whether a block is full already.
    has_blocks: bool,
}

/// Compresses a stream with `threads` threads (1 or more). The output does not depend on their number.
///
/// # Errors
/// Errors of the writer; LZW and zlib are not written.
pub fn encoder<W: Write>(encoding: Encoding, threads: usize, out: W) -> io::Result<Encoder<W>> {
    Ok(Encoder {
        out,
        block_size: match encoding.compression {
            Compression::Zstd => ZSTD_BLOCK,
            _ => GZIP_BLOCK,
        },
        block: Vec::new(),
        workers: match encoding.compression {
            Compression::None => None,
            _ => Some(Workers::new(encoding, threads)?),
        },
        has_blocks: false,
    })
}

impl<W: Write> Encoder<W> {
    /// Ends the stream and returns the writer.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        if let Some(mut workers) = self.workers {
            // An empty stream needs a block.
            if !self.block.is_empty() || !self.has_blocks {
                workers.push(self.block, &mut self.out)?;
            }
            workers.drain(&mut self.out)?;
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

impl<W: Write> Write for Encoder<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        let Some(workers) = &mut self.workers else {
            return self.out.write(b);
        };
        let mut rest = b;
        while !rest.is_empty() {
            let room = self.block_size - self.block.len();
            let (now, later) = rest.split_at(room.min(rest.len()));
            self.block.extend_from_slice(now);
            rest = later;
            if self.block.len() == self.block_size {
                let next = Vec::with_capacity(self.block_size);
                let block = std::mem::replace(&mut self.block, next);
                self.has_blocks = true;
                workers.push(block, &mut self.out)?;
            }
        }
        Ok(b.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Compresses blocks independently of each other.
enum BlockCompressor {
    Gzip(libdeflater::Compressor),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl BlockCompressor {
    fn new(encoding: Encoding) -> io::Result<Self> {
        Ok(match encoding.compression {
            Compression::Gzip => {
                let level = libdeflater::CompressionLvl::new(GZIP_LEVEL)
                    .map_err(|e| io::Error::other(format!("{e:?}")))?;
                BlockCompressor::Gzip(libdeflater::Compressor::new(level))
            }
            Compression::Zstd => {
                let mut frames = zstd::bulk::Compressor::new(encoding.level)?;
                frames.include_checksum(true)?;
                BlockCompressor::Zstd(frames)
            }
            method @ (Compression::None | Compression::Lzw | Compression::Zlib) => {
                return Err(io::Error::other(format!(
                    "{method} is not written in blocks"
                )));
            }
        })
    }

    fn compress(&mut self, block: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            BlockCompressor::Gzip(members) => {
                let mut out = vec![0; members.gzip_compress_bound(block.len())];
                let packed = members.gzip_compress(block, &mut out);
                out.truncate(packed.map_err(io::Error::other)?);
                Ok(out)
            }
            BlockCompressor::Zstd(frames) => frames.compress(block),
        }
    }
}

/// A block to compress.
struct Task {
    block: Vec<u8>,
    reply: mpsc::SyncSender<io::Result<Vec<u8>>>,
}

/// Threads that compress blocks. The results are written in the order of the blocks.
struct Workers {
    compressor: BlockCompressor,
    /// `None` if the calling thread compresses all blocks itself.
    tasks: Option<mpsc::Sender<Task>>,
    /// The results that were not written yet, in order.
    pending: VecDeque<mpsc::Receiver<io::Result<Vec<u8>>>>,
    most_pending: usize,
}

impl Workers {
    fn new(encoding: Encoding, threads: usize) -> io::Result<Self> {
        let mut tasks = None;
        if threads > 1 {
            let (send, receive) = mpsc::channel::<Task>();
            let receive = Arc::new(Mutex::new(receive));
            let mut running = 0;
            for _ in 0..threads {
                let receive = Arc::clone(&receive);
                let compressor = BlockCompressor::new(encoding)?;
                // If the system has no threads left, fewer of them work.
                let thread =
                    std::thread::Builder::new().spawn(move || compress_tasks(&receive, compressor));
                running += usize::from(thread.is_ok());
            }
            if running > 0 {
                tasks = Some(send);
            }
        }
        Ok(Workers {
            compressor: BlockCompressor::new(encoding)?,
            tasks,
            pending: VecDeque::new(),
            most_pending: threads + 1,
        })
    }

    fn push(&mut self, block: Vec<u8>, out: &mut impl Write) -> io::Result<()> {
        let Some(tasks) = &self.tasks else {
            return out.write_all(&self.compressor.compress(&block)?);
        };
        let (reply, receive) = mpsc::sync_channel(1);
        let task = Task { block, reply };
        tasks
            .send(task)
            .map_err(|_| io::Error::other("the compression threads have ended"))?;
        self.pending.push_back(receive);
        while self.pending.len() > self.most_pending {
            self.write_next(out)?;
        }
        Ok(())
    }

    /// Waits for the oldest pending block and writes it.
    fn write_next(&mut self, out: &mut impl Write) -> io::Result<()> {
        let Some(next) = self.pending.pop_front() else {
            return Ok(());
        };
        let ended = |_| io::Error::other("a compression thread has ended");
        out.write_all(&next.recv().map_err(ended)??)
    }

    fn drain(&mut self, out: &mut impl Write) -> io::Result<()> {
        while !self.pending.is_empty() {
            self.write_next(out)?;
        }
        Ok(())
    }
}

/// The body of a compression thread.
fn compress_tasks(tasks: &Mutex<mpsc::Receiver<Task>>, mut compressor: BlockCompressor) {
    loop {
        // The lock is held while waiting: the thread that holds it gets the next block.
        let task = tasks.lock().ok().and_then(|tasks| tasks.recv().ok());
        let Some(Task { block, reply }) = task else {
            return;
        };
        // The send fails if the writer has given up.
        let _ = reply.send(compressor.compress(&block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(len: usize) -> Vec<u8> {
        let mut x = 1u32;
        (0..len)
            .map(|i| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if i % 3 == 0 {
                    (x >> 24) as u8
                } else {
                    b'a' + (i / 1000 % 26) as u8
                }
            })
            .collect()
    }

    fn compress(c: Compression, threads: usize, chunk: usize, data: &[u8]) -> Vec<u8> {
        let level = flate2::Compression::default();
        match c {
            Compression::Zlib => {
                let mut e = flate2::write::ZlibEncoder::new(Vec::new(), level);
                e.write_all(data).unwrap();
                return e.finish().unwrap();
            }
            Compression::Lzw => {
                let mut e = weezl::encode::Encoder::new(weezl::BitOrder::Lsb, 8);
                return e.encode(data).unwrap();
            }
            _ => {}
        }
        let mut e = encoder(c.into(), threads, Vec::new()).unwrap();
        for part in data.chunks(chunk) {
            e.write_all(part).unwrap();
        }
        e.finish().unwrap()
    }

    fn decompress(c: Compression, data: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        decoder(c, data)?.read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn the_bytes_do_not_depend_on_threads_or_writes() {
        for c in Compression::ALL {
            for len in [0, 1, 1000, GZIP_BLOCK, ZSTD_BLOCK, ZSTD_BLOCK + 12_345] {
                let data = sample(len);
                let one = compress(c, 1, 1 << 30, &data);
                assert_eq!(one, compress(c, 4, 7_777, &data), "{c} {len}");
                assert_eq!(decompress(c, &one).unwrap(), data, "{c} {len}");
            }
        }
    }

    #[test]
    fn a_cut_stream_and_trailing_bytes_are_refused() {
        for c in Compression::ALL.into_iter().skip(1) {
            let data = sample(5000);
            let packed = compress(c, 1, 5000, &data);
            for cut in 0..packed.len() {
                // A decoder may let a cut stream pass, since the hash of the frame is checked later. It must
                // not invent bytes.
                if let Ok(out) = decompress(c, &packed[..cut]) {
                    assert!(
                        data.starts_with(&out) && out.len() < data.len() || cut == 0,
                        "{c} {cut}"
                    );
                }
            }
            let mut tail = packed.clone();
            tail.extend_from_slice(b"garbage");
            assert!(decompress(c, &tail).is_err(), "{c}");
        }
    }

    #[test]
    fn lzw_and_zlib_are_written_as_gzip() {
        for c in Compression::ALL {
            let written = match c {
                Compression::Lzw | Compression::Zlib => Compression::Gzip,
                c => c,
            };
            let chosen: CompressionChoice = c.as_str().parse().unwrap();
            assert_eq!(chosen.resolve(Compression::None).compression, written);
            assert_eq!(CompressionChoice::Same.resolve(c).compression, written);
        }
    }

    #[test]
    fn choices_are_parsed_as_documented() {
        let parse = |s: &str| s.parse::<CompressionChoice>();
        assert_eq!(parse("same").unwrap(), CompressionChoice::Same);
        assert_eq!(
            parse("zstd:19").unwrap(),
            CompressionChoice::Chosen(Encoding {
                compression: Compression::Zstd,
                level: 19
            })
        );
        for bad in ["", "gz", "gzip:9", "zstd:0", "zstd:23", "zstd:x"] {
            assert_eq!(parse(bad).unwrap_err().reason(), Reason::Usage, "{bad}");
        }
    }
}
