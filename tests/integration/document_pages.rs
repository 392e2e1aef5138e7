//! The blocks of shell in README.md and docs/, run as they stand there: each page from its top to its end, in one
//! shell, on a real etcd and a local folder or a real S3 server.
//!
//! Only addresses and places are replaced, so that pages run at the same time and leave nothing behind. A page starts
//! its own etcd, or finds one at `http://127.0.0.1:2379`. For a guide, `DELTAFOLD_STORE` and `DELTAFOLD_ENDPOINTS`
//! name that etcd and a backup of it. `sh,untested` blocks are not run. `ELSEWHERE` lists
//! pages that other tests run.

use crate::support::etcd::Etcd;
use crate::support::pages::{self, Block};
use crate::support::process::free_port;
use crate::support::s3::Kind;
use crate::support::tools::{self, EtcdVersion};
use crate::support::versitygw::Versitygw;
use crate::support::{copy_dir, fixtures_dir, scratch};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

/// Run by other tests: on three machines, on a real API server, and as root on a system with packages and systemd.
const ELSEWHERE: [&str; 4] = [
    "docs/quorum-loss.md",
    "docs/guides/deleted-object.md",
    "docs/guides/install.md",
    "docs/guides/systemd.md",
];
const VERSION: EtcdVersion = EtcdVersion::V3_6;
/// The address of the etcd that a page finds or starts.
const ETCD: &str = "127.0.0.1:2379";
/// Folders of the machine that become folders of the test.
const PLACES: [&str; 6] = ["/var/", "/etc/", "/backups", "/srv/", "/mnt/", "/tmp/"];
/// Begins the line between the output of two blocks.
const MARK: &str = "@@ block ";

/// A page with its blocks that are run, and the text blocks directly after them.
struct Page {
    name: String,
    blocks: Vec<(Block, Option<Block>)>,
}

impl Page {
    /// Returns the page, or none if nothing on it is run here.
    fn read(name: &str) -> Option<Self> {
        let all = pages::blocks(name);
        let mut blocks = Vec::new();
        for (at, block) in all.iter().enumerate() {
            // `.ci/run` runs what is built with cargo.
            if block.language != "sh" || block.lines.iter().any(|l| l.contains("cargo ")) {
                continue;
            }
            let next = all.get(at + 1).filter(|b| b.language == "text");
            // A text that begins with a prompt shows another command.
            let output = next.filter(|b| !b.lines.iter().any(|l| l.starts_with("$ ")));
            blocks.push((block.clone(), output.cloned()));
        }
        let name = name.to_owned();
        (!blocks.is_empty()).then_some(Self { name, blocks })
    }

    fn text(&self) -> String {
        let lines = self.blocks.iter().flat_map(|(block, _)| &block.lines);
        lines.map(|line| format!("{line}\n")).collect()
    }
}

/// The folder of a page's run, and what stands for the addresses on the page.
struct Stage {
    root: PathBuf,
    /// Addresses on the page, each with its replacement.
    addresses: BTreeMap<String, String>,
    variables: Vec<(String, String)>,
}

