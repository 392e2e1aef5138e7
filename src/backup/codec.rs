//! Compression of snapshots, read as streams and written as streams of fixed blocks.
//!
//! What is written depends on the input, the method and the level alone: never on the number of
//! threads, the sizes of writes or the time of day. gzip is a member for every 1 MiB (RFC 1952 has
//! members follow one another, and readers take them as one stream), zlib one stream whose blocks
//! of 1 MiB are compressed apart and end on a byte boundary (a full flush), zstd a frame for every
//! 4 MiB, so that threads can work side by side; LZW cannot be cut.

use crate::error::{Error, Reason};
use flate2::{Compress, FlushCompress, Status};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::str::FromStr;
use std::sync::{Arc, Mutex, mpsc};

/// How a snapshot is compressed; told by its name's suffix.
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
    /// Every method.
    pub const ALL: [Compression; 5] = [
        Compression::None,
        Compression::Gzip,
        Compression::Zlib,
        Compression::Lzw,
        Compression::Zstd,
    ];

    /// The suffix in names, with its dot.
    pub fn suffix(self) -> &'static str {
        match self {
            Compression::None => "",
            Compression::Gzip => ".gz",
            Compression::Zlib => ".zlib",
            Compression::Lzw => ".Z",
            Compression::Zstd => ".zst",
        }
    }

    /// The method of a suffix with its dot.
    pub fn from_suffix(s: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.suffix() == s)
    }

    /// As in options and output.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether etcd-backup-restore reads it.
    pub fn is_read_by_others(self) -> bool {
        self != Compression::Zstd
    }
}

/// The zstd levels that can be asked for.
pub const ZSTD_LEVELS: std::ops::RangeInclusive<i32> = 1..=22;
const ZSTD_DEFAULT_LEVEL: i32 = 3;

/// The user's choice for a new snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CompressionChoice {
    /// As the newest snapshot that goes into it.
    #[default]
    Same,
    /// This one.
    Chosen(Encoding),
}

/// A method and its level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoding {
    /// The method.
    pub compression: Compression,
    /// For zstd 1 to 22; the others have one level each.
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
    /// The encoding to write, where the newest input has `newest`.
    pub fn resolve(self, newest: Compression) -> Encoding {
        match self {
            CompressionChoice::Same => newest.into(),
            CompressionChoice::Chosen(e) => e,
        }
    }
}

impl FromStr for CompressionChoice {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let bad = |why: &str| {
            Reason::Usage.error(format!(
                "\"{s}\" is no compression ({why}): use same, none, gzip, zlib, lzw, zstd or zstd:LEVEL (1 to 22)"
            ))
        };
        if s == "same" {
            return Ok(CompressionChoice::Same);
        }
        let (method, level) = s.split_once(':').map_or((s, None), |(m, l)| (m, Some(l)));
        let compression: Compression = method.parse().map_err(|_| bad("unknown method"))?;
        let mut encoding = Encoding::from(compression);
        if let Some(level) = level {
            if compression != Compression::Zstd {
                return Err(bad("only zstd takes a level"));
            }
            let level = level.parse().ok().filter(|l| ZSTD_LEVELS.contains(l));
            encoding.level = level.ok_or_else(|| bad("the level is out of range"))?;
        }
        Ok(CompressionChoice::Chosen(encoding))
    }
}

const BUFFER: usize = 256 << 10;
const SMALLEST_BUFFER: u64 = 4 << 10;
/// A decoder has a window in memory, of a size that the stream names. Of snapshots in a prefix: 2^23 bytes, twice what
/// [`ZSTD_BLOCK`] needs.
const ZSTD_WINDOW: u32 = 23;
/// Of a plain file that somebody packed: 2^27 bytes, as `zstd` itself allows.
const ZSTD_WINDOW_OF_OTHERS: u32 = 27;

/// What zstd says of a window that is too large.
const ZSTD_NO_MEMORY: &str = "requires too much memory";

