//! A small S3 in memory that speaks the dialects of many stores, lies and attacks. It also understands Google Cloud
//! Storage's XML API.
//!
//! It does not check signatures. Without a dialect it behaves like S3, as far as deltafold needs it: objects, ranges,
//! listings, multipart uploads, conditional writes, tags; no versions.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha2::{Digest as _, Sha256};

use super::s3::S3;

/// What a store says to a call that it does not have: the status, and the code of its error.
pub type Refusal = (u16, &'static str);

/// What a store does with the conditions of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conditions {
    #[default]
    Kept,
    /// Responds with 200 and overwrites, like Garage.
    Ignored,
    Refused(Refusal),
    /// Responds with 412, whatever is there.
    NeverHold,
}

/// How a store's pages of a listing lead to the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NextPage {
    #[default]
    Named,
    /// Says that more pages follow, and does not name the next one.
    Hidden,
    /// The last page names the first one.
    Circles,
}

/// How the server differs from S3. The default does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    pub conditions: Conditions,
    /// Refuses headers with checksums.
    pub refuses_checksums: bool,
    pub refuses_bulk_delete: Option<Refusal>,
    pub refuses_tags: Option<Refusal>,
    pub refuses_versioning: Option<Refusal>,
    pub refuses_locks: Option<Refusal>,
    pub refuses_lists_of_uploads: Option<Refusal>,
    /// Completes an upload only if all parts but the last have one size.
    pub wants_parts_of_one_size: bool,
    /// What exists cannot be overwritten or deleted, and this is said.
    pub is_immutable: Option<Refusal>,
    /// Leaves out the number of tags when an object is read.
    pub hides_tag_counts: bool,
    /// Leaves out the ETag when an object is read.
    pub hides_etags: bool,
    /// Ignores the header Range: the whole object comes.
    pub ignores_ranges: bool,
    pub next_page: NextPage,
    /// Knows only the first version of listings, whose pages follow a marker.
    pub lists_by_marker: bool,
    /// Lists two objects a page.
    pub lists_small_pages: bool,
    /// Announces a terabyte in the response to a write, and breaks off.
    pub announces_terabytes: bool,
    /// Changes the last byte of what is read.
    pub damages: bool,
    /// Confirms deletions without deleting.
    pub keeps_deleted: bool,
    /// Unpacks what it stores for clients that do not say that they take gzip, as Google Cloud Storage does.
    pub unpacks: bool,
    /// Reads bodies at this many bytes a second.
    pub reads_slowly: Option<usize>,
    /// Refuses each request with all its headers and 27 MiB of text.
    pub refuses_at_length: bool,
}

