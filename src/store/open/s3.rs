//! Opens S3, and servers that speak its protocol.

use super::aws_profile::ProfileFiles;
use super::builder::{self, Builder};
use super::secret::{CredentialsOf, Secret};
use super::{Family, Location, OpenConfig, check_endpoint, flag, one_of};
use crate::error::{Reason, Result};
use crate::store::exclude::{ExcludeTags, TagKind};
use crate::store::s3::S3;
use crate::store::{LookFirst, Store};
use object_store::aws::{
    AmazonS3, AmazonS3Builder, AmazonS3ConfigKey as Key, AwsCredential, Checksum,
};
use std::sync::Arc;
use tokio::runtime::Handle;
use url::Url;

/// A setting of our own: `false` puts the bucket into the host name, also into that of `endpoint`.
const OPTION_PATH_STYLE: &str = "path_style";
/// The value of `checksum_algorithm` that sends no checksum.
const NO_CHECKSUM: &str = "none";
/// The value of `conditional_put` for a store that does not keep conditions.
const CONDITIONS_DISABLED: &str = "disabled";
/// The region of the crate, if none is given.
const DEFAULT_REGION: &str = "us-east-1";
/// The size of an SSE-C key.
const CUSTOMER_KEY_BYTES: usize = 32;

pub(super) fn open(location: &Location, mut config: OpenConfig, handle: Handle) -> Result<Store> {
    let secret = config.read_secret()?;
    let (builder, client) = builder::configured::<AmazonS3Builder>(location, &mut config, secret)?;
    let uses_conditions = builder.completes_if_free();
    let unsigned = builder.is_set(Key::SkipSignature);
    let is_other_server = builder
        .endpoint()
        .is_some_and(|e| !e.contains(".amazonaws.com"));
    let request_payer = builder.is_set(Key::RequestPayer);
    let region = builder.setting(Key::Region);
    let store = builder::built(location, builder)?;
    let server = config.requests.server.clone();
    let store = if unsigned {
        location.store(store, ExcludeTags::none(), handle)
    } else {
        let client = config.retrying_client(&client, &location.action)?;
        let own = Arc::new(S3::new(store.clone(), client, region, request_payer));
        // AWS documents that its responses tell the number of tags to everybody who may read tags.
        if !is_other_server {
            server.set_responses_report_tags();
        }
        let tags = ExcludeTags::of(TagKind::S3(own.clone())).with_server(server);
        location.store(store, tags, handle).with_s3(own)
    };
    // AWS obeys the conditions of writes. Of another server nobody knows.
    let look_first = match is_other_server {
        _ if !uses_conditions => LookFirst::Instead,
        true => LookFirst::Always,
        false => LookFirst::Never,
    };
    Ok(store
        .with_requests(config.requests.most())
        .with_ranges()
        .with_look_first(look_first))
}

impl Builder for AmazonS3Builder {
    builder::crate_methods!(AmazonS3, Key, AwsCredential);

