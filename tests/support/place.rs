//! A kind of store, in which a test with faults runs an operation.

use std::fs;
use std::sync::{Arc, Mutex};

use deltafold::backup::Catalog;
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::{Folder, Store};
use futures::{FutureExt, TryStreamExt};
use object_store::ObjectStore;
use object_store::aws::AmazonS3;
use object_store::memory::InMemory;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::faults::FaultStore;
use super::made_backups::{Objects, in_memory, objects_in, objects_of};
use super::orphan_deltas::catalog;
use super::{bucket_store, scratch};

/// A kind of store.
#[derive(Clone)]
pub enum Place {
    Memory(Arc<InMemory>),
    Folder(Arc<TempDir>),
    Server(Arc<AmazonS3>),
}

/// Collects the files below a folder, some of which come and go.
fn paths_in(folder: &std::path::Path, below: &str, all: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = format!("{below}{}", entry.file_name().to_string_lossy());
        match entry.path().is_dir() {
            true => paths_in(&entry.path(), &format!("{path}/"), all),
            false => all.push(path),
        }
    }
}

impl Place {
    pub fn memory(objects: &Objects) -> Self {
        Place::Memory(in_memory(objects))
    }

    pub fn folder(objects: &Objects) -> Self {
        let folder = scratch::folder_named("copy-").unwrap();
        for (path, bytes) in objects {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        Place::Folder(Arc::new(folder))
    }

    pub fn inner(&self) -> Arc<dyn ObjectStore> {
        match self {
            Place::Memory(store) => store.clone(),
            Place::Server(store) => store.clone(),
            Place::Folder(folder) => Arc::new(Folder::from(folder.path().to_owned())),
        }
    }

    pub fn paths(&self) -> Vec<String> {
        match self {
            Place::Memory(store) => {
                let listed = store.list(None).map_ok(|o| o.location.to_string());
                let listed = listed.try_collect().now_or_never();
                listed.expect("memory does not wait").unwrap()
            }
            Place::Folder(folder) => {
                let mut all = Vec::new();
                paths_in(folder.path(), "", &mut all);
                all
            }
            Place::Server(_) => panic!("only the other places are listed while a call waits"),
        }
    }

    pub fn objects(&self, rt: &Runtime) -> Objects {
        match self {
            Place::Folder(folder) => objects_in(folder.path()),
            _ => rt.block_on(objects_of(&self.inner())),
        }
    }

    pub fn store(&self, rt: &Runtime, faults: &FaultStore, tags: ExcludeTags) -> Store {
        let store = bucket_store(rt, faults.clone(), tags);
        match self {
            Place::Folder(folder) => store.with_local_root(folder.path().to_owned()),
            _ => store,
        }
    }

    /// Lists the target before each call and keeps every delta that was visible without a base.
    pub fn watched(
        &self,
        faults: &FaultStore,
        useless: fn(&Catalog) -> Vec<String>,
    ) -> Arc<Mutex<Vec<String>>> {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (place, shown) = (self.clone(), seen.clone());
        faults.watch(move || {
            let useless = useless(&catalog(&place.paths()));
            shown.lock().unwrap().extend(useless);
        });
        seen
    }
}
