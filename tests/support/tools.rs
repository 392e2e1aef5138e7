//! Builds the servers and tools of the tests by name from the Go module proxy.
//!
//! Each is built once per user into a cache. A file's name contains its version, so a new version is a new
//! file.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

const AGE: &str = "1.3.2";
const BBOLT: &str = "1.4.3";
/// Kubernetes 1.36.3. Its libraries, such as client-go, have the version 0.36.3.
const KUBERNETES: &str = "36.3";
const FAKE_GCS_SERVER: &str = "1.56.0";
const HELM: &str = "3.22.0";
const MDBOOK: &str = "0.5.4";
const MINIO: &str = "0.0.0-20260212201848-7aac2a2c5b7c";
const VERSITYGW: &str = "1.8.0";

const ETCD_MOD: &str = include_str!("go/etcd.mod");
const KUBERNETES_MOD: &str = include_str!("go/kubernetes.mod");
const UNPACK_MOD: &str = include_str!("go/unpack.mod");
const UNPACK_GO: &str = include_str!("go/unpack.go");
const NOLINKS_GO: &str = include_str!("go/nolinks.go");
const CERTS_GO: &str = include_str!("go/certs.go");
const INFORMER_MOD: &str = include_str!("go/informer.mod");
const INFORMER_GO: &str = include_str!("go/informer.go");

/// The etcd releases under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EtcdVersion {
    V3_5,
    V3_6,
    V3_7,
}

impl EtcdVersion {
    pub const ALL: [Self; 3] = [Self::V3_5, Self::V3_6, Self::V3_7];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::V3_5 => "3.5.35",
            Self::V3_6 => "3.6.16",
            Self::V3_7 => "3.7.3",
        }
    }
}

impl std::fmt::Display for EtcdVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Returns the etcd server of a version.
pub fn etcd(version: EtcdVersion) -> PathBuf {
    etcd_module(version, "etcd", "go.etcd.io/etcd/server/v3")
}

/// Returns the etcdutl of a version.
pub fn etcdutl(version: EtcdVersion) -> PathBuf {
    etcd_module(version, "etcdutl", "go.etcd.io/etcd/etcdutl/v3")
}

/// Returns the etcdctl of a version.
pub fn etcdctl(version: EtcdVersion) -> PathBuf {
    etcd_module(version, "etcdctl", "go.etcd.io/etcd/etcdctl/v3")
}

/// Returns the reference implementation of age.
pub fn age() -> PathBuf {
    age_program("age")
}

/// Returns its maker of identities.
pub fn age_keygen() -> PathBuf {
    age_program("age-keygen")
}

fn age_program(name: &str) -> PathBuf {
    cached(&format!("{name}-{AGE}"), "some seconds", |build| {
        build.install(&format!("filippo.io/age/cmd/{name}"), AGE, name)
    })
}

/// Returns mdBook, which builds the book of docs/.
pub fn mdbook() -> PathBuf {
    cached(&format!("mdbook-{MDBOOK}"), "2 to 5 minutes", |build| {
        // A debug build takes a fraction of the time, and builds this book in a second or two.
        let features = ["--no-default-features", "--features", "search"];
        let args = [
            "install",
            "mdbook",
            "--version",
            MDBOOK,
            "--locked",
            "--debug",
        ];
        build.run(
            Command::new("cargo")
                .args(args)
                .args(features)
                .args(["--root", "."]),
        );
        build.dir.join("bin/mdbook")
    })
}

/// Returns bbolt's command line tool.
pub fn bbolt() -> PathBuf {
    cached(&format!("bbolt-{BBOLT}"), "some seconds", |build| {
        build.install("go.etcd.io/bbolt/cmd/bbolt", BBOLT, "bbolt")
    })
}

/// Returns the MinIO server.
pub fn minio() -> PathBuf {
    cached(&format!("minio-{MINIO}"), "3 to 10 minutes", |build| {
        build.install("github.com/minio/minio", MINIO, "minio")
    })
}

