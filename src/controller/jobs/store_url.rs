//! What a store's URL tells without a connection: whether two mean the same, and which folder one names.

use crate::store::open::Family;
use url::Url;

/// Whether two URLs of stores mean the same, on the same server.
pub fn same_url(a: &str, b: &str) -> bool {
    let (one, other) = (a.trim_end_matches('/'), b.trim_end_matches('/'));
    match (one.split_once("://"), other.split_once("://")) {
        (Some((_, p)), Some((_, q))) => p == q && Family::of(one) == Family::of(other),
        _ => one == other,
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
