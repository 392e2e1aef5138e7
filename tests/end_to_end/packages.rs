//! The files of a release: what they hold, and the guides' commands with them on a machine with systemd.

use crate::support::manifests::{path, read};
use crate::support::pages::{self, Block};
use crate::support::scratch;
use crate::support::tools::{self, EtcdVersion};
use deltafold::Reason;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use tempfile::TempDir;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Runs a command to its end. Returns its standard output.
fn run(command: &mut Command) -> String {
    let out = command.output().unwrap();
    let [stdout, stderr] =
        [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
    assert!(out.status.success(), "{command:?}:\n{stdout}{stderr}");
    stdout
}

fn sh(folder: &Path, script: &str) -> String {
    run(Command::new("bash")
        .args(["-euc", script])
        .current_dir(folder))
}

/// Runs `packaging/release` with the program of the tests, without its symbols.
fn make_release(to: &Path) {
    let program = to.with_extension("program");
    let built = crate::support::program();
    run(Command::new("strip").arg("-o").arg(&program).arg(built));
    let mut release = Command::new(path("packaging/release"));
    release.arg("--fast").arg("--binary").arg(&program);
    // It must be the same in every environment, and whatever the clock says.
    release
        .env("DELTAFOLD_STORE", "s3://b")
        .env("SOURCE_DATE_EPOCH", "1700000000");
    release.env("TMPDIR", scratch::place()).arg("--out").arg(to);
    run(&mut release);
}

/// The folder of a release, made once for all tests.
fn release() -> &'static Path {
    static RELEASE: OnceLock<PathBuf> = OnceLock::new();
    RELEASE.get_or_init(|| {
        let folder = scratch::folder_named("release-").unwrap().keep();
        make_release(&folder.join("files"));
        folder.join("files")
    })
}

fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => panic!("no name is known for the architecture {other}"),
    }
}

fn tarball() -> String {
    format!("deltafold-{VERSION}-linux-{}.tar.gz", arch())
}

fn file_names(folder: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(folder).unwrap();
    names
        .map(|f| f.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_release_is_complete_and_can_be_made_again() {
    let files = release();
    let arch = arch();
    let wanted = [
        "SHA256SUMS".to_owned(),
        format!("deltafold-{VERSION}-linux-{arch}.cdx.json"),
        tarball(),
        format!("deltafold-chart-{VERSION}.tgz"),
        format!("deltafold-krew-linux-{arch}.yaml"),
        format!("deltafold_{VERSION}-1_{arch}.deb"),
    ];
    assert_eq!(file_names(files), BTreeSet::from(wanted));
    sh(files, "sha256sum --strict --check SHA256SUMS");
    let sums = fs::read_to_string(files.join("SHA256SUMS")).unwrap();
    assert_eq!(sums.lines().count(), 5);

    let again = scratch::folder().unwrap();
    make_release(&again.path().join("files"));
    let others = fs::read_to_string(again.path().join("files/SHA256SUMS")).unwrap();
    assert_eq!(others, sums);
}

#[test]
fn a_release_is_not_mixed_with_other_files() {
    let folder = scratch::folder().unwrap();
    fs::write(folder.path().join("older"), "").unwrap();
    let mut release = Command::new(path("packaging/release"));
    let out = release.arg("--out").arg(folder.path()).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        said.contains("is not empty: choose another folder by --out"),
        "{said}"
    );
    let out = Command::new(path("packaging/release"))
        .arg("--publish")
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
}

#[test]
fn the_sbom_has_every_linked_crate() {
    let sbom = release().join(format!("deltafold-{VERSION}-linux-{}.cdx.json", arch()));
    let text = fs::read_to_string(sbom).unwrap();
    let scratch = scratch::place().display().to_string();
    for place in [env!("CARGO_MANIFEST_DIR"), &scratch] {
        assert!(!text.contains(place), "{place} of this machine");
    }
    let sbom: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&sbom["bomFormat"], &sbom["specVersion"]),
        (&"CycloneDX".into(), &"1.5".into())
    );
    let of = |c: &Value| {
        format!(
            "{} {}",
            c["name"].as_str().unwrap(),
            c["version"].as_str().unwrap()
        )
    };
    assert_eq!(
        of(&sbom["metadata"]["component"]),
        format!("deltafold {VERSION}")
    );
    let components = sbom["components"].as_array().unwrap();
    let told: BTreeSet<String> = components.iter().map(of).collect();
    let mut tree = Command::new(env!("CARGO"));
    tree.args([
        "tree",
        "--locked",
        "--edges",
        "normal,no-proc-macro",
        "--prefix",
        "none",
    ]);
    tree.arg("--target")
        .arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH));
    let tree = run(tree.current_dir(env!("CARGO_MANIFEST_DIR")));
    let linked: BTreeSet<String> = tree
        .lines()
        .filter_map(|line| line.split_once(" v"))
        .map(|(name, rest)| format!("{name} {}", rest.split(' ').next().unwrap()))
        .filter(|c| !c.starts_with("deltafold "))
        .collect();
    assert!(linked.len() > 200, "{}", linked.len());
    let missing: Vec<_> = linked.difference(&told).collect();
    assert!(missing.is_empty(), "{missing:?}");
    // A scanner finds vulnerabilities by purl; a lawyer asks for licences.
    for c in components {
        assert!(
            c["purl"].as_str().unwrap().starts_with("pkg:cargo/"),
            "{c:#}"
        );
        assert!(c["licenses"].is_array(), "{c:#}");
        assert_eq!(c["hashes"][0]["alg"], "SHA-256", "{c:#}");
    }
}

