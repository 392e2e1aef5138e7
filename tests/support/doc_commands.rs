//! The commands on a page of the documents.

use std::fs;
use std::path::Path;

/// A block of shell.
#[derive(Clone, Debug)]
pub struct Block {
    /// The heading that it stands below.
    pub heading: String,
    /// Its first line, a comment: where it is run.
    pub place: String,
    pub lines: Vec<String>,
}

/// The blocks of shell on `docs/<name>`, in order.
pub fn blocks(name: &str) -> Vec<Block> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("docs")
        .join(name);
    let page = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (mut blocks, mut heading, mut open) = (Vec::new(), "", None::<Vec<&str>>);
    for line in page.lines() {
        match &mut open {
            Some(lines) if line == "```" => {
                let place = lines[0].strip_prefix("# ");
                blocks.push(Block {
                    heading: heading.to_owned(),
                    place: place.expect("where it is run").to_owned(),
                    lines: lines[1..].iter().map(|&line| line.to_owned()).collect(),
                });
                open = None;
            }
            Some(lines) => lines.push(line),
            None if line == "```sh" => open = Some(Vec::new()),
            None if line.starts_with('#') => heading = line.trim_start_matches(['#', ' ']),
            None => {}
        }
    }
    assert!(open.is_none(), "{name}: a block without an end");
    blocks
}
