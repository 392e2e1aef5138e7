//! Errors of stores: turns the object_store crate's error into one of ours, with a reason and advice.
//!
//! What a store answers, `answers` has judged already: its [`Refusal`] is in the crate's error. Here are the errors of
//! requests without an answer, and of local folders. Removes secrets in URLs from the text.

use super::answers::{NO_CONDITIONS, Refusal, WITHOUT_CONDITIONS};
use super::requests::At;
use crate::base::opt::{self, STORE_SECRET};
use crate::base::{causes, tls};
use crate::error::{Error, Reason};
use url::Url;

/// The name of a local folder in the crate's errors.
pub(super) const LOCAL: &str = "LocalFileSystem";

/// Turns the crate's error into ours. `action` says what was tried on what, such as `read s3://b/p/x`. The
/// message names the server that was asked, and advises.
pub fn store_error(action: impl std::fmt::Display, e: object_store::Error) -> Error {
    use object_store::Error as E;
    let action = action.to_string();
    let text = tidy(&redact(&causes::without_layers(&innermost(&e))));
    if let Some(server) = server_of(&e).filter(|server| gives_credentials(server)) {
        let reason = refusal_in(&e).map_or(Reason::StoreUnreachable, |refusal| refusal.reason);
        return reason.error(format!(
            "cannot {action}: no credentials are given, and the machine's metadata service at {server} gives none ({text}); {}",
            how_to_give_credentials(&action)
        ));
    }
    let action_at = action_at(&action, &e);
    if let Some(refusal) = refusal_in(&e) {
        return refusal.error(action_at);
    }
    let (reason, advice) = match &e {
        E::NotFound { .. } => (Reason::NoSnapshots, None),
        E::AlreadyExists { .. } | E::Precondition { .. } => (Reason::TargetExists, None),
        E::PermissionDenied { .. } => (Reason::PermissionDenied, None),
        E::Unauthenticated { .. } => (
            Reason::Unauthenticated,
            Some("check the credentials and what they allow"),
        ),
        E::NotSupported { .. } | E::NotImplemented { .. } | E::UnknownConfigurationKey { .. } => (
            Reason::Configuration,
            Some("check the URL and {store-option}"),
        ),
        // The crate cannot name an object, and fails the whole listing.
        E::InvalidPath { .. } => (
            Reason::Configuration,
            Some("rename or delete that object, or use another prefix"),
        ),
        _ => match io_cause(&e) {
            Some(io) => (Error::io("", std::io::Error::from(io)).reason(), None),
            None if tls::says_expired(&text) => {
                (Reason::CertificateExpired, advice_for_text(&text))
            }
            None if tls::is_final(&text) => (Reason::Configuration, advice_for_text(&text)),
            // In a bulk deletion of Azure, the crate keeps the status of each object alone.
            None if text.contains("(code: 409)") || text.contains("(code: 412)") => (
                Reason::ObjectLocked,
                Some("a lease, a policy or a hold keeps the object"),
            ),
            None if text.contains("Header missing from response") => (
                Reason::Configuration,
                Some("every store sends it: a proxy may take it away, or the server is incomplete"),
            ),
            None => (Reason::StoreUnreachable, advice_for_text(&text)),
        },
    };
    let advice = advice.map_or_else(String::new, |advice| {
        // Swift has no endpoint: Keystone names it.
        let setting = if action.contains("swift://") {
            "auth_url (OS_AUTH_URL)"
        } else {
            "{store-option} endpoint"
        };
        format!("; {}", opt::fill(&advice.replace("{endpoint}", setting)))
    });
    reason.error(format!("cannot {action_at}: {text}{advice}"))
}

/// Returns what was tried, and the server that was asked.
pub(super) fn action_at(action: &str, e: &object_store::Error) -> String {
    match server_of(e) {
        Some(server) => format!("{action} at {server}"),
        None => action.to_owned(),
    }
}

/// Returns the server that was asked.
fn server_of(e: &object_store::Error) -> Option<String> {
    causes::chain(e).find_map(|e| match e.downcast_ref::<At>() {
        Some(at) => Some(at.server.clone()),
        None => server_in(&e.to_string()),
    })
}

/// Returns the store's refusal in an error of the crate.
pub(super) fn refusal_in(e: &object_store::Error) -> Option<&Refusal> {
    causes::chain(e).find_map(|e| e.downcast_ref::<Refusal>())
}

/// Returns the error for a store that does not keep the conditions of writes.
pub(super) fn no_conditions(what: impl std::fmt::Display) -> Error {
    let error = Reason::Configuration.error(format!("{what}: {}", opt::fill(NO_CONDITIONS)));
    error.with_setting(WITHOUT_CONDITIONS)
}

/// Returns the origin of the server in an error of the crate: `Error performing GET http://host:port/… in …`.
fn server_in(text: &str) -> Option<String> {
    let (_, request) = text.split_once("Error performing ")?;
    let url = request.split(' ').nth(1)?;
    let origin = Url::parse(url).ok()?.origin();
    origin.is_tuple().then(|| origin.ascii_serialization())
}

/// Returns whether a server is the metadata service of a cloud, which gives a machine the credentials of its
/// role.
fn gives_credentials(server: &str) -> bool {
    let services = [
        "://169.254.",
        "://metadata.google.internal",
        "://[fd00:ec2:",
    ];
    services.iter().any(|s| server.contains(s))
}

