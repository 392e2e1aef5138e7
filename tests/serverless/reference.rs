//! The generated pages in docs/reference/ match the program.

use crate::support::manifests::{documents, path, printed};
use crate::support::{reference, writes_generated};
use std::fs;

/// Compares a page with its file. `tests/generate` writes the file first.
fn compare(name: &str, page: &str) {
    let file = path(&format!("docs/reference/{name}.md"));
    if writes_generated() {
        fs::write(&file, page).unwrap();
    }
    let written = fs::read_to_string(&file).unwrap_or_default();
    let different = page.lines().zip(written.lines()).find(|(a, b)| a != b);
    assert!(
        page == written,
        "docs/reference/{name}.md differs from the program: tests/generate writes it (first difference: {different:?})"
    );
}

#[test]
fn commands_are_those_of_the_program() {
    let page = reference::commands(deltafold::cli::command_line());
    assert!(page.contains("## deltafold snapshot follow\n"));
    assert!(!page.contains('\u{a0}'));
    compare("commands", &page);
}

#[test]
fn custom_resources_are_those_of_the_controller() {
    let page = reference::crds(&documents(&printed(&["crds"])));
    assert!(page.contains("| `spec.store.url` | string | "));
    compare("crds", &page);
}

#[test]
fn the_index_names_every_schema() {
    let page = reference::json(&deltafold::cli::schemas());
    let files = fs::read_dir(path("docs")).unwrap();
    let names = files.map(|f| f.unwrap().file_name().into_string().unwrap());
    for name in names.filter(|n| n.ends_with(".schema.json")) {
        assert!(page.contains(&format!("[{name}](../{name})")), "{name}");
    }
    compare("json", &page);
}
