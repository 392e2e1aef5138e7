//! The book of docs/: mdBook builds it without a warning, with the reference of commands and resources.

use crate::support::manifests::path;
use crate::support::{reference, scratch, tools};
use std::fs;
use std::process::Command;

#[test]
fn the_book_builds_with_the_reference_in_it() {
    reference::write();
    let folder = scratch::folder().unwrap();
    let book = folder.path().join("book");
    let output = Command::new(tools::mdbook())
        .args(["build", "--dest-dir"])
        .args([&book, &path("docs")])
        .env("RUST_LOG", "info")
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{log}");
    for word in ["WARN", "ERROR", "warning", "error:"] {
        assert!(!log.contains(word), "{log}");
    }
    let read = |page: &str| fs::read_to_string(book.join(page)).unwrap();
    assert!(read("reference/commands.html").contains("deltafold snapshot follow"));
    assert!(read("reference/crds.html").contains("spec.store.url"));
}
