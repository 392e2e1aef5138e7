//! Finds the backups beside a prefix, for a hint: a slip in a URL begins a new backup.

use super::Store;
use super::open::local_folder;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use std::path::Path as FilePath;

/// At most this many places beside the prefix are looked at, and this many names in each of their folders.
const MAX_PLACES: usize = 20;
const MAX_NAMES: usize = 1000;

impl Store {
    /// Returns the places beside this prefix, each with the names of the objects in these folders of it. Failures are
    /// ignored: the hint is then missing.
    pub fn neighbours(&self, folders: &[&str]) -> Vec<(String, Vec<String>)> {
        match local_folder(&self.url) {
            Some(dir) => {
                std::path::absolute(dir).map_or_else(|_| Vec::new(), |d| beside_folder(&d, folders))
            }
            None => self
                .block_on(self.beside_prefix(folders))
                .unwrap_or_default(),
        }
    }

    async fn beside_prefix(&self, folders: &[&str]) -> Vec<(String, Vec<String>)> {
        let own: Vec<_> = self.prefix.parts().collect();
        let Some((_, above)) = own.split_last() else {
            return Vec::new();
        };
        let above: Path = above.iter().cloned().collect();
        let Ok(listed) = self.inner.list_with_delimiter(Some(&above)).await else {
            return Vec::new();
        };
        let places = listed.common_prefixes.into_iter();
        let mut neighbours = Vec::new();
        for place in places.filter(|p| *p != self.prefix).take(MAX_PLACES) {
            let mut names = Vec::new();
            for folder in folders {
                let objects = self.inner.list(Some(&place.clone().join(*folder)));
                let objects = objects.take(MAX_NAMES).try_collect::<Vec<_>>().await;
                let objects = objects.unwrap_or_default().into_iter();
                names.extend(objects.filter_map(|o| o.location.filename().map(str::to_owned)));
            }
            let name = place.filename().unwrap_or_default();
            neighbours.push((format!("…/{name}"), names));
        }
        neighbours
    }
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
