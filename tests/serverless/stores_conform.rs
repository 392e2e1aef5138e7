//! A folder and a store in memory do what every store must do.

use crate::support::conformance::{
    Abilities, Server, conforms, prefixes_are_taken_as_they_are_written, runtime,
};
use crate::support::random::rounds;
use crate::support::scratch;
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::{LookFirst, Store, Versioning};
use object_store::memory::InMemory;
use object_store::path::Path;
use std::sync::Arc;

const HAVE: Abilities = Abilities {
    versions: false,
    tags: false,
    conditional_update: true,
    conditional_completion: true,
};

fn hides_nothing(store: &Store) {
    assert_eq!(store.versioning().unwrap(), Versioning::Off);
    assert_eq!(store.uploads().unwrap(), []);
}

#[test]
fn a_folder_does() {
    let (runtime, folder) = (runtime(), scratch::folder().unwrap());
    let url = folder.path().to_str().unwrap();
    let store = deltafold::store::open(url, &[], runtime.handle().clone()).unwrap();
    let _within = runtime.enter();
    conforms(&store, HAVE);
    hides_nothing(&store);
}

#[test]
fn memory_does() {
    let runtime = runtime();
    let store = Store::new(
        Arc::new(InMemory::new()),
        Path::from("deep/prefix"),
        "memory".to_owned(),
        ExcludeTags::none(),
        runtime.handle().clone(),
    );
    conforms(
        &store.clone().with_look_first(LookFirst::Large),
        Abilities {
            conditional_completion: false,
            ..HAVE
        },
    );
    hides_nothing(&store);
}

#[test]
fn a_folder_takes_prefixes_as_they_are_written() {
    for scheme in ["", "file://"] {
        let folder = scratch::folder().unwrap();
        let url = format!("{scheme}{}", folder.path().to_str().unwrap());
        let server = Server::new(runtime(), &url, &[]);
        prefixes_are_taken_as_they_are_written(&server, rounds(10, 40));
    }
}
