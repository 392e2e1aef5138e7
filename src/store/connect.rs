//! The HTTP connections of stores, made from object_store's settings like the crate's own, except that
//! redirects are not followed.
//!
//! A hostile server, or somebody in the network, could redirect a request to another host, and with it all headers that
//! reqwest does not know to be secret: `X-Auth-Token`, `x-amz-security-token`, the keys of SSE-C. Also warns once for
//! each host that gets credentials without TLS.

use super::answers::{LONGEST_REFUSAL, PROXY_WANTS_PASSWORD, Refusal, Through};
use super::proxies::Proxies;
use crate::base::causes::causes;
use crate::base::{lock, tls};
use crate::error::Reason;
use async_trait::async_trait;
use futures::TryStreamExt;
use http::header::{AUTHORIZATION, LOCATION};
use http::{HeaderMap, HeaderName, Method, StatusCode, Uri};
use object_store::client::{
    HttpClient, HttpError, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey as Key, ClientOptions};
use reqwest::redirect::Policy;
use reqwest::{ClientBuilder, NoProxy, Proxy};
use rustls::pki_types::CertificateDer;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Duration;
use url::{Host, Url};

/// Headers with which their reader could act as us, or decrypt what is stored.
static SECRET_HEADERS: [HeaderName; 6] = [
    AUTHORIZATION,
    HeaderName::from_static("x-auth-token"),
    HeaderName::from_static("x-auth-key"),
    HeaderName::from_static("x-amz-security-token"),
    HeaderName::from_static("x-amz-server-side-encryption-customer-key"),
    HeaderName::from_static("x-amz-copy-source-server-side-encryption-customer-key"),
];
/// Parameters of a URL with which its reader could act as us.
const SECRET_PARAMETERS: [&str; 4] = [
    "sig",
    "X-Amz-Signature",
    "X-Amz-Security-Token",
    "X-Goog-Signature",
];

/// Returns a client with these settings. It trusts these certificates, and the system's unless
/// NoSystemCertificates is set.
///
/// # Errors
/// Fails with the crate's errors if a setting is invalid.
pub(super) fn connect(
    options: &ClientOptions,
    certificates: &[CertificateDer<'static>],
    bodies: Bodies,
) -> object_store::Result<HttpClient> {
    let proxies = Proxies::from_env();
    let builder = builder(options, certificates, proxies.clone(), bodies)?;
    let client = builder.build().map_err(invalid)?;
    let proxy = Settings(options).text(Key::ProxyUrl);
    Ok(HttpClient::new(WithoutRedirects {
        client: HttpClient::new(client),
        proxy,
        proxies,
    }))
}

/// Returns the longest time without a byte.
///
/// # Errors
/// Fails with the crate's errors if the setting is invalid.
pub(super) fn read_timeout(options: &ClientOptions) -> object_store::Result<Option<Duration>> {
    Settings(options).duration(Key::ReadTimeout)
}

/// Which way the bodies of a client's requests go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bodies {
    Received,
    /// The time of a request counts with its body, so its sender limits it by its length.
    Sent,
}

fn invalid(e: impl std::error::Error + Send + Sync + 'static) -> object_store::Error {
    object_store::Error::Generic {
        store: "HTTP client",
        source: Box::new(e),
    }
}

fn builder(
    options: &ClientOptions,
    certificates: &[CertificateDer<'static>],
    proxies: Proxies,
    bodies: Bodies,
) -> object_store::Result<ClientBuilder> {
    let settings = Settings(options);
    let mut certificates = certificates.to_vec();
    let mut builder = ClientBuilder::new()
        .redirect(Policy::none())
        .user_agent(concat!("deltafold/", env!("CARGO_PKG_VERSION")))
        // Objects must be read as they were written, whatever features reqwest is built with.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .https_only(!settings.flag(Key::AllowHttp)?);
    if let Some(url) = settings.text(Key::ProxyUrl) {
        let mut proxy = Proxy::all(url).map_err(invalid)?;
        if let Some(pem) = settings.text(Key::ProxyCaCertificate) {
            certificates.extend(tls::certificates(pem.as_bytes()).map_err(invalid)?);
        }
        if let Some(hosts) = settings.text(Key::ProxyExcludes) {
            proxy = proxy.no_proxy(NoProxy::from_string(&hosts));
        }
        builder = builder.proxy(proxy);
    } else {
        // Also turns off what reqwest takes from the environment.
        builder = builder.no_proxy().proxy(Proxy::custom(move |url| {
            proxies.of_url(url).map(str::to_owned)
        }));
    }
    let no_system = settings.flag(Key::NoSystemCertificates)?;
    let accepts_all = settings.flag(Key::AllowInvalidCertificates)?;
    if !accepts_all && (no_system || !certificates.is_empty()) {
        let mut config = tls::client_config(certificates, !no_system, None).map_err(invalid)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        builder = builder.tls_backend_preconfigured(config);
    }
    if let Some(time) = settings.duration(Key::Timeout)? {
        builder = builder.timeout(time);
    }
    if let Some(time) = settings.duration(Key::ConnectTimeout)? {
        builder = builder.connect_timeout(time);
    }
    if let Some(time) = read_timeout(options)? {
        builder = match bodies {
            Bodies::Received => builder.read_timeout(time),
            Bodies::Sent => builder.tcp_user_timeout(time),
        };
    }
    if accepts_all {
        builder = builder.tls_danger_accept_invalid_certs(true);
    }
    Ok(builder)
}

/// The crate's settings, which it returns as texts.
struct Settings<'a>(&'a ClientOptions);

