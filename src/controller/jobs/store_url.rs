//! Two readings of a store's URL that need no connection: a text for comparing URLs, and the folder of a local
//! store.
//!
//! It does not check URLs: `problems` does. Called by `problems`, `pod` and `observe::claims`.

use crate::store::open::Family;
use url::Url;

/// Returns a text for comparing store URLs: without slashes at the end, and with the store's family in place of
/// the scheme. It is not a URL itself.
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
