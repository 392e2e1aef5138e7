//! Logs in to Swift: with a token, by Swift's own protocol (version 1), or by Keystone (version 3).

use super::Swift;
use super::client::{Request, failed, header_value, refused, text};
use crate::error::Reason;
use crate::store::answers::Refusal;
use chrono::{DateTime, Utc};
use http::Method;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use object_store::Result;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A token is not used in the last moments before it expires.
const EXPIRY_MARGIN: Duration = Duration::from_secs(60);
/// The longest use of a token, whatever expiry the server names: that may be nonsense.
const LONGEST_SESSION: Duration = Duration::from_secs(24 * 60 * 60);

const X_AUTH_KEY: HeaderName = HeaderName::from_static("x-auth-key");
const X_AUTH_TOKEN: HeaderName = HeaderName::from_static("x-auth-token");
const X_AUTH_TOKEN_EXPIRES: HeaderName = HeaderName::from_static("x-auth-token-expires");
const X_AUTH_USER: HeaderName = HeaderName::from_static("x-auth-user");
const X_STORAGE_URL: HeaderName = HeaderName::from_static("x-storage-url");
const X_SUBJECT_TOKEN: HeaderName = HeaderName::from_static("x-subject-token");

/// The credentials, and where to log in with them.
#[derive(Clone, PartialEq)]
pub(in crate::store) enum Login {
    /// A token for the account at `url`: no login is needed.
    Token { url: String, token: String },
    /// Swift's own protocol, as the middleware tempauth has it.
    V1 {
        url: String,
        user: String,
        key: String,
    },
    /// Keystone's protocol.
    V3 {
        url: String,
        /// The body of the login request.
        request: Value,
        region: Option<String>,
        interface: String,
        /// The account's URL, instead of the one in Keystone's catalogue.
        storage_url: Option<String>,
    },
}

impl Login {
    /// Returns the URLs that requests go to, as far as they are known before the login.
    pub(in crate::store) fn urls(&self) -> impl Iterator<Item = &str> {
        let (url, storage_url) = match self {
            Login::Token { url, .. } | Login::V1 { url, .. } => (url, None),
            Login::V3 {
                url, storage_url, ..
            } => (url, storage_url.as_deref()),
        };
        [Some(url.as_str()), storage_url].into_iter().flatten()
    }
}

/// The result of a login.
pub(super) struct Session {
    login: Login,
    /// The account's URL, without a slash at its end.
    pub(super) url: String,
    pub(super) token: HeaderValue,
    /// When the token is no longer used.
    end: Option<Instant>,
}

impl Session {
    fn new(login: Login, url: &str, token: &str, lifetime: Option<Duration>) -> Result<Self> {
        let mut token = header_value(token)?;
        token.set_sensitive(true);
        Ok(Session {
            login,
            url: url.trim_end_matches('/').to_owned(),
            token,
            end: lifetime.and_then(session_end),
        })
    }

    /// Returns a request header that names the token, and the token.
    pub(super) fn header(&self) -> (HeaderName, HeaderValue) {
        (X_AUTH_TOKEN, self.token.clone())
    }

    fn is_usable_for(&self, login: &Login) -> bool {
        self.login == *login && self.end.is_none_or(|end| Instant::now() < end)
    }
}

impl Swift {
    /// Returns a session, and logs in if there is none. The token `refused` is not used again.
    pub(super) async fn session(&self, refused: Option<&HeaderValue>) -> Result<Arc<Session>> {
        let mut current = self.0.session.lock().await;
        let login = (self.0.login)();
        if let Some(session) = &*current
            && session.is_usable_for(&login)
            && Some(&session.token) != refused
        {
            return Ok(session.clone());
        }
        let new = Arc::new(self.log_in(login).await?);
        *current = Some(new.clone());
        Ok(new)
    }

    async fn log_in(&self, login: Login) -> Result<Session> {
        let (url, request) = match &login {
            Login::Token { url, token } => {
                return Session::new(login.clone(), url, token, None);
            }
            Login::V1 { url, user, key } => {
                let request = Request::new(Method::GET, None)
                    .header(X_AUTH_USER, user)?
                    .header(X_AUTH_KEY, key)?;
                (url.clone(), request)
            }
            Login::V3 { url, request, .. } => {
                let request = Request::new(Method::POST, None)
                    .header(header::CONTENT_TYPE, "application/json")?
                    .body(request.to_string());
                (format!("{url}/auth/tokens"), request)
            }
        };
        let response = self.send_with_retries(request.to(&url)?).await?;
        let (parts, body) = response.into_parts();
        let body = body.bytes().await.map_err(failed)?;
        if !parts.status.is_success() {
            let text = String::from_utf8_lossy(&body);
            return Err(failed(format!("log in at {url}: {}: {text}", parts.status)));
        }
        match login {
            Login::V3 { .. } => keystone_session(login, &parts.headers, &body),
            _ => v1_session(login, &parts.headers),
        }
    }
}