impl Settings<'_> {
    fn text(&self, key: Key) -> Option<String> {
        self.0.get_config_value(&key)
    }

    fn parsed<T>(
        &self,
        key: Key,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> object_store::Result<Option<T>> {
        let Some(text) = self.text(key) else {
            return Ok(None);
        };
        let Some(value) = parse(&text) else {
            let error = format!(
                "the setting {} has the invalid value {text:?}",
                key.as_ref()
            );
            return Err(invalid(std::io::Error::other(error)));
        };
        Ok(Some(value))
    }

    fn flag(&self, key: Key) -> object_store::Result<bool> {
        let flag = |text: &str| match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" | "y" => Some(true),
            "0" | "false" | "off" | "no" | "n" => Some(false),
            _ => None,
        };
        Ok(self.parsed(key, flag)?.unwrap_or_default())
    }

    fn duration(&self, key: Key) -> object_store::Result<Option<Duration>> {
        self.parsed(key, |text| humantime::parse_duration(text).ok())
    }
}

/// Turns redirects into refusals, and names the proxy in errors.
#[derive(Debug)]
struct WithoutRedirects {
    client: HttpClient,
    /// The proxy that the user gives.
    proxy: Option<String>,
    /// The proxies that the environment gives.
    proxies: Proxies,
}

impl WithoutRedirects {
    /// Returns the origin of the proxy of a request.
    fn proxy_of(&self, uri: &Uri) -> Option<String> {
        let url = Url::parse(&uri.to_string()).ok()?;
        let proxy = self
            .proxy
            .as_deref()
            .or_else(|| self.proxies.of_url(&url))?;
        // It may have a user and a password.
        let url = if proxy.contains("://") {
            Url::parse(proxy)
        } else {
            Url::parse(&format!("http://{proxy}"))
        };
        let url = url.ok()?;
        let port = url
            .port()
            .map(|port| format!(":{port}"))
            .unwrap_or_default();
        Some(format!("{}://{}{port}", url.scheme(), url.host_str()?))
    }
}

/// Returns the error of a request that went through a proxy. What the proxy refuses, it refuses again.
fn through_proxy(proxy: &str, e: &HttpError) -> HttpError {
    const REFUSALS: [(&str, &str); 3] = [
        (
            "unsupported scheme",
            "give a proxy that speaks HTTP, as http://HOST:PORT",
        ),
        (
            "tunnel error: proxy authorization required",
            PROXY_WANTS_PASSWORD,
        ),
        (
            "tunnel error: unsuccessful",
            "it refuses the connection to this host: ask who runs it, or name the host in NO_PROXY",
        ),
    ];
    let causes = causes(e);
    let refusal = REFUSALS.iter().find(|(sign, _)| causes.contains(sign));
    let text = format!("through the proxy {proxy}: {causes}");
    match refusal {
        Some((_, advice)) => {
            Refusal::new(Reason::Configuration, format!("{text}; {advice}")).into()
        }
        None => HttpError::new(e.kind(), std::io::Error::other(text)),
    }
}

#[async_trait]
impl HttpService for WithoutRedirects {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let uri = request.uri().clone();
        if let Some(origin) = shows_secrets(request.method(), &uri, request.headers()) {
            warn_once(&origin);
        }
        let secrets = secrets(&request);
        let response = self.client.execute(request).await;
        let response = response.map_err(|e| match self.proxy_of(&uri) {
            Some(proxy) => through_proxy(&proxy, &e),
            None => e,
        })?;
        if is_redirect(response.status()) {
            return Ok(refusal(&uri, &response));
        }
        if response.status().is_success() {
            return Ok(response);
        }
        let mut response = without_secrets(response, &secrets).await?;
        if let Some(proxy) = self.proxy_of(&uri) {
            response.extensions_mut().insert(Through(proxy));
        }
        Ok(response)
    }
}

