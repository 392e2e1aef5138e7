//! S3 requests of the tests: buckets with versions and object lock, tags, versions.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use deltafold::store::{self, Store};
use http::{HeaderName, HeaderValue};
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsAuthorizer, AwsCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::path::Path;
use object_store::signer::{Method, SignedUrlOptions, Signer as _};

pub const ACCESS_KEY: &str = "deltafold-test";
pub const SECRET_KEY: &str = "deltafold-test-secret";
pub const REGION: &str = "us-east-1";

/// An S3 server at an address, with the tests' credentials.
#[derive(Clone, Debug)]
pub struct S3 {
    endpoint: String,
}

/// The kind of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Plain,
    Versioned,
    /// With versions and an object lock.
    Locked,
}

impl S3 {
    pub fn new(endpoint: &str) -> Self {
        S3 {
            endpoint: endpoint.to_owned(),
        }
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the environment variables with which the object_store crate reaches this server.
    pub fn env(&self) -> Vec<(String, String)> {
        [
            ("AWS_ENDPOINT_URL", self.endpoint()),
            ("AWS_REGION", REGION),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
            ("AWS_ALLOW_HTTP", "true"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
    }

    pub fn store(&self, bucket: &str) -> Arc<AmazonS3> {
        deltafold::base::tls::ensure_provider();
        let store = AmazonS3Builder::new()
            .with_endpoint(self.endpoint())
            .with_region(REGION)
            .with_access_key_id(ACCESS_KEY)
            .with_secret_access_key(SECRET_KEY)
            .with_allow_http(true)
            .with_bucket_name(bucket)
            .build()
            .expect("a client for S3");
        Arc::new(store)
    }

    /// Opens a store as deltafold does.
    pub fn open(&self, url: &str, handle: &tokio::runtime::Handle) -> Store {
        self.open_with(url, &[], handle)
    }

    /// Opens a store with further settings.
    pub fn open_with(
        &self,
        url: &str,
        settings: &[(&str, &str)],
        handle: &tokio::runtime::Handle,
    ) -> Store {
        let options = [
            ("endpoint", self.endpoint()),
            ("region", REGION),
            ("access_key_id", ACCESS_KEY),
            ("secret_access_key", SECRET_KEY),
            ("max_retries", "2"),
        ];
        let options = options.iter().chain(settings);
        let options: Vec<(String, String)> = options
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        store::open(url, &options, handle.clone()).expect("a store")
    }

    /// Sends a request and returns status and body, whatever they are.
    pub async fn ask(
        &self,
        method: Method,
        (bucket, key): (&str, &str),
        query: &[(&str, &str)],
        headers: &[(&'static str, &str)],
        body: &str,
    ) -> (u16, String) {
        let mut options = SignedUrlOptions::new().with_query(query.iter().copied());
        for (name, value) in headers {
            let value = HeaderValue::from_str(value).expect("a header");
            options = options.with_signed_header(HeaderName::from_static(name), value);
        }
        let url = self
            .store(bucket)
            .signed_url_opts(
                method.clone(),
                &Path::from(key),
                Duration::from_secs(60),
                &options,
            )
            .await
            .expect("sign a URL");
        let address = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let target = &url[url::Position::BeforePath..];
        let mut request = format!("{method} {target} HTTP/1.0\r\nHost: {address}\r\n");
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str(&format!("Content-Length: {}\r\n\r\n{body}", body.len()));
        let mut stream = TcpStream::connect(address).expect("a connection");
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .expect("a timeout");
        stream.write_all(request.as_bytes()).expect("a request");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer's head");
        let status = head.split(' ').nth(1).expect("a status");
        (status.parse().expect("a status"), body.to_owned())
    }

    /// Sends a request that must succeed.
    pub async fn must(
        &self,
        method: Method,
        place: (&str, &str),
        query: &[(&str, &str)],
        headers: &[(&'static str, &str)],
        body: &str,
    ) -> String {
        let (status, answer) = self.ask(method, place, query, headers, body).await;
        assert!(
            (200..300).contains(&status),
            "{place:?} {query:?}: {status} {answer}"
        );
        answer
    }

    /// Puts an object whose key object_store cannot express, percent-encoded. Returns the status.
    pub async fn put_odd(&self, bucket: &str, encoded_key: &str, body: &str) -> u16 {
        let url = format!("{}/{bucket}/{encoded_key}", self.endpoint);
        let mut request = HttpRequest::new(HttpRequestBody::from(body.to_owned()));
        *request.method_mut() = Method::PUT;
        *request.uri_mut() = url.parse().expect("a URL");
        let credential = AwsCredential {
            key_id: ACCESS_KEY.to_owned(),
            secret_key: SECRET_KEY.to_owned(),
            token: None,
        };
        AwsAuthorizer::new(&credential, "s3", REGION)
            .try_authorize(&mut request, None)
            .expect("a signature");
        let client = super::http_client().build().expect("a client");
        let put = client.put(url).headers(request.headers().clone());
        let answer = put.body(body.to_owned()).send().await.expect("an answer");
        answer.status().as_u16()
    }

    pub async fn create_bucket(&self, name: &str, kind: Kind) {
        let headers: &[_] = match kind {
            Kind::Locked => &[("x-amz-bucket-object-lock-enabled", "true")],
            Kind::Plain | Kind::Versioned => &[],
        };
        self.must(Method::PUT, (name, ""), &[], headers, "").await;
        if kind == Kind::Versioned {
            self.set_versioning(name, "Enabled").await;
        }
    }

    /// Sets the versioning state: `Enabled` or `Suspended`.
    pub async fn set_versioning(&self, bucket: &str, state: &str) {
        let xml = format!(
            r#"<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>{state}</Status></VersioningConfiguration>"#
        );
        let query = [("versioning", "")];
        self.must(Method::PUT, (bucket, ""), &query, &[], &xml)
            .await;
    }

    /// Locks an object of a bucket with object lock until this time, as RFC 3339.
    pub async fn retain(&self, bucket: &str, key: &str, until: &str) {
        let xml = format!(
            "<Retention><Mode>GOVERNANCE</Mode><RetainUntilDate>{until}</RetainUntilDate></Retention>"
        );
        self.set_lock(bucket, key, "retention", &xml).await;
    }

    /// Sets an object's legal hold: `ON` or `OFF`.
    pub async fn hold(&self, bucket: &str, key: &str, state: &str) {
        let xml = format!("<LegalHold><Status>{state}</Status></LegalHold>");
        self.set_lock(bucket, key, "legal-hold", &xml).await;
    }

    async fn set_lock(&self, bucket: &str, key: &str, lock: &str, xml: &str) {
        use base64::Engine as _;
        use md5::Digest as _;
        let sum = md5::Md5::digest(xml.as_bytes());
        let sum = base64::engine::general_purpose::STANDARD.encode(sum);
        let (query, headers) = ([(lock, "")], [("content-md5", sum.as_str())]);
        self.must(Method::PUT, (bucket, key), &query, &headers, xml)
            .await;
    }

    pub async fn set_tags(&self, bucket: &str, key: &str, tags: &[(&str, &str)]) {
        let tags: String = tags
            .iter()
            .map(|(k, v)| format!("<Tag><Key>{k}</Key><Value>{v}</Value></Tag>"))
            .collect();
        let xml = format!("<Tagging><TagSet>{tags}</TagSet></Tagging>");
        let query = [("tagging", "")];
        self.must(Method::PUT, (bucket, key), &query, &[], &xml)
            .await;
    }

    /// Returns the tags of an object, sorted.
    pub async fn tags(&self, bucket: &str, key: &str) -> Vec<(String, String)> {
        let query = [("tagging", "")];
        let xml = self.must(Method::GET, (bucket, key), &query, &[], "").await;
        let element = |xml: &str, name: &str| {
            let rest = xml.split_once(&format!("<{name}>"))?.1;
            Some(rest.split_once(&format!("</{name}>"))?.0.to_owned())
        };
        let mut tags: Vec<_> = xml
            .split("<Tag>")
            .skip(1)
            .map(|tag| (element(tag, "Key"), element(tag, "Value")))
            .map(|(key, value)| (key.expect("a tag's key"), value.unwrap_or_default()))
            .collect();
        tags.sort();
        tags
    }
}