    const FAMILY: Family = Family::S3;
    const OWN_CREDENTIALS: &'static [&'static str] = &["access_key_id"];
    const ENDPOINT: &'static str = "endpoint";

    fn endpoint(&self) -> Option<String> {
        let own = self.setting(Key::S3Endpoint);
        own.or_else(|| self.setting(Key::Endpoint))
    }

    fn completes_if_free(&self) -> bool {
        self.setting(Key::ConditionalPut).as_deref() != Some(CONDITIONS_DISABLED)
    }

    fn is_credential(key: &Key) -> bool {
        matches!(key, Key::AccessKeyId | Key::SecretAccessKey | Key::Token)
    }

    /// A session token belongs to one access key: if the user gives another key, no other server gets to see the
    /// token. AWS has two variables for the endpoint: none wins over the option or the Secret.
    fn takes_variable(key: &Key, config: &OpenConfig, secret: Option<&Secret>) -> bool {
        match key {
            Key::Token => !config.has_option(Self::OWN_CREDENTIALS),
            Key::Endpoint | Key::S3Endpoint => {
                let is_given = config
                    .options
                    .iter()
                    .any(|(key, _)| matches!(key.parse(), Ok(Key::Endpoint | Key::S3Endpoint)));
                !is_given && secret.is_none_or(|secret| secret.get("endpoint").is_none())
            }
            _ => true,
        }
    }

    fn shared_files(&self) -> Result<Vec<(String, String)>> {
        let gives_credentials = [
            Key::AccessKeyId,
            Key::WebIdentityTokenFile,
            Key::ContainerCredentialsRelativeUri,
            Key::ContainerCredentialsFullUri,
        ];
        let has_some = gives_credentials
            .into_iter()
            .any(|key| self.setting(key).is_some());
        if has_some || self.is_set(Key::SkipSignature) {
            return Ok(Vec::new());
        }
        let mut settings = ProfileFiles::of(super::variable).settings()?;
        // A variable wins over a file.
        settings.retain(|(key, _)| match key.as_str() {
            "region" => self.setting(Key::Region).is_none(),
            "endpoint" => self.endpoint().is_none(),
            _ => true,
        });
        Ok(settings)
    }

    fn from_secret(secret: &Secret) -> Result<Vec<(String, String)>> {
        let mut settings = Vec::new();
        let mut add = |key: &str, value: String| settings.push((key.to_owned(), value));
        for (name, key) in [
            ("accessKeyID", "access_key_id"),
            ("secretAccessKey", "secret_access_key"),
            ("sessionToken", "session_token"),
            ("region", "region"),
            ("endpoint", "endpoint"),
        ] {
            if let Some(value) = secret.get(name) {
                let is_bare = name == "endpoint" && !value.contains("://");
                add(
                    key,
                    if is_bare { "https://" } else { "" }.to_owned() + value,
                );
            }
        }
        // A role for the token of a workload. The crate reads the token's file again by itself.
        if let (Some(role), Some(_)) = (secret.get("roleARN"), secret.get("token")) {
            add("role_arn", role.to_owned());
            let file = secret.file("token").display().to_string();
            add("web_identity_token_file", file);
        }
        match secret.get("requestChecksumCalculation") {
            Some("when_required" | "WHEN_REQUIRED") => {
                add("checksum_algorithm", NO_CHECKSUM.to_owned());
            }
            None | Some("when_supported" | "WHEN_SUPPORTED") => {}
            Some(other) => {
                return Err(secret.wrong(&format!(
                    "requestChecksumCalculation is \"{other}\": give when_supported or when_required"
                )));
            }
        }
        // Without this setting the bucket is part of the path, which AWS also accepts.
        if secret.flag("s3ForcePathStyle")? == Some(true) {
            add(OPTION_PATH_STYLE, "true".to_owned());
        }
        if secret.flag("insecureSkipVerify")? == Some(true) {
            add("allow_invalid_certificates", "true".to_owned());
        }
        match (
            secret.get("sseCustomerKey"),
            secret.get("sseCustomerAlgorithm"),
        ) {
            (None, None) => {}
            (Some(key), Some("AES256")) => {
                let text = if key.len() == CUSTOMER_KEY_BYTES {
                    base64_simd::STANDARD.encode_to_string(key)
                } else {
                    key.to_owned()
                };
                let decoded = base64_simd::STANDARD.decode_to_vec(&text);
                if decoded.is_ok_and(|k| k.len() == CUSTOMER_KEY_BYTES) {
                    add("server_side_encryption", "sse-c".to_owned());
                    add("sse_customer_key_base64", text);
                } else {
                    return Err(secret.wrong("sseCustomerKey is not a key of 32 bytes"));
                }
            }
            _ => {
                let error = "sseCustomerKey needs sseCustomerAlgorithm with the value AES256";
                return Err(secret.wrong(error));
            }
        }
        Ok(settings)
    }

    fn with_settings(self, location: &Location, settings: Vec<(String, String)>) -> Result<Self> {
        let (path_style, mut settings): (Vec<_>, Vec<_>) = settings
            .into_iter()
            .partition(|(key, _)| key == OPTION_PATH_STYLE);
        for (key, value) in &settings {
            match key.parse() {
                Ok(Key::Checksum) => one_of(key, value, &[NO_CHECKSUM, "sha256", "crc64nvme"])?,
                Ok(Key::ConditionalPut) => one_of(key, value, &["etag", CONDITIONS_DISABLED])?,
                _ => {}
            }
        }
        // The crate has no name for "none": it sends a checksum if the setting is there.
        let is_checksum = |key: &str| matches!(key.parse(), Ok(Key::Checksum));
        let checksum = settings.iter().rfind(|(key, _)| is_checksum(key));
        let sends_none = checksum.is_some_and(|(_, value)| value == NO_CHECKSUM);
        settings.retain(|(key, value)| !is_checksum(key) || value != NO_CHECKSUM);
        let mut builder = settings.into_iter().try_fold(self, Self::with_text)?;
        if builder.setting(Key::Checksum).is_none() && !sends_none {
            builder = builder.with_checksum_algorithm(Checksum::SHA256);
        }
        if let Some(sts) = builder.setting(Key::StsEndpoint)
            && !sts.starts_with("https://")
        {
            return Err(Reason::Configuration.error(format!(
                "the endpoint of AWS's token service, endpoint_url_sts (AWS_ENDPOINT_URL_STS), is {sts}: it gets a token and gives credentials, so it must begin with https://"
            )));
        }
        let takes_role =
            builder.setting(Key::AccessKeyId).is_none() && builder.setting(Key::RoleArn).is_some();
        if let (true, Some(file)) = (takes_role, builder.setting(Key::WebIdentityTokenFile)) {
            std::fs::File::open(&file).map_err(|e| {
                Reason::Configuration.error(format!(
                    "cannot read the token for the role, web_identity_token_file (AWS_WEB_IDENTITY_TOKEN_FILE) {file}: {e}"
                ))
            })?;
        }
        let has_endpoint = builder.endpoint().is_some();
        builder = of_cloud(builder, Variants::from_env()?);
        let path_style = match path_style.last() {
            Some((key, value)) => flag(key, value)?,
            // If an endpoint is given, the crate's own setting means that the bucket is in it already.
            None if has_endpoint => return Ok(builder),
            None => !builder.is_set(Key::VirtualHostedStyleRequest),
        };
        builder = builder.with_virtual_hosted_style_request(!path_style);
        if let (false, Some(endpoint)) = (path_style, builder.endpoint()) {
            check_endpoint(Self::ENDPOINT, &endpoint)?;
            let host = with_bucket(&endpoint, &location.bucket);
            builder = builder.with(Key::S3Endpoint, host.unwrap_or(endpoint));
        }
        Ok(builder)
    }
}