/// Returns the values of a request with which somebody could act as us.
fn secrets(request: &HttpRequest) -> Vec<String> {
    let mut secrets = Vec::new();
    for name in &SECRET_HEADERS {
        for value in request.headers().get_all(name) {
            let Ok(value) = value.to_str() else { continue };
            secrets.push(value.to_owned());
            // The token of `Bearer TOKEN`.
            secrets.extend(value.rsplit_once(' ').map(|(_, token)| token.to_owned()));
        }
    }
    secrets.extend(secret_parameters(request.uri()).map(str::to_owned));
    secrets.retain(|secret| !secret.is_empty());
    secrets
}

/// Returns the values of the secret parameters of a URL. They may be empty.
fn secret_parameters(uri: &Uri) -> impl Iterator<Item = &str> {
    let pairs = uri.query().unwrap_or_default().split('&');
    pairs.filter_map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        SECRET_PARAMETERS.contains(&name).then_some(value)
    })
}

/// Returns the beginning of a refusal, which becomes a message, without the secrets of its request: a server may
/// echo them.
async fn without_secrets(
    response: HttpResponse,
    secrets: &[String],
) -> Result<HttpResponse, HttpError> {
    let (parts, body) = response.into_parts();
    let mut stream = body.bytes_stream();
    let mut whole = Vec::new();
    while whole.len() < LONGEST_REFUSAL
        && let Some(piece) = stream.try_next().await?
    {
        whole.extend_from_slice(&piece);
    }
    whole.truncate(LONGEST_REFUSAL);
    let mut text = String::from_utf8_lossy(&whole).into_owned();
    for secret in secrets {
        text = text.replace(secret, "…");
    }
    let body = HttpResponseBody::from(text.into_bytes());
    Ok(HttpResponse::from_parts(parts, body))
}

fn is_redirect(status: StatusCode) -> bool {
    status.is_redirection() && status != StatusCode::NOT_MODIFIED
}

/// Returns the response that replaces a redirect: status 421, which clients neither follow nor retry, with the
/// reason in the body.
fn refusal(uri: &Uri, redirect: &HttpResponse) -> HttpResponse {
    let header = |name: &str| redirect.headers().get(name)?.to_str().ok();
    let to = header(LOCATION.as_str())
        .and_then(|to| Url::parse(&uri.to_string()).ok()?.join(to).ok())
        .map_or_else(String::new, |to| format!(" to {}", origin_of(&to)));
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let region = header("x-amz-bucket-region")
        .filter(|region| region.chars().all(is_plain) && region.len() < 40)
        .map_or_else(String::new, |region| {
            format!("; the bucket is in the region {region}")
        });
    let text = format!(
        "the server redirects ({}){to}, and redirects are not followed, because credentials would go along: give the store's own endpoint and region{region}",
        redirect.status().as_u16()
    );
    let mut response = HttpResponse::new(HttpResponseBody::from(text.into_bytes()));
    *response.status_mut() = StatusCode::MISDIRECTED_REQUEST;
    response
}

/// Returns the origin of a URL. Its path and query may have secrets.
fn origin_of(url: &Url) -> String {
    url.origin().ascii_serialization()
}

/// Returns the server that a request goes to.
pub(super) fn server_of(uri: &Uri) -> String {
    let url = Url::parse(&uri.to_string());
    url.map_or_else(|_| String::new(), |url| origin_of(&url))
}

/// Returns the origin of the URL if the request sends credentials without TLS to another machine; else `None`.
fn shows_secrets(method: &Method, uri: &Uri, headers: &HeaderMap) -> Option<String> {
    if uri.scheme_str() != Some("http") {
        return None;
    }
    let is_login = *method == Method::POST && uri.path().ends_with("/auth/tokens");
    let is_signed = secret_parameters(uri).next().is_some();
    let has_header = SECRET_HEADERS.iter().any(|name| headers.contains_key(name));
    let url = Url::parse(&uri.to_string()).ok()?;
    (is_login || is_signed || has_header)
        .then_some(url)
        .filter(|url| !is_local(url))
        .map(|url| origin_of(&url))
}

/// Returns whether the host is this machine or a metadata service of a cloud. Those services have link-local
/// addresses; AWS's IPv6 ones are in `fd00:ec2::/32`.
fn is_local(url: &Url) -> bool {
    let address = match url.host() {
        Some(Host::Domain(name)) => return name == "localhost" || name.ends_with(".localhost"),
        Some(Host::Ipv4(address)) => IpAddr::V4(address),
        Some(Host::Ipv6(address)) => IpAddr::V6(address),
        None => return false,
    };
    match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local(),
        IpAddr::V6(v6) => {
            v6.is_loopback()
                || v6.is_unicast_link_local()
                || v6.segments().starts_with(&[0xfd00, 0x0ec2])
        }
    }
}

