//! Errors of stores: turns the object_store crate's error, or a refusal, into one of ours, with a reason and
//! advice.
//!
//! Removes secrets in URLs from the text.

use super::answers::{DefiniteRefusal, Refused};
use super::listing::{CUT_OFF, NO_LISTING};
use crate::base::{causes, tls};
use crate::error::{Error, Reason};
use url::Url;

/// What to do with a store that has no conditional writes.
pub(super) const NO_CONDITIONS: &str = "the store does not keep the conditions of writes: use another store; or, if nobody else writes to this prefix, set --store-option conditional_put=disabled, and --lock-lease for the commands that take a lock";

/// The name of a local folder in the crate's errors.
pub(super) const LOCAL: &str = "LocalFileSystem";

/// Turns the crate's error into ours. `action` says what was tried on what, such as `read s3://b/p/x`. The
/// message names the server that was asked, and advises.
pub fn store_error(action: impl std::fmt::Display, e: object_store::Error) -> Error {
    use object_store::Error as E;
    let action = action.to_string();
    let text = tidy(&redact(&causes::without_layers(&innermost(&e))));
    let refusal = causes::chain(&e).find_map(|e| e.downcast_ref::<DefiniteRefusal>());
    let reason = match &e {
        _ if refusal.is_some_and(|r| r.refused == Refused::Locked) => Reason::ObjectLocked,
        _ if refusal.is_some() => Reason::Configuration,
        E::NotFound { .. } => Reason::NoSnapshots,
        E::AlreadyExists { .. } | E::Precondition { .. } => Reason::TargetExists,
        E::PermissionDenied { .. } => Reason::PermissionDenied,
        E::Unauthenticated { .. } => Reason::Unauthenticated,
        E::NotSupported { .. } | E::NotImplemented { .. } | E::UnknownConfigurationKey { .. } => {
            Reason::Configuration
        }
        // The crate cannot name an object, and fails the whole listing.
        E::InvalidPath { .. } => Reason::Configuration,
        // The same server says the same again.
        _ if text.contains(CUT_OFF) => {
            return Reason::Configuration.error(format!("cannot {action}: {CUT_OFF}"));
        }
        _ if text.contains(NO_LISTING) => Reason::Configuration,
        _ if tls::says_expired(&text) => Reason::CertificateExpired,
        _ if tls::is_final(&text) => Reason::Configuration,
        _ => match io_cause(&e) {
            Some(io) => Error::io("", std::io::Error::from(io)).reason(),
            // The error of a listing has no kind. Its text has the status.
            None => status_in(&text).map_or(Reason::StoreUnreachable, reason_of),
        },
    };
    if matches!(e, E::InvalidPath { .. }) {
        return reason.error(format!(
            "cannot {action}: {text}; rename or delete that object, or use another prefix"
        ));
    }
    if io_cause(&e).is_some() {
        return reason.error(format!("cannot {action}: {text}"));
    }
    let server = causes::chain(&e).find_map(|e| server_in(&e.to_string()));
    let at = match &server {
        Some(server) if gives_credentials(server) => {
            return reason.error(format!(
                "cannot {action}: no credentials are given, and the machine's metadata service at {server} gives none ({text}); {}",
                how_to_give_credentials(&action)
            ));
        }
        Some(server) => format!(" at {server}"),
        None => String::new(),
    };
    let known = match refusal {
        Some(refusal) => Some(advice_for_refusal(refusal.refused)),
        None => tls::advice(&text),
    };
    if let Some(advice) = known {
        return reason.error(format!("cannot {action}{at}: {text}; {advice}"));
    }
    let advice = advice_for_text(&text).unwrap_or_else(|| advice_for(reason));
    reason.error(format!("cannot {action}{at}: {text}{advice}"))
}

fn advice_for_refusal(refused: Refused) -> &'static str {
    match refused {
        Refused::Condition => NO_CONDITIONS,
        Refused::Checksum => {
            "the store refuses headers with checksums: set --store-option checksum_algorithm=none, or requestChecksumCalculation: when_required in the Secret"
        }
        Refused::Locked => "a retention policy or a hold keeps the object",
        Refused::Call => "the store does not have this call: see `deltafold store check`",
    }
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

fn how_to_give_credentials(action: &str) -> &'static str {
    let is_for = |scheme: &str| action.contains(scheme);
    if is_for("gs://") {
        "set GOOGLE_APPLICATION_CREDENTIALS to a key file, give --store-secret DIR, or run with a service account that may use the bucket"
    } else if is_for("az://") || is_for("abfs") {
        "set AZURE_STORAGE_ACCOUNT_KEY, give --store-secret DIR, or run with a managed identity that may use the container"
    } else {
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give --store-secret DIR, or run with a role that may use the bucket"
    }
}

