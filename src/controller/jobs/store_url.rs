//! Two readings of a store that need no connection: a text for comparing stores, and the folder of a local store.
//!
//! It does not check URLs: `problems` does.

use super::super::api::{StoreSpec, StoreVolume};
use crate::store::open::{Family, local_folder};
use std::path::PathBuf;

/// Returns the location of a backup: the URL, with the server and account of the options. Settings in a Secret are
/// unknown here. A local store's location is the whole volume: every Pod mounts all of it.
pub fn store_location(store: &StoreSpec) -> String {
    match store.volume.clone().unwrap_or_default() {
        StoreVolume {
            persistent_volume_claim: Some(claim),
            ..
        } => format!("claim {claim}"),
        StoreVolume {
            host_path: Some(path),
            ..
        } => format!("folder {}", path.trim_end_matches('/')),
        StoreVolume { .. } => {
            let mut location = plain_url(&store.url);
            for (name, value) in server_options(store) {
                location += &format!(" {name}={value}");
            }
            location
        }
    }
}

/// Returns the options that name the server or the account of a store, without the prefixes of the providers.
fn server_options(store: &StoreSpec) -> impl Iterator<Item = (&str, &str)> {
    const NAMES: [&str; 3] = ["endpoint", "endpoint_url", "account_name"];
    store.options.iter().filter_map(|(key, value)| {
        let name = NAMES.into_iter().find(|name| key.ends_with(name))?;
        Some((name.trim_end_matches("_url"), value.trim_end_matches('/')))
    })
}

/// Returns a text for comparing store URLs: the path of a local store; else without slashes at the end, and with
/// the store's family in place of the scheme. It is not a URL itself.
fn plain_url(url: &str) -> String {
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
    let path = local_folder(url).filter(|path| path.is_absolute())?;
    let path: PathBuf = path.components().collect();
    Some(path.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(url: &str, options: &[(&str, &str)], volume: Option<StoreVolume>) -> StoreSpec {
        let options = options
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        StoreSpec {
            url: url.to_owned(),
            options: options.collect(),
            volume,
            ..StoreSpec::default()
        }
    }

    #[test]
    fn equal_locations_have_equal_texts() {
        let claim = |name: &str| {
            Some(StoreVolume {
                persistent_volume_claim: Some(name.to_owned()),
                host_path: None,
            })
        };
        let folder = |path: &str| {
            Some(StoreVolume {
                persistent_volume_claim: None,
                host_path: Some(path.to_owned()),
            })
        };
        let here = |url: &str| at(url, &[], None);
        let server = |name: &str| at("s3://b/p", &[("aws_endpoint", name)], None);
        let account = |name: &str| at("az://b/p", &[("azure_storage_account_name", name)], None);
        for (a, b) in [
            (here("s3://b/p"), here("s3://b/p/")),
            (here("s3://b/p"), here("s3a://b/p")),
            (here("az://b/p"), here("abfss://b/p")),
            (server("http://a:1"), server("http://a:1/")),
            // For a local store, the volume counts, not the URL.
            (
                at("file:///one", &[], folder("/data/")),
                at("file:///two", &[], folder("/data")),
            ),
            (
                at("file:///one", &[], claim("c")),
                at("file:///two", &[], claim("c")),
            ),
        ] {
            assert_eq!(store_location(&a), store_location(&b));
        }
        for (a, b) in [
            (here("s3://b/p"), here("s3://b/q")),
            (here("s3://b/p"), here("gs://b/p")),
            (server("http://a:1"), server("http://b:1")),
            (account("a"), account("b")),
            (
                at("file:///one", &[], folder("/data/a")),
                at("file:///one", &[], folder("/data/b")),
            ),
        ] {
            assert_ne!(store_location(&a), store_location(&b));
        }
    }
}
