//! Two readings of a store's URL that need no connection: a text for comparing URLs, and the folder of a local
//! store.
//!
//! It does not check URLs: `problems` does. Called by `problems`, `pod` and `observe::claims`.

use crate::store::open::Family;
use std::path::PathBuf;
use url::Url;

/// Returns a text for comparing store URLs: the path of a local store; else without slashes at the end, and with
/// the store's family in place of the scheme. It is not a URL itself.
pub fn plain_url(url: &str) -> String {
    if let Some(path) = local_path(url) {
        return path;
    }
    let url = url.trim_end_matches('/');
    match (url.split_once("://"), Family::of(url)) {
        (Some((_, rest)), Some(family)) => format!("{family:?}://{rest}"),
        _ => url.to_owned(),
    }
}

/// Returns the folder of a local store, or `None` for any other URL. A path has one spelling: `/b` for `//b`,
/// `/./b` and `/b/`. `..` stays.
pub(super) fn local_path(url: &str) -> Option<String> {
    let path = if url.starts_with('/') {
        PathBuf::from(url)
    } else {
        let url = Url::parse(url).ok().filter(|u| u.scheme() == "file")?;
        url.to_file_path().ok()?
    };
    let path: PathBuf = path.components().collect();
    Some(path.to_str()?.to_owned())
}
