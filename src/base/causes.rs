//! The text of an error with the errors below it.

use std::error::Error;

/// The error and its sources, outermost first.
pub fn chain<'a>(e: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    fn source<'a>(e: &&'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
        (*e).source()
    }
    std::iter::successors(Some(e), source)
}

/// The error's text, and those of its sources that say something new.
pub fn causes(e: &(dyn Error + 'static)) -> String {
    below(e.to_string(), e)
}

/// `said`, and the texts of the error's sources that say something new.
pub fn below(mut said: String, e: &(dyn Error + 'static)) -> String {
    for cause in chain(e).skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            said = format!("{said}: {cause}");
        }
    }
    said
}
