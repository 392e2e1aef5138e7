//! Opens Alibaba Cloud OSS, through opendal. Untested: there is no OSS server that the tests could run.
//!
//! Called by `store::open`.

use super::secret::{Secret, SecretDerived};
use super::{Family, Location, OpenConfig};
use crate::base::unpoisoned;
use crate::error::{Reason, Result};
use crate::store::Store;
use crate::store::errors::redact;
use crate::store::exclude::ExcludeTags;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, TryStreamExt};
use object_store::client::{HttpClient, HttpRequestBody};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use object_store_opendal::OpendalStore;
use opendal::layers::RetryLayer;
use opendal::services::Oss;
use opendal::{
    Buffer, ErrorKind, HttpBody, HttpTransport, HttpTransporter, OperationContext, Operator,
};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use tokio::runtime::Handle;

/// The options that are passed on to opendal. It has the same names.
const KEYS: [&str; 11] = [
    "endpoint",
    "addressing_style",
    "access_key_id",
    "access_key_secret",
    "security_token",
    "role_arn",
    "role_session_name",
    "oidc_provider_arn",
    "oidc_token_file",
    "server_side_encryption",
    "server_side_encryption_key_id",
];

/// The settings in the providers' variables.
const VARIABLES: [(&str, &str); 7] = [
    ("endpoint", "ALIBABA_CLOUD_OSS_ENDPOINT"),
    ("endpoint", "ALICLOUD_ENDPOINT"),
    ("access_key_id", "ALIBABA_CLOUD_ACCESS_KEY_ID"),
    ("access_key_secret", "ALIBABA_CLOUD_ACCESS_KEY_SECRET"),
    ("security_token", "ALIBABA_CLOUD_SECURITY_TOKEN"),
    ("access_key_id", "ALICLOUD_ACCESS_KEY_ID"),
    ("access_key_secret", "ALICLOUD_ACCESS_KEY_SECRET"),
];
/// Parts of the names of options with credentials. If one of them is given, the Secret's credentials are not
/// used.
const OWN_CREDENTIALS: &[&str] = &["access_key", "role_arn", "oidc_"];

pub(super) fn open(location: &Location, config: OpenConfig, handle: Handle) -> Result<Store> {
    let requests = config.requests.most();
    let secret = config.read_secret()?;
    let current: CurrentOperator = match (&config.secret, &secret) {
        (Some(source), Some(secret)) => {
            let (location, config) = (location.clone(), config.clone());
            let operator = move |secret: &Secret| operator(&location, &config, Some(secret));
            let derived = SecretDerived::new(source.clone(), secret.clone(), operator)?;
            Box::new(move || derived.current())
        }
        _ => {
            let operator = operator(location, &config, None)?;
            Box::new(move || operator.clone())
        }
    };
    let store = location.store(Arc::new(OssStore(current)), ExcludeTags::none(), handle);
    Ok(store.with_requests(requests))
}

/// Makes an opendal client from all settings.
fn operator(location: &Location, config: &OpenConfig, secret: Option<&Secret>) -> Result<Operator> {
    let (client, options) = config.plain_client()?;
    let deciding = config.deciding_secret(secret, OWN_CREDENTIALS);
    if let Some(secret) = deciding
        && !secret.has_credentials(Family::Oss, |_| false)
    {
        return Err(secret.lacks_credentials(Family::Oss));
    }
    let mut settings: Vec<(String, String)> = Vec::new();
    for (key, variable) in VARIABLES {
        let is_endpoint = key == "endpoint";
        // Without a Secret, opendal itself reads the credentials in ALIBABA_CLOUD_ variables.
        let is_read = match deciding {
            Some(_) => is_endpoint,
            None => is_endpoint || variable.starts_with("ALICLOUD_"),
        };
        if is_read && let Ok(value) = std::env::var(variable) {
            settings.push((key.to_owned(), value));
        }
    }
    if let Some(secret) = secret {
        settings.extend(secret.settings(VARIABLES));
        settings.extend(secret.settings([
            ("endpoint", "storageEndpoint"),
            ("access_key_id", "accessKeyID"),
            ("access_key_secret", "accessKeySecret"),
        ]));
    }
    for (key, value) in options {
        if !KEYS.contains(&key.as_str()) {
            return Err(super::no_such_setting(&key));
        }
        settings.push((key, value));
    }
    let mut oss = Oss::default().bucket(&location.bucket);
    let mut has_endpoint = false;
    for (key, value) in &settings {
        has_endpoint |= key == "endpoint";
        oss = match key.as_str() {
            "endpoint" => oss.endpoint(value),
            "addressing_style" => oss.addressing_style(value),
            "access_key_id" => oss.access_key_id(value),
            "access_key_secret" => oss.access_key_secret(value),
            "security_token" => oss.security_token(value),
            "role_arn" => oss.role_arn(value),
            "role_session_name" => oss.role_session_name(value),
            "oidc_provider_arn" => oss.oidc_provider_arn(value),
            "oidc_token_file" => oss.oidc_token_file(value),
            "server_side_encryption" => oss.server_side_encryption(value),
            _ => oss.server_side_encryption_key_id(value),
        };
    }
    if !has_endpoint {
        return Err(Reason::Configuration.error(format!(
            "--store {}: OSS needs its region's endpoint: --store-option endpoint=https://oss-<region>.aliyuncs.com",
            location.url
        )));
    }
    let http = config.http(&client, &location.action)?;
    let wrong = |e: opendal::Error| {
        let text = redact(&e.to_string());
        Reason::Configuration.error(format!("cannot {}: {text}", location.action))
    };
    let retry = RetryLayer::new()
        .with_max_times(config.retry.max_retries)
        .with_jitter();
    let transport = HttpTransporter::new(SharedTransport(http));
    let context = OperationContext::new().with_http_transport(transport);
    Ok(Operator::new(oss)
        .map_err(wrong)?
        .with_context(context)
        .layer(retry))
}

