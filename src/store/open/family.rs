//! The families of stores: which URLs belong to them, and which keys of a Secret are complete credentials.
//!
//! Reads nothing. Called to open a store, and by the controller, which only looks at URLs.

/// The family of a store: all stores that speak the same protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// A local folder
    Local,
    /// S3, and servers that speak its protocol
    S3,
    /// Google Cloud Storage
    Gcs,
    /// Azure Blob Storage
    Azure,
    /// OpenStack Swift
    Swift,
}

/// Keys of a Secret that together are complete credentials.
pub(super) type KeySet = &'static [&'static str];

impl Family {
    /// Returns the family of a store's URL, or of an absolute path; `None` if no store has such a URL.
    pub fn of(url: &str) -> Option<Family> {
        if url.starts_with('/') {
            Some(Family::Local)
        } else {
            Family::of_scheme(url.split_once("://")?.0)
        }
    }

    /// Returns the family of a URL's scheme.
    pub(super) fn of_scheme(scheme: &str) -> Option<Family> {
        match &*scheme.to_ascii_lowercase() {
            "file" => Some(Family::Local),
            "s3" | "s3a" => Some(Family::S3),
            "gs" => Some(Family::Gcs),
            "az" | "azure" | "abfs" | "abfss" | "adl" => Some(Family::Azure),
            "swift" => Some(Family::Swift),
            _ => None,
        }
    }

    /// Returns whether the stores are local folders.
    pub fn is_local(self) -> bool {
        self == Family::Local
    }

    /// Returns advice for the scheme of a URL that no store has; empty if there is none.
    pub fn advice(scheme: &str) -> &'static str {
        match scheme {
            "oss" => {
                "; OSS speaks S3's protocol: give s3://BUCKET/PREFIX, with {store-option} endpoint=https://BUCKET.s3.oss-REGION.aliyuncs.com, virtual_hosted_style_request=true and region=oss-REGION"
            }
            "http" | "https" => {
                "; of a server with S3's protocol give s3://BUCKET/PREFIX, and its URL as {store-option} endpoint=URL"
            }
            _ => "",
        }
    }

    /// Returns whether the stores can keep a lock. Swift cannot: it has no conditional writes over an object.
    pub fn keeps_locks(self) -> bool {
        self != Family::Swift
    }

    /// Returns sets of keys; one set is enough. etcd-druid's come first, then the providers' variables.
    pub(super) fn credentials(self) -> &'static [KeySet] {
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
        }
    }

    /// Returns the prefixes of the providers' environment variables.
    pub(super) fn variables(self) -> &'static [&'static str] {
        match self {
            Family::Local => &[],
            Family::S3 => &["AWS_"],
            Family::Gcs => &["GOOGLE_"],
            Family::Azure => &["AZURE_"],
            Family::Swift => &["OS_", "ST_"],
        }
    }
}
