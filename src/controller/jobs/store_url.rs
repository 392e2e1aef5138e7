//! What a store's URL tells without a connection: whether two mean the same, and which folder one names.

use crate::store::open::Family;
use url::Url;

/// A store's URL as one text for all ways in which the same place is written.
pub fn plain_url(url: &str) -> String {
    let url = url.trim_end_matches('/');
    match (url.split_once("://"), Family::of(url)) {
        (Some((_, rest)), Some(family)) => format!("{family:?}://{rest}"),
        _ => url.to_owned(),
    }
}

/// The folder of a store of local files.
pub(super) fn local_path(url: &str) -> Option<String> {
    if url.starts_with('/') {
        return Some(url.to_owned());
    }
    let path = Url::parse(url).ok().filter(|u| u.scheme() == "file")?;
    Some(path.to_file_path().ok()?.to_str()?.to_owned())
}