/// Sends opendal's requests through our own client, so that proxies, certificates and time-outs are the same.
#[derive(Clone)]
struct SharedTransport(HttpClient);

impl HttpTransport for SharedTransport {
    async fn fetch(
        &self,
        request: http::Request<Buffer>,
    ) -> opendal::Result<http::Response<HttpBody>> {
        let failed = |what: &str, e: object_store::client::HttpError| {
            opendal::Error::new(ErrorKind::Unexpected, format!("{what}: {e}")).set_temporary()
        };
        let (parts, body) = request.into_parts();
        let mut sent = http::Request::new(HttpRequestBody::from(body.to_bytes()));
        *sent.method_mut() = parts.method;
        *sent.uri_mut() = parts.uri;
        *sent.headers_mut() = parts.headers;
        let response = self
            .0
            .execute(sent)
            .await
            .map_err(|e| failed("send a request", e))?;
        let (mut parts, body) = response.into_parts();
        let length = parts.headers.get(http::header::CONTENT_LENGTH);
        let length = length.and_then(|l| l.to_str().ok()?.parse().ok());
        parts.extensions.clear();
        let stream = body
            .bytes_stream()
            .map_ok(Buffer::from)
            .map_err(move |e| failed("read a response", e));
        let stream = SyncStream(Mutex::new(stream.boxed()));
        Ok(http::Response::from_parts(
            parts,
            HttpBody::new(stream, length),
        ))
    }
}

/// A stream that is `Sync`, as opendal requires. Only one thread at a time reads it.
struct SyncStream(Mutex<BoxStream<'static, opendal::Result<Buffer>>>);

impl Stream for SyncStream {
    type Item = opendal::Result<Buffer>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let stream = unpoisoned(self.0.get_mut());
        stream.poll_next_unpin(cx)
    }
}

/// Returns the client with the credentials as they are now.
type CurrentOperator = Box<dyn Fn() -> Operator + Send + Sync>;

/// OSS as an object store that also has conditional copies.
struct OssStore(CurrentOperator);

impl OssStore {
    fn store(&self) -> OpendalStore {
        OpendalStore::new((self.0)())
    }
}

impl fmt::Debug for OssStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for OssStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OSS")
    }
}

#[async_trait]
impl ObjectStore for OssStore {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.store().put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.store().put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.store().get_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.store().delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.store().list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.store().list_with_delimiter(prefix).await
    }

    /// Copies. On condition that the name is free, reads the object and writes it again: opendal's copies on
    /// OSS have no such condition, but its uploads have.
    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        if options.mode != CopyMode::Create {
            return self.store().copy_opts(from, to, options).await;
        }
        let failed = |e: opendal::Error| copy_error(to, e);
        let operator = (self.0)();
        let mut content = self
            .store()
            .get_opts(from, GetOptions::default())
            .await?
            .into_stream();
        let mut writer = operator
            .writer_with(to.as_ref())
            .if_not_exists(true)
            .chunk(PART)
            .await
            .map_err(failed)?;
        let copy = async {
            while let Some(bytes) = content.next().await {
                let bytes: Bytes = bytes?;
                writer.write(bytes).await.map_err(failed)?;
            }
            writer.close().await.map(|_| ()).map_err(failed)
        };
        let result = copy.await;
        if result.is_err() {
            // An unfinished upload is not an object. If the abort fails, it stays until the bucket's rules
            // remove it.
            let _ = writer.abort().await;
        }
        result
    }
}

fn copy_error(to: &Path, e: opendal::Error) -> object_store::Error {
    let path = to.to_string();
    let source = redact(&e.to_string()).into();
    match e.kind() {
        ErrorKind::AlreadyExists | ErrorKind::ConditionNotMatch => {
            object_store::Error::AlreadyExists { path, source }
        }
        ErrorKind::NotFound => object_store::Error::NotFound { path, source },
        ErrorKind::PermissionDenied => object_store::Error::PermissionDenied { path, source },
        _ => object_store::Error::Generic {
            store: "OSS",
            source,
        },
    }
}

/// Size of a part of a conditional copy, in bytes.
const PART: usize = 16 << 20;
