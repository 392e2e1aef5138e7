//! The book's reference is made of the program. docs/build runs this.

use crate::support::manifests::{documents, read};
use crate::support::reference;

#[test]
fn commands_and_resources_are_written_for_the_book() {
    let commands = reference::commands(deltafold::cli::command_line());
    assert!(commands.contains("## deltafold snapshot follow\n"));
    assert!(!commands.contains('\u{a0}'));
    let crds = reference::crds(&documents(&read("jobs/crds.yaml")));
    assert!(crds.contains("| `spec.store.url` | string | "));
    reference::write();
}
