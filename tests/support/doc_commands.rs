//! The commands of docs/quorum-loss.md: blocks of shell whose first line, a comment, says where they are run.

use super::pages;

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
    let blocks = pages::blocks(&format!("docs/{name}")).into_iter();
    let shell = blocks.filter(|b| b.language == "sh");
    let block = |b: pages::Block| Block {
        heading: b.heading,
        place: b.lines[0]
            .strip_prefix("# ")
            .expect("where it is run")
            .to_owned(),
        lines: b.lines[1..].to_vec(),
    };
    shell.map(block).collect()
}
