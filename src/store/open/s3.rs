//! Opens S3, and servers that speak its protocol.

use super::secret::{Provider, Renewed, Secret};
use super::{Family, Means, Place, config_key, misconfigured};
use crate::error::{Reason, Result};
use crate::store::Store;
use crate::store::exclude::{ExcludeTags, Kind};
use crate::store::publish::direct::Direct;
use crate::store::s3::S3;
use async_trait::async_trait;
use object_store::aws::{
    AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredential, Checksum, S3CopyIfNotExists,
};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use std::sync::Arc;
use tokio::runtime::Handle;
use url::Url;

/// S3 copies no more than this at once.
const LARGEST_COPY: u64 = 5 << 30;
/// A setting of ours: `false` puts the bucket into the host name, also into that of `endpoint`.
const OPTION_PATH_STYLE: &str = "path_style";
/// What names of settings have in them that are credentials: with one of these, the Secret's are not asked for.
const OWN_CREDENTIALS: &[&str] = &["access_key_id"];
/// An SSE-C key has so many bytes.
const CUSTOMER_KEY_BYTES: usize = 32;

pub(super) fn open(place: &Place, mut means: Means, handle: Handle) -> Result<Store> {
    let secret = means.read_secret()?;
    if let Some(secret) = &secret {
        let own = means.certificates_of(secret, "trustedCaCert")?;
        means.certificates.extend(own);
    }
    let has_own = means.gives(OWN_CREDENTIALS);
    let (mut builder, client) = configure(place, &means, secret.as_ref())?;
    if let (Some(source), Some(secret)) = (&means.secret, &secret)
        && !has_own
    {
        let (place, means) = (place.clone(), means.clone());
        let renewed = Renewed::new(source.clone(), secret.clone(), move |secret| {
            if !secret.has_credentials(Family::S3, |_| false) {
                return Err(secret.lacks_credentials(Family::S3));
            }
            let (builder, _) = configure(&place, &means, Some(secret))?;
            let store = builder.build().map_err(|e| misconfigured(&place.what, e))?;
            Ok(store.credentials().clone() as Provider<AwsCredential>)
        })?;
        builder = builder.with_credentials(Arc::new(renewed));
    }
    let setting = |key| builder.get_config_value(&key);
    let is_set = |key| setting(key).as_deref() == Some("true");
    let unsigned = is_set(AmazonS3ConfigKey::SkipSignature);
    let own_server = setting(AmazonS3ConfigKey::S3Endpoint)
        .or_else(|| setting(AmazonS3ConfigKey::Endpoint))
        .is_some_and(|e| !e.contains(".amazonaws.com"));
    let request_payer = is_set(AmazonS3ConfigKey::RequestPayer);
    let region = setting(AmazonS3ConfigKey::Region);
    // The crate tells the key of this setting by its name alone.
    let encryption = config_key::<AmazonS3ConfigKey>("aws_server_side_encryption")?;
    let own_key = setting(encryption).as_deref() == Some("sse-c");
    let (store, direct) = ways(place, builder, means.http(&client, &place.what)?)?;
    let tagged = means.requests.tagged.clone();
    let store = if unsigned {
        place.store(store, ExcludeTags::none(), handle)
    } else {
        let wire = means.wire(&client, &place.what)?;
        let own = Arc::new(S3::new(store.clone(), wire, region, request_payer));
        // AWS documents that it does, to who may read tags.
        if !own_server {
            tagged.set_tells();
        }
        let tags = ExcludeTags::of(Kind::S3(own.clone())).with_tagged(tagged);
        place.store(store, tags, handle).with_s3(own)
    };
    let store = store
        .with_requests(means.requests.most())
        .with_ranges()
        .with_direct(direct);
    // By ranges only what we sign, and without a key that each request would have to show.
    let store = match unsigned || own_key {
        true => store.with_largest_copy(LARGEST_COPY),
        false => store.with_largest_range(LARGEST_COPY),
    };
    Ok(match own_server {
        true => store.with_doubted_conditions(),
        false => store,
    })
}

/// A store, and the ways to put small objects into it at once. All of them have the same credentials and the same
/// connections.
fn ways(
    place: &Place,
    builder: AmazonS3Builder,
    http: HttpClient,
) -> Result<(Arc<AmazonS3>, Direct)> {
    let built = |builder: AmazonS3Builder| {
        let store = builder.build();
        store.map_err(|e| misconfigured(&place.what, e))
    };
    // Credentials are asked for with connections of their own.
    let credentials = built(builder.clone())?.credentials().clone();
    let builder = builder.with_credentials(credentials);
    let through = |builder: &AmazonS3Builder, http: HttpClient| {
        built(builder.clone().with_http_connector(Through(http))).map(Arc::new)
    };
    let store = through(&builder, http.clone())?;
    let checked = match builder.get_config_value(&AmazonS3ConfigKey::Checksum) {
        Some(_) => builder,
        None => builder.with_checksum_algorithm(Checksum::SHA256),
    };
    let damaging = HttpClient::new(Damaging(http.clone()));
    let direct = Direct::new(through(&checked, http)?, through(&checked, damaging)?);
    Ok((store, direct))
}