/// Which of AWS's endpoints are used.
#[derive(Debug, Clone, Copy, Default)]
struct Variants {
    fips: bool,
    dual_stack: bool,
}

impl Variants {
    fn from_env() -> Result<Self> {
        let is_set =
            |name: &str| super::variable(name).map_or(Ok(false), |value| flag(name, &value));
        Ok(Variants {
            fips: is_set("AWS_USE_FIPS_ENDPOINT")?,
            dual_stack: is_set("AWS_USE_DUALSTACK_ENDPOINT")?,
        })
    }

    /// Returns the hosts of S3 and of the token service in a region, unless they are those that the crate knows. The names
    /// are those of AWS's partitions.
    fn hosts(self, region: &str) -> Option<(String, String)> {
        const CLOUDS: [(&str, &str, &str); 4] = [
            ("cn-", "amazonaws.com.cn", "api.amazonwebservices.com.cn"),
            ("eusc-", "amazonaws.eu", "api.amazonwebservices.eu"),
            ("us-iso-", "c2s.ic.gov", "api.aws.ic.gov"),
            ("us-isob-", "sc2s.sgov.gov", "api.aws.scloud"),
        ];
        let cloud = CLOUDS
            .iter()
            .find(|(begin, _, _)| region.starts_with(begin));
        let (_, domain, dual_domain) = cloud.copied().unwrap_or(("", "amazonaws.com", "api.aws"));
        if cloud.is_none() && !self.fips && !self.dual_stack {
            return None;
        }
        let fips = if self.fips { "-fips" } else { "" };
        let dual = if self.dual_stack { ".dualstack" } else { "" };
        let of_sts = if self.dual_stack { dual_domain } else { domain };
        // GovCloud's token service is FIPS without the name.
        let sts_fips = if region.starts_with("us-gov-") {
            ""
        } else {
            fips
        };
        Some((
            format!("https://s3{fips}{dual}.{region}.{domain}"),
            format!("https://sts{sts_fips}.{region}.{of_sts}"),
        ))
    }
}

