//! Opens S3, and servers that speak its protocol.

use super::super::requests::Connector;
use super::secret::{Provider, Secret, SecretDerived};
use super::{Family, Location, OpenConfig, check_endpoint, config_key, misconfigured};
use crate::error::{Reason, Result};
use crate::store::exclude::{ExcludeTags, TagKind};
use crate::store::s3::S3;
use crate::store::{LookFirst, Store};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential, Checksum};
use object_store::{ClientConfigKey, ClientOptions};
use std::sync::Arc;
use tokio::runtime::Handle;
use url::Url;

/// A setting of our own: `false` puts the bucket into the host name, also into that of `endpoint`.
const OPTION_PATH_STYLE: &str = "path_style";
/// Parts of the names of options with credentials. If one of them is given, the Secret's credentials are not
/// used.
const OWN_CREDENTIALS: &[&str] = &["access_key_id"];
/// The size of an SSE-C key.
const CUSTOMER_KEY_BYTES: usize = 32;

pub(super) fn open(location: &Location, mut config: OpenConfig, handle: Handle) -> Result<Store> {
    let secret = config.read_secret()?;
    if let Some(secret) = &secret {
        let certificates = config.certificates_in(secret, "trustedCaCert")?;
        config.certificates.extend(certificates);
    }
    let user_has_credentials = config.has_option(OWN_CREDENTIALS);
    let (mut builder, client) = configure(location, &config, secret.as_ref())?;
    if let (Some(source), Some(secret)) = (&config.secret, &secret)
        && !user_has_credentials
    {
        let (location, config) = (location.clone(), config.clone());
        let derived = SecretDerived::new(source.clone(), secret.clone(), move |secret| {
            credentials(&location, &config, secret)
        })?;
        builder = builder.with_credentials(Arc::new(derived));
    }
    let setting = |key| builder.get_config_value(&key);
    let is_set = |key| setting(key).as_deref() == Some("true");
    let unsigned = is_set(AmazonS3ConfigKey::SkipSignature);
    let is_other_server = setting(AmazonS3ConfigKey::S3Endpoint)
        .or_else(|| setting(AmazonS3ConfigKey::Endpoint))
        .is_some_and(|e| !e.contains(".amazonaws.com"));
    let request_payer = is_set(AmazonS3ConfigKey::RequestPayer);
    let region = setting(AmazonS3ConfigKey::Region);
    if setting(AmazonS3ConfigKey::Checksum).is_none() {
        builder = builder.with_checksum_algorithm(Checksum::SHA256);
    }
    let store = builder
        .build()
        .map_err(|e| misconfigured(&location.action, e))?;
    let store = Arc::new(store);
    let tagged = config.requests.tagged.clone();
    let store = if unsigned {
        location.store(store, ExcludeTags::none(), handle)
    } else {
        let client = config.retrying_client(&client, &location.action)?;
        let own = Arc::new(S3::new(store.clone(), client, region, request_payer));
        // AWS documents that its responses tell the number of tags to everybody who may read tags.
        if !is_other_server {
            tagged.set_tells();
        }
        let tags = ExcludeTags::of(TagKind::S3(own.clone())).with_tagged(tagged);
        location.store(store, tags, handle).with_s3(own)
    };
    // AWS obeys the conditions of writes. Of another server nobody knows.
    let look_first = if is_other_server {
        LookFirst::Always
    } else {
        LookFirst::Never
    };
    Ok(store
        .with_requests(config.requests.most())
        .with_ranges()
        .with_look_first(look_first))
}

/// Returns the provider of the credentials in a Secret.
fn credentials(
    location: &Location,
    config: &OpenConfig,
    secret: &Secret,
) -> Result<Provider<AwsCredential>> {
    if !secret.has_credentials(Family::S3, |_| false) {
        return Err(secret.lacks_credentials(Family::S3));
    }
    let (builder, _) = configure(location, config, Some(secret))?;
    let store = builder
        .build()
        .map_err(|e| misconfigured(&location.action, e))?;
    Ok(store.credentials().clone())
}

/// Returns a store's builder with all settings, and how it connects.
fn configure(
    location: &Location,
    config: &OpenConfig,
    secret: Option<&Secret>,
) -> Result<(AmazonS3Builder, ClientOptions)> {
    let mut builder = from_variables(config, secret)
        .with_url(&location.url)
        .with_retry(config.retry.clone())
        .with_http_connector(Connector {
            completes_if_free: true,
            ..config.connector()
        });
    let mut settings = config.timeouts();
    if let Some(secret) = secret {
        settings.extend(from_secret(secret)?);
    }
    settings.extend(config.options.iter().cloned());
    let mut path_style = None;
    for (key, value) in settings {
        if key == OPTION_PATH_STYLE {
            path_style = Some(config.flag(&key, &value)?);
            continue;
        }
        builder = builder.with_config(config_key::<AmazonS3ConfigKey>(&key)?, value);
    }
    let endpoint = builder
        .get_config_value(&AmazonS3ConfigKey::S3Endpoint)
        .or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
    if let Some(endpoint) = &endpoint {
        check_endpoint("endpoint", endpoint)?;
    }
    if let Some(path_style) = path_style {
        builder = builder.with_virtual_hosted_style_request(!path_style);
        if let (false, Some(endpoint)) = (path_style, &endpoint) {
            let host = with_bucket(endpoint, &location.bucket).ok_or_else(|| {
                let error = format!("the endpoint {endpoint} is not the URL of a server");
                Reason::Configuration.error(error)
            })?;
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, host);
        }
    }
    if endpoint.is_some_and(|e| e.starts_with("http://")) {
        let key = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
        builder = builder.with_config(key, "true");
    }
    let client = config.client(|key| builder.get_config_value(&AmazonS3ConfigKey::Client(key)));
    Ok((builder.with_client_options(client.clone()), client))
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

/// Returns a builder with the settings in the providers' variables. A session token belongs to one access
/// key: if the user gives another key, the token is left out, and no other server gets to see it.
fn from_variables(config: &OpenConfig, secret: Option<&Secret>) -> AmazonS3Builder {
    use AmazonS3ConfigKey::{AccessKeyId, SecretAccessKey, Token};
    let is_credential =
        |key: &AmazonS3ConfigKey| matches!(key, AccessKeyId | SecretAccessKey | Token);
    let user_has_credentials = config.has_option(OWN_CREDENTIALS);
    config
        .variables(Family::S3, secret, OWN_CREDENTIALS, is_credential)
        .into_iter()
        .filter(|(key, _)| !(user_has_credentials && *key == Token))
        .fold(AmazonS3Builder::new(), |builder, (key, value)| {
            builder.with_config(key, value)
        })
}

/// Returns a Secret's settings under the builder's names.
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
            let text = match key.len() == CUSTOMER_KEY_BYTES {
                true => base64_simd::STANDARD.encode_to_string(key),
                false => key.to_owned(),
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
}