fn how_to_give_credentials(action: &str) -> String {
    let is_for = |scheme: &str| action.contains(scheme);
    if is_for("gs://") {
        format!(
            "set GOOGLE_APPLICATION_CREDENTIALS to a key file, give {STORE_SECRET} DIR, or run with a service account that may use the bucket"
        )
    } else if is_for("az://") || is_for("abfs") {
        format!(
            "set AZURE_STORAGE_ACCOUNT_KEY, give {STORE_SECRET} DIR, or run with a managed identity that may use the container"
        )
    } else {
        format!(
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give {STORE_SECRET} DIR, or run with a role that may use the bucket"
        )
    }
}

/// Returns the advice for requests without an answer. The causes have no types that could be told apart.
fn advice_for_text(text: &str) -> Option<&'static str> {
    const ADVICE: [(&str, &str); 7] = [
        (
            "Connection refused",
            "nothing listens at this host and port: check {endpoint}",
        ),
        (
            "dns error",
            "check the host name in {endpoint}, and the region",
        ),
        (
            "InvalidContentType",
            "the server does not speak TLS at this port: give an endpoint with http://, or the port with TLS",
        ),
        (
            "connection closed before message completed",
            "the server closed the connection: if it speaks TLS at this port, give an endpoint with https://",
        ),
        (
            "UnknownIssuer",
            "trust the authority of the server's certificate with {store-option} ca_certificate=FILE",
        ),
        (
            "not valid for name",
            "use a host name of the certificate in {endpoint}",
        ),
        ("timed out", "check {endpoint}, firewalls and proxies"),
    ];
    let known = ADVICE.iter().find(|(sign, _)| text.contains(sign));
    tls::advice(text).or(known.map(|(_, advice)| *advice))
}

/// Turns the error of a write into ours. If something is missing, it was deleted meanwhile.
pub(super) fn write_error(name: &str, e: object_store::Error) -> Error {
    match e {
        object_store::Error::NotFound { .. } => Reason::SnapshotVanished.error(format!(
            "cannot write {name}: its upload is gone: it was aborted meanwhile; run again"
        )),
        e => store_error(format!("write {name}"), e),
    }
}

/// Returns whether a conditional write failed because of its condition: the name is taken, or the object has
/// changed.
pub(super) fn is_taken(e: &object_store::Error) -> bool {
    use object_store::Error as E;
    matches!(e, E::AlreadyExists { .. } | E::Precondition { .. })
}

/// Returns the text in one line.
fn tidy(text: &str) -> String {
    text.split_whitespace().collect::<Vec<&str>>().join(" ")
}

/// Returns the texts of the error and its sources, outermost first, without those that repeat another's.
fn innermost(e: &object_store::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for text in causes::chain(e).map(ToString::to_string) {
        // Most errors contain their source's text.
        parts.retain(|p| !p.contains(&text) || *p == text);
        if !parts.iter().any(|p| p.contains(&text)) {
            parts.push(text);
        }
    }
    parts.join(": ")
}

/// Returns the kind of the I/O error that is the cause, if a local folder failed.
pub(super) fn io_cause(e: &object_store::Error) -> Option<std::io::ErrorKind> {
    let object_store::Error::Generic { store, .. } = e else {
        return None;
    };
    if *store != LOCAL {
        return None;
    }
    let below = causes::chain(e).skip(1);
    let mut io = below.filter_map(|e| e.downcast_ref::<std::io::Error>());
    io.next().map(std::io::Error::kind)
}

/// Removes the query of every URL, which may hold signatures and tokens.
fn redact(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (i, word) in text.split(' ').enumerate() {
        if i > 0 {
            out.push(' ');
        }
        match word.find("://").and_then(|_| word.find('?')) {
            Some(q) => {
                out.push_str(&word[..q]);
                out.push_str("?…");
            }
            None => out.push_str(word),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_without_an_answer_have_reasons() {
        let reason = |text: &str| {
            let source = text.to_owned().into();
            let store = "x";
            store_error("do it", object_store::Error::Generic { store, source }).reason()
        };
        for (text, expected) in [
            (
                "Bulk delete request failed for key p/x: Precondition Failed (code: 412)",
                Reason::ObjectLocked,
            ),
            ("ETag Header missing from response", Reason::Configuration),
            ("Connection refused", Reason::StoreUnreachable),
        ] {
            assert_eq!(reason(text), expected, "{text}");
        }
    }

    #[test]
    fn the_server_is_named_without_path_and_query() {
        let text =
            "Error performing GET http://a.example:9000/b?sig=SECRET in 2ms, after 1 retries - no";
        assert_eq!(server_in(text).as_deref(), Some("http://a.example:9000"));
        let text = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - no";
        let server = server_in(text).unwrap();
        assert!(gives_credentials(&server), "{server}");
        assert_eq!(server_in("Error performing GET REDACTED in 2ms - no"), None);
        assert_eq!(server_in("no"), None);
    }

    #[test]
    fn tokens_in_urls_are_removed() {
        let shown = redact("GET https://a.example/b/c?sig=SECRET&x=1 failed (http://b/?t=SECRET)");
        assert!(!shown.contains("SECRET"), "{shown}");
        assert!(shown.contains("https://a.example/b/c?…"), "{shown}");
    }
}