/// Returns the advice for causes that have a text but no reason of their own.
fn advice_for_text(text: &str) -> Option<&'static str> {
    const ADVICE: [(&str, &str); 15] = [
        (
            "Connection refused",
            "; nothing listens at this host and port: check --store-option endpoint",
        ),
        (
            "dns error",
            "; check the host name in --store-option endpoint, and the region",
        ),
        (
            "InvalidContentType",
            "; the server does not speak TLS at this port: give an endpoint with http://, or the port with TLS",
        ),
        (
            "HTTP request to an HTTPS server",
            "; the server speaks TLS at this port: give an endpoint with https://",
        ),
        (
            "connection closed before message completed",
            "; the server closed the connection: if it speaks TLS at this port, give an endpoint with https://",
        ),
        (
            "UnknownIssuer",
            "; trust the authority of the server's certificate with --store-option ca_certificate=FILE",
        ),
        (
            "not valid for name",
            "; use a host name of the certificate in --store-option endpoint",
        ),
        (
            "timed out",
            "; check --store-option endpoint, firewalls and proxies",
        ),
        (
            "NoSuchBucket",
            "; create the bucket, or check its name in the URL",
        ),
        (
            "ContainerNotFound",
            "; create the container, or check its name in the URL",
        ),
        (
            "AuthorizationHeaderMalformed",
            "; give the bucket's region with --store-option region=… or AWS_REGION",
        ),
        (
            "SignatureDoesNotMatch",
            "; check the secret key (AWS_SECRET_ACCESS_KEY), and that no space is in it",
        ),
        (
            "InvalidAccessKeyId",
            "; check the access key (AWS_ACCESS_KEY_ID)",
        ),
        ("RequestTimeTooSkewed", "; set the clock of this machine"),
        ("UserNotFound", "; check the access key (AWS_ACCESS_KEY_ID)"),
    ];
    let known = ADVICE.iter().find(|(sign, _)| text.contains(sign));
    known.map(|(_, advice)| *advice)
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

/// Returns the error for a refusal. `text` has its status and its body.
pub(super) fn status_error(action: &str, status: u16, text: &str) -> Error {
    /// The most characters of a body that are shown.
    const SHOWN: usize = 300;
    let reason = match status {
        501 | 505 => Reason::Configuration,
        status => reason_of(status),
    };
    let text = tidy(&redact(text));
    let shown = match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    };
    reason.error(format!("cannot {action}: {shown}{}", advice_for(reason)))
}

/// Returns the reason for a refusal.
fn reason_of(status: u16) -> Reason {
    match status {
        401 => Reason::Unauthenticated,
        403 => Reason::PermissionDenied,
        404 => Reason::NoSnapshots,
        408 | 429 => Reason::StoreUnreachable,
        // The request is wrong, so a retry cannot help.
        300..=499 => Reason::Configuration,
        _ => Reason::StoreUnreachable,
    }
}

fn advice_for(reason: Reason) -> &'static str {
    match reason {
        Reason::PermissionDenied | Reason::Unauthenticated => {
            "; check the credentials and what they allow"
        }
        Reason::Configuration => "; check the URL and --store-option",
        _ => "",
    }
}

/// Returns the HTTP status in a message of the crate.
fn status_in(text: &str) -> Option<u16> {
    let at = text.find("status code: ")? + "status code: ".len();
    text.get(at..at + 3)?.parse().ok()
}

/// Returns the text in one line. Of a server's XML, keeps only the code and the message.
fn tidy(text: &str) -> String {
    let within = |tag: &str| {
        let from = text.find(&format!("<{tag}>"))? + tag.len() + 2;
        let to = text[from..].find(&format!("</{tag}>"))? + from;
        Some(&text[from..to])
    };
    let begin = text.find("<?xml").or_else(|| text.find("<Error"));
    let short = match (begin, within("Code"), within("Message")) {
        (Some(xml), Some(code), Some(message)) => {
            format!("{}{code}: {message}", &text[..xml])
        }
        _ => text.to_owned(),
    };
    let words: Vec<&str> = short.split_whitespace().collect();
    let quotes = words.join(" ").replace("&#34;", "\"");
    quotes.replace("&quot;", "\"").replace("&apos;", "'")
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
    fn a_refusal_becomes_one_line_with_its_status() {
        let text = tidy(
            "status code: 403 Forbidden: <?xml version=\"1.0\"?>\n<Error><Code>No</Code><Message>Not\nyou.</Message><Id>7</Id></Error>",
        );
        assert_eq!(text, "status code: 403 Forbidden: No: Not you.");
        assert_eq!(status_in(&text), Some(403));
        assert_eq!(status_in("connection refused"), None);
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