/// Decompresses a stream that any tool may have packed. Bytes behind the end of the compressed data are an error.
///
/// # Errors
/// `CorruptSnapshot`, behind `std::io::Error`, while reading.
pub fn decoder<'a, R: Read + Send + 'a>(
    compression: Compression,
    inner: R,
) -> io::Result<Box<dyn Read + Send + 'a>> {
    open_decoder(compression, inner, u64::MAX, ZSTD_WINDOW_OF_OTHERS)
}

/// Decompresses a snapshot of about so many bytes: a small object needs no large buffer.
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
        Compression::Zlib => Box::new(ToEnd {
            inner: flate2::bufread::ZlibDecoder::new(inner),
            rest: |z| z.get_mut().fill_buf().map(<[u8]>::is_empty),
        }),
        Compression::Lzw => Box::new(LzwDecoder {
            inner,
            decoder: weezl::decode::Decoder::new(weezl::BitOrder::Lsb, 8),
            ended: false,
        }),
        Compression::Zstd => {
            let mut frames = zstd::stream::read::Decoder::with_buffer(inner)?;
            frames.window_log_max(window_log)?;
            Box::new(Windowed { frames, window_log })
        }
    };
    Ok(Box::new(Decoder { inner, compression }))
}

/// Makes the decompressors' complaints ours; errors of the source pass as they are.
struct Decoder<'a> {
    inner: Box<dyn Read + Send + 'a>,
    compression: Compression,
}

impl Read for Decoder<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.inner.read(out).map_err(|e| {
            let of_source =
                e.raw_os_error().is_some() || e.get_ref().is_some_and(|i| i.is::<Error>());
            if of_source {
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

/// Tells a window that is too large from damage.
struct Windowed<D> {
    frames: D,
    window_log: u32,
}

impl<D: Read> Read for Windowed<D> {
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

/// Checks that nothing follows where a decoder stops by itself.
struct ToEnd<D> {
    inner: D,
    rest: fn(&mut D) -> io::Result<bool>,
}

impl<D: Read> Read for ToEnd<D> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        if n == 0 && !out.is_empty() && !(self.rest)(&mut self.inner)? {
            return Err(io::Error::other("bytes follow its end"));
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
                        "{n} bytes or more follow its end"
                    ))),
                };
            }
            let at_end = input.is_empty();
            let r = self.decoder.decode_bytes(input, out);
            self.inner.consume(r.consumed_in);
            match r.status {
                Err(e) => return Err(io::Error::other(e.to_string())),
                Ok(weezl::LzwStatus::Done) => self.ended = true,
                Ok(_) if at_end && r.consumed_out == 0 => {
                    return Err(io::Error::other("it ends without an end mark"));
                }
                Ok(_) => {}
            }
            if r.consumed_out > 0 {
                return Ok(r.consumed_out);
            }
        }
    }
}

/// Bytes of input that are compressed apart.
const DEFLATE_BLOCK: usize = 1 << 20;
const ZSTD_BLOCK: usize = 4 << 20;
/// zlib's default, as in Go's compress/zlib.
const ZLIB_LEVEL: u32 = 6;
/// libdeflate's level whose results are as small as those of zlib's default.
const GZIP_LEVEL: i32 = 5;

/// See [`encoder`].
pub struct Encoder<W> {
    out: W,
    encoding: Encoding,
    block: Vec<u8>,
    workers: Workers,
    lzw: Option<weezl::encode::Encoder>,
    adler: libdeflater::Adler32,
    bytes: u64,
}

/// Compresses a stream with `threads` threads (1 or more); the bytes do not depend on them.
pub fn encoder<W: Write>(encoding: Encoding, threads: usize, mut out: W) -> io::Result<Encoder<W>> {
    if encoding.compression == Compression::Zlib {
        // 32 KiB window, default level, no dictionary.
        out.write_all(&[0x78, 0x9c])?;
    }
    let lzw = (encoding.compression == Compression::Lzw)
        .then(|| weezl::encode::Encoder::new(weezl::BitOrder::Lsb, 8));
    Ok(Encoder {
        out,
        encoding,
        block: Vec::new(),
        workers: Workers::new(encoding, threads)?,
        lzw,
        adler: libdeflater::Adler32::new(),
        bytes: 0,
    })
}