/// Reads the response to a login by Swift's own protocol.
fn v1_session(login: Login, headers: &HeaderMap) -> Result<Session> {
    let seconds = text(headers, X_AUTH_TOKEN_EXPIRES).and_then(|s| s.parse().ok());
    match (text(headers, X_STORAGE_URL), text(headers, X_AUTH_TOKEN)) {
        (Some(url), Some(token)) => {
            Session::new(login, &url, &token, seconds.map(Duration::from_secs))
        }
        _ => Err(failed("the response to the login has no token or no URL")),
    }
}

/// Reads the response to a login by Keystone: the token is in a header, its expiry and the catalogue in the
/// body.
fn keystone_session(login: Login, headers: &HeaderMap, body: &[u8]) -> Result<Session> {
    let Login::V3 {
        region,
        interface,
        storage_url,
        ..
    } = &login
    else {
        return Err(failed("Keystone was not asked for a token"));
    };
    let response: Value = serde_json::from_slice(body)
        .map_err(|e| failed(format!("Keystone's response is not JSON: {e}")))?;
    let region = region.as_deref();
    let url = match storage_url {
        Some(url) => url.clone(),
        None => catalogue_url(&response, interface, region)
            .map_err(|why| refused(Refusal::new(Reason::Configuration, why)))?,
    };
    let Some(token) = text(headers, X_SUBJECT_TOKEN) else {
        return Err(failed("the response to the login has no token or no URL"));
    };
    let expiry = response["token"]["expires_at"].as_str();
    Session::new(login, &url, &token, expiry.and_then(time_until))
}

/// Returns the time from now until an RFC 3339 date, or `None` if it is unreadable or past.
fn time_until(date: &str) -> Option<Duration> {
    let date = DateTime::parse_from_rfc3339(date).ok()?;
    (date.with_timezone(&Utc) - Utc::now()).to_std().ok()
}

/// Returns when a token of this lifetime is no longer used.
fn session_end(lifetime: Duration) -> Option<Instant> {
    let usable = lifetime.saturating_sub(EXPIRY_MARGIN).min(LONGEST_SESSION);
    Instant::now().checked_add(usable)
}

/// Returns the URL of the object store in Keystone's catalogue.
///
/// # Errors
/// Fails with what the catalogue has instead.
fn catalogue_url(
    response: &Value,
    interface: &str,
    region: Option<&str>,
) -> Result<String, String> {
    let services = response["token"]["catalog"].as_array();
    let services: Vec<&Value> = services.into_iter().flatten().collect();
    if services.is_empty() {
        return Err(
            "Keystone's catalogue is empty: give the user a role in the project, and check the project's name (OS_PROJECT_NAME)".to_owned(),
        );
    }
    let endpoints = services
        .iter()
        .filter(|s| s["type"] == "object-store")
        .filter_map(|s| s["endpoints"].as_array())
        .flatten();
    let endpoints: Vec<&Value> = endpoints.filter(|e| e["interface"] == interface).collect();
    let names =
        |e: &Value| [&e["region"], &e["region_id"]].map(|name| name.as_str().map(str::to_owned));
    let is_there = |e: &&&Value| region.is_none_or(|r| names(e).contains(&Some(r.to_owned())));
    let url = endpoints
        .iter()
        .find(is_there)
        .and_then(|e| e["url"].as_str());
    url.map(str::to_owned).ok_or_else(|| {
        let there: BTreeSet<String> = endpoints
            .iter()
            .filter_map(|e| names(e).into_iter().flatten().next())
            .collect();
        let there = Vec::from_iter(there).join(", ");
        match region {
            _ if there.is_empty() => format!(
                "Keystone's catalogue has no {interface} endpoint of an object store: check the interface (OS_INTERFACE), and that the project may use one"
            ),
            Some(region) => format!(
                "Keystone's catalogue has no {interface} endpoint of an object store in the region {region} (OS_REGION_NAME): there is one in {there}"
            ),
            None => "the endpoint in Keystone's catalogue has no URL".to_owned(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_catalogue_names_the_object_stores_url() {
        let answer = json!({"token": {"catalog": [
            {"type": "compute", "endpoints": [{"interface": "public", "region": "r", "url": "c"}]},
            {"type": "object-store", "endpoints": [
                {"interface": "internal", "region": "r", "url": "https://i/"},
                {"interface": "public", "region": "other", "url": "https://o/"},
                {"interface": "public", "region_id": "r", "url": "https://p/"},
            ]},
        ]}});
        let at = |interface, region| catalogue_url(&answer, interface, region).ok();
        assert_eq!(at("public", Some("r")).as_deref(), Some("https://p/"));
        assert_eq!(at("public", None).as_deref(), Some("https://o/"));
        assert_eq!(at("internal", Some("r")).as_deref(), Some("https://i/"));
        for (answer, region, says) in [
            (&answer, Some("none"), "there is one in other, r"),
            (
                &json!({"token": {"catalog": []}}),
                None,
                "give the user a role",
            ),
        ] {
            let why = catalogue_url(answer, "public", region).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn a_token_that_never_expires_is_used_for_a_day() {
        let day = Instant::now() + LONGEST_SESSION;
        for lifetime in [Duration::MAX, Duration::from_secs(u64::MAX)] {
            let end = session_end(lifetime).unwrap();
            assert!(end >= day && end < day + EXPIRY_MARGIN);
        }
        assert!(session_end(Duration::ZERO).unwrap() <= Instant::now());
    }
}
