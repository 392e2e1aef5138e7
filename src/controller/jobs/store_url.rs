//! Store URLs without a connection: a canonical form, and the folder of a local store.
//!
//! It does not check URLs: `problems` does. Called by `problems`, `pod` and `observe::claims`.

use crate::store::open::Family;
use url::Url;

/// Returns the canonical form of a store's URL, equal for all spellings of the same prefix.
pub fn plain_url(url: &str) -> String {
    let url = url.trim_end_matches('/');
    match (url.split_once("://"), Family::of(url)) {
        (Some((_, rest)), Some(family)) => format!("{family:?}://{rest}"),
        _ => url.to_owned(),
    }
}

/// Returns the folder of a local store, or `None` for any other URL.
pub(super) fn local_path(url: &str) -> Option<String> {
    if url.starts_with('/') {
        return Some(url.to_owned());
    }
    let path = Url::parse(url).ok().filter(|u| u.scheme() == "file")?;
    Some(path.to_file_path().ok()?.to_str()?.to_owned())
}
