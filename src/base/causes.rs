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

/// Appends the texts of the error's sources to `message`, unless it already contains them.
pub fn append_causes(mut message: String, e: &(dyn Error + 'static)) -> String {
    for cause in chain(e).skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}
