//! The protocols of stores: which URLs are whose, and which files of a Secret have credentials.
//!
//! It reads nothing. Who opens a store of a family calls it, and the controller, which knows no more than URLs.

/// The protocol of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Files of a folder
    Local,
    /// S3, and servers that speak its protocol
    S3,
    /// Google Cloud Storage
    Gcs,
    /// Azure Blob Storage
    Azure,
    /// OpenStack Swift
    Swift,
    /// Alibaba Cloud OSS
    Oss,
}

impl Family {
    /// Returns the family of a store's URL, or of an absolute path; `None` if no store has such a URL.
    pub fn of(url: &str) -> Option<Family> {
        match url.starts_with('/') {
            true => Some(Family::Local),
            false => Family::of_scheme(url.split_once("://")?.0),
        }
    }

    /// Returns the family of a URL's scheme.
    pub(super) fn of_scheme(scheme: &str) -> Option<Family> {
        match scheme {
            "file" => Some(Family::Local),
            "s3" | "s3a" => Some(Family::S3),
            "gs" => Some(Family::Gcs),
            "az" | "azure" | "abfs" | "abfss" | "adl" => Some(Family::Azure),
            "swift" => Some(Family::Swift),
            "oss" => Some(Family::Oss),
            _ => None,
        }
    }

    /// Whether its stores are files of a folder.
    pub fn is_local(self) -> bool {
        self == Family::Local
    }

    /// Whether its stores can keep a lock: Swift and OSS write on no condition.
    pub fn keeps_locks(self) -> bool {
        !matches!(self, Family::Swift | Family::Oss)
    }
}