#[test]
fn lintian_finds_nothing_in_the_package() {
    let package = release().join(format!("deltafold_{VERSION}-1_{}.deb", arch()));
    let mut lintian = Command::new("lintian");
    lintian
        .args(["--allow-root", "--fail-on", "error,warning"])
        .arg(&package);
    let said = run(&mut lintian);
    assert_eq!(said.trim(), "");
    let fields = run(Command::new("dpkg-deb").arg("--field").arg(&package));
    let depends = fields
        .lines()
        .find_map(|l| l.strip_prefix("Depends: "))
        .unwrap();
    for needed in ["libc6 (>= ", "ca-certificates", "systemd | "] {
        assert!(depends.contains(needed), "{depends}");
    }
}

/// The rules of krew's documentation: <https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/>.
#[test]
fn krew_can_install_the_plugin() {
    let files = release();
    let text =
        fs::read_to_string(files.join(format!("deltafold-krew-linux-{}.yaml", arch()))).unwrap();
    assert!(!text.contains(['{', '}']), "{text}");
    let plugin: Value = yaml_serde::from_str(&text).unwrap();
    assert_eq!(
        plugin["apiVersion"],
        "krew.googlecontainertools.github.com/v1alpha2"
    );
    assert_eq!(
        (&plugin["kind"], &plugin["metadata"]["name"]),
        (&"Plugin".into(), &"deltafold".into())
    );
    let spec = &plugin["spec"];
    assert_eq!(spec["version"], format!("v{VERSION}"));
    let short = spec["shortDescription"].as_str().unwrap();
    assert!(short.len() <= 60 && !short.ends_with('.'), "{short}");
    assert!(spec["homepage"].as_str().unwrap().starts_with("https://"));
    let [platform] = spec["platforms"].as_array().unwrap().as_slice() else {
        panic!("{spec:#}")
    };
    assert_eq!(platform["selector"]["matchLabels"]["arch"], arch());
    let archive = fs::read(files.join(tarball())).unwrap();
    let sum: String = Sha256::digest(&archive)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    assert_eq!(platform["sha256"], sum);
    assert!(
        platform["uri"]
            .as_str()
            .unwrap()
            .ends_with(&format!("/{}", tarball()))
    );
    // What krew does: unpack, move the files, and link `bin` as kubectl-deltafold.
    let folder = scratch::folder().unwrap();
    fs::create_dir(folder.path().join("to")).unwrap();
    fs::create_dir(folder.path().join("from")).unwrap();
    let archive = files.join(tarball());
    run(Command::new("tar")
        .arg("-xzf")
        .arg(&archive)
        .arg("-C")
        .arg(folder.path().join("from")));
    for file in platform["files"].as_array().unwrap() {
        let (from, to) = (file["from"].as_str().unwrap(), file["to"].as_str().unwrap());
        sh(folder.path(), &format!("mv from/{from} to/{to}"));
    }
    let plugin = folder
        .path()
        .join("to")
        .join(platform["bin"].as_str().unwrap());
    assert_eq!(
        run(Command::new(plugin).arg("--version")),
        format!("deltafold {VERSION}\n")
    );
    assert_eq!(
        file_names(&folder.path().join("to")),
        ["LICENSE", "kubectl-deltafold"].map(str::to_owned).into()
    );
}

