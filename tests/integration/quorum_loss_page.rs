//! The commands of docs/quorum-loss.md, run as they stand there, on real clusters of three of which two members
//! are lost for good.
//!
//! The test plays `systemctl`: it starts and stops the etcds that stand for the machines.

use crate::support::etcd::{EtcdOptions, Tls};
use crate::support::etcd_cluster::{Cluster, Member, initial_cluster};
use crate::support::pages::{self, Block};
use crate::support::scratch;
use crate::support::tools::{self, EtcdVersion};
use deltafold::controller::api::{EtcdBackupTask, TaskType};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const PAGE: &str = "docs/quorum-loss.md";
const MEMBERS: usize = 3;
/// The member that is not lost.
const SURVIVOR: usize = 0;
const BUMP: i64 = 1_000_000_000;

/// The source with the highest revision in step 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leads {
    Backup,
    Survivor,
}

/// The result of a block on a machine.
#[derive(Debug)]
struct Ran {
    heading: String,
    code: i32,
    out: String,
    err: String,
}

struct Machines {
    members: Vec<Member>,
    cluster: Cluster,
    writers_run: bool,
    /// Settings of the page's first block, for each machine.
    settings: Vec<BTreeMap<String, String>>,
    ran: Vec<Ran>,
    // Declared after the cluster, so removed after it.
    _folder: TempDir,
}

