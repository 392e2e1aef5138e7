//! Google Cloud Storage on fake-gcs-server. That server speaks the JSON API, the object_store crate the XML
//! API: a translator in between converts requests, and holds only the parts of unfinished uploads.

use super::scratch;
use std::collections::{BTreeMap, HashMap};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use object_store::path::Path;
use reqwest::Url;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::process::{Process, free_port, http};
use super::tools;

const LARGEST_BODY: usize = 64 << 20;
const START_TIMEOUT: Duration = Duration::from_secs(30);
const IF_GENERATION: &str = "x-goog-if-generation-match";
const METADATA: &str = "x-goog-meta-";

/// A running server and its translator. Both end when this is dropped.
pub struct Gcs {
    endpoint: String,
    server: u16,
    _process: Process,
    _folder: TempDir,
}

#[derive(Clone)]
struct Shim {
    client: reqwest::Client,
    server: String,
    uploads: Arc<Mutex<HashMap<String, BTreeMap<u32, Bytes>>>>,
    /// A conditional copy takes two requests of the JSON API, so only one runs at a time.
    copies: Arc<tokio::sync::Mutex<()>>,
}

impl Gcs {
    pub fn start(runtime: &Runtime) -> Self {
        let program = tools::fake_gcs_server();
        let folder = scratch::folder_named("gcs-").expect("a folder for the server");
        let log = folder.path().join("gcs.log");
        let server = free_port();
        let mut command = Command::new(program);
        command.args([
            "-backend",
            "memory",
            "-scheme",
            "http",
            "-host",
            "127.0.0.1",
        ]);
        command.args(["-port", &server.to_string()]);
        let mut process = Process::spawn(&mut command, &log).unwrap_or_else(|e| panic!("{e}"));
        process
            .wait_until(START_TIMEOUT, || {
                http(server, "GET", "/storage/v1/b?project=test", "")
                    .is_some_and(|a| a.contains(" 200 "))
            })
            .unwrap_or_else(|e| panic!("fake-gcs-server: {e}\n{}", tools::tail(&log)));
        let shim = Shim {
            client: super::http_client().build().expect("a client"),
            server: format!("http://127.0.0.1:{server}"),
            uploads: Arc::default(),
            copies: Arc::default(),
        };
        let endpoint = runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
                .await
                .expect("a port");
            let address = listener.local_addr().expect("its address");
            let app = axum::Router::new().fallback(answer).with_state(shim);
            tokio::spawn(async { axum::serve(listener, app).await });
            format!("http://{address}")
        });
        Gcs {
            endpoint,
            server,
            _process: process,
            _folder: folder,
        }
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub fn create_bucket(&self, name: &str) {
        let body = json!({ "name": name }).to_string();
        let answer = http(self.server, "POST", "/storage/v1/b?project=test", &body);
        assert!(
            answer.is_some_and(|a| a.contains(" 200 ")),
            "create the bucket {name}"
        );
    }

    /// Returns the key of a service account that is never checked: this server does not authenticate.
    pub fn service_account(&self) -> String {
        json!({
            "type": "service_account",
            "gcs_base_url": self.endpoint,
            "disable_oauth": true,
            "client_email": "test@example.com",
            "private_key": "",
            "private_key_id": "1",
        })
        .to_string()
    }
}

async fn answer(State(shim): State<Shim>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = match axum::body::to_bytes(body, LARGEST_BODY).await {
        Ok(body) => body,
        Err(e) => return (StatusCode::PAYLOAD_TOO_LARGE, e.to_string()).into_response(),
    };
    let query: HashMap<String, String> = parts
        .uri
        .query()
        .map(|q| {
            url::form_urlencoded::parse(q.as_bytes())
                .into_owned()
                .collect()
        })
        .unwrap_or_default();
    let path = parts.uri.path().trim_start_matches('/');
    let done = if path.starts_with("storage/v1/") {
        // Requests of the JSON API pass through.
        let url = format!("{}{}", shim.server, parts.uri);
        let sent = shim.client.request(parts.method, url).body(body);
        pass(sent.header("content-type", "application/json")).await
    } else {
        let (bucket, object) = path.split_once('/').unwrap_or((path, ""));
        let object = Path::from_url_path(object).expect("a name").to_string();
        let place = Place {
            shim: &shim,
            bucket,
            object: &object,
        };
        match parts.method {
            Method::GET if object.is_empty() => place.list(&query).await,
            Method::GET | Method::HEAD => place.get(&parts.method, &parts.headers).await,
            Method::PUT => place.put(&query, &parts.headers, body).await,
            Method::POST => place.post(&query).await,
            Method::DELETE => match query.get("uploadId") {
                Some(id) => {
                    shim.uploads.lock().expect("a lock").remove(id);
                    Ok(StatusCode::NO_CONTENT.into_response())
                }
                None => pass(shim.client.delete(place.url("storage/v1"))).await,
            },
            _ => Ok(StatusCode::METHOD_NOT_ALLOWED.into_response()),
        }
    };
    done.unwrap_or_else(|e: reqwest::Error| {
        (StatusCode::BAD_GATEWAY, e.to_string()).into_response()
    })
}