#[test]
fn helm_takes_the_packed_chart() {
    let chart = release().join(format!("deltafold-chart-{VERSION}.tgz"));
    let home = scratch::folder().unwrap();
    let helm = |args: &[&str]| {
        let mut helm = Command::new(tools::helm());
        tools::forget_env(&mut helm, &["HELM_", "KUBE"]);
        run(helm.env("HOME", home.path()).args(args).arg(&chart))
    };
    let told = helm(&["show", "chart"]);
    assert!(told.contains(&format!("version: {VERSION}")), "{told}");
    assert_eq!(
        helm(&["show", "readme"]).trim(),
        read("jobs/helm/deltafold/README.md").trim()
    );
    let made = helm(&[
        "template",
        "--kube-version",
        "1.36.3",
        "--set",
        "image.repository=registry/x",
        "x",
    ]);
    assert!(made.contains(&format!("registry/x:{VERSION}")), "{made}");
}

#[test]
fn units_do_not_repeat_what_a_retry_cannot_mend() {
    // systemd counts 143 as a failure, too, but it follows a stop.
    let codes = Reason::ALL
        .iter()
        .filter(|r| !r.is_retryable() && **r != Reason::Terminated)
        .map(|r| r.exit_code().to_string());
    let real: BTreeSet<String> = codes.collect();
    // Of the failures with 65, only another cluster ends a follower.
    let ends_follower = [Reason::Usage, Reason::OtherCluster, Reason::Configuration];
    let ends_follower = ends_follower.map(|r| r.exit_code().to_string()).into();
    for (unit, real) in [("follow", &ends_follower), ("gc", &real), ("verify", &real)] {
        let text = read(&format!("packaging/systemd/deltafold-{unit}@.service"));
        let told = text
            .lines()
            .find_map(|l| l.strip_prefix("RestartPreventExitStatus="));
        let told = told.unwrap().split(' ').map(str::to_owned);
        assert_eq!(&told.collect::<BTreeSet<_>>(), real, "{unit}");
    }
    // A stale backup has a code that a retry may resolve, but the timer is the retry.
    let status = read("packaging/systemd/deltafold-status@.service");
    assert!(!status.lines().any(|line| line.starts_with("Restart")));
}

/// Runs the unit tests of the alert rules. Each rule has one test in which it fires, and one in which it does not.
#[test]
fn every_alert_fires_and_rests() {
    for name in ["hosts", "controller"] {
        let tests = format!("tests/alerts/{name}.yaml");
        run(Command::new("promtool")
            .args(["test", "rules"])
            .arg(path(&tests)));
        let tests: Value = yaml_serde::from_str(&read(&tests)).unwrap();
        let (mut firing, mut resting) = (BTreeSet::new(), BTreeSet::new());
        let groups = tests["tests"].as_array().unwrap().iter();
        for check in groups.flat_map(|group| group["alert_rule_test"].as_array().unwrap()) {
            let alert = check["alertname"].as_str().unwrap();
            if check["exp_alerts"].as_array().unwrap().is_empty() {
                resting.insert(alert);
            } else {
                firing.insert(alert);
            }
        }
        let rules: Value =
            yaml_serde::from_str(&read(&format!("jobs/alerts-{name}.yaml"))).unwrap();
        let rules = rules["groups"][0]["rules"].as_array().unwrap();
        let alerts: BTreeSet<&str> = rules.iter().map(|r| r["alert"].as_str().unwrap()).collect();
        assert!(alerts.len() > 8, "{alerts:?}");
        assert_eq!((&firing, &resting), (&alerts, &alerts), "{name}");
    }
}