/// Returns versitygw, an S3 server that stores objects as files.
pub fn versitygw() -> PathBuf {
    cached(
        &format!("versitygw-{VERSITYGW}"),
        "1 to 3 minutes",
        |build| {
            let package = "github.com/versity/versitygw/cmd/versitygw";
            build.install(package, VERSITYGW, "versitygw")
        },
    )
}

/// Returns a server that speaks the JSON API of Google Cloud Storage.
pub fn fake_gcs_server() -> PathBuf {
    let name = format!("fake-gcs-server-{FAKE_GCS_SERVER}");
    cached(&name, "2 to 4 minutes", |build| {
        let package = "github.com/fsouza/fake-gcs-server";
        build.install(package, FAKE_GCS_SERVER, "fake-gcs-server")
    })
}

/// Helm.
pub fn helm() -> PathBuf {
    cached(&format!("helm-{HELM}"), "2 to 4 minutes", |build| {
        build.install("helm.sh/helm/v3/cmd/helm", HELM, "helm")
    })
}

/// The Kubernetes API server.
pub fn kube_apiserver() -> PathBuf {
    kubernetes("kube-apiserver", "3 to 6 minutes")
}

/// Returns kube-controller-manager: Jobs, CronJobs, garbage collection and others.
pub fn kube_controller_manager() -> PathBuf {
    kubernetes(
        "kube-controller-manager",
        "1 to 3 minutes after kube-apiserver",
    )
}

/// Returns kubectl.
pub fn kubectl() -> PathBuf {
    kubernetes("kubectl", "1 to 2 minutes after kube-apiserver")
}

/// Builds a program of Kubernetes' repository.
fn kubernetes(name: &str, time: &str) -> PathBuf {
    let version = format!("v1.{KUBERNETES}");
    cached(&format!("{name}-{version}"), time, |build| {
        build.write("go.mod", &kubernetes_mod(build, &version));
        let variable =
            |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
        let (minor, _) = KUBERNETES.split_once('.').expect("a minor version");
        // The version that it reports to clients; usually Kubernetes' build scripts set it.
        let flags = [
            variable("gitVersion", &version),
            variable("gitMajor", "1"),
            variable("gitMinor", minor),
        ];
        build.go(&[
            "build",
            "-mod=mod",
            &format!("-ldflags=-s -w {}", flags.join(" ")),
            "-o",
            name,
            &format!("k8s.io/kubernetes/cmd/{name}"),
        ]);
        build.dir.join(name)
    })
}

