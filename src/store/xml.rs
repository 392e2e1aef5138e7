//! The small XML answers of S3 and Azure, as a tree.
//!
//! It knows no meaning; `signed`, `versions`, `retention` and `exclude` look for what they need. Namespaces
//! and attributes are passed over: no answer needs them.

use quick_xml::Reader;
use quick_xml::escape::resolve_predefined_entity;
use quick_xml::events::Event;

/// Elements within each other; the answers have five at most.
const DEEPEST: usize = 16;

/// An element, what text it has itself, and the elements in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Element {
    pub name: String,
    pub text: String,
    pub children: Vec<Element>,
}

impl Element {
    /// The first child of that name.
    pub fn child(&self, name: &str) -> Option<&Element> {
        self.children.iter().find(|c| c.name == name)
    }

    /// The children of that name.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Element> {
        self.children.iter().filter(move |c| c.name == name)
    }

    /// The text of the first child of that name, without the white space around it.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        Some(self.child(name)?.text.trim())
    }
}

/// The root of a document; `None` where it is no whole XML.
pub(super) fn parse(xml: &[u8]) -> Option<Element> {
    let mut reader = Reader::from_reader(xml);
    // The last is the one that is open; the first holds the root.
    let mut open = vec![Element::default()];
    loop {
        match reader.read_event().ok()? {
            Event::Start(e) => {
                if open.len() > DEEPEST {
                    return None;
                }
                open.push(named(e.local_name().as_ref())?);
            }
            Event::Empty(e) => {
                let element = named(e.local_name().as_ref())?;
                open.last_mut()?.children.push(element);
            }
            Event::End(_) => {
                let element = open.pop()?;
                open.last_mut()?.children.push(element);
            }
            Event::Text(text) => open.last_mut()?.text.push_str(&text.decode().ok()?),
            Event::CData(text) => open.last_mut()?.text.push_str(&text.decode().ok()?),
            Event::GeneralRef(r) => {
                let text = &mut open.last_mut()?.text;
                match r.resolve_char_ref().ok()? {
                    Some(c) => text.push(c),
                    None => text.push_str(resolve_predefined_entity(&r.decode().ok()?)?),
                }
            }
            Event::Eof => break,
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
        }
    }
    let [document] = &mut open[..] else {
        return None;
    };
    document.children.pop()
}

fn named(name: &[u8]) -> Option<Element> {
    Some(Element {
        name: std::str::from_utf8(name).ok()?.to_owned(),
        ..Element::default()
    })
}

/// A text as it stands between two tags.
pub(super) fn escape(text: &str) -> String {
    quick_xml::escape::escape(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_becomes_a_tree() {
        let root = parse(
            b"\xef\xbb\xbf<?xml version=\"1.0\"?>\n<a xmlns=\"urn:x\" x=\"1\"><b> one &amp;&#x20;<![CDATA[two<]]> </b><c/><b>3</b></a>\n",
        )
        .unwrap();
        assert_eq!(root.name, "a");
        assert_eq!(root.text_of("b"), Some("one & two<"));
        assert_eq!(root.text_of("c"), Some(""));
        assert_eq!(root.text_of("d"), None);
        assert_eq!(root.all("b").count(), 2);
    }

    #[test]
    fn what_is_no_whole_document_is_none() {
        for bad in [
            "",
            "text",
            "<a>",
            "<a></b>",
            "<a>&nope;</a>",
            &"<a>".repeat(40),
        ] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn text_survives_escaping() {
        let odd = "a<b>&\"c'";
        let root = parse(format!("<a>{}</a>", escape(odd)).as_bytes()).unwrap();
        assert_eq!(root.text, odd);
    }
}