/// Adds the names of values, such as `allow.root`.
fn add_value_names(prefix: &str, values: &Value, names: &mut BTreeSet<String>) {
    for (key, value) in values.as_object().unwrap() {
        let name = format!("{prefix}{key}");
        let has_more = value.as_object().is_some_and(|below| !below.is_empty());
        if has_more && name != "resources" {
            add_value_names(&format!("{name}."), value, names);
        } else {
            names.insert(name);
        }
    }
}

/// Every value of the chart is in the table of its README, and the other way round.
#[test]
fn the_chart_documents_its_values() {
    let values: Value = yaml_serde::from_str(&read("jobs/helm/deltafold/values.yaml")).unwrap();
    let mut real = BTreeSet::new();
    add_value_names("", &values, &mut real);
    let readme = read("jobs/helm/deltafold/README.md");
    let rows = readme.lines().filter_map(|line| line.strip_prefix("| `"));
    let told: BTreeSet<String> = rows
        .flat_map(|row| row.split('|').next().unwrap().split(", "))
        .map(|name| name.trim_matches([' ', '`']).to_owned())
        .collect();
    assert_eq!(told, real);
}

/// A script that runs the blocks of both guides in order, with the checks of tests/support/packages.sh around them.
fn script() -> String {
    let mut script =
        String::from("set -euo pipefail\n. /test/packages.sh\ncd /test/files\nbefore\n");
    let mut headings = BTreeSet::new();
    for guide in ["docs/guides/install.md", "docs/guides/systemd.md"] {
        let blocks = pages::shell(guide);
        assert!(blocks.len() > 3, "{guide}");
        for (i, Block { heading, lines, .. }) in blocks.iter().enumerate() {
            let name = heading.replace(' ', "_");
            headings.insert(name.clone());
            let block = lines.join("\n").replace("amd64", arch());
            script += &format!("say '{heading}'\n");
            script += &format!("if declare -F before_{name} >/dev/null; then before_{name}; fi\n");
            script += &format!("cat > /run/block <<'END_OF_BLOCK'\n{block}\nEND_OF_BLOCK\n");
            script += "bash -euo pipefail /run/block\n";
            if blocks
                .get(i + 1)
                .is_none_or(|next| next.heading != *heading)
            {
                script +=
                    &format!("if declare -F after_{name} >/dev/null; then after_{name}; fi\n");
            }
        }
    }
    // No check is lost when a heading is renamed.
    let checks = include_str!("../support/packages.sh");
    let names = checks
        .lines()
        .filter_map(|line| line.split_once("() {")?.0.split_once('_'));
    for (when, name) in names.filter(|(when, _)| ["before", "after"].contains(when)) {
        assert!(
            headings.contains(name),
            "{when}_{name}: no guide has this heading"
        );
    }
    script + "say 'all blocks have run'\n"
}

#[test]
fn the_guides_work_from_install_to_purge() {
    let folder: TempDir = scratch::folder().unwrap();
    let place = |name: &str| folder.path().join(name);
    fs::write(place("run"), script()).unwrap();
    fs::write(place("packages.sh"), include_str!("../support/packages.sh")).unwrap();
    fs::create_dir(place("certs")).unwrap();
    tools::write_certs(&place("certs"));
    fs::copy(tools::etcd(EtcdVersion::V3_6), place("etcd")).unwrap();
    fs::create_dir(place("files")).unwrap();
    for name in file_names(release()) {
        fs::copy(release().join(&name), place("files").join(&name)).unwrap();
    }
    let machine = Command::new(path("tests/support/machine"))
        .arg(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&machine.stdout);
    let errors = String::from_utf8_lossy(&machine.stderr);
    // What failed comes first: a long output may be cut.
    let mut last: Vec<&str> = said.lines().rev().take(60).collect();
    last.reverse();
    let last = last.join("\n");
    assert!(
        machine.status.success(),
        "{}\n{errors}{last}",
        machine.status
    );
    assert!(said.ends_with("== all blocks have run\n"), "{last}");
}