/// Returns a go.mod. Kubernetes replaces its own libraries by folders of its repository; a module that requires
/// Kubernetes must replace each by its published version. Kubernetes' go.mod lists them.
fn kubernetes_mod(build: &Build, version: &str) -> String {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Download {
        go_mod: PathBuf,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Mod {
        replace: Vec<Replace>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Replace {
        old: Module,
        new: Module,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Module {
        path: String,
    }
    let module = format!("k8s.io/kubernetes@{version}");
    let said = build.go(&["mod", "download", "-json", &module]);
    let download: Download = serde_json::from_slice(&said).expect("what `go mod download` says");
    let file = download.go_mod.to_str().expect("a path in UTF-8");
    let said = build.go(&["mod", "edit", "-json", file]);
    let theirs: Mod = serde_json::from_slice(&said).expect("what `go mod edit` says");
    let mut text = KUBERNETES_MOD.replace("VERSION", version);
    for Replace { old, new } in theirs.replace {
        if new.path.starts_with("./staging/") {
            let path = old.path;
            text.push_str(&format!("replace {path} => {path} v0.{KUBERNETES}\n"));
        }
    }
    text
}

/// Returns `unpack gzip
/// zlib
/// lzw`: Go's own decompressors, from standard input to standard output.
pub fn unpack() -> PathBuf {
    our_program("unpack", "some seconds", UNPACK_MOD, UNPACK_GO)
}

/// Returns `nolinks COMMAND [ARGUMENT]…`, which runs a command as on a file system without hard links and without
/// RENAME_NOREPLACE, such as a mounted bucket.
pub fn nolinks() -> PathBuf {
    let module = "module deltafold.test/nolinks\n\ngo 1.21\n";
    our_program("nolinks", "some seconds", module, NOLINKS_GO)
}

/// Returns `informer URL TOKEN NAMESPACE`: what client-go's informer sees of the ConfigMaps there.
pub fn informer() -> PathBuf {
    let module = INFORMER_MOD.replace("VERSION", &format!("v0.{KUBERNETES}"));
    our_program("informer", "a minute or two", &module, INFORMER_GO)
}

/// Builds a program of this project. Its name in the cache contains the hash of its source.
fn our_program(name: &str, time: &str, module: &str, source: &str) -> PathBuf {
    let hash = Sha256::digest([module, source].concat());
    let hash: String = hash.iter().take(6).map(|b| format!("{b:02x}")).collect();
    cached(&format!("{name}-{hash}"), time, |build| {
        build.write("go.mod", module);
        build.write("main.go", source);
        build.go(&["build", "-mod=mod", "-o", name, "."]);
        build.dir.join(name)
    })
}

/// Writes `ca.crt`, `node.crt` and `node.key` for 127.0.0.1 into a folder, `expired.crt` with its key,
/// `other-ca.crt`, which signed none of them, and `self.crt`, an authority that is its own server, with its key.
pub fn write_certs(dir: &Path) {
    write_certs_for(dir, &[]);
}

/// Like `write_certs`, for more addresses.
pub fn write_certs_for(dir: &Path, addresses: &[&str]) {
    let source = Sha256::digest([UNPACK_MOD, CERTS_GO].concat());
    let name: String = source.iter().take(6).map(|b| format!("{b:02x}")).collect();
    let certs = cached(&format!("certs-{name}"), "some seconds", |build| {
        build.write("go.mod", UNPACK_MOD);
        build.write("certs.go", CERTS_GO);
        build.go(&["build", "-o", "certs", "."]);
        build.dir.join("certs")
    });
    let addresses = addresses.iter().map(OsStr::new);
    let args = [dir.as_os_str()].into_iter().chain(addresses);
    run(&certs, args).unwrap_or_else(|err| panic!("{err}"));
}

/// Builds a program of etcd from a module of ours that requires it: `go install` refuses modules with replace
/// directives.
fn etcd_module(version: EtcdVersion, name: &str, package: &str) -> PathBuf {
    cached(&format!("{name}-{version}"), "about a minute", |build| {
        build.write("go.mod", &ETCD_MOD.replace("VERSION", version.as_str()));
        // -mod=mod lets Go add indirect requirements and go.sum.
        build.go(&["build", "-mod=mod", "-o", name, package]);
        build.dir.join(name)
    })
}

/// Returns the folder of the cache.
pub fn cache_dir() -> PathBuf {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    if let Some(dir) = set("DELTAFOLD_TEST_CACHE") {
        return PathBuf::from(dir);
    }
    set("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache")))
        .expect("set DELTAFOLD_TEST_CACHE: neither XDG_CACHE_HOME nor HOME is set")
        .join("deltafold-test")
}

fn cached(name: &str, time: &str, build: impl FnOnce(&Build) -> PathBuf) -> PathBuf {
    let cache = cache_dir();
    let path = cache.join(name);
    if path.exists() {
        return path;
    }
    fs::create_dir_all(&cache).unwrap_or_else(|err| panic!("{}: {err}", cache.display()));
    // One lock for all builds: two heavy builds at once would only slow each other down.
    let lock = File::create(cache.join("lock")).expect("create the cache's lock file");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("lock the cache");
    if path.exists() {
        return path;
    }
    // Remove what a killed build left: nobody else builds while the lock is held.
    for left in fs::read_dir(&cache).into_iter().flatten().flatten() {
        if left.file_name().to_string_lossy().starts_with("build-") {
            let _ = fs::remove_dir_all(left.path());
        }
    }
    say(&format!(
        "building {name} into {} (once; usually {time})",
        cache.display()
    ));
    let started = Instant::now();
    let build_dir = tempfile::Builder::new()
        .prefix(&format!("build-{name}-"))
        .tempdir_in(&cache)
        .expect("create a folder to build in");
    let built = build(&Build {
        dir: build_dir.path().to_owned(),
        log: cache.join(format!("{name}.log")),
        name: name.to_owned(),
    });
    // Rename at the end: a killed build leaves nothing under the final name.
    fs::rename(&built, &path).expect("move the built program into the cache");
    say(&format!(
        "built {name} in {} s",
        started.elapsed().as_secs()
    ));
    path
}

struct Build {
    dir: PathBuf,
    log: PathBuf,
    name: String,
}

impl Build {
    fn write(&self, name: &str, text: &str) {
        fs::write(self.dir.join(name), text).expect("write a file of the module");
    }

    fn install(&self, package: &str, version: &str, name: &str) -> PathBuf {
        self.go(&["install", "-mod=mod", &format!("{package}@v{version}")]);
        self.dir.join(name)
    }

    /// Returns standard output. Standard error goes to the log.
    fn go(&self, args: &[&str]) -> Vec<u8> {
        let (verb, rest) = args.split_first().expect("a go command");
        let mut command = Command::new("go");
        command.arg(verb);
        if *verb != "mod" {
            // The cache may be inside a Git repository that has nothing to do with this build. Flags given here
            // override those in GOFLAGS.
            command.arg("-buildvcs=false");
        }
        command
            .args(rest)
            .env("GOBIN", &self.dir)
            .env("GOWORK", "off")
            // The program runs here, whatever the user cross-compiles for.
            .env_remove("GOOS")
            .env_remove("GOARCH");
        self.run(&mut command)
    }

    /// Runs a command in the folder of the build. Returns standard output. Standard error goes to the log.
    fn run(&self, command: &mut Command) -> Vec<u8> {
        let log = File::create(&self.log).expect("create the build's log");
        let program = command.get_program().to_string_lossy().into_owned();
        let output = command
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stderr(log)
            .output()
            .unwrap_or_else(|err| {
                panic!(
                    "cannot run `{program}`, which the tests need to build {}: {err}",
                    self.name
                )
            });
        assert!(
            output.status.success(),
            "{command:?} for {} failed ({}); the end of {}:\n{}",
            self.name,
            output.status,
            self.log.display(),
            tail(&self.log)
        );
        output.stdout
    }
}

/// Writes directly to standard error: the test runner would hold `eprintln!` back for the minutes of a build.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "[deltafold tests] {text}");
}

/// Returns the last lines of a log.
pub fn tail(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Decompresses bytes with Go's own reader (`gzip`, `zlib` or `lzw`).
pub fn unpacked(format: &str, packed: &[u8]) -> Result<Vec<u8>, String> {
    let mut child = Command::new(unpack())
        .arg(format)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start unpack");
    let mut stdin = child.stdin.take().expect("its stdin");
    let output = std::thread::scope(|scope| {
        // The program may refuse the input before it has read all of it.
        scope.spawn(move || {
            let _ = stdin.write_all(packed);
        });
        child.wait_with_output().expect("the end of unpack")
    });
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Removes the variables with these prefixes from a command's environment.
pub fn forget_env(command: &mut Command, prefixes: &[&str]) {
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if prefixes.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
}

/// Runs a tool to its end. Returns its standard output, or its messages if it failed.
pub fn run<S: AsRef<OsStr>>(
    tool: &Path,
    args: impl IntoIterator<Item = S>,
) -> Result<Vec<u8>, String> {
    let output = Command::new(tool)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|err| format!("{}: {err}", tool.display()))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(format!(
        "{} failed ({}):\n{}{}",
        tool.display(),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    ))
}
