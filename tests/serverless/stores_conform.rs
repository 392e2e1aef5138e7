//! A folder and a store in memory do what every store must do.

use crate::support::conformance::{conforms, runtime};
use crate::support::scratch;
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::probe::{Ability, AbilityState};
use deltafold::store::{Store, Versioning};
use object_store::memory::InMemory;
use object_store::path::Path;
use std::sync::Arc;

/// Abilities that neither has.
const ABSENT: [(Ability, AbilityState); 5] = [
    (Ability::Checksum, AbilityState::Absent),
    (Ability::ExcludeTag, AbilityState::Absent),
    (Ability::TagCount, AbilityState::Absent),
    (Ability::Versioning, AbilityState::Absent),
    (Ability::ObjectLock, AbilityState::Absent),
];

fn hides_nothing(store: &Store) {
    assert_eq!(store.versioning().unwrap(), Versioning::Off);
    assert_eq!(store.versions(&["v2"]).unwrap(), []);
    assert_eq!(store.uploads().unwrap(), []);
}

#[test]
fn a_folder_does() {
    let (runtime, folder) = (runtime(), scratch::folder().unwrap());
    let url = folder.path().to_str().unwrap();
    let store = deltafold::store::open(url, &[], runtime.handle().clone()).unwrap();
    let _within = runtime.enter();
    assert_eq!(conforms(&store), ABSENT);
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
    assert_eq!(conforms(&store), ABSENT);
    hides_nothing(&store);
}
