//! A running `deltafold explore`, and requests to its API.

use super::deltafold;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use reqwest::{Method, StatusCode};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// The page. It ends when it is dropped.
pub struct Page {
    program: Child,
    /// The address that was printed, with its token.
    pub address: String,
    runtime: Runtime,
    client: reqwest::Client,
}

/// Returns what names a key in requests.
pub fn id(key: &str) -> String {
    URL_SAFE_NO_PAD.encode(key)
}

impl Page {
    /// Starts the page of a store or a plain snapshot file, and waits until it has been read, or cannot be.
    pub fn start(backup: &Path) -> Self {
        let page = Page::begin(backup);
        page.wait();
        page
    }

    /// Starts the page.
    pub fn begin(backup: &Path) -> Self {
        let (folder, name) = (backup.parent(), backup.file_name());
        let flag = if backup.is_dir() {
            "--store"
        } else {
            "--snapshot"
        };
        let mut command = deltafold();
        // The page shows the backup's name, and screenshots must be the same everywhere.
        command.current_dir(folder.expect("a folder"));
        command
            .args(["explore", "--output", "json", flag])
            .arg(name.expect("a name"));
        let mut program = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("start the page");
        let mut line = String::new();
        let out = program.stdout.take().expect("its output");
        BufReader::new(out).read_line(&mut line).expect("a line");
        let printed: Value = serde_json::from_str(&line).expect("JSON");
        Page {
            program,
            address: printed["address"].as_str().expect("an address").to_owned(),
            runtime: Runtime::new().expect("a runtime"),
            client: super::http_client()
                .redirect(reqwest::redirect::Policy::none())
                .build()
                .expect("a client"),
        }
    }

    /// Waits until the backup has been read, or cannot be.
    pub fn wait(&self) {
        let began = Instant::now();
        while self.get("backup", &[])["phase"] == "reading" {
            assert!(began.elapsed() < Duration::from_secs(60), "still reading");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.program.id()
    }

    fn token(&self) -> &str {
        self.address.split_once("token=").expect("a token").1
    }

    /// Sends a request. Returns its status and its body.
    pub fn send(
        &self,
        method: Method,
        target: &str,
        query: &[(&str, &str)],
        headers: &[(&str, String)],
    ) -> (StatusCode, String) {
        let base = self.address.split_once('#').expect("a fragment").0;
        let query: Vec<String> = query
            .iter()
            .map(|(name, value)| format!("{name}={}", deltafold::base::percent::encoded(value)))
            .collect();
        let url = format!("{base}{target}?{}", query.join("&"));
        let mut request = self.client.request(method, url);
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        self.runtime.block_on(async {
            let response = request.send().await.expect("a response");
            (response.status(), response.text().await.expect("a body"))
        })
    }

    /// Asks as the page does. Returns the status and the body.
    pub fn ask(&self, path: &str, query: &[(&str, &str)]) -> (StatusCode, String) {
        let token = ("authorization", format!("Bearer {}", self.token()));
        self.send(Method::GET, &format!("api/{path}"), query, &[token])
    }

    /// Returns an answer of the API.
    pub fn get(&self, path: &str, query: &[(&str, &str)]) -> Value {
        let (status, body) = self.ask(path, query);
        assert_eq!(status, StatusCode::OK, "{path} {query:?}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
