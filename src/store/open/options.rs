//! Tells settings of stores that are not secret from those that may be.

use url::Url;

/// The prefixes that providers put before the names of settings.
const PREFIXES: [&str; 4] = ["aws_", "google_", "azure_storage_", "azure_"];

/// Names of settings that are not secret, without the providers' prefixes. Every other setting may be secret.
const PLAIN: [&str; 80] = [
    // S3
    "bucket",
    "bucket_name",
    "checksum_algorithm",
    "conditional_put",
    "container_authorization_token_file",
    "container_credentials_full_uri",
    "container_credentials_relative_uri",
    "copy_if_not_exists",
    "default_region",
    "disable_bulk_delete",
    "disable_tagging",
    "endpoint",
    "endpoint_url",
    "endpoint_url_s3",
    "endpoint_url_sts",
    "imdsv1_fallback",
    "metadata_endpoint",
    "path_style",
    "region",
    "request_payer",
    "role_arn",
    "role_session_name",
    "s3_express",
    "server_side_encryption",
    "skip_signature",
    "sse_bucket_key_enabled",
    "sse_kms_key_id",
    "unsigned_payload",
    "virtual_hosted_style_request",
    "web_identity_token_file",
    // Google Cloud Storage
    "application_credentials",
    "base_url",
    "service_account",
    "service_account_path",
    // Azure
    "account_name",
    "authority_host",
    "authority_id",
    "client_id",
    "container_name",
    "credential_type",
    "fabric_cluster_identifier",
    "fabric_token_service_url",
    "fabric_workload_host",
    "federated_token_file",
    "identity_endpoint",
    "msi_endpoint",
    "msi_resource_id",
    "object_id",
    "tenant_id",
    "use_azure_cli",
    "use_emulator",
    "use_fabric_endpoint",
    // Swift
    "application_credential_id",
    "application_credential_name",
    "auth_url",
    "domain_id",
    "domain_name",
    "interface",
    "project_domain_name",
    "storage_url",
    "tenant_name",
    "username",
    // OSS
    "addressing_style",
    "oidc_provider_arn",
    "oidc_token_file",
    "server_side_encryption_key_id",
    // Every store
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "disable_system_certificates",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "read_timeout",
    "timeout",
    // Our own
    super::OPTION_CA_CERTIFICATE,
    super::OPTION_MAX_RETRIES,
    super::OPTION_REQUESTS,
    super::OPTION_RETRY_TIMEOUT,
    super::OPTION_SECRET_DIR,
];

/// Parts of the names of settings whose values are URLs. The URL of a proxy needs no scheme.
const URLS: [&str; 4] = ["endpoint", "host", "uri", "url"];

/// Returns whether a setting is certainly not secret: its name is known, and its value has no password in a
/// URL.
pub fn is_plain(key: &str, value: &str) -> bool {
    let key = key.to_ascii_lowercase();
    let named = PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix));
    let is_known = PLAIN.contains(&key.as_str()) || named.is_some_and(|key| PLAIN.contains(&key));
    let is_url = URLS.iter().any(|part| key.contains(part));
    is_known && !has_password(value, is_url)
}

/// Returns whether a text has the user or the password of a URL in it.
fn has_password(value: &str, is_url: bool) -> bool {
    let authority = match value.split_once("://") {
        Some((_, rest)) => rest,
        None if is_url => value,
        None => return false,
    };
    let in_text = authority.split(['/', '?', '#']).next();
    // The URL parser also accepts `http:/user:password@host`.
    let in_url = |url: &str| {
        let url = Url::parse(url);
        url.is_ok_and(|url| !url.username().is_empty() || url.password().is_some())
    };
    in_text.is_some_and(|text| text.contains('@'))
        || in_url(value)
        || (is_url && in_url(&format!("http://{value}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings in docs/stores.md that are secret.
    const SECRETS: [&str; 14] = [
        "access_key_id",
        "access_key_secret",
        "account_key",
        "application_credential_secret",
        "auth_token",
        "client_secret",
        "password",
        "sas_token",
        "secret_access_key",
        "security_token",
        "service_account_key",
        "session_token",
        "sse_customer_key_base64",
        "token",
    ];

    #[test]
    fn each_documented_setting_is_either_plain_or_secret() {
        let document = include_str!("../../../docs/stores.md");
        let settings = document
            .split("\n## ")
            .find(|s| s.starts_with("Settings\n"));
        let rows = settings.unwrap().lines().filter_map(|line| {
            let (key, _) = line.strip_prefix("| `")?.split_once('`')?;
            Some(key)
        });
        let keys: Vec<&str> = rows.collect();
        assert!(keys.len() > 40, "{keys:?}");
        for key in keys {
            assert_ne!(is_plain(key, ""), SECRETS.contains(&key), "{key}");
        }
    }

    #[test]
    fn secrets_are_not_plain_in_any_spelling() {
        for key in SECRETS {
            for spelled in [
                key.to_owned(),
                format!("aws_{key}"),
                format!("azure_storage_{key}"),
                format!("AWS_{}", key.to_ascii_uppercase()),
            ] {
                assert!(!is_plain(&spelled, "x"), "{spelled}");
            }
        }
        for key in [
            "master_key",
            "access_key",
            "sas_key",
            "bearer_token",
            "what_is_it",
        ] {
            assert!(!is_plain(key, "x"), "{key}");
        }
        assert!(is_plain("AWS_REGION", "eu-west-1"));
        assert!(is_plain("proxy_url", "http://proxy:3128/x@y"));
        assert!(!is_plain("proxy_url", "http://user:password@proxy:3128"));
        assert!(!is_plain("endpoint", "https://user@host"));
        for proxy in [
            "user:hunter2@proxy:3128",
            "//user:hunter2@proxy:3128",
            "http:/user:hunter2@proxy:3128",
            "user:hunter2@[",
        ] {
            assert!(!is_plain("proxy_url", proxy), "{proxy}");
        }
        for (key, value) in [
            ("proxy_url", "proxy:3128"),
            ("proxy_url", "proxy:3128/x@y"),
            ("username", "user@example.com"),
        ] {
            assert!(is_plain(key, value), "{key} {value}");
        }
    }
}
