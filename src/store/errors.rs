//! What a store's complaint means for the user: a reason, and the cause that helps.

use crate::base::causes;
use crate::error::{Error, Reason, Result};

/// What object_store's errors have for the name of a local folder.
pub(super) const LOCAL: &str = "LocalFileSystem";

/// Turns a store's error into ours; `what` says what was tried, on what.
pub fn store_error(what: impl std::fmt::Display, e: object_store::Error) -> Error {
    use object_store::Error as E;
    let text = tidy(&redact(&innermost(&e)));
    let reason = match &e {
        E::NotFound { .. } => Reason::NoSnapshots,
        E::AlreadyExists { .. } | E::Precondition { .. } => Reason::TargetExists,
        E::PermissionDenied { .. } => Reason::PermissionDenied,
        E::Unauthenticated { .. } => Reason::Unauthenticated,
        E::NotSupported { .. } | E::NotImplemented { .. } | E::UnknownConfigurationKey { .. } => {
            Reason::Configuration
        }
        // An object's name that the client library cannot take fails the whole listing.
        E::InvalidPath { .. } => Reason::Configuration,
        _ => match io_cause(&e) {
            Some(io) => Error::io("", std::io::Error::from(io)).reason(),
            // Listings do not come with a kind, only with the answer's status in words.
            None => status_in(&text).map_or(Reason::StoreUnreachable, reason_of),
        },
    };
    let advice = match reason {
        _ if matches!(e, E::InvalidPath { .. }) => {
            "; rename or delete that object, or use another prefix"
        }
        _ if io_cause(&e).is_some() => "",
        _ => advice_for(reason),
    };
    reason.error(format!("cannot {what}: {text}{advice}"))
}

/// A write that failed. What it needs was there a moment ago: if it is missing, it was deleted.
pub(super) fn write_error(name: &str, e: object_store::Error) -> Error {
    match e {
        object_store::Error::NotFound { .. } => Reason::SnapshotVanished.error(format!(
                "cannot write {name}: its staging object or upload is gone: it was deleted meanwhile; run again"
            ),
        ),
        e => store_error(format!("write {name}"), e),
    }
}

/// Whether the name of a conditional write is taken.
pub(super) fn is_taken(e: &object_store::Error) -> bool {
    use object_store::Error as E;
    matches!(e, E::AlreadyExists { .. } | E::Precondition { .. })
}

/// What an error tells of the store: a refusal.
///
/// # Errors
/// The error itself, if a later run may not see it.
pub(super) fn refusal(what: &str, e: object_store::Error) -> Result<Error> {
    use object_store::Error as E;
    let is_answer = matches!(e, E::NotImplemented { .. } | E::NotSupported { .. });
    let e = store_error(what, e);
    match e.reason() {
        // A server may call 501 an error of its own.
        Reason::StoreUnreachable
            if !is_answer && !e.to_string().contains("501 Not Implemented") =>
        {
            Err(e)
        }
        Reason::Terminated => Err(e),
        _ => Ok(e),
    }
}

/// An answer's refusal; `text` is its status and its body.
pub(super) fn status_error(what: &str, status: u16, text: &str) -> Error {
    /// Of a body that is no XML, bytes that are shown.
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
    reason.error(format!("cannot {what}: {shown}{}", advice_for(reason)))
}

fn reason_of(status: u16) -> Reason {
    match status {
        401 => Reason::Unauthenticated,
        403 => Reason::PermissionDenied,
        404 => Reason::NoSnapshots,
        408 | 429 => Reason::StoreUnreachable,
        // A retry cannot mend what is wrong with the request.
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

/// The HTTP status that object_store writes into its messages.
fn status_in(text: &str) -> Option<u16> {
    let at = text.find("status code: ")? + "status code: ".len();
    text.get(at..at + 3)?.parse().ok()
}

/// One line; of a server's XML only its code and message.
fn tidy(text: &str) -> String {
    let within = |tag: &str| {
        let from = text.find(&format!("<{tag}>"))? + tag.len() + 2;
        let to = text[from..].find(&format!("</{tag}>"))? + from;
        Some(&text[from..to])
    };
    let begin = text.find("<?xml").or_else(|| text.find("<Error"));
    let said = match (begin, within("Code"), within("Message")) {
        (Some(xml), Some(code), Some(message)) => {
            format!("{}{code}: {message}", &text[..xml])
        }
        _ => text.to_owned(),
    };
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The error and those below it that say something new, outermost first.
fn innermost(e: &object_store::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for text in causes::chain(e).map(ToString::to_string) {
        // Most errors repeat their source's text.
        parts.retain(|p| !p.contains(&text) || *p == text);
        if !parts.iter().any(|p| p.contains(&text)) {
            parts.push(text);
        }
    }
    parts.join(": ")
}

/// The local file system's error at the bottom, if that is what failed.
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

/// Cuts the query off every URL: signatures and tokens stand there.
pub(super) fn redact(text: &str) -> String {
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
    fn a_servers_answer_becomes_one_line_and_a_status() {
        let text = tidy(
            "status code: 403 Forbidden: <?xml version=\"1.0\"?>\n<Error><Code>No</Code><Message>Not\nyou.</Message><Id>7</Id></Error>",
        );
        assert_eq!(text, "status code: 403 Forbidden: No: Not you.");
        assert_eq!(status_in(&text), Some(403));
        assert_eq!(status_in("connection refused"), None);
    }

    #[test]
    fn tokens_in_urls_never_show() {
        let shown = redact("GET https://a.example/b/c?sig=SECRET&x=1 failed (http://b/?t=SECRET)");
        assert!(!shown.contains("SECRET"), "{shown}");
        assert!(shown.contains("https://a.example/b/c?…"), "{shown}");
    }
}
