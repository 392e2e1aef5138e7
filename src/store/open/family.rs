//! The protocols of stores: which URLs are whose, and which keys of a Secret are enough to log in.
//!
//! It reads nothing. Who opens a store calls it, and the controller, which looks at URLs alone.

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

/// Keys of a Secret that are enough together.
pub(super) type Set = &'static [&'static str];

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

    /// Returns the sets of keys of which one is enough: etcd-druid's, then the providers' variables.
    pub(super) fn credentials(self) -> &'static [Set] {
        match self {
            Family::Local => &[],
            Family::S3 => &[
                &["accessKeyID", "secretAccessKey"],
                &["roleARN", "token"],
                &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
            ],
            Family::Gcs => &[
                &["serviceaccount.json"],
                &["emulatorEnabled"],
                &["GOOGLE_SERVICE_ACCOUNT_KEY"],
            ],
            Family::Azure => &[
                &["storageAccount", "storageKey"],
                &["storageAccount", "sasToken"],
                &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"],
                &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_SAS_TOKEN"],
                &[
                    "AZURE_STORAGE_ACCOUNT_NAME",
                    "AZURE_CLIENT_ID",
                    "AZURE_TENANT_ID",
                    "AZURE_CLIENT_SECRET",
                ],
            ],
            Family::Swift => &[
                &["authURL", "username", "password"],
                &["authURL", "applicationCredentialSecret"],
                &["storageURL", "authToken"],
                &["OS_AUTH_URL", "OS_USERNAME", "OS_PASSWORD"],
                &["OS_AUTH_URL", "OS_APPLICATION_CREDENTIAL_SECRET"],
                &["ST_AUTH", "ST_USER", "ST_KEY"],
            ],
            Family::Oss => &[
                &["accessKeyID", "accessKeySecret"],
                &["ALICLOUD_ACCESS_KEY_ID", "ALICLOUD_ACCESS_KEY_SECRET"],
                &[
                    "ALIBABA_CLOUD_ACCESS_KEY_ID",
                    "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
                ],
            ],
        }
    }

    /// Returns what the providers' variables begin with.
    pub(super) fn variables(self) -> &'static [&'static str] {
        match self {
            Family::Local => &[],
            Family::S3 => &["AWS_"],
            Family::Gcs => &["GOOGLE_"],
            Family::Azure => &["AZURE_"],
            Family::Swift => &["OS_", "ST_"],
            Family::Oss => &["ALICLOUD_", "ALIBABA_CLOUD_"],
        }
    }
}