/// Connects through what is connected already.
#[derive(Debug)]
struct Through(HttpClient);

impl HttpConnector for Through {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(self.0.clone())
    }
}

/// Sends other bytes than those that were signed and summed up, as a broken network would.
#[derive(Debug)]
struct Damaging(HttpClient);

#[async_trait]
impl HttpService for Damaging {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let length = request.body().content_length();
        *request.body_mut() = vec![b'?'; length].into();
        self.0.execute(request).await
    }
}

/// A store's builder, and how it connects.
fn configure(
    place: &Place,
    means: &Means,
    secret: Option<&Secret>,
) -> Result<(AmazonS3Builder, ClientOptions)> {
    let mut builder = from_variables(means, secret)
        .with_url(&place.url)
        .with_retry(means.retry.clone())
        .with_http_connector(means.connector())
        .with_copy_if_not_exists(S3CopyIfNotExists::Multipart);
    let mut settings = means.timeouts();
    if let Some(secret) = secret {
        settings.extend(from_secret(secret)?);
    }
    settings.extend(means.options.iter().cloned());
    let mut path_style = None;
    for (key, value) in settings {
        if key == OPTION_PATH_STYLE {
            path_style = Some(means.flag(&key, &value)?);
            continue;
        }
        builder = builder.with_config(config_key::<AmazonS3ConfigKey>(&key)?, value);
    }
    let endpoint = builder
        .get_config_value(&AmazonS3ConfigKey::S3Endpoint)
        .or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
    if let Some(path_style) = path_style {
        builder = builder.with_virtual_hosted_style_request(!path_style);
        if let (false, Some(endpoint)) = (path_style, &endpoint) {
            let host = with_bucket(endpoint, &place.bucket).ok_or_else(|| {
                let what = format!("the endpoint {endpoint} is no URL of a server");
                Reason::Configuration.error(what)
            })?;
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, host);
        }
    }
    if endpoint.is_some_and(|e| e.starts_with("http://")) {
        let key = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
        builder = builder.with_config(key, "true");
    }
    let client = means.client(|key| builder.get_config_value(&AmazonS3ConfigKey::Client(key)));
    Ok((builder.with_client_options(client.clone()), client))
}

/// `http://server:9000` with the bucket in its host name, where it is not there yet.
fn with_bucket(endpoint: &str, bucket: &str) -> Option<String> {
    let mut url = Url::parse(endpoint).ok()?;
    let host = url.host_str()?.to_owned();
    if !host.starts_with(&format!("{bucket}.")) {
        url.set_host(Some(&format!("{bucket}.{host}"))).ok()?;
    }
    Some(url.as_str().trim_end_matches('/').to_owned())
}

/// A builder with the settings of the providers' variables. A session token belongs to its own access key: beside a
/// user's, no server takes it, and it would be shown to that of somebody else.
fn from_variables(means: &Means, secret: Option<&Secret>) -> AmazonS3Builder {
    use AmazonS3ConfigKey::{AccessKeyId, SecretAccessKey, Token};
    let is_credential =
        |key: &AmazonS3ConfigKey| matches!(key, AccessKeyId | SecretAccessKey | Token);
    let has_own = means.gives(OWN_CREDENTIALS);
    means
        .variables(Family::S3, secret, OWN_CREDENTIALS, is_credential)
        .into_iter()
        .filter(|(key, _)| !(has_own && *key == Token))
        .fold(AmazonS3Builder::new(), |builder, (key, value)| {
            builder.with_config(key, value)
        })
}

/// A Secret's settings under the names that the builder has for them.
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
    // A role that the token of a workload is good for; the token's file is read again by itself.
    if let (Some(role), Some(_)) = (secret.get("roleARN"), secret.get("token")) {
        add("role_arn", role.to_owned());
        let file = secret.file("token").display().to_string();
        add("web_identity_token_file", file);
    }
    // Without it the bucket is part of the path, which AWS understands as well.
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
                return Err(secret.wrong("sseCustomerKey is no key of 32 bytes"));
            }
        }
        _ => {
            let what = "sseCustomerKey needs sseCustomerAlgorithm with the value AES256";
            return Err(secret.wrong(what));
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
