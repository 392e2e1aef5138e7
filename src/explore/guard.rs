//! Who may ask: the page of this process in a browser of this machine, and nobody else.
//!
//! The address that is printed has a token in its fragment, which no request sends by itself: the page keeps it for its
//! tab, and sends it as a header with each request to the API. A cookie would be sent to other ports of this machine,
//! too. The files of the page have no secrets. The Host must be a name of this machine, so that another site cannot
//! point its own name here (DNS rebinding); the Origin, if there is one, must be this page's. Answers forbid scripts,
//! styles and requests from elsewhere.

use crate::base::hash::hex;
use crate::base::random;
use crate::error::Result;
use axum::extract::{Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, ORIGIN,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

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
        Verdict::Refused(status, text) => (status, text).into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
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
    let sent = text(AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
    if !uri.path().starts_with("/api/") || sent.is_some_and(|sent| token.is(sent)) {
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
        let bearer = |token: &Token| (AUTHORIZATION, format!("Bearer {}", token.text()));
        let get = |headers: &[_]| ask(Method::GET, "/api/state?at=5", headers);
        for name in ["127.0.0.1:8080", "localhost", "[::1]:1", "localhost:9"] {
            assert_eq!(get(&[host(name), bearer(&token)]), Verdict::Answered);
        }
        let refused = |verdict| match verdict {
            Verdict::Refused(status, _) => status.as_u16(),
            Verdict::Answered => panic!("it is answered"),
        };
        for name in [
            "evil.example",
            "127.0.0.1.evil.example:80",
            "localhost.:80",
            "10.0.0.1",
        ] {
            assert_eq!(refused(get(&[host(name), bearer(&token)])), 421, "{name}");
        }
        assert_eq!(refused(get(&[bearer(&token)])), 421);
        assert_eq!(refused(get(&[host("localhost")])), 401);
        assert_eq!(refused(get(&[host("localhost"), bearer(&other)])), 401);
        let origin = |text: &str| (ORIGIN, text.to_owned());
        let with = |text: &str| get(&[host("localhost:9"), bearer(&token), origin(text)]);
        assert_eq!(with("http://localhost:9"), Verdict::Answered);
        assert_eq!(refused(with("http://localhost:8")), 403);
        assert_eq!(refused(with("null")), 403);
        // A cookie is sent to every port of the machine, also to the web server of another user.
        let cookie = (
            HeaderName::from_static("cookie"),
            format!("deltafold-explore={}", token.text()),
        );
        assert_eq!(refused(get(&[host("localhost"), cookie])), 401);
        let by_address = ask(
            Method::GET,
            &format!("/api/state?token={}", token.text()),
            &[host("localhost")],
        );
        assert_eq!(refused(by_address), 401);
        // The files of the page have no secrets.
        let page = ask(Method::GET, "/app.js", &[host("localhost")]);
        assert_eq!(page, Verdict::Answered);
        assert_eq!(refused(ask(Method::GET, "/", &[host("evil.example")])), 421);
        let put = ask(Method::PUT, "/", &[host("localhost"), bearer(&token)]);
        assert_eq!(refused(put), 405);
    }
}
