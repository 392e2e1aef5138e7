//! Finds the backups beside a prefix, for a hint: a slip in a URL begins a new backup.

use super::Store;
use super::open::local_folder;
use object_store::path::Path;
use std::collections::BTreeMap;
use std::path::Path as FilePath;

/// At most this many places beside the prefix are looked at, and this many names in each of their folders.
const MAX_PLACES: usize = 20;
const MAX_NAMES: usize = 1000;

pub(super) fn neighbours(store: &Store, folders: &[&str]) -> Vec<(String, Vec<String>)> {
    match local_folder(&store.url) {
        Some(dir) => {
            std::path::absolute(dir).map_or_else(|_| Vec::new(), |d| beside_folder(&d, folders))
        }
        None => beside_prefix(store, folders),
    }
}

fn beside_prefix(store: &Store, folders: &[&str]) -> Vec<(String, Vec<String>)> {
    let own: Vec<_> = store.prefix.parts().collect();
    let Some((_, above)) = own.split_last() else {
        return Vec::new();
    };
    let above: Path = above.iter().cloned().collect();
    let listed = store.first_below(&above).ok().and_then(Result::ok);
    let mut neighbours: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in listed.unwrap_or_default() {
        if path.prefix_matches(&store.prefix) {
            continue;
        }
        let below: Vec<_> = path.parts().skip(own.len() - 1).collect();
        if let [place, folder, .., name] = below.as_slice()
            && folders.contains(&folder.as_ref())
        {
            let names = neighbours
                .entry(format!("…/{}", place.as_ref()))
                .or_default();
            names.push(name.as_ref().to_owned());
        }
    }
    neighbours.into_iter().take(MAX_PLACES).collect()
}

fn beside_folder(dir: &FilePath, folders: &[&str]) -> Vec<(String, Vec<String>)> {
    let names_in = |dir: &FilePath| {
        let entries = std::fs::read_dir(dir).into_iter().flatten();
        let names = entries.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into()));
        names.take(MAX_NAMES).collect::<Vec<String>>()
    };
    let Some((above, own)) = dir.parent().zip(dir.file_name()) else {
        return Vec::new();
    };
    let mut neighbours = Vec::new();
    for name in names_in(above) {
        let place = above.join(&name);
        if name.as_str() == own || !place.is_dir() {
            continue;
        }
        let names = folders
            .iter()
            .flat_map(|folder| names_in(&place.join(folder)));
        neighbours.push((place.display().to_string(), names.collect()));
        if neighbours.len() == MAX_PLACES {
            break;
        }
    }
    neighbours
}
