//! The XML documents of S3 and Azure: responses, and the tags that are sent.
//!
//! Responses may be hostile. `requests` limits their length; unknown elements are skipped without recursion; no
//! entities are expanded except XML's own five.

use serde::{Deserialize, Serialize};

/// A document, by the name of its root element.
#[derive(Debug, Deserialize)]
pub(super) enum Document {
    Error(StoreError),
    #[serde(alias = "Tags")]
    Tagging(Tagging),
    // versitygw's root element is `ObjectLockRetention`.
    #[serde(alias = "ObjectLockRetention")]
    Retention(RetentionDocument),
    LegalHold(StatusDocument),
    ObjectLockConfiguration(LockConfiguration),
    VersioningConfiguration(StatusDocument),
    ListMultipartUploadsResult(ListingPage),
}

impl Document {
    /// Returns the document, or `None` if the text is not one of these documents.
    pub(super) fn read(xml: &[u8]) -> Option<Self> {
        quick_xml::de::from_str(std::str::from_utf8(xml).ok()?).ok()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct StoreError {
    /// The error code, such as `NoSuchKey`.
    pub(super) code: String,
    pub(super) message: String,
    /// Azure's.
    pub(super) authentication_error_detail: String,
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
pub(super) struct RetentionDocument {
    pub(super) mode: String,
    pub(super) retain_until_date: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct StatusDocument {
    #[serde(default)]
    pub(super) status: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct LockConfiguration {
    pub(super) object_lock_enabled: String,
}

/// A page of a listing of unfinished uploads.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "PageElements")]
pub(super) struct ListingPage {
    /// The entries, in the order of the page.
    pub(super) entries: Vec<UploadFields>,
    pub(super) is_truncated: bool,
    /// Whether the names are percent-encoded.
    pub(super) is_encoded: bool,
    /// The markers with which the next page begins.
    pub(super) next_key: String,
    pub(super) next_id: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct UploadFields {
    pub(super) key: Option<String>,
    pub(super) upload_id: Option<String>,
    pub(super) initiated: Option<String>,
}

/// All elements of a page. Servers mix uploads and settings in any order.
#[derive(Deserialize)]
struct PageElements {
    #[serde(default, rename = "$value")]
    elements: Vec<PageElement>,
}

#[derive(Deserialize)]
enum PageElement {
    Upload(UploadFields),
    IsTruncated(String),
    EncodingType(String),
    NextKeyMarker(String),
    NextUploadIdMarker(String),
    #[serde(other)]
    Other,
}

impl From<PageElements> for ListingPage {
    fn from(all: PageElements) -> Self {
        let mut page = ListingPage::default();
        for element in all.elements {
            match element {
                PageElement::Upload(fields) => page.entries.push(fields),
                PageElement::IsTruncated(text) => page.is_truncated = text == "true",
                PageElement::EncodingType(text) => page.is_encoded = text == "url",
                PageElement::NextKeyMarker(text) => page.next_key = text,
                PageElement::NextUploadIdMarker(text) => page.next_id = text,
                PageElement::Other => {}
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
    fn declarations_comments_and_unknown_elements_are_skipped() {
        let xml = "\u{feff}<?xml version=\"1.0\"?>\n<s:Tagging xmlns:s=\"urn:x\" x=\"1\">\n <!-- no --><Own><Tag/></Own>\n<TagSet>\n <Tag><Key> one &amp;&#x20;<![CDATA[two<]]> </Key>\n<Value/><More>x</More></Tag> </TagSet>\n</s:Tagging>\n";
        let one = (" one & two< ".to_owned(), String::new());
        assert_eq!(tags(xml), Some(vec![one]));
        assert_eq!(tags("<Tags><TagSet>\n</TagSet></Tags>"), Some(vec![]));
        assert_eq!(tags("<Tagging/>"), Some(vec![]));
    }

    #[test]
    fn an_incomplete_or_unknown_document_is_refused() {
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
    fn deep_nesting_does_not_overflow_the_stack() {
        for tag in ["x", "Tag", "TagSet", "Upload", "Rule"] {
            let deep = format!("<{tag}>").repeat(100_000);
            let closed = deep.clone() + &format!("</{tag}>").repeat(100_000);
            for root in [
                "Tagging",
                "ListMultipartUploadsResult",
                "Error",
                "CopyPartResult",
            ] {
                assert!(Document::read(format!("<{root}>{deep}").as_bytes()).is_none());
                // It may be skipped or refused.
                let _ = Document::read(format!("<{root}>{closed}</{root}>").as_bytes());
            }
        }
    }

    #[test]
    fn no_document_panics() {
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
            "<ListMultipartUploadsResult>",
            "</ListMultipartUploadsResult>",
            "<Upload>",
            "</Upload>",
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
                "ListMultipartUploadsResult",
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
    fn the_elements_of_a_page_may_have_any_order() {
        let xml = "<ListMultipartUploadsResult><Name>b</Name><Upload><Key>a</Key><Owner><ID>o</ID></Owner></Upload><CommonPrefixes/><IsTruncated>true</IsTruncated><Upload><Key>c</Key></Upload><NextKeyMarker>c</NextKeyMarker><NextUploadIdMarker>v</NextUploadIdMarker><EncodingType>url</EncodingType></ListMultipartUploadsResult>";
        let Some(Document::ListMultipartUploadsResult(page)) = Document::read(xml.as_bytes())
        else {
            panic!("no page");
        };
        let keys: Vec<_> = page.entries.iter().map(|u| u.key.as_deref()).collect();
        assert_eq!(keys, [Some("a"), Some("c")]);
        assert!(page.is_truncated && page.is_encoded);
        assert_eq!((&*page.next_key, &*page.next_id), ("c", "v"));
    }
}
