//! A folder, a store in memory and every dialect of S3 do what every store must do.

use crate::support::conformance::{
    Abilities, Server, conforms, prefixes_are_taken_as_they_are_written, runtime,
};
use crate::support::fake_s3::{Conditions, Dialect, FakeS3};
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

/// A dialect, the settings that it needs, and what it lacks.
struct Case {
    name: &'static str,
    dialect: Dialect,
    settings: &'static [(&'static str, &'static str)],
    has: Abilities,
}

const ALL: Abilities = Abilities { tags: true, ..HAVE };

fn dialects() -> Vec<Case> {
    let s3 = Dialect::default();
    let case = |name, dialect| Case {
        name,
        dialect,
        settings: &[],
        has: ALL,
    };
    let refused = Some((501, "NotImplemented"));
    let without_conditions = Abilities {
        conditional_update: false,
        conditional_completion: false,
        ..ALL
    };
    vec![
        case("S3", s3),
        Case {
            has: Abilities { tags: false, ..ALL },
            ..case(
                "Cloudflare R2",
                Dialect {
                    wants_parts_of_one_size: true,
                    refuses_tags: refused,
                    refuses_versioning: refused,
                    refuses_locks: refused,
                    ..s3
                },
            )
        },
        Case {
            settings: &[
                ("conditional_put", "disabled"),
                ("checksum_algorithm", "none"),
            ],
            has: Abilities {
                tags: false,
                ..without_conditions
            },
            ..case(
                "Backblaze B2",
                Dialect {
                    conditions: Conditions::Refused((501, "NotImplemented")),
                    refuses_checksums: true,
                    refuses_tags: Some((400, "InvalidArgument")),
                    ..s3
                },
            )
        },
        Case {
            settings: &[("conditional_put", "disabled")],
            has: without_conditions,
            ..case(
                "Wasabi",
                Dialect {
                    conditions: Conditions::Ignored,
                    ..s3
                },
            )
        },
        Case {
            settings: &[("checksum_algorithm", "none")],
            ..case(
                "checksums refused",
                Dialect {
                    refuses_checksums: true,
                    ..s3
                },
            )
        },
        Case {
            settings: &[("conditional_put", "disabled")],
            has: without_conditions,
            ..case(
                "conditions refused",
                Dialect {
                    conditions: Conditions::Refused((501, "NotImplemented")),
                    ..s3
                },
            )
        },
        case(
            "no bulk delete",
            Dialect {
                refuses_bulk_delete: refused,
                ..s3
            },
        ),
        case(
            "parts of one size",
            Dialect {
                wants_parts_of_one_size: true,
                ..s3
            },
        ),
        case(
            "small pages",
            Dialect {
                lists_small_pages: true,
                ..s3
            },
        ),
        Case {
            has: Abilities {
                conditional_update: false,
                ..ALL
            },
            ..case(
                "no ETags of objects",
                Dialect {
                    hides_etags: true,
                    ..s3
                },
            )
        },
        case(
            "no ranges",
            Dialect {
                ignores_ranges: true,
                ..s3
            },
        ),
        Case {
            has: Abilities { tags: false, ..ALL },
            ..case(
                "no tags, versions and locks",
                Dialect {
                    refuses_tags: refused,
                    refuses_versioning: refused,
                    refuses_locks: refused,
                    ..s3
                },
            )
        },
        Case {
            has: Abilities { tags: false, ..ALL },
            ..case(
                "no tags, versions and locks, by 400",
                Dialect {
                    refuses_tags: Some((400, "InvalidArgument")),
                    refuses_versioning: Some((400, "InvalidArgument")),
                    refuses_locks: Some((400, "InvalidArgument")),
                    ..s3
                },
            )
        },
    ]
}

#[test]
fn every_dialect_does() {
    let runtime = runtime();
    let cases = dialects();
    let run = |case: &Case| {
        let server = FakeS3::start(case.dialect);
        let url = "s3://b/deep/p q";
        let store = server.s3().open_with(url, case.settings, runtime.handle());
        conforms(&store, case.has);
    };
    let failed: Vec<&str> = std::thread::scope(|s| {
        let runs: Vec<_> = cases.iter().map(|case| s.spawn(|| run(case))).collect();
        let ended = cases
            .iter()
            .zip(runs)
            .map(|(case, run)| (case.name, run.join()));
        let failed = ended.filter(|(_, result)| result.is_err());
        failed.map(|(name, _)| name).collect()
    });
    assert!(failed.is_empty(), "{failed:?}");
}