async fn pass(sent: reqwest::RequestBuilder) -> reqwest::Result<Response> {
    let got = sent.send().await?;
    let status = got.status();
    let body = got.bytes().await?;
    // The fields of the response that the crate reads.
    let json: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut response = Response::builder().status(status);
    if let (Some(generation), Some(e_tag)) = (json["generation"].as_str(), json["etag"].as_str()) {
        response = response
            .header("x-goog-generation", generation)
            .header("etag", e_tag);
    }
    Ok(response.body(Body::from(body)).expect("an answer"))
}

struct Place<'a> {
    shim: &'a Shim,
    bucket: &'a str,
    object: &'a str,
}

impl Place<'_> {
    fn url(&self, api: &str) -> Url {
        let mut url =
            Url::parse(&format!("{}/{api}/b/{}/o", self.shim.server, self.bucket)).expect("a URL");
        if !self.object.is_empty() {
            url.path_segments_mut().expect("a path").push(self.object);
        }
        url
    }

    /// Returns the URL of the object's content, not of its metadata.
    fn media(&self) -> Url {
        let mut url = self.url("storage/v1");
        url.query_pairs_mut().append_pair("alt", "media");
        url
    }

    async fn get(&self, method: &Method, headers: &HeaderMap) -> reqwest::Result<Response> {
        let client = &self.shim.client;
        let got = client.get(self.url("storage/v1")).send().await?;
        if !got.status().is_success() {
            return Ok(got.status().into_response());
        }
        let json: Value = serde_json::from_slice(&got.bytes().await?).expect("JSON");
        let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
        let updated = chrono::DateTime::parse_from_rfc3339(&text("updated")).expect("a time");
        let mut response = Response::builder()
            .header("etag", text("etag"))
            .header("x-goog-generation", text("generation"))
            .header(
                "last-modified",
                updated.format("%a, %d %b %Y %H:%M:%S GMT").to_string(),
            );
        for (name, value) in json["metadata"].as_object().into_iter().flatten() {
            response = response.header(format!("{METADATA}{name}"), value.as_str().expect("text"));
        }
        if *method == Method::HEAD {
            let response = response.header("content-length", text("size"));
            return Ok(response.body(Body::empty()).expect("an answer"));
        }
        let mut request = client.get(self.media());
        if let Some(range) = headers.get("range") {
            request = request.header("range", range);
        }
        let got = request.send().await?;
        if let Some(range) = got.headers().get("content-range") {
            response = response.header("content-range", range);
        }
        response = response.status(got.status());
        Ok(response
            .body(Body::from(got.bytes().await?))
            .expect("an answer"))
    }

    async fn upload(&self, headers: &HeaderMap, content: Bytes) -> reqwest::Result<Response> {
        let mut url = Url::parse(&format!(
            "{}/upload/storage/v1/b/{}/o",
            self.shim.server, self.bucket
        ))
        .expect("a URL");
        url.query_pairs_mut()
            .append_pair("uploadType", "media")
            .append_pair("name", self.object);
        if let Some(generation) = headers.get(IF_GENERATION) {
            let generation = generation.to_str().expect("text");
            url.query_pairs_mut()
                .append_pair("ifGenerationMatch", generation);
        }
        let stored = pass(self.shim.client.post(url).body(content)).await?;
        let metadata: serde_json::Map<String, Value> = headers
            .iter()
            .filter_map(|(name, value)| {
                let name = name.as_str().strip_prefix(METADATA)?;
                Some((name.to_owned(), value.to_str().ok()?.into()))
            })
            .collect();
        if !metadata.is_empty() && stored.status().is_success() {
            let url = self.url("storage/v1");
            let patch = json!({ "metadata": metadata }).to_string();
            let patch = self.shim.client.patch(url).body(patch);
            return pass(patch.header("content-type", "application/json")).await;
        }
        Ok(stored)
    }

    async fn put(
        &self,
        query: &HashMap<String, String>,
        headers: &HeaderMap,
        body: Bytes,
    ) -> reqwest::Result<Response> {
        if let (Some(id), Some(number)) = (query.get("uploadId"), query.get("partNumber")) {
            let mut uploads = self.shim.uploads.lock().expect("a lock");
            let Some(parts) = uploads.get_mut(id) else {
                return Ok(StatusCode::NOT_FOUND.into_response());
            };
            parts.insert(number.parse().expect("a number"), body);
            return Ok([("etag", format!("\"{number}\""))].into_response());
        }
        let Some(source) = headers.get("x-goog-copy-source") else {
            return self.upload(headers, body).await;
        };
        let _alone = self.shim.copies.lock().await;
        let source = source.to_str().expect("text");
        let (bucket, object) = source.split_once('/').expect("a bucket");
        let object = Path::from_url_path(object).expect("a name").to_string();
        let from = Place {
            shim: self.shim,
            bucket,
            object: &object,
        };
        let url = from.media();
        let got = self.shim.client.get(url).send().await?;
        if !got.status().is_success() {
            return Ok(got.status().into_response());
        }
        self.upload(headers, got.bytes().await?).await
    }

    async fn post(&self, query: &HashMap<String, String>) -> reqwest::Result<Response> {
        let Some(id) = query.get("uploadId") else {
            let id = format!("upload-{:016x}", fastrand::u64(..));
            self.shim
                .uploads
                .lock()
                .expect("a lock")
                .insert(id.clone(), BTreeMap::new());
            let xml = format!(
                "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
            );
            return Ok(xml.into_response());
        };
        let Some(parts) = self.shim.uploads.lock().expect("a lock").remove(id) else {
            return Ok(StatusCode::NOT_FOUND.into_response());
        };
        let content = parts.into_values().collect::<Vec<_>>().concat();
        let stored = self.upload(&HeaderMap::new(), content.into()).await?;
        if !stored.status().is_success() {
            return Ok(stored);
        }
        let (parts, _) = stored.into_parts();
        let e_tag = parts.headers["etag"]
            .to_str()
            .expect("text")
            .trim_matches('"')
            .to_owned();
        let xml = format!(
            "<CompleteMultipartUploadResult><ETag>{e_tag}</ETag></CompleteMultipartUploadResult>"
        );
        let generation = parts.headers["x-goog-generation"].clone();
        Ok(([("x-goog-generation", generation)], xml).into_response())
    }

    async fn list(&self, query: &HashMap<String, String>) -> reqwest::Result<Response> {
        let mut url = self.url("storage/v1");
        for (theirs, ours) in [
            ("prefix", "prefix"),
            ("delimiter", "delimiter"),
            ("continuation-token", "pageToken"),
            ("max-keys", "maxResults"),
        ] {
            if let Some(value) = query.get(theirs) {
                url.query_pairs_mut().append_pair(ours, value);
            }
        }
        let got = self.shim.client.get(url).send().await?;
        if !got.status().is_success() {
            return Ok(got.status().into_response());
        }
        let json: Value = serde_json::from_slice(&got.bytes().await?).expect("JSON");
        let mut xml = "<ListBucketResult>".to_owned();
        let escaped = |v: &Value| {
            let text = v.as_str().unwrap_or_default();
            text.replace('&', "&amp;").replace('<', "&lt;")
        };
        for item in json["items"].as_array().into_iter().flatten() {
            xml.push_str(&format!(
                "<Contents><Key>{}</Key><LastModified>{}</LastModified><Size>{}</Size><ETag>{}</ETag></Contents>",
                escaped(&item["name"]),
                escaped(&item["updated"]),
                escaped(&item["size"]),
                escaped(&item["etag"]),
            ));
        }
        for prefix in json["prefixes"].as_array().into_iter().flatten() {
            let prefix = escaped(prefix);
            xml.push_str(&format!(
                "<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>"
            ));
        }
        if json["nextPageToken"].is_string() {
            let token = escaped(&json["nextPageToken"]);
            xml.push_str(&format!(
                "<NextContinuationToken>{token}</NextContinuationToken>"
            ));
        }
        xml.push_str("</ListBucketResult>");
        Ok(xml.into_response())
    }
}