impl<W: Write> Encoder<W> {
    fn block_size(&self) -> usize {
        match self.encoding.compression {
            Compression::Zstd => ZSTD_BLOCK,
            _ => DEFLATE_BLOCK,
        }
    }

    fn lzw(&mut self, mut input: &[u8], finish: bool) -> io::Result<()> {
        let Some(encoder) = &mut self.lzw else {
            return Ok(());
        };
        let mut buf = [0; 16 << 10];
        if finish {
            encoder.finish();
        }
        loop {
            let r = encoder.encode_bytes(input, &mut buf);
            input = &input[r.consumed_in..];
            self.out.write_all(&buf[..r.consumed_out])?;
            match r.status {
                Err(e) => return Err(io::Error::other(e.to_string())),
                Ok(weezl::LzwStatus::Done) => return Ok(()),
                Ok(_) if !finish && input.is_empty() && r.consumed_out < buf.len() => return Ok(()),
                Ok(_) => {}
            }
        }
    }

    fn send(&mut self, last: bool) -> io::Result<()> {
        let next = Vec::with_capacity(self.block_size());
        let block = std::mem::replace(&mut self.block, next);
        if self.encoding.compression == Compression::Zlib {
            self.adler.update(&block);
        }
        self.bytes += block.len() as u64;
        self.workers.push(block, last, &mut self.out)
    }