impl Stage {
    fn new(root: &Path, page: &Page) -> Self {
        for folder in ["bin", "work/fixtures", "home", "var/lib", "etc"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        // The sample bucket of the repository.
        copy_dir(
            &fixtures_dir().join("kubernetes"),
            &root.join("work/fixtures/kubernetes"),
        );
        let programs = [
            ("deltafold", crate::support::program().to_owned()),
            ("etcd", tools::etcd(VERSION)),
            ("etcdctl", tools::etcdctl(VERSION)),
            ("etcdutl", tools::etcdutl(VERSION)),
            ("age", tools::age()),
            ("age-keygen", tools::age_keygen()),
        ];
        for (name, program) in programs {
            symlink(program, root.join("bin").join(name)).unwrap();
        }
        let sudo = root.join("bin/sudo");
        fs::write(&sudo, "#!/bin/sh\nexec \"$@\"\n").unwrap();
        fs::set_permissions(&sudo, fs::Permissions::from_mode(0o755)).unwrap();
        let text = page.text();
        let mut addresses = BTreeMap::new();
        for host in ["127.0.0.1:", "localhost:"] {
            for (at, _) in text.match_indices(host) {
                let port = &text[at + host.len()..];
                let end = port
                    .find(|c: char| !c.is_ascii_digit())
                    .unwrap_or(port.len());
                let address = format!("{host}{}", &port[..end]);
                addresses
                    .entry(address)
                    .or_insert_with(|| format!("{host}{}", free_port()));
            }
        }
        Self {
            root: root.to_owned(),
            addresses,
            variables: Vec::new(),
        }
    }

    /// Returns a line of the page with addresses and places of this stage.
    fn here(&self, line: &str) -> String {
        let mut line = line.to_owned();
        for (address, own) in &self.addresses {
            line = line.replace(address, own);
        }
        let root = self.root.to_str().unwrap();
        for place in PLACES {
            let mut replaced = String::new();
            let mut rest = line.as_str();
            while let Some(at) = rest.find(place) {
                let (before, after) = rest.split_at(at);
                replaced += before;
                let last = replaced.chars().next_back();
                // Only where a path begins: after a space, a quotation mark, `=` or `file://`.
                if last.is_none_or(|c| " '\"=".contains(c)) || replaced.ends_with("file://") {
                    replaced += root;
                }
                replaced += place;
                rest = &after[place.len()..];
            }
            line = replaced + rest;
        }
        line
    }

    /// Returns output with the page's addresses and places.
    fn there(&self, output: &str) -> String {
        let mut output = output.replace(self.root.to_str().unwrap(), "");
        for (address, own) in &self.addresses {
            output = output.replace(own, address);
        }
        output
    }

    /// Runs a script in a shell of its own. Returns whether it succeeded, and all that it printed.
    fn run(&self, script: &str) -> (bool, String) {
        let log = self.root.join("log");
        let file = fs::File::create(&log).unwrap();
        let status = pages::runner(&self.root.join("bin"), script)
            .current_dir(self.root.join("work"))
            .env("HOME", self.root.join("home"))
            .env("TMPDIR", &self.root)
            .env("TZ", "UTC")
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .status()
            .unwrap();
        let output = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
        (status.success(), output)
    }
}

/// Runs a page. Returns what is wrong with it.
fn run(page: &Page) -> Result<(), String> {
    let folder = scratch::folder().unwrap();
    let mut stage = Stage::new(folder.path(), page);
    let text = page.text();

    let starts_one = text.contains(&format!("--listen-client-urls http://{ETCD}"));
    let is_guide = page.name.starts_with("docs/guides/");
    let etcd = (!starts_one && (is_guide || text.contains(ETCD)))
        .then(|| Etcd::start(VERSION, &folder.path().join("etcd")));
    if let Some(etcd) = &etcd {
        let own = etcd.endpoint().trim_start_matches("http://").to_owned();
        stage.addresses.insert(ETCD.to_owned(), own.clone());
        stage.addresses.insert("localhost:2379".to_owned(), own);
        let endpoint = ("ETCDCTL_ENDPOINTS".to_owned(), etcd.endpoint().to_owned());
        let mut before = stage.variables.clone();
        before.push(endpoint.clone());
        if is_guide {
            let store = folder.path().join("store");
            let value = |path: &Path| path.to_str().unwrap().to_owned();
            before.push(("DELTAFOLD_STORE".to_owned(), value(&store)));
            before.push(("DELTAFOLD_ENDPOINTS".to_owned(), endpoint.1));
            stage.variables = before.clone();
        }
        let of_page = std::mem::replace(&mut stage.variables, before);
        let mut script = "etcdctl put /app/colour blue\n".to_owned();
        // An encrypted backup begins in a new prefix.
        if is_guide && page.name != "docs/guides/encryption.md" {
            script +=
                "deltafold snapshot full\netcdctl put /app/size 10\ndeltafold snapshot delta\n";
        }
        let (succeeded, output) = stage.run(&script);
        assert!(succeeded, "{output}");
        stage.variables = of_page;
    }
    let buckets: BTreeSet<&str> = text
        .split("s3://")
        .skip(1)
        .map(|rest| rest.split(['/', ' ', '\n', '\'', '"']).next().unwrap())
        .collect();
    let s3 = (!buckets.is_empty()).then(Versitygw::start);
    if let Some(server) = &s3 {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        for bucket in buckets {
            runtime.block_on(server.s3().create_bucket(bucket, Kind::Plain));
        }
        stage.variables.extend(server.s3().env());
    }

    // What is left in the background ends with the shell.
    let mut script = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n".to_owned();
    for (at, (block, _)) in page.blocks.iter().enumerate() {
        script += &format!("echo; echo '{MARK}{at}'\n");
        for line in &block.lines {
            script += &format!("{}\n", stage.here(line));
        }
    }
    let (succeeded, output) = stage.run(&script);
    let output = stage.there(&output);
    let parts = output.split(MARK).skip(1).map(|part| {
        let (_, rest) = part.split_once('\n').unwrap_or((part, ""));
        rest
    });
    let parts: Vec<&str> = parts.collect();
    if !succeeded {
        let last = parts.len().saturating_sub(1);
        let line = page.blocks[last].0.line;
        return Err(format!("{}:{line}: the block failed\n{output}", page.name));
    }
    assert_eq!(parts.len(), page.blocks.len());
    for ((_, expected), printed) in page.blocks.iter().zip(parts) {
        if let Some(expected) = expected {
            compare(expected, printed)
                .map_err(|e| format!("{}:{}: {e}\n{printed}", page.name, expected.line))?;
        }
    }
    Ok(())
}

/// Whether the lines of a text block are printed in this order, apart from numbers and IDs. `…` stands for any lines.
fn compare(expected: &Block, printed: &str) -> Result<(), String> {
    let mut lines = printed.lines().map(steady);
    for line in expected
        .lines
        .iter()
        .filter(|l| !l.trim().is_empty() && l.trim() != "…")
    {
        let line = steady(line);
        if !lines.any(|l| l == line) {
            return Err(format!("not printed: {line}"));
        }
    }
    Ok(())
}

/// Returns a line without what differs from run to run: numbers, units of sizes and times, hexadecimal IDs, spaces.
fn steady(line: &str) -> String {
    let word = |word: &str| {
        let inner = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        let is_id = inner.len() >= 8 && inner.chars().all(|c| c.is_ascii_hexdigit());
        if is_id || ["B", "KiB", "MiB", "ms", "s"].contains(&inner) {
            return word.replace(inner, "0");
        }
        let mut kept = String::new();
        for c in word.chars() {
            let c = if c.is_ascii_digit() { '0' } else { c };
            if !(c == '0' && kept.ends_with('0')) {
                kept.push(c);
            }
        }
        kept
    };
    let words: Vec<String> = line.split_whitespace().map(word).collect();
    words.join(" ")
}

#[test]
fn every_page_can_be_followed() {
    let names = pages::of_users();
    let names = names
        .iter()
        .filter(|name| !ELSEWHERE.contains(&name.as_str()));
    let pages: Vec<Page> = names.filter_map(|name| Page::read(name)).collect();
    assert!(!pages.is_empty());
    let failures: Vec<String> = std::thread::scope(|scope| {
        let running: Vec<_> = pages.iter().map(|page| scope.spawn(|| run(page))).collect();
        let ended = running.into_iter().map(|thread| thread.join().unwrap());
        ended.filter_map(Result::err).collect()
    });
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// A block that fails, an output that is not printed and a block that hangs are failures of the page.
#[test]
fn a_page_that_is_wrong_is_noticed() {
    let block = |language: &str, line: usize, text: &str| Block {
        language: language.to_owned(),
        line,
        lines: text.lines().map(str::to_owned).collect(),
        ..Block::default()
    };
    let page = |blocks| Page {
        name: "test.md".to_owned(),
        blocks,
    };
    let shown = block(
        "text",
        4,
        "2 keys in 3 s\n…\nin /var/lib/etcd at 127.0.0.1:12379",
    );
    let printed = "echo 17 keys in 30 ms; echo more\necho in /var/lib/etcd at 127.0.0.1:12379";
    let good = page(vec![(block("sh", 1, printed), Some(shown.clone()))]);
    run(&good).unwrap();
    let other = page(vec![(block("sh", 1, "echo 17 key in 30 s"), Some(shown))]);
    assert!(
        run(&other)
            .unwrap_err()
            .starts_with("test.md:4: not printed: 0 keys")
    );
    let list = "deltafold list --store /backups/nothing";
    let failing = page(vec![
        (block("sh", 1, "true"), None),
        (block("sh", 5, list), None),
        (block("sh", 9, "echo never"), None),
    ]);
    let error = run(&failing).unwrap_err();
    assert!(error.starts_with("test.md:5: "), "{error}");
    assert!(
        error.contains("NoSnapshots") && !error.contains("never"),
        "{error}"
    );
}