fn warn_once(origin: &str) {
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut warned = lock(&WARNED);
    if warned.insert(origin.to_owned()) {
        tracing::warn!(
            endpoint = origin,
            "credentials and snapshots go to this endpoint without TLS: everybody who sees the network's traffic can read them; use https://"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn redirect(status: u16, headers: &[(&'static str, &'static str)]) -> HttpResponse {
        let mut response = HttpResponse::new(HttpResponseBody::from(Vec::new()));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        for &(name, value) in headers {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }

    async fn text_of(redirected: HttpResponse) -> String {
        assert!(is_redirect(redirected.status()));
        let uri = Uri::from_static("http://a.example:1/b?sig=SECRET");
        let refusal = refusal(&uri, &redirected);
        assert_eq!(refusal.status().as_u16(), 421);
        String::from_utf8(refusal.into_body().bytes().await.unwrap().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn a_redirect_becomes_a_refusal_that_only_shows_the_host() {
        let to = "https://u:SECRET@b.example:2/c?sig=SECRET";
        let text = text_of(redirect(307, &[("location", to)])).await;
        assert!(text.contains("(307) to https://b.example:2,"), "{text}");
        assert!(!text.contains("SECRET"), "{text}");
        let text = text_of(redirect(302, &[("location", "/else?sig=SECRET")])).await;
        assert!(text.contains("to http://a.example:1,"), "{text}");
        assert!(!text.contains("SECRET"), "{text}");
        let region = ("x-amz-bucket-region", "eu-west-1");
        let text = text_of(redirect(301, &[region])).await;
        assert!(text.ends_with("is in the region eu-west-1"), "{text}");
        let hostile = ("x-amz-bucket-region", "x; rm -rf");
        let text = text_of(redirect(301, &[hostile])).await;
        assert!(!text.contains("rm"), "{text}");
        assert!(!is_redirect(StatusCode::NOT_MODIFIED));
        assert!(!is_redirect(StatusCode::OK));
    }

    #[test]
    fn secrets_without_tls_are_noticed_unless_they_stay_on_the_machine() {
        let shows = |method, uri: &'static str, header: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            if let Some(name) = header {
                headers.insert(name, HeaderValue::from_static("x"));
            }
            shows_secrets(&method, &Uri::from_static(uri), &headers)
        };
        let get = |uri, header| shows(Method::GET, uri, header);
        for header in [
            "authorization",
            "x-auth-token",
            "x-amz-server-side-encryption-customer-key",
        ] {
            assert_eq!(
                get("http://s.example:9000/b?x", Some(header)).as_deref(),
                Some("http://s.example:9000")
            );
        }
        assert!(get("http://s.example/b?a=b&sig=x", None).is_some());
        assert!(shows(Method::POST, "http://k.example/v3/auth/tokens", None).is_some());
        assert_eq!(get("http://s.example/b", None), None);
        assert_eq!(get("https://s.example/b", Some("authorization")), None);
        for local in [
            "http://127.0.0.1:9000/b",
            "http://[::1]/b",
            "http://localhost/b",
            "http://b.localhost:9000/",
            "http://169.254.170.2/v2/credentials",
            "http://[fd00:ec2::254]/latest/meta-data",
            "http://[fd00:ec2::23]/v1/credentials",
        ] {
            assert_eq!(get(local, Some("authorization")), None, "{local}");
        }
        for elsewhere in ["http://localhost.example/b", "http://[fd00:ec3::23]/b"] {
            assert!(get(elsewhere, Some("authorization")).is_some());
        }
    }

    #[test]
    fn settings_are_read_as_the_crate_reads_its_own() {
        crate::base::tls::ensure_provider();
        let with = |key, value: &str| ClientOptions::new().with_config(key, value);
        builder(&ClientOptions::new(), &[], Proxies::default(), Bodies::Sent)
            .unwrap()
            .build()
            .unwrap();
        for (key, value) in [(Key::Timeout, "1 day"), (Key::AllowHttp, "Yes")] {
            builder(&with(key, value), &[], Proxies::default(), Bodies::Sent)
                .unwrap()
                .build()
                .unwrap();
        }
        for (key, value) in [
            (Key::Timeout, "soon"),
            (Key::AllowHttp, "perhaps"),
            (Key::ProxyUrl, "http://[nowhere"),
        ] {
            let e = builder(&with(key, value), &[], Proxies::default(), Bodies::Sent).unwrap_err();
            assert!(e.to_string().contains("HTTP client"), "{e}");
        }
    }
}
