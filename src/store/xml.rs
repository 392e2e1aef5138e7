//! The XML documents of S3 and Azure: answers, and the tags that are sent.
//!
//! Answers are hostile. A document is no longer than `requests` lets it be, unknown elements are skipped without
//! recursion, and no entity is known but XML's own five.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A document, by the name of its root.
#[derive(Debug, Deserialize)]
pub(super) enum Document {
    Error(Refusal),
    #[serde(alias = "Tags")]
    Tagging(Tagging),
    // versitygw says `ObjectLockRetention`.
    #[serde(alias = "ObjectLockRetention")]
    Retention(Retention),
    LegalHold(Status),
    ObjectLockConfiguration(LockConfiguration),
    VersioningConfiguration(Status),
    #[serde(alias = "ListMultipartUploadsResult")]
    ListVersionsResult(Page),
    /// The part's ETag, and the checksums that putting the parts together must repeat.
    CopyPartResult(BTreeMap<String, String>),
}

impl Document {
    /// `None` if this is no such document.
    pub(super) fn read(xml: &[u8]) -> Option<Self> {
        quick_xml::de::from_str(std::str::from_utf8(xml).ok()?).ok()
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Refusal {
    /// Such as `NoSuchKey`.
    #[serde(default)]
    pub(super) code: String,
}

/// The tags of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Tagging {
    #[serde(default)]
    pub(super) tag_set: TagSet,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TagSet {
    #[serde(default, rename = "Tag")]
    pub(super) tags: Vec<Tag>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Tag {
    pub(super) key: String,
    pub(super) value: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
#[derive(Default)]
pub(super) struct Retention {
    pub(super) mode: String,
    pub(super) retain_until_date: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Status {
    #[serde(default)]
    pub(super) status: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct LockConfiguration {
    pub(super) object_lock_enabled: String,
    pub(super) rule: Rule,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Rule {
    pub(super) default_retention: Option<DefaultRetention>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct DefaultRetention {
    pub(super) mode: String,
    pub(super) days: String,
    pub(super) years: String,
}

/// A page of a listing of versions or of uploads.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "Items")]
pub(super) struct Page {
    /// In the order of the page.
    pub(super) entries: Vec<Entry>,
    pub(super) is_truncated: bool,
    /// Whether names are percent-encoded.
    pub(super) is_encoded: bool,
    /// Where the next page begins.
    pub(super) next_key: String,
    pub(super) next_id: String,
}

#[derive(Debug)]
pub(super) enum Entry {
    Version(Box<Fields>),
    DeleteMarker(Box<Fields>),
    Upload(Box<Fields>),
}

/// What an entry has, whatever it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Fields {
    pub(super) key: Option<String>,
    pub(super) version_id: Option<String>,
    pub(super) is_latest: Option<String>,
    pub(super) last_modified: Option<String>,
    pub(super) size: Option<String>,
    pub(super) upload_id: Option<String>,
    pub(super) initiated: Option<String>,
}

/// All elements of a page: servers mix versions, marks and settings in any order.
#[derive(Deserialize)]
struct Items {
    #[serde(default, rename = "$value")]
    items: Vec<Item>,
}

#[derive(Deserialize)]
enum Item {
    Version(Box<Fields>),
    DeleteMarker(Box<Fields>),
    Upload(Box<Fields>),
    IsTruncated(String),
    EncodingType(String),
    NextKeyMarker(String),
    #[serde(alias = "NextUploadIdMarker")]
    NextVersionIdMarker(String),
    #[serde(other)]
    Other,
}

impl From<Items> for Page {
    fn from(all: Items) -> Self {
        let mut page = Page::default();
        for item in all.items {
            match item {
                Item::Version(fields) => page.entries.push(Entry::Version(fields)),
                Item::DeleteMarker(fields) => page.entries.push(Entry::DeleteMarker(fields)),
                Item::Upload(fields) => page.entries.push(Entry::Upload(fields)),
                Item::IsTruncated(text) => page.is_truncated = text == "true",
                Item::EncodingType(text) => page.is_encoded = text == "url",
                Item::NextKeyMarker(text) => page.next_key = text,
                Item::NextVersionIdMarker(text) => page.next_id = text,
                Item::Other => {}
            }
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(xml: &str) -> Option<Vec<(String, String)>> {
        match Document::read(xml.as_bytes())? {
            Document::Tagging(t) => Some(
                t.tag_set
                    .tags
                    .into_iter()
                    .map(|t| (t.key, t.value))
                    .collect(),
            ),
            _ => None,
        }
    }

    #[test]
    fn a_document_is_read_whatever_stands_around_it() {
        let xml = "\u{feff}<?xml version=\"1.0\"?>\n<s:Tagging xmlns:s=\"urn:x\" x=\"1\">\n <!-- no --><Own><Tag/></Own>\n<TagSet>\n <Tag><Key> one &amp;&#x20;<![CDATA[two<]]> </Key>\n<Value/><More>x</More></Tag> </TagSet>\n</s:Tagging>\n";
        let one = (" one & two< ".to_owned(), String::new());
        assert_eq!(tags(xml), Some(vec![one]));
        assert_eq!(tags("<Tags><TagSet>\n</TagSet></Tags>"), Some(vec![]));
        assert_eq!(tags("<Tagging/>"), Some(vec![]));
    }

    #[test]
    fn what_is_no_whole_document_is_none() {
        for bad in [
            "",
            "text",
            "<Tagging>",
            "<Tagging><TagSet>",
            "<Tagging></TagSet>",
            "<Tagging><TagSet><Tag><Key>k</Key></Tag></TagSet></Tagging>",
            "<Retention>text</Tagging>",
            "<html/>",
        ] {
            assert!(Document::read(bad.as_bytes()).is_none(), "{bad}");
        }
        assert!(Document::read(b"<Error><Code>\xff</Code></Error>").is_none());
    }

    #[test]
    fn entities_are_not_expanded() {
        let code = |text: &str, dtd: &str| {
            let xml = format!("{dtd}<Error><Code>{text}</Code></Error>");
            match Document::read(xml.as_bytes()) {
                Some(Document::Error(e)) => Some(e.code),
                _ => None,
            }
        };
        let dtd =
            r#"<!DOCTYPE Error [<!ENTITY own "x"><!ENTITY file SYSTEM "file:///etc/hostname">]>"#;
        assert_eq!(code("a&lt;b", dtd).as_deref(), Some("a<b"));
        for entity in ["&own;", "&file;", "&nope;", "&#xFFFFFFFF;"] {
            assert_eq!(code(entity, dtd), None, "{entity}");
        }
    }

    #[test]
    fn depth_does_not_end_the_stack() {
        for tag in ["x", "Tag", "TagSet", "Version", "Rule"] {
            let deep = format!("<{tag}>").repeat(100_000);
            let closed = deep.clone() + &format!("</{tag}>").repeat(100_000);
            for root in ["Tagging", "ListVersionsResult", "Error", "CopyPartResult"] {
                assert!(Document::read(format!("<{root}>{deep}").as_bytes()).is_none());
                // It is skipped or refused.
                let _ = Document::read(format!("<{root}>{closed}</{root}>").as_bytes());
            }
        }
    }

    #[test]
    fn no_answer_panics() {
        let parts = [
            "<Tagging>",
            "</Tagging>",
            "<TagSet>",
            "</TagSet>",
            "<Tag>",
            "</Tag>",
            "<Key>",
            "</Key>",
            "<Value/>",
            "<Error>",
            "</Error>",
            "<Code>",
            "</Code>",
            "<ListVersionsResult>",
            "</ListVersionsResult>",
            "<Version>",
            "</Version>",
            "<IsTruncated>",
            "</IsTruncated>",
            "<CopyPartResult>",
            "</CopyPartResult>",
            "<ETag>",
            "</ETag>",
            "<Retention>",
            "</Retention>",
            "<Mode>",
            "</Mode>",
            "<x>",
            "</x>",
            "<x/>",
            "text",
            " ",
            "&amp;",
            "&no;",
            "<![CDATA[c]]>",
            "<!DOCTYPE d>",
            "<!-- c -->",
            "<?pi?>",
            "xsi:nil=\"true\"",
            "<Key xsi:nil=\"true\">",
            "<",
        ];
        let mut rng = fastrand::Rng::with_seed(18);
        for _ in 0..20_000 {
            let root = [
                "Tagging",
                "Error",
                "ListVersionsResult",
                "CopyPartResult",
                "Retention",
            ];
            let root = root[rng.usize(..5)];
            let inner: String = (0..rng.usize(..9))
                .map(|_| parts[rng.usize(..parts.len())])
                .collect();
            let _ = Document::read(format!("<{root}>{inner}</{root}>").as_bytes());
            let _ = Document::read(inner.as_bytes());
        }
    }

    #[test]
    fn a_page_may_have_any_order() {
        let xml = "<ListVersionsResult><Name>b</Name><Version><Key>a</Key><Owner><ID>o</ID></Owner></Version><DeleteMarker><Key>b</Key></DeleteMarker><CommonPrefixes/><IsTruncated>true</IsTruncated><Version><Key>c</Key><Size>7</Size></Version><NextKeyMarker>c</NextKeyMarker><NextVersionIdMarker>v</NextVersionIdMarker><EncodingType>url</EncodingType></ListVersionsResult>";
        let Some(Document::ListVersionsResult(page)) = Document::read(xml.as_bytes()) else {
            panic!("no page");
        };
        let kinds = page.entries.iter().map(|e| match e {
            Entry::Version(f) => ("version", f.key.as_deref()),
            Entry::DeleteMarker(f) => ("mark", f.key.as_deref()),
            Entry::Upload(f) => ("upload", f.key.as_deref()),
        });
        let kinds: Vec<_> = kinds.collect();
        assert_eq!(
            kinds,
            [
                ("version", Some("a")),
                ("mark", Some("b")),
                ("version", Some("c"))
            ]
        );
        assert!(page.is_truncated && page.is_encoded);
        assert_eq!((&*page.next_key, &*page.next_id), ("c", "v"));
    }
}