/// Asks the endpoints of the region's cloud, unless others are given.
fn of_cloud(builder: AmazonS3Builder, variants: Variants) -> AmazonS3Builder {
    let region = builder.setting(Key::Region);
    let Some((s3, sts)) = variants.hosts(region.as_deref().unwrap_or(DEFAULT_REGION)) else {
        return builder;
    };
    let builder = match builder.setting(Key::StsEndpoint) {
        Some(_) => builder,
        None => builder.with(Key::StsEndpoint, sts),
    };
    match builder.endpoint() {
        Some(_) => builder,
        None => builder.with(Key::S3Endpoint, s3),
    }
}

/// Returns the endpoint with the bucket in its host name, or `None` if the endpoint is not a URL with a host.
fn with_bucket(endpoint: &str, bucket: &str) -> Option<String> {
    let mut url = Url::parse(endpoint).ok()?;
    let host = url.host_str()?.to_owned();
    if !host.starts_with(&format!("{bucket}.")) {
        url.set_host(Some(&format!("{bucket}.{host}"))).ok()?;
    }
    Some(url.as_str().trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bucket_goes_into_the_host_name_once() {
        let with = |endpoint| with_bucket(endpoint, "b");
        assert_eq!(
            with("http://s.example:9000/").as_deref(),
            Some("http://b.s.example:9000")
        );
        assert_eq!(
            with("https://b.s.example").as_deref(),
            Some("https://b.s.example")
        );
        assert_eq!(with("nonsense"), None);
    }

    #[test]
    fn each_cloud_of_aws_has_its_hosts() {
        let hosts = |region, fips, dual_stack| Variants { fips, dual_stack }.hosts(region);
        assert_eq!(hosts("eu-west-1", false, false), None);
        assert_eq!(hosts("us-gov-west-1", false, false), None);
        for (region, fips, dual_stack, s3, sts) in [
            (
                "cn-north-1",
                false,
                false,
                "https://s3.cn-north-1.amazonaws.com.cn",
                "https://sts.cn-north-1.amazonaws.com.cn",
            ),
            (
                "us-gov-west-1",
                true,
                false,
                "https://s3-fips.us-gov-west-1.amazonaws.com",
                "https://sts.us-gov-west-1.amazonaws.com",
            ),
            (
                "us-east-1",
                true,
                true,
                "https://s3-fips.dualstack.us-east-1.amazonaws.com",
                "https://sts-fips.us-east-1.api.aws",
            ),
            (
                "eusc-de-east-1",
                false,
                true,
                "https://s3.dualstack.eusc-de-east-1.amazonaws.eu",
                "https://sts.eusc-de-east-1.api.amazonwebservices.eu",
            ),
        ] {
            let expected = Some((s3.to_owned(), sts.to_owned()));
            assert_eq!(hosts(region, fips, dual_stack), expected, "{region}");
        }
    }
}