impl Machines {
    fn start(version: EtcdVersion, token: &str) -> Self {
        let folder = scratch::folder().unwrap();
        let certs = folder.path().join("certs");
        fs::create_dir(&certs).unwrap();
        tools::write_certs(&certs);
        let names = ["a", "b", "c"];
        let members = names.map(|name| Member::new(name, folder.path().join(name).join("etcd")));
        for name in names {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let options = EtcdOptions {
            tls: Some(Tls::new(&certs)),
            ..EtcdOptions::default()
        };
        let cluster = Cluster::start_with(version, &members, token, &options);
        let settings = members.iter().map(|member| {
            let path = |path: PathBuf| path.to_str().unwrap().to_owned();
            let own = |name: &str| path(member.data_dir.parent().unwrap().join(name));
            [
                ("STORE", path(folder.path().join("store"))),
                ("ENDPOINTS", cluster.endpoints().join(",")),
                ("DELTAFOLD_CACERT", path(certs.join("ca.crt"))),
                ("DELTAFOLD_CERT", path(certs.join("node.crt"))),
                ("DELTAFOLD_KEY", path(certs.join("node.key"))),
                ("NAME", member.name.clone()),
                ("PEER_URL", member.peer_url()),
                ("CLUSTER", initial_cluster(&members)),
                ("TOKEN", "recovered".to_owned()),
                ("DATA_DIR", path(member.data_dir.clone())),
                ("ASIDE", own("aside")),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .into()
        });
        Self {
            settings: settings.collect(),
            writers_run: true,
            ran: Vec::new(),
            members: members.to_vec(),
            cluster,
            _folder: folder,
        }
    }

    fn store(&self) -> &str {
        &self.settings[0]["STORE"]
    }

    /// Runs `deltafold snapshot`, as it ran before the loss.
    fn snapshot(&self, kind: &str, endpoints: &str) -> i64 {
        let script = format!(
            "deltafold snapshot {kind} --output json --store \"$STORE\" --endpoints {endpoints}"
        );
        let ran = self.bash(SURVIVOR, &script);
        assert_eq!(ran.code, 0, "{ran:?}");
        let result: Value = serde_json::from_str(&ran.out).unwrap();
        result["revision"]
            .as_i64()
            .unwrap_or_else(|| panic!("{result:#}"))
    }

    /// Runs a script as a shell of that machine would, with the settings of the page.
    fn bash(&self, at: usize, script: &str) -> Ran {
        let mut settings = String::new();
        for (name, value) in &self.settings[at] {
            assert!(!value.contains('\''));
            settings.push_str(&format!("export {name}='{value}'\n"));
        }
        let programs = crate::support::program().parent().unwrap();
        let mut command = pages::runner(programs, &format!("{settings}{script}"));
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ran {
            heading: String::new(),
            code: output.status.code().unwrap(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    /// Returns the machines that a block is for; none if it is for the other case.
    fn place(&self, block: &Block, leads: Leads) -> Vec<usize> {
        let of = |wanted: Leads, machines: Vec<usize>| match wanted == leads {
            true => machines,
            false => Vec::new(),
        };
        let all: Vec<usize> = (0..MEMBERS).collect();
        let (head, place) = (block.heading.as_str(), block.place.as_str());
        match (head, place) {
            ("The backup leads", "Anywhere") => of(Leads::Backup, vec![1]),
            ("The backup leads", "On every machine") => of(Leads::Backup, all),
            ("A survivor leads", "On every machine") => of(Leads::Survivor, all),
            ("A survivor leads", "On the machine whose member leads") => {
                of(Leads::Survivor, vec![SURVIVOR])
            }
            (_, "Anywhere") => vec![2],
            (_, "Anywhere, if the backup led") => of(Leads::Backup, vec![1]),
            (_, "On the machine whose member leads, if a survivor led") => {
                of(Leads::Survivor, vec![SURVIVOR])
            }
            (_, "On every machine") => all,
            (_, "On every machine that has its member still") => vec![SURVIVOR],
            // Run by `tests/end-to-end cluster`.
            ("By tasks", "By kubectl") => Vec::new(),
            // Copying a file to every machine includes this one.
            (_, "On every machine that had its member still") => vec![SURVIVOR],
            _ => panic!("nobody knows where this is run: {head}: {place}"),
        }
    }

    /// Runs a block on a machine.
    fn run(&mut self, block: &Block, at: usize, revision: Option<i64>) {
        let mut script = String::new();
        for line in &block.lines {
            if let Some(what) = line.strip_prefix("systemctl ") {
                assert_eq!(block.lines.len(), 1, "{block:?}");
                self.systemctl(what, at);
                return;
            }
            // What a person fills in.
            let line = match (line.starts_with("REVISION="), revision) {
                (true, Some(revision)) => format!("REVISION={revision}"),
                (true, None) => panic!("no revision is known: {block:?}"),
                (false, _) => line.clone(),
            };
            script.push_str(&line);
            script.push('\n');
        }
        let ran = self.bash(at, &script);
        println!(
            "== {} ({})\n{script}-- {}\n{}{}",
            block.heading, self.members[at].name, ran.code, ran.out, ran.err
        );
        self.ran.push(Ran {
            heading: block.heading.clone(),
            ..ran
        });
    }

    fn systemctl(&mut self, what: &str, at: usize) {
        match what {
            "stop kube-apiserver" => self.writers_run = false,
            "start kube-apiserver" => self.writers_run = true,
            "stop etcd" => self.cluster.stop_one(at),
            // No member serves alone.
            "start etcd" if at + 1 < MEMBERS => {}
            "start etcd" => self.cluster.start_all_again(),
            _ => panic!("nobody knows how to {what}"),
        }
    }

    /// Returns the identity of the backup.
    fn identity(&self) -> String {
        let text = fs::read(Path::new(self.store()).join("deltafold-identity.json")).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        json["clusterId"].as_str().unwrap().to_owned()
    }

    /// Returns the output below a heading, by machine.
    fn said(&self, heading: &str) -> Vec<&Ran> {
        let found: Vec<_> = self.ran.iter().filter(|r| r.heading == heading).collect();
        assert!(!found.is_empty(), "{heading}");
        found
    }
}

/// Returns all keys and values of a member.
async fn content(cluster: &Cluster, at: usize) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let options = etcd_client::GetOptions::new().with_all_keys();
    let got = cluster
        .member(at)
        .kv()
        .await
        .get("", Some(options))
        .await
        .unwrap();
    let pair = |kv: &etcd_client::KeyValue| (kv.key().to_vec(), kv.value().to_vec());
    got.kvs().iter().map(pair).collect()
}

async fn write(cluster: &Cluster, through: usize, from: usize, count: usize) {
    let mut kv = cluster.member(through).kv().await;
    for n in from..from + count {
        kv.put(
            format!("/registry/things/{n:04}"),
            format!("value {n}"),
            None,
        )
        .await
        .unwrap();
        kv.put("/registry/leader", format!("{n}"), None)
            .await
            .unwrap();
    }
    kv.delete(format!("/registry/things/{from:04}"), None)
        .await
        .unwrap();
}

/// Returns the number after `revision` in each outcome that was printed as text.
fn revisions(out: &str) -> Vec<i64> {
    let lines = out
        .lines()
        .filter_map(|l| l.trim_start().strip_prefix("revision "));
    lines
        .map(|l| {
            l.split_whitespace()
                .next()
                .unwrap()
                .trim_end_matches(',')
                .parse()
                .unwrap()
        })
        .collect()
}

async fn recovered(version: EtcdVersion, leads: Leads) {
    let mut machines = Machines::start(version, "before");
    let mut blocks = pages::placed(PAGE).into_iter();

    // Every setting that the page names has a value here, and no other.
    let settings = blocks.next().unwrap();
    assert_eq!(
        settings.place,
        "On every machine, with its own NAME and PEER_URL"
    );
    let mut named: Vec<&str> = settings
        .lines
        .iter()
        .map(|l| l.trim_start_matches("export ").split_once('=').unwrap().0)
        .collect();
    named.sort_unstable();
    assert_eq!(named, machines.settings[0].keys().collect::<Vec<_>>());

    // Before the loss: a full, deltas; then two members are lost, with what was written since.
    write(&machines.cluster, 1, 0, 50).await;
    let all = machines.settings[0]["ENDPOINTS"].clone();
    machines.snapshot("full", &all);
    write(&machines.cluster, 1, 100, 50).await;
    machines.snapshot("delta", &all);
    let (saved, wanted);
    match leads {
        Leads::Survivor => {
            saved = machines.cluster.member(1).revision().await;
            write(&machines.cluster, 1, 200, 50).await;
            // The survivor has seen everything.
            machines.cluster.member(SURVIVOR).revision().await;
            wanted = content(&machines.cluster, SURVIVOR).await;
        }
        Leads::Backup => {
            // The survivor's machine fails first and comes back too late.
            machines.cluster.move_leader_to(1).await;
            machines.cluster.kill(SURVIVOR);
            write(&machines.cluster, 1, 200, 50).await;
            let others: Vec<&str> = all.split(',').skip(1).collect();
            saved = machines.snapshot("delta", &others.join(","));
            wanted = content(&machines.cluster, 1).await;
            assert_eq!(saved, machines.cluster.member(1).revision().await);
        }
    }
    let newest = machines.cluster.member(1).revision().await;
    for lost in [1, 2] {
        machines.cluster.kill(lost);
        fs::remove_dir_all(&machines.members[lost].data_dir).unwrap();
    }
    if leads == Leads::Backup {
        machines.cluster.spawn(SURVIVOR);
    }
    let old_id = machines.identity();

    let mut revision = None;
    for block in blocks {
        if block.heading == "7. Look before anybody writes" {
            assert!(!machines.writers_run);
        }
        for at in machines.place(&block, leads) {
            machines.run(&block, at, revision);
        }
        match (block.heading.as_str(), machines.ran.last()) {
            ("4. Which state leads farthest?", Some(ran)) => {
                let told = revisions(&ran.out);
                let [.., backup, survivor] = told[..] else {
                    panic!("{told:?}: {ran:?}")
                };
                assert_eq!(backup, saved);
                match leads {
                    Leads::Backup => assert!(survivor < backup, "{told:?}"),
                    Leads::Survivor => assert_eq!((survivor, backup < survivor), (newest, true)),
                }
                revision = Some(backup.max(survivor));
            }
            ("A survivor leads", _)
                if block.place.contains("leads") && leads == Leads::Survivor =>
            {
                // "Copy that file to every other machine."
                let file =
                    |at: usize| PathBuf::from(&machines.settings[at]["ASIDE"]).join("survivor.db");
                for other in [1, 2] {
                    fs::create_dir(file(other).parent().unwrap()).unwrap();
                    fs::copy(file(SURVIVOR), file(other)).unwrap();
                }
            }
            _ => {}
        }
    }
    assert_eq!(revision, Some(newest), "nothing is lost");

    // The output of each step.
    let lost = machines.said("1. Is it lost?");
    assert_eq!(lost[0].code, 69, "{lost:?}");
    // A member that starts without a quorum does not respond.
    let why = match leads {
        Leads::Survivor => "[NoQuorum]",
        Leads::Backup => "[EtcdUnreachable]",
    };
    assert!(lost[0].err.contains(why), "{lost:?}");
    for ran in &machines.ran {
        assert!(ran.code == 0 || ran.heading == "1. Is it lost?", "{ran:?}");
    }
    let looked = &machines.said("7. Look before anybody writes")[0].out;
    assert!(
        looked.starts_with("nothing to do: all keys of the backup are as they were"),
        "{looked}"
    );
    assert!(!looked.contains("left"), "{looked}");
    assert!(machines.writers_run);
    assert!(!Path::new(&machines.settings[SURVIVOR]["ASIDE"]).exists());

    // The new cluster: three members that agree, all content, revisions beyond all that clients have seen.
    let mut hashes = Vec::new();
    for at in 0..MEMBERS {
        let member = machines.cluster.member(at);
        assert_eq!(content(&machines.cluster, at).await, wanted);
        let revision = member.revision().await;
        assert_eq!(revision, newest + BUMP);
        hashes.push(member.hash_kv(revision).await);
        let mode = fs::metadata(member.data_dir())
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
    }
    hashes.dedup();
    assert_eq!(hashes.len(), 1, "{hashes:?}");
    let late = etcd_client::GetOptions::new().with_revision(newest);
    let e = machines
        .cluster
        .member(0)
        .kv()
        .await
        .get("/", Some(late))
        .await
        .unwrap_err();
    assert!(e.to_string().contains("compacted"), "{e}");
    assert_ne!(machines.identity(), old_id);

    // And it is backed up: a write is saved as a delta.
    write(&machines.cluster, 2, 300, 5).await;
    let saved = machines.snapshot("delta", &all);
    assert_eq!(saved, machines.cluster.member(1).revision().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_recovers_what_the_backup_holds() {
    recovered(EtcdVersion::V3_6, Leads::Backup).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_recovers_what_a_survivor_holds() {
    for version in EtcdVersion::ALL {
        recovered(version, Leads::Survivor).await;
    }
}

/// The tasks on the page do what the commands do.
#[test]
fn the_tasks_are_some() {
    let blocks = pages::placed(PAGE);
    let (by_tasks, by_hand): (Vec<_>, Vec<_>) =
        blocks.iter().partition(|b| b.heading == "By tasks");
    let lines: Vec<&str> = by_tasks
        .iter()
        .flat_map(|b| &b.lines)
        .map(String::as_str)
        .collect();
    let text = lines
        .join("\n")
        .replace("$member", "etcd-1")
        .replace("$REVISION", "7");
    let tasks = text.split("<<END\n").skip(1).map(|rest| {
        let written: Value = yaml_serde::from_str(rest.split_once("\nEND").unwrap().0).unwrap();
        let task: EtcdBackupTask = serde_json::from_value(written.clone()).unwrap();
        let known = serde_json::to_value(&task).unwrap();
        assert!(holds(&known, &written), "{known:#} {written:#}");
        task
    });
    let tasks: Vec<EtcdBackupTask> = tasks.collect();
    let types: Vec<TaskType> = tasks.iter().map(|t| t.spec.type_).collect();
    assert_eq!(types, [TaskType::Restore, TaskType::OnDemandSnapshot]);
    let restore = tasks[0].spec.config.clone().unwrap().restore.unwrap();
    let all = restore.membership.initial_cluster.unwrap();
    assert_eq!(all.split(',').count(), MEMBERS);
    let own = restore.membership.initial_advertise_peer_urls.unwrap();
    let own = format!("{}={own}", restore.membership.name.unwrap());
    assert!(all.split(',').any(|member| member == own), "{all}");
    let args = [
        format!("--bump-revision={BUMP}"),
        "--mark-compacted".to_owned(),
    ];
    assert_eq!(tasks[0].spec.args, args);
    assert!(restore.membership.initial_cluster_token.is_some());
    let mut lines = by_hand.iter().flat_map(|b| &b.lines);
    assert!(lines.any(|l| l.contains(&format!("--bump-revision {BUMP} --mark-compacted"))));
}

/// Returns whether every written field is known.
fn holds(known: &Value, written: &Value) -> bool {
    match (known, written) {
        (Value::Object(known), Value::Object(written)) => written
            .iter()
            .all(|(name, value)| known.get(name).is_some_and(|known| holds(known, value))),
        _ => known == written,
    }
}
