//! The book of docs/: mdBook builds it without a warning, and every link and anchor of its pages leads somewhere.

use crate::support::manifests::path;
use crate::support::{reference, scratch, tools};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Returns the values of an attribute in a page.
fn values(html: &str, attribute: &str) -> Vec<String> {
    let begin = format!(" {attribute}=\"");
    let values = html.split(&begin).skip(1);
    values
        .map(|rest| {
            let value = rest.split('"').next().unwrap();
            value.replace("&amp;", "&").replace("%20", " ")
        })
        .collect()
}

fn pages_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap().path();
        if entry.is_dir() {
            pages_below(&entry, found);
        } else if entry.extension().is_some_and(|e| e == "html") {
            found.push(entry);
        }
    }
}

/// Returns a path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

#[test]
fn the_book_builds_and_its_links_lead_somewhere() {
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

    let mut files = Vec::new();
    pages_below(&book, &mut files);
    let read = |file: &PathBuf| (file.clone(), fs::read_to_string(file).unwrap());
    let pages: BTreeMap<PathBuf, String> = files.iter().map(read).collect();
    let anchors: BTreeMap<&PathBuf, BTreeSet<String>> = pages
        .iter()
        .map(|(file, html)| (file, values(html, "id").into_iter().collect()))
        .collect();
    let docs = path("docs");
    let mut links = 0;
    let mut wrong = Vec::new();
    for (file, html) in &pages {
        // All pages in one, for printing; and the page for wrong addresses, which has a base of its own.
        if file.ends_with("print.html") || file.ends_with("404.html") {
            continue;
        }
        let at = file.strip_prefix(&book).unwrap().display();
        let targets = values(html, "href").into_iter().chain(values(html, "src"));
        for link in targets.filter(|l| !l.contains("://") && !l.starts_with("mailto:")) {
            links += 1;
            let (to, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let to = match to {
                "" => file.clone(),
                to => plain(&file.parent().unwrap().join(to)),
            };
            if !to.starts_with(&book) {
                // A file of the repository: the book stands beside it.
                let of_docs = file.strip_prefix(&book).unwrap().parent().unwrap();
                let to = plain(&docs.join(of_docs).join(link.split('#').next().unwrap()));
                let source = to.with_extension("md");
                if !to.exists() && !source.exists() {
                    wrong.push(format!("{at}: {link}"));
                }
                continue;
            }
            let to = match to.is_dir() {
                true => to.join("index.html"),
                false => to,
            };
            let known = || anchors.get(&to).is_some_and(|ids| ids.contains(anchor));
            if !to.exists() || !anchor.is_empty() && !known() {
                wrong.push(format!("{at}: {link}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(links > 1000, "{links}");
    // The search index has the pages' words.
    let names = fs::read_dir(&book).unwrap();
    let mut names = names.map(|f| f.unwrap().file_name().into_string().unwrap());
    let index = names.find(|n| n.starts_with("searchindex") && n.ends_with(".js"));
    let index = fs::read_to_string(book.join(index.expect("a search index"))).unwrap();
    for word in ["hashkv", "etcd-druid", "quorum"] {
        assert!(index.contains(word), "the search does not know {word}");
    }
}