/// Requests that fail: those whose method, path and query match.
struct Failing {
    matches: Box<dyn Fn(&str) -> bool + Send>,
    times: usize,
    refusal: Refusal,
    headers: Vec<(&'static str, String)>,
    /// Instead of the refusal: a page with status 200.
    page: Option<&'static str>,
}

/// A running server. It ends with the process.
#[derive(Clone)]
pub struct FakeS3 {
    s3: S3,
    state: Arc<Mutex<State>>,
}

struct State {
    dialect: Dialect,
    failing: Vec<Failing>,
    /// By `bucket/key`.
    objects: BTreeMap<String, Object>,
    /// By upload ID: the key and the parts.
    uploads: BTreeMap<String, (String, BTreeMap<u32, Vec<u8>>)>,
    count: u64,
    requests: Vec<String>,
    /// The status of a redirect and the target of all requests.
    redirect: Option<(u16, String)>,
}

#[derive(Clone)]
struct Object {
    body: Vec<u8>,
    etag: String,
    modified: chrono::DateTime<chrono::Utc>,
    tags: String,
}

impl Object {
    /// The number by which Google Cloud Storage tells versions apart.
    fn generation(&self) -> u64 {
        u64::from_str_radix(self.etag.trim_matches('"'), 16).expect("an ETag of this server")
    }
}

struct Request {
    method: String,
    /// As the client sent it.
    target: String,
    path: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl FakeS3 {
    pub fn start(dialect: Dialect) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(Mutex::new(State {
            dialect,
            failing: Vec::new(),
            objects: BTreeMap::new(),
            uploads: BTreeMap::new(),
            count: 0,
            requests: Vec::new(),
            redirect: None,
        }));
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = shared.clone();
                // The client reports a broken connection.
                std::thread::spawn(move || serve(client, &shared));
            }
        });
        FakeS3 {
            s3: S3::new(&format!("http://{address}")),
            state,
        }
    }

    pub fn s3(&self) -> &S3 {
        &self.s3
    }

    /// Returns all objects: `bucket/key` and content.
    pub fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        let state = self.state.lock().expect("a lock");
        let objects = state.objects.iter();
        objects.map(|(k, o)| (k.clone(), o.body.clone())).collect()
    }

    /// Adds objects (`bucket/key`) without a request.
    pub fn seed(&self, objects: impl IntoIterator<Item = (String, Vec<u8>)>) {
        let mut state = self.state.lock().expect("a lock");
        for (path, body) in objects {
            let object = Object {
                body,
                etag: state.next_etag(),
                modified: chrono::Utc::now(),
                tags: String::new(),
            };
            state.objects.insert(path, object);
        }
    }

    /// Removes an object (`bucket/key`) without a request.
    pub fn remove(&self, path: &str) {
        let mut state = self.state.lock().expect("a lock");
        state.objects.remove(path).expect("an object");
    }

    /// Makes an object (`bucket/key`) look this old.
    pub fn set_age(&self, path: &str, age: chrono::TimeDelta) {
        let mut state = self.state.lock().expect("a lock");
        let object = state.objects.get_mut(path).expect("an object");
        object.modified = chrono::Utc::now() - age;
    }

    /// Sets the tags of an object (`bucket/key`) without a request.
    pub fn set_tags(&self, path: &str, tags: &[(&str, &str)]) {
        let mut state = self.state.lock().expect("a lock");
        let object = state.objects.get_mut(path).expect("an object");
        object.tags = tag_set(tags.iter().copied());
    }

    /// The next requests that match fail this many times. `matches` gets a request as
    /// [`requests`](Self::requests) shows it. A status of 200 has the error in its body.
    pub fn fail(
        &self,
        times: usize,
        refusal: Refusal,
        headers: &[(&'static str, &str)],
        matches: impl Fn(&str) -> bool + Send + 'static,
    ) {
        let headers = headers.iter().map(|(k, v)| (*k, (*v).to_owned()));
        self.state.lock().expect("a lock").failing.push(Failing {
            matches: Box::new(matches),
            times,
            refusal,
            headers: headers.collect(),
            page: None,
        });
    }

    /// All requests that match are answered with this page, as by a console or a proxy.
    pub fn answer_with(&self, page: &'static str, matches: impl Fn(&str) -> bool + Send + 'static) {
        self.state.lock().expect("a lock").failing.push(Failing {
            matches: Box::new(matches),
            times: usize::MAX,
            refusal: (200, ""),
            headers: Vec::new(),
            page: Some(page),
        });
    }

    /// Redirects all requests from now on to another server.
    pub fn redirect(&self, status: u16, to: &str) {
        self.state.lock().expect("a lock").redirect = Some((status, to.to_owned()));
    }

    /// Forgets the requests so far.
    pub fn forget_requests(&self) {
        self.state.lock().expect("a lock").requests.clear();
    }

    /// Returns the number of uploads that were neither completed nor aborted.
    pub fn uploads(&self) -> usize {
        self.state.lock().expect("a lock").uploads.len()
    }

    /// Returns the requests so far: method, path and query.
    pub fn requests(&self) -> Vec<String> {
        self.state.lock().expect("a lock").requests.clone()
    }
}

fn serve(client: TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut writer = client;
    let pace = state.lock().expect("a lock").dialect.reads_slowly;
    while let Some(request) = read_request(&mut reader, pace)? {
        let writes = matches!(&*request.method, "POST" | "PUT");
        let (answer, dialect) = {
            let mut state = state.lock().expect("a lock");
            let shown = format!("{} {} {:?}", request.method, request.path, request.query);
            state.requests.push(shown.clone());
            let failed = state.failure(&shown);
            let answer = failed.unwrap_or_else(|| state.answer(&request));
            (answer, state.dialect)
        };
        if dialect.announces_terabytes && writes {
            writer.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\n")?;
            // Send at least two pieces, so that clients have to join them.
            for _ in 0..2 {
                writer.write_all(b"<Error>")?;
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            return Ok(());
        }
        let date = chrono::Utc::now();
        let mut head = format!(
            "HTTP/1.1 {} Whatever\r\nDate: {}\r\n",
            answer.status,
            date.format("%a, %d %b %Y %H:%M:%S GMT")
        );
        // A server of unknown make promises nothing.
        if dialect.conditions == Conditions::Kept && !dialect.hides_tag_counts {
            head.push_str("Server: MinIO\r\n");
        }
        for (name, value) in &answer.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !answer.headers.iter().any(|(n, _)| *n == "Content-Length") {
            head.push_str(&format!("Content-Length: {}\r\n", answer.body.len()));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        if request.method != "HEAD" {
            bytes.extend(&answer.body);
        }
        // In one write: the second of two small packets would wait for an acknowledgement.
        writer.write_all(&bytes)?;
        if request
            .headers
            .get("connection")
            .is_some_and(|c| c == "close")
        {
            break;
        }
    }
    Ok(())
}

fn read_request(
    reader: &mut BufReader<TcpStream>,
    pace: Option<usize>,
) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, target) = (words.next(), words.next());
    let (Some(method), Some(target)) = (method, target) else {
        return Ok(None);
    };
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map(|l| l.parse());
    let mut body = vec![0; length.and_then(Result::ok).unwrap_or(0)];
    if headers.contains_key("expect") {
        reader
            .get_mut()
            .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    for piece in body.chunks_mut(pace.unwrap_or(usize::MAX) / 10) {
        reader.read_exact(piece)?;
        if pace.is_some() {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
    let url = url::Url::parse(&format!("http://server{target}")).map_err(io::Error::other)?;
    let path = decoded(url.path().trim_start_matches('/'));
    Ok(Some(Request {
        method,
        target,
        path,
        query: url.query_pairs().into_owned().collect(),
        headers,
        body,
    }))
}

fn decoded(text: &str) -> String {
    let query = format!("x={}", text.replace('+', "%2B"));
    let mut pairs = url::form_urlencoded::parse(query.as_bytes()).into_owned();
    pairs.next().map_or_else(String::new, |(_, v)| v)
}

fn refused((status, code): Refusal) -> Answer {
    Answer {
        status,
        headers: Vec::new(),
        body: format!("<Error><Code>{code}</Code><Message>It says {code}.</Message></Error>")
            .into(),
    }
}

/// Escapes text for XML, control characters as AWS does.
fn xml(text: &str) -> String {
    let escaped = |c: char| match c {
        '<' | '>' | '&' => format!("&#{};", c as u32),
        c if c.is_control() => format!("&#x{:X};", c as u32),
        c => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

fn tag_set<T: std::fmt::Display>(tags: impl Iterator<Item = (T, T)>) -> String {
    let tags: String = tags
        .map(|(k, v)| format!("<Tag><Key>{k}</Key><Value>{v}</Value></Tag>"))
        .collect();
    format!("<Tagging><TagSet>{tags}</TagSet></Tagging>")
}

fn said(body: impl Into<Vec<u8>>) -> Answer {
    Answer {
        status: 200,
        headers: Vec::new(),
        body: body.into(),
    }
}

impl State {
    /// Returns the answer to a request that is to fail.
    fn failure(&mut self, shown: &str) -> Option<Answer> {
        let mut failing = self.failing.iter_mut();
        let failing = failing.find(|f| f.times > 0 && (f.matches)(shown))?;
        failing.times -= 1;
        let headers = failing.headers.clone();
        let body = failing.page.map(Vec::from);
        let refusal = refused(failing.refusal);
        Some(Answer {
            headers,
            body: body.unwrap_or(refusal.body),
            ..refusal
        })
    }

    /// Returns the refusal of a header that the dialect does not have.
    fn refused_header(&self, r: &Request) -> Option<Answer> {
        if r.headers
            .get("x-amz-security-token")
            .is_some_and(String::is_empty)
        {
            return Some(refused((400, "InvalidToken")));
        }
        let is_checksum = |name: &&String| name.starts_with("x-amz-checksum");
        let name = r.headers.keys().find(is_checksum)?;
        self.dialect.refuses_checksums.then(|| Answer {
            status: 400,
            headers: Vec::new(),
            body: format!(
                "<Error><Code>InvalidArgument</Code><Message>Unsupported header '{name}' received for this API call.</Message></Error>"
            )
            .into(),
        })
    }

    /// Returns the refusal of a call that the dialect does not have.
    fn lacks(&self, r: &Request) -> Option<Refusal> {
        let has = |name: &str| r.query.contains_key(name);
        let d = &self.dialect;
        match &*r.method {
            "POST" if has("delete") => d.refuses_bulk_delete,
            _ if has("tagging") => d.refuses_tags,
            _ if has("versioning") => d.refuses_versioning,
            _ if has("object-lock") || has("retention") || has("legal-hold") => d.refuses_locks,
            "GET" if has("uploads") => d.refuses_lists_of_uploads,
            _ => None,
        }
    }

    fn answer(&mut self, r: &Request) -> Answer {
        if let Some((status, to)) = &self.redirect {
            return Answer {
                status: *status,
                headers: vec![("Location", format!("{to}{}", r.target))],
                body: Vec::new(),
            };
        }
        if self.dialect.refuses_at_length {
            let mut body = format!("{:?} {:?}", r.query, r.headers).into_bytes();
            body.resize(27 << 20, b'x');
            let headers = Vec::new();
            return Answer {
                status: 403,
                headers,
                body,
            };
        }
        if let Some(refusal) = self.refused_header(r) {
            return refusal;
        }
        if let Some(refusal) = self.lacks(r) {
            return refused(refusal);
        }
        let has = |name: &str| r.query.contains_key(name);
        let (_, key) = r.path.split_once('/').unwrap_or((&r.path, ""));
        match (r.method.as_str(), key.is_empty()) {
            ("PUT", true) => said(""),
            ("GET", true) if has("object-lock") => {
                refused((404, "ObjectLockConfigurationNotFoundError"))
            }
            ("GET", true) if has("versioning") => said("<VersioningConfiguration/>"),
            ("GET", true) if has("uploads") => self.list_uploads(r),
            ("GET", true) => self.list(r),
            ("POST", true) if has("delete") => self.delete_all(r),
            (_, true) => refused((501, "NotImplemented")),
            ("GET", _) if has("tagging") => self.tags(r),
            ("PUT", _) if has("tagging") => self.set_tags(r),
            ("GET", _) if has("retention") || has("legal-hold") => {
                refused((404, "NoSuchObjectLockConfiguration"))
            }
            ("GET" | "HEAD", _) => self.get(r),
            ("POST", _) if has("uploads") => {
                self.count += 1;
                let id = format!("upload-{}", self.count);
                let upload = (r.path.clone(), BTreeMap::new());
                self.uploads.insert(id.clone(), upload);
                said(format!(
                    "<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                ))
            }
            ("PUT", _) if has("uploadId") => self.put_part(r),
            ("POST", _) if has("uploadId") => self.complete(r),
            ("DELETE", _) if has("uploadId") => {
                self.uploads.remove(&r.query["uploadId"]);
                Answer {
                    status: 204,
                    ..said("")
                }
            }
            ("PUT", _) => match self.checked(r) {
                Some(refusal) => refusal,
                None => self.put(r, r.body.clone()),
            },
            ("DELETE", _) => match self.dialect.is_immutable {
                Some(refusal) => refused(refusal),
                None => {
                    self.delete(&r.path);
                    Answer {
                        status: 204,
                        ..said("")
                    }
                }
            },
            _ => refused((501, "NotImplemented")),
        }
    }

    /// Returns the refusal of a body that does not match its checksum.
    fn checked(&self, r: &Request) -> Option<Answer> {
        let sum = r.headers.get("x-amz-checksum-sha256")?;
        let own = base64_simd::STANDARD.encode_to_string(Sha256::digest(&r.body));
        (own != *sum).then(|| refused((400, "BadDigest")))
    }

    fn put_part(&mut self, r: &Request) -> Answer {
        let number: u32 = r.query["partNumber"].parse().expect("a part's number");
        if let Some(refusal) = self.checked(r) {
            return refusal;
        }
        let etag = self.next_etag();
        let Some((_, parts)) = self.uploads.get_mut(&r.query["uploadId"]) else {
            return refused((404, "NoSuchUpload"));
        };
        parts.insert(number, r.body.clone());
        Answer {
            headers: vec![("ETag", etag)],
            ..said("")
        }
    }

    fn complete(&mut self, r: &Request) -> Answer {
        let id = &r.query["uploadId"];
        let Some((_, parts)) = self.uploads.get(id) else {
            return refused((404, "NoSuchUpload"));
        };
        let sizes: Vec<usize> = parts.values().map(Vec::len).collect();
        let has_one_size = sizes.split_last().is_none_or(|(last, others)| {
            others.iter().all(|s| *s == sizes[0]) && *last <= sizes[0]
        });
        if self.dialect.wants_parts_of_one_size && !has_one_size {
            return refused((400, "InvalidPart"));
        }
        let body: Vec<u8> = parts.values().flatten().copied().collect();
        let answer = self.put(r, body);
        if answer.status != 200 {
            return answer;
        }
        self.uploads.remove(id);
        let etag = &self.objects[&r.path].etag;
        said(format!(
            "<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        ))
    }

    fn next_etag(&mut self) -> String {
        self.count += 1;
        format!("\"{:032x}\"", self.count)
    }

    fn put(&mut self, r: &Request, body: Vec<u8>) -> Answer {
        let there = self.objects.get(&r.path);
        if let (Some(refusal), true) = (self.dialect.is_immutable, there.is_some()) {
            return refused(refusal);
        }
        let none_match = r.headers.get("if-none-match");
        let is_match = r.headers.get("if-match");
        let generation = r.headers.get("x-goog-if-generation-match");
        let holds = || {
            none_match.is_none_or(|_| there.is_none())
                && is_match.is_none_or(|etag| there.map(|o| &o.etag) == Some(etag))
                && generation.is_none_or(|g| there.map_or(0, Object::generation).to_string() == *g)
        };
        let is_conditional = [none_match, is_match, generation]
            .iter()
            .any(Option::is_some);
        match self.dialect.conditions {
            Conditions::Refused(refusal) if is_conditional => return refused(refusal),
            Conditions::NeverHold if is_conditional => return refused((412, "PreconditionFailed")),
            Conditions::Kept if !holds() => return refused((412, "PreconditionFailed")),
            _ => {}
        }
        let etag = self.next_etag();
        let object = Object {
            body,
            etag: etag.clone(),
            modified: chrono::Utc::now(),
            tags: self.tags_of_header(r),
        };
        let generation = object.generation().to_string();
        self.objects.insert(r.path.clone(), object);
        Answer {
            headers: vec![("ETag", etag), ("x-goog-generation", generation)],
            ..said("")
        }
    }

    /// Returns the tags that are written with an object.
    fn tags_of_header(&self, r: &Request) -> String {
        let Some(tags) = r.headers.get("x-amz-tagging") else {
            return String::new();
        };
        let tags = url::form_urlencoded::parse(tags.as_bytes());
        tag_set(tags)
    }

    fn get(&self, r: &Request) -> Answer {
        let Some(object) = self.objects.get(&r.path) else {
            return refused((404, "NoSuchKey"));
        };
        let mut body = object.body.clone();
        let takes_gzip = r
            .headers
            .get("accept-encoding")
            .is_some_and(|e| e.contains("gzip"));
        if self.dialect.unpacks && !takes_gzip {
            let mut plain = Vec::new();
            let read = flate2::read::MultiGzDecoder::new(&*body).read_to_end(&mut plain);
            body = read.map_or(body, |_| plain);
        }
        if self.dialect.damages
            && let Some(last) = body.last_mut()
        {
            *last ^= 1;
        }
        let modified = object.modified.format("%a, %d %b %Y %H:%M:%S GMT");
        let mut headers = vec![
            ("Last-Modified", modified.to_string()),
            ("x-goog-generation", object.generation().to_string()),
        ];
        if !self.dialect.hides_etags {
            headers.push(("ETag", object.etag.clone()));
        }
        let tags = object.tags.matches("<Tag>").count();
        if tags > 0 && !self.dialect.hides_tag_counts {
            headers.push(("x-amz-tagging-count", tags.to_string()));
        }
        if r.method == "HEAD" {
            headers.push(("Content-Length", body.len().to_string()));
            body.clear();
        }
        let mut status = 200;
        let range = r
            .headers
            .get("range")
            .filter(|_| !self.dialect.ignores_ranges);
        if let Some((first, last)) = range.and_then(|r| r.strip_prefix("bytes=")?.split_once('-')) {
            let first: usize = first.parse().expect("a range");
            let end = last.parse().map_or(body.len(), |last: usize| last + 1);
            let end = end.min(body.len());
            if first >= end {
                return refused((416, "InvalidRange"));
            }
            let range = format!("bytes {first}-{}/{}", end - 1, body.len());
            headers.push(("Content-Range", range));
            body = body[first..end].to_vec();
            status = 206;
        }
        Answer {
            status,
            headers,
            body,
        }
    }

    fn delete(&mut self, path: &str) {
        if !self.dialect.keeps_deleted {
            self.objects.remove(path);
        }
    }

    fn delete_all(&mut self, r: &Request) -> Answer {
        let text = String::from_utf8_lossy(&r.body).into_owned();
        let mut done = String::new();
        for part in text.split("<Key>").skip(1) {
            let key = part.split("</Key>").next().unwrap_or_default();
            let bucket = r.path.trim_end_matches('/');
            let plain = quick_xml::escape::unescape(key).expect("a key");
            self.delete(&format!("{bucket}/{plain}"));
            done.push_str(&format!("<Deleted><Key>{key}</Key></Deleted>"));
        }
        said(format!("<DeleteResult>{done}</DeleteResult>"))
    }

    fn listed(&self, r: &Request) -> Vec<(&String, &Object)> {
        let bucket = r.path.trim_end_matches('/');
        let prefix = r.query.get("prefix").map_or("", String::as_str);
        let prefix = format!("{bucket}/{prefix}");
        let objects = self.objects.iter();
        objects
            .filter(|(k, _)| {
                let below = k.strip_prefix(&prefix);
                let deeper = |b: &str| r.query.get("delimiter").is_some_and(|d| b.contains(&**d));
                below.is_some_and(|below| !deeper(below))
            })
            .collect()
    }

    fn list(&self, r: &Request) -> Answer {
        let page = if self.dialect.lists_small_pages {
            2
        } else {
            1000
        };
        let (mut contents, mut count) = (String::new(), 0);
        let token = |path: &str| path.bytes().map(|b| format!("{b:02x}")).collect::<String>();
        let bucket = r.path.trim_end_matches('/');
        let marker = r
            .query
            .get("marker")
            .map(|m| token(&format!("{bucket}/{m}")));
        let after = match self.dialect.lists_by_marker {
            true => marker,
            false => r.query.get("continuation-token").cloned(),
        };
        let listed = self.listed(r).into_iter();
        let mut listed = listed
            .skip_while(|(path, _)| after.as_ref().is_some_and(|a| token(path.as_str()) <= *a));
        let mut last = None;
        for (path, object) in listed.by_ref().take(page) {
            last = Some(path);
            let (_, key) = path.split_once('/').expect("a bucket");
            let (etag, time) = (&object.etag, object.modified.to_rfc3339());
            contents.push_str(&format!(
                "<Contents><Key>{}</Key><Size>{}</Size><ETag>{etag}</ETag><LastModified>{time}</LastModified></Contents>",
                xml(key),
                object.body.len()
            ));
            count += 1;
        }
        let is_last = listed.next().is_none();
        let next = match (is_last, last) {
            (false, _) if self.dialect.next_page == NextPage::Hidden => String::new(),
            (false, _) if self.dialect.lists_by_marker => String::new(),
            (false, Some(last)) => {
                let token = token(last);
                format!("<NextContinuationToken>{token}</NextContinuationToken>")
            }
            _ if self.dialect.next_page == NextPage::Circles => {
                "<NextContinuationToken>00</NextContinuationToken>".to_owned()
            }
            _ => String::new(),
        };
        said(format!(
            "<ListBucketResult><IsTruncated>{}</IsTruncated>{next}<KeyCount>{count}</KeyCount>{contents}</ListBucketResult>",
            !is_last || !next.is_empty()
        ))
    }

    fn list_uploads(&self, r: &Request) -> Answer {
        let bucket = r.path.trim_end_matches('/');
        let prefix = r.query.get("prefix").map_or("", String::as_str);
        let prefix = format!("{bucket}/{prefix}");
        let uploads = self.uploads.iter();
        let uploads = uploads.filter(|(_, (path, _))| path.starts_with(&prefix));
        let uploads: String = uploads
            .map(|(id, (path, _))| {
                let (_, key) = path.split_once('/').expect("a bucket");
                format!("<Upload><Key>{key}</Key><UploadId>{id}</UploadId><Initiated>2026-11-21T00:00:00Z</Initiated></Upload>")
            })
            .collect();
        said(format!(
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{uploads}</ListMultipartUploadsResult>"
        ))
    }

    fn tags(&self, r: &Request) -> Answer {
        match self.objects.get(&r.path) {
            Some(o) if o.tags.is_empty() => said("<Tagging><TagSet></TagSet></Tagging>"),
            Some(o) => said(o.tags.clone()),
            None => refused((404, "NoSuchKey")),
        }
    }

    fn set_tags(&mut self, r: &Request) -> Answer {
        match self.objects.get_mut(&r.path) {
            Some(o) => {
                o.tags = String::from_utf8_lossy(&r.body).into_owned();
                said("")
            }
            None => refused((404, "NoSuchKey")),
        }
    }
}
