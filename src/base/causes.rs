//! Texts of errors together with their sources.
//!
//! `etcd`, `store` and `controller` use it for errors of foreign crates. Our own [`crate::Error`] has no
//! sources.

use std::error::Error;

/// Iterates over the error and its sources, outermost first.
pub fn chain<'a>(e: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    fn source<'a>(e: &&'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
        (*e).source()
    }
    std::iter::successors(Some(e), source)
}

/// Returns the error's text and the texts of its sources, separated by colons. A text that is already part of
/// the message is not repeated.
pub fn causes(e: &(dyn Error + 'static)) -> String {
    append_causes(e.to_string(), e)
}

/// Returns the text without the parts that only name a layer of the network libraries, and without repeated
/// parts: `transport error: tcp connect error: transport error: refused` becomes `tcp connect error: refused`.
pub fn without_layers(text: &str) -> String {
    const LAYERS: [&str; 6] = [
        "transport error",
        "connection error",
        "error sending request",
        "client error (Connect)",
        "error trying to connect",
        "error resolving DNS",
    ];
    let mut parts: Vec<&str> = Vec::new();
    for part in text.split(": ") {
        if !LAYERS.contains(&part) && !parts.contains(&part) {
            parts.push(part);
        }
    }
    if parts.is_empty() {
        text.to_owned()
    } else {
        parts.join(": ")
    }
}

/// Joins the messages of several failures. What they all end with is said once:
/// `ask a: refused: look` and `ask b: refused: look` become `ask a; ask b: refused: look`.
pub fn join(messages: &[String]) -> String {
    let mut parts: Vec<Vec<&str>> = messages.iter().map(|m| m.split(": ").collect()).collect();
    let mut common = Vec::new();
    while parts.len() > 1
        && let Some(last) = parts[0].last().copied()
        && parts.iter().all(|p| p.len() > 1 && p.last() == Some(&last))
    {
        for part in &mut parts {
            part.pop();
        }
        common.insert(0, last);
    }
    let starts: Vec<String> = parts.iter().map(|p| p.join(": ")).collect();
    let mut joined = vec![starts.join("; ")];
    joined.extend(common.into_iter().map(str::to_owned));
    joined.join(": ")
}

/// Appends the texts of the error's sources to `message`, unless it already contains them.
pub fn append_causes(mut message: String, e: &(dyn Error + 'static)) -> String {
    for cause in chain(e).skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_repetitions_are_left_out_but_never_everything() {
        for (text, short) in [
            (
                "tcp connect error: transport error: Connection refused (os error 111)",
                "tcp connect error: Connection refused (os error 111)",
            ),
            (
                "transport error: transport error: keys may not be consistent",
                "keys may not be consistent",
            ),
            ("transport error", "transport error"),
            ("no leader", "no leader"),
        ] {
            assert_eq!(without_layers(text), short);
        }
    }

    #[test]
    fn what_all_failures_end_with_is_said_once() {
        let joined = |messages: &[&str]| {
            let messages: Vec<String> = messages.iter().map(|m| (*m).to_owned()).collect();
            join(&messages)
        };
        assert_eq!(joined(&["a: b: c"]), "a: b: c");
        assert_eq!(
            joined(&["ask a: b: c", "ask d: b: c"]),
            "ask a; ask d: b: c"
        );
        assert_eq!(joined(&["ask a: b", "ask d: c"]), "ask a: b; ask d: c");
        assert_eq!(joined(&["a", "a"]), "a; a");
        assert_eq!(joined(&[]), "");
    }
}
