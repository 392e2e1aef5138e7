//! MinIO: a real S3 server.

use super::scratch;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::signer::{Method, SignedUrlOptions, Signer as _};
use tempfile::TempDir;

use super::process::{Process, free_port, http_at, is_a_process};
use super::s3::{ACCESS_KEY, S3, SECRET_KEY};
use super::tools::{self, tail};

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running MinIO with a folder of its own. It is killed when dropped.
#[derive(Debug)]
pub struct Minio {
    endpoint: String,
    process: Process,
    // Declared after the process, so removed after it.
    folder: TempDir,
}

is_a_process!(Minio);

impl Minio {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with more environment variables, such as MINIO_KMS_SECRET_KEY.
    pub fn start_with(env: &[(&str, &str)]) -> Self {
        Self::start_on("127.0.0.1", env, None)
    }

    /// Starts a server at another address of this machine.
    pub fn start_at(host: &str) -> Self {
        Self::start_on(host, &[], None)
    }

    /// Starts a server with TLS and a certificate that `tools::write_certs` has written.
    pub fn start_tls(certs: &std::path::Path) -> Self {
        Self::start_on("127.0.0.1", &[], Some(certs))
    }

    fn start_on(host: &str, env: &[(&str, &str)], certs: Option<&std::path::Path>) -> Self {
        let folder = scratch::folder_named("minio-").expect("a folder for MinIO");
        if let Some(certs) = certs {
            let own = folder.path().join("certs");
            std::fs::create_dir(&own).expect("a folder for certificates");
            for (from, to) in [("node.crt", "public.crt"), ("node.key", "private.key")] {
                std::fs::copy(certs.join(from), own.join(to)).expect("a certificate");
            }
        }
        let scheme = if certs.is_some() { "https" } else { "http" };
        let log = folder.path().join("minio.log");
        // Another process may take a free port before the server binds it.
        for attempt in 1.. {
            let address = format!("{host}:{}", free_port());
            let started = Self::process(&address, &folder, &log, env, certs.is_some());
            match started {
                Ok(process) => {
                    return Self {
                        endpoint: format!("{scheme}://{address}"),
                        process,
                        folder,
                    };
                }
                Err(_) if attempt < 3 && tail(&log).contains("in use") => {}
                Err(err) => panic!("MinIO: {err}; the end of its log:\n{}", tail(&log)),
            }
        }
        unreachable!("the loop ends by returning")
    }

    fn process(
        address: &str,
        folder: &TempDir,
        log: &std::path::Path,
        env: &[(&str, &str)],
        tls: bool,
    ) -> Result<Process, String> {
        let mut command = Command::new(tools::minio());
        tools::forget_env(&mut command, &["MINIO_"]);
        command
            .arg("server")
            .arg(folder.path().join("data"))
            .args(["--address", address])
            // Otherwise it would read certificates from the user's home.
            .arg("--certs-dir")
            .arg(folder.path().join("certs"))
            .env("MINIO_ROOT_USER", ACCESS_KEY)
            .env("MINIO_ROOT_PASSWORD", SECRET_KEY)
            .env("MINIO_UPDATE", "off")
            .env("MINIO_BROWSER", "off")
            .envs(env.iter().copied());
        let mut process = Process::spawn(&mut command, log)?;
        let (host, port) = address.split_once(':').expect("a port");
        let port = port.parse().expect("a number");
        process.wait_until(START_TIMEOUT, || {
            // Wait for its own log line first: another server on the port could respond.
            let text = std::fs::read_to_string(log).unwrap_or_default();
            // Over TLS the log line is enough: only clients with the certificate can ask.
            text.contains(address) && tls
                || text.contains(address)
                    && http_at(host, port, "GET", "/minio/health/ready", "")
                        .is_some_and(|answer| answer.starts_with("HTTP/1.0 200"))
        })?;
        Ok(process)
    }

    /// Restarts the server with another secret key, at the same address and with the same data. The old key is
    /// invalid from now on.
    pub fn rotate(&mut self, secret: &str) {
        self.process.stop();
        let address = self.endpoint.strip_prefix("http://").expect("no TLS");
        let env = [("MINIO_ROOT_PASSWORD", secret)];
        self.process = Self::process(address, &self.folder, &self.log, &env, false)
            .unwrap_or_else(|err| panic!("MinIO: {err}; the end of its log:\n{}", tail(&self.log)));
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub fn access_key(&self) -> &'static str {
        ACCESS_KEY
    }

    pub fn secret_key(&self) -> &'static str {
        SECRET_KEY
    }

    /// Returns the environment variables with which the object_store crate reaches this server.
    pub fn env(&self) -> Vec<(String, String)> {
        self.s3().env()
    }

    pub fn store(&self, bucket: &str) -> Arc<AmazonS3> {
        self.s3().store(bucket)
    }

    /// Returns a client for what only S3 has: versions, object lock.
    pub fn s3(&self) -> S3 {
        S3::new(self.endpoint())
    }

    pub async fn create_bucket(&self, name: &str) {
        self.signed(Method::PUT, name, "", "", String::new()).await;
    }

    /// Returns the tags of an object.
    pub async fn tags(&self, bucket: &str, key: &str) -> Vec<(String, String)> {
        let xml = self
            .signed(Method::GET, bucket, key, "tagging", String::new())
            .await;
        let element = |xml: &str, name: &str| {
            let rest = xml.split_once(&format!("<{name}>"))?.1;
            Some(rest.split_once(&format!("</{name}>"))?.0.to_owned())
        };
        xml.split("<Tag>")
            .skip(1)
            .map(|tag| (element(tag, "Key"), element(tag, "Value")))
            .map(|(key, value)| (key.expect("a tag's key"), value.expect("a tag's value")))
            .collect()
    }

    /// Replaces the tags of an object by one tag.
    pub async fn set_tag(&self, bucket: &str, key: &str, tag: &str, value: &str) {
        let xml = format!(
            "<Tagging><TagSet><Tag><Key>{tag}</Key><Value>{value}</Value></Tag></TagSet></Tagging>"
        );
        self.signed(Method::PUT, bucket, key, "tagging", xml).await;
    }

    /// Sends a request that the object_store crate has no call for, by a URL that the crate signs.
    async fn signed(
        &self,
        method: Method,
        bucket: &str,
        key: &str,
        query: &str,
        body: String,
    ) -> String {
        let mut options = SignedUrlOptions::new();
        if !query.is_empty() {
            options = options.with_query([(query, "")]);
        }
        let url = self
            .store(bucket)
            .signed_url_opts(
                method.clone(),
                &Path::from(key),
                Duration::from_secs(60),
                &options,
            )
            .await
            .expect("sign a URL");
        let (host, port) = (url.host_str(), url.port());
        let (host, port) = host.zip(port).expect("MinIO's address");
        let target = &url[url::Position::BeforePath..];
        let answer =
            http_at(host, port, method.as_str(), target, &body).expect("an answer from MinIO");
        assert!(
            answer.starts_with("HTTP/1.0 2") || answer.starts_with("HTTP/1.1 2"),
            "{method} {bucket}/{key}?{query}: {answer}"
        );
        answer
    }
}