    /// Ends the stream and gives the writer back.
    ///
    /// # Errors
    /// What the writer returns.
    pub fn finish(mut self) -> io::Result<W> {
        match self.encoding.compression {
            Compression::None => {}
            Compression::Lzw => self.lzw(&[], true)?,
            method => {
                // An empty stream still needs a block; so does the end of zlib's.
                if method == Compression::Zlib || !self.block.is_empty() || self.bytes == 0 {
                    self.send(true)?;
                }
                self.workers.drain(&mut self.out)?;
                if method == Compression::Zlib {
                    self.out.write_all(&self.adler.sum().to_be_bytes())?;
                }
            }
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

impl<W: Write> Write for Encoder<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        match self.encoding.compression {
            Compression::None => return self.out.write(b),
            Compression::Lzw => self.lzw(b, false)?,
            _ => {
                let mut rest = b;
                while !rest.is_empty() {
                    let room = self.block_size() - self.block.len();
                    let (now, later) = rest.split_at(room.min(rest.len()));
                    self.block.extend_from_slice(now);
                    rest = later;
                    if self.block.len() == self.block_size() {
                        self.send(false)?;
                    }
                }
            }
        }
        Ok(b.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Compresses blocks, each by itself.
enum Packer {
    Gzip(libdeflater::Compressor),
    Zlib,
    Zstd(zstd::bulk::Compressor<'static>),
}

impl Packer {
    fn new(encoding: Encoding) -> io::Result<Self> {
        Ok(match encoding.compression {
            Compression::Gzip => {
                let level = libdeflater::CompressionLvl::new(GZIP_LEVEL)
                    .map_err(|e| io::Error::other(format!("{e:?}")))?;
                Packer::Gzip(libdeflater::Compressor::new(level))
            }
            Compression::Zstd => {
                let mut frames = zstd::bulk::Compressor::new(encoding.level)?;
                frames.include_checksum(true)?;
                Packer::Zstd(frames)
            }
            _ => Packer::Zlib,
        })
    }

    fn pack(&mut self, block: &[u8], last: bool) -> io::Result<Vec<u8>> {
        match self {
            Packer::Gzip(members) => {
                let mut out = vec![0; members.gzip_compress_bound(block.len())];
                let packed = members.gzip_compress(block, &mut out);
                out.truncate(packed.map_err(io::Error::other)?);
                Ok(out)
            }
            Packer::Zlib => deflate(block, last),
            Packer::Zstd(frames) => frames.compress(block),
        }
    }
}

/// A piece of a deflate stream that ends on a byte boundary.
fn deflate(block: &[u8], last: bool) -> io::Result<Vec<u8>> {
    let mut deflate = Compress::new(flate2::Compression::new(ZLIB_LEVEL), false);
    let flush = match last {
        true => FlushCompress::Finish,
        false => FlushCompress::Full,
    };
    let mut out = Vec::with_capacity(block.len() / 2 + 64);
    loop {
        let consumed = deflate.total_in() as usize;
        let status = deflate
            .compress_vec(&block[consumed..], &mut out, flush)
            .map_err(io::Error::other)?;
        let done = match status {
            Status::StreamEnd => true,
            // A flush is complete once it leaves room in the output.
            _ => !last && deflate.total_in() as usize == block.len() && out.len() < out.capacity(),
        };
        if done {
            return Ok(out);
        }
        out.reserve(block.len() / 4 + 1024);
    }
}

type Job = (Vec<u8>, bool, mpsc::SyncSender<io::Result<Vec<u8>>>);

/// Threads that compress blocks; results come back in order.
struct Workers {
    packer: Packer,
    jobs: Option<mpsc::Sender<Job>>,
    pending: VecDeque<mpsc::Receiver<io::Result<Vec<u8>>>>,
    most_pending: usize,
}

impl Workers {
    fn new(encoding: Encoding, threads: usize) -> io::Result<Self> {
        let cuts = !matches!(encoding.compression, Compression::None | Compression::Lzw);
        let mut jobs = None;
        if threads > 1 && cuts {
            let (send, receive) = mpsc::channel::<Job>();
            let receive = Arc::new(Mutex::new(receive));
            let mut running = 0;
            for _ in 0..threads {
                let receive = Arc::clone(&receive);
                let mut packer = Packer::new(encoding)?;
                let work = move || {
                    loop {
                        // The lock is held while waiting: whoever has it gets the next block.
                        let job = receive.lock().ok().and_then(|r| r.recv().ok());
                        let Some((block, last, reply)) = job else {
                            return;
                        };
                        // A writer that has given up no longer listens.
                        let _ = reply.send(packer.pack(&block, last));
                    }
                };
                // Where the system has no thread left, fewer do it.
                running += usize::from(std::thread::Builder::new().spawn(work).is_ok());
            }
            if running > 0 {
                jobs = Some(send);
            }
        }
        Ok(Workers {
            packer: Packer::new(encoding)?,
            jobs,
            pending: VecDeque::new(),
            most_pending: threads + 1,
        })
    }

    fn push(&mut self, block: Vec<u8>, last: bool, out: &mut impl Write) -> io::Result<()> {
        let Some(jobs) = &self.jobs else {
            return out.write_all(&self.packer.pack(&block, last)?);
        };
        let (send, receive) = mpsc::sync_channel(1);
        jobs.send((block, last, send))
            .map_err(|_| io::Error::other("the compression threads have ended"))?;
        self.pending.push_back(receive);
        while self.pending.len() > self.most_pending {
            self.take(out)?;
        }
        Ok(())
    }

    fn take(&mut self, out: &mut impl Write) -> io::Result<()> {
        let Some(next) = self.pending.pop_front() else {
            return Ok(());
        };
        let ended = |_| io::Error::other("a compression thread has ended");
        out.write_all(&next.recv().map_err(ended)??)
    }

    fn drain(&mut self, out: &mut impl Write) -> io::Result<()> {
        while !self.pending.is_empty() {
            self.take(out)?;
        }
        Ok(())
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
            for len in [0, 1, 1000, DEFLATE_BLOCK, ZSTD_BLOCK, ZSTD_BLOCK + 12_345] {
                let data = sample(len);
                let one = compress(c, 1, 1 << 30, &data);
                assert_eq!(one, compress(c, 4, 7_777, &data), "{c} {len}");
                assert_eq!(decompress(c, &one).unwrap(), data, "{c} {len}");
            }
        }
    }

    #[test]
    fn what_is_cut_or_has_a_tail_is_refused() {
        for c in Compression::ALL.into_iter().skip(1) {
            let data = sample(5000);
            let packed = compress(c, 1, 5000, &data);
            for cut in 0..packed.len() {
                // A frame's hash guards what a decoder lets pass; none may invent bytes.
                if let Ok(got) = decompress(c, &packed[..cut]) {
                    assert!(
                        data.starts_with(&got) && got.len() < data.len() || cut == 0,
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
    fn choices_are_read_as_documented() {
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
