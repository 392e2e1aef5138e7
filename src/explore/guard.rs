//! Who may ask: the page of this process in a browser of this machine, and nobody else.
//!
//! The address that is printed has a token; the first answer moves it into a cookie, so that it does not stay in the
//! address. The Host must be a name of this machine, so that another site cannot point its own name here (DNS rebinding);
//! the Origin, if there is one, must be this page's. Answers forbid scripts, styles and requests from elsewhere. Called by
//! `api` for each request.

use crate::base::hash::hex;
use crate::base::random;
use crate::error::Result;
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, COOKIE, HOST, HeaderName, LOCATION, ORIGIN,
    REFERRER_POLICY, SET_COOKIE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

const COOKIE_NAME: &str = "deltafold-explore";
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

/// What only the address that was printed has: 32 hexadecimal digits.
pub(super) struct Token(String);

impl Token {
    /// Returns a random token.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn random() -> Result<Self> {
        Ok(Token(hex(&random::secret_bytes::<16>()?)))
    }

    /// The token as text.
    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Whether a text is the token. Takes the same time whatever differs.
    fn is(&self, text: &str) -> bool {
        let pairs = self.0.bytes().zip(text.bytes());
        let difference = pairs.fold(0, |sum, (a, b)| sum | (a ^ b));
        self.0.len() == text.len() && difference == 0
    }
}

/// What becomes of a request.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Answered,
    /// The token is right: it moves into a cookie.
    Entered,
    Refused(StatusCode, &'static str),
}

/// Lets only our own page ask, and adds the headers of every answer.
pub(super) async fn guard(
    State(token): State<Arc<Token>>,
    request: Request,
    next: Next,
) -> Response {
    let verdict = verdict(&token, request.method(), request.uri(), request.headers());
    let mut response = match verdict {
        Verdict::Answered => next.run(request).await,
        Verdict::Entered => {
            let cookie = format!(
                "{COOKIE_NAME}={}; Path=/; HttpOnly; SameSite=Strict",
                token.text()
            );
            (
                StatusCode::SEE_OTHER,
                [(LOCATION, "/".to_owned()), (SET_COOKIE, cookie)],
            )
                .into_response()
        }
        Verdict::Refused(status, text) => (status, text).into_response(),
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            HeaderValue::from_static("same-origin"),
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            HeaderValue::from_static("same-origin"),
        ),
    ] {
        headers.insert(name, value);
    }
    response
}

fn verdict(token: &Token, method: &Method, uri: &Uri, headers: &HeaderMap) -> Verdict {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(host) = text(HOST).filter(|host| is_local(host)) else {
        return Verdict::Refused(
            StatusCode::MISDIRECTED_REQUEST,
            "open the page by the address that deltafold printed: 127.0.0.1 or localhost\n",
        );
    };
    if headers.contains_key(ORIGIN) && text(ORIGIN) != Some(&format!("http://{host}")) {
        return Verdict::Refused(StatusCode::FORBIDDEN, "another site asks\n");
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        return Verdict::Refused(StatusCode::METHOD_NOT_ALLOWED, "the page only reads\n");
    }
    let parameters = uri.query().unwrap_or_default().split('&');
    let mut tokens = parameters.filter_map(|p| p.strip_prefix("token="));
    if uri.path() == "/" && tokens.any(|text| token.is(text)) {
        return Verdict::Entered;
    }
    let cookies = headers.get_all(COOKIE).iter();
    let mut cookies = cookies
        .filter_map(|cookies| cookies.to_str().ok())
        .flat_map(|cookies| cookies.split(';'));
    let is_ours = |cookie: &str| {
        let value = cookie.trim().split_once('=');
        value.is_some_and(|(name, value)| name == COOKIE_NAME && token.is(value))
    };
    if cookies.any(is_ours) {
        Verdict::Answered
    } else {
        Verdict::Refused(
            StatusCode::UNAUTHORIZED,
            "the token is missing or wrong: open the whole address that deltafold printed\n",
        )
    }
}

/// Whether a Host means this machine, with any port: a port may be forwarded.
fn is_local(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    matches!(name, "127.0.0.1" | "localhost" | "[::1]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_page_may_ask() {
        let token = Token::random().unwrap();
        let other = Token::random().unwrap();
        assert!(token.text().len() == 32 && token.text() != other.text());
        let ask = |method: Method, uri: &str, headers: &[(HeaderName, String)]| {
            let mut map = HeaderMap::new();
            for (name, value) in headers {
                map.append(name.clone(), HeaderValue::from_str(value).unwrap());
            }
            verdict(&token, &method, &uri.parse().unwrap(), &map)
        };
        let host = |host: &str| (HOST, host.to_owned());
        let cookie = |token: &Token| (COOKIE, format!("a=b; {COOKIE_NAME}={}", token.text()));
        let get = |headers: &[_]| ask(Method::GET, "/api/state?at=5", headers);
        for name in ["127.0.0.1:8080", "localhost", "[::1]:1", "localhost:9"] {
            assert_eq!(get(&[host(name), cookie(&token)]), Verdict::Answered);
        }
        let refused = |verdict| match verdict {
            Verdict::Refused(status, _) => status.as_u16(),
            verdict => panic!("{verdict:?}"),
        };
        for name in [
            "evil.example",
            "127.0.0.1.evil.example:80",
            "localhost.:80",
            "10.0.0.1",
        ] {
            assert_eq!(refused(get(&[host(name), cookie(&token)])), 421, "{name}");
        }
        assert_eq!(refused(get(&[cookie(&token)])), 421);
        assert_eq!(refused(get(&[host("localhost")])), 401);
        assert_eq!(refused(get(&[host("localhost"), cookie(&other)])), 401);
        let origin = |text: &str| (ORIGIN, text.to_owned());
        let with = |text: &str| get(&[host("localhost:9"), cookie(&token), origin(text)]);
        assert_eq!(with("http://localhost:9"), Verdict::Answered);
        assert_eq!(refused(with("http://localhost:8")), 403);
        assert_eq!(refused(with("null")), 403);
        let enter = |token: &Token, path: &str| {
            let uri = format!("{path}?x=1&token={}", token.text());
            ask(Method::GET, &uri, &[host("localhost:9")])
        };
        assert_eq!(enter(&token, "/"), Verdict::Entered);
        assert_eq!(refused(enter(&other, "/")), 401);
        assert_eq!(refused(enter(&token, "/api/state")), 401);
        let put = ask(Method::PUT, "/", &[host("localhost"), cookie(&token)]);
        assert_eq!(refused(put), 405);
    }
}
