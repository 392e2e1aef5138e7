//! The list: what a prefix holds, which of it makes a chain, what can be restored, what is wrong.

use crate::bucket::chain::{self, Choice, Range};
use crate::bucket::timeline::{NamesOnly, Timeline, Timelines};
use crate::bucket::{Kind, Snapshot};
use crate::error::{Error, Reason, Result};
use crate::job::Context;
use crate::job::identity::{self, Identity};
use crate::job::scan::{Depth, Scan, TAGS_UNREADABLE, scan};
use crate::mvcc::Revision;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// What to list.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Read contents too, not only names.
    pub deep: bool,
}

/// What a prefix holds. The fields are a contract: `docs/list-result.schema.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Whose backup it is; `None` where nobody has recorded it.
    pub identity: Option<Recorded>,
    /// In order of creation.
    pub snapshots: Vec<Listed>,
    /// The newest revision of the newest timeline; where none is the newest, of all.
    pub latest_revision: Option<Revision>,
    /// What can be restored, by timeline.
    pub restorable: Vec<Restorable>,
    /// What is wrong, or worth knowing.
    pub problems: Vec<Problem>,
}

/// Whose backup a prefix is.
#[derive(Debug, Clone, Serialize)]
pub struct Recorded {
    /// The cluster's ID, hexadecimal.
    pub cluster_id: String,
    /// Its members' names when it was recorded.
    pub member_names: Vec<String>,
    /// When that was; `None` where it is no time.
    pub recorded_at: Option<DateTime<Utc>>,
    /// The clusters that wrote there before, the oldest first.
    pub former_cluster_ids: Vec<String>,
}

impl From<Identity> for Recorded {
    fn from(i: Identity) -> Self {
        let at = DateTime::parse_from_rfc3339(&i.recorded_at).ok();
        Recorded {
            cluster_id: i.cluster_id,
            member_names: i.member_names,
            recorded_at: at.map(|t| t.with_timezone(&Utc)),
            former_cluster_ids: i.former_cluster_ids,
        }
    }
}

/// One snapshot.
#[derive(Debug, Clone, Serialize)]
pub struct Listed {
    /// The object's name without its folder.
    pub name: String,
    /// Below the store's prefix.
    pub path: String,
    /// `Full` or `Incr`.
    pub kind: &'static str,
    /// 0 for a full.
    pub start_revision: Revision,
    /// By its name.
    pub last_revision: Revision,
    /// By its name.
    pub created: DateTime<Utc>,
    /// Size in the store.
    pub bytes: u64,
    /// `none`, `gzip`, `zlib`, `lzw` or `zstd`.
    pub compression: &'static str,
    /// The last snapshot of a cluster that was given up.
    #[serde(rename = "final")]
    pub is_final: bool,
    /// Whether it is encrypted, by its name.
    pub encrypted: bool,
    /// Tagged not to be used.
    pub excluded: bool,
    /// The first timeline it is on; `None` where only contents would tell, or where it is unusable.
    pub timeline: Option<String>,
    /// Whether `compact` would take it now.
    pub in_chain: bool,
}

/// A range of revisions that can be restored.
#[derive(Debug, Clone, Serialize)]
pub struct Restorable {
    /// The timeline's ID.
    pub timeline: String,
    /// The oldest revision.
    pub first_revision: Revision,
    /// The newest revision.
    pub last_revision: Revision,
    /// The oldest time; by names, when the oldest full was made.
    pub first_time: DateTime<Utc>,
    /// The newest time; by names, when the newest snapshot was made.
    pub last_time: DateTime<Utc>,
}

/// Something that is wrong.
#[derive(Debug, Clone, Serialize)]
pub struct Problem {
    /// CamelCase, stable.
    pub reason: &'static str,
    /// In words.
    pub message: String,
    /// The paths it is about.
    pub snapshots: Vec<String>,
}

/// Lists a prefix.
///
/// # Errors
/// `NoSnapshots` where there is none; the store's. What is wrong with snapshots is no error here.
pub fn run(ctx: &Context, options: Options) -> Result<Outcome> {
    let depth = if options.deep {
        Depth::All
    } else {
        Depth::Names
    };
    let scan = scan(ctx, depth)?;
    let known = scan.contents.known_bases();
    let mut problems = problems(&scan, options.deep)?;
    if ctx.store.hides_tags() {
        problems.push(Problem {
            reason: "TagsUnreadable",
            message: TAGS_UNREADABLE.to_owned(),
            snapshots: Vec::new(),
        });
    }

    let identity = match identity::read(&ctx.store) {
        Ok(identity) => identity.map(Recorded::from),
        Err(e) if e.reason() == Reason::Configuration => {
            problems.push(Problem {
                reason: "IdentityUnreadable",
                message: e.to_string(),
                snapshots: Vec::new(),
            });
            None
        }
        Err(e) => return Err(e),
    };

    // Where no timeline is the newest, none is taken.
    let newest = match scan.timelines.newest(&scan.catalog) {
        Ok(t) => Some(t),
        Err(e) => {
            problems.push(problem(&e, Vec::new()));
            None
        }
    };
    let mut in_chain = HashSet::new();
    // Damage that `compact` would meet is a problem already; without it there is no chain.
    let newest_usable = newest.filter(|_| !is_blocked(&scan));
    if let Some(t) = newest_usable {
        match chain::choose(&scan.catalog, t, None, &known) {
            Ok(Choice::Found(c)) => {
                in_chain.insert(c.base);
                in_chain.extend(c.deltas.iter().map(|l| l.snapshot));
            }
            // Names leave a gap after this full, which only its content can close.
            Ok(Choice::Look(i)) => problems.push(Problem {
                reason: Reason::RevisionGap.as_str(),
                message: format!(
                    "by names, revisions {} are missing; whether {} holds them, past its name, needs --deep",
                    chain::show_ranges(&chain::missing(
                        &scan.catalog,
                        t,
                        scan.catalog.snapshots[i].name.last,
                        t.last(&scan.catalog, &scan.contents).unwrap_or_default(),
                    )),
                    path(&scan, i)
                ),
                snapshots: vec![path(&scan, i)],
            }),
            Err(e) => problems.push(problem(&e, Vec::new())),
        }
    }
    let in_doubt: HashSet<usize> = match options.deep {
        true => HashSet::new(),
        false => scan.doubtful.iter().copied().collect(),
    };
    // The first timeline counts.
    let mut timeline_of: HashMap<usize, &str> = HashMap::new();
    for t in scan.timelines.all.iter().rev() {
        timeline_of.extend(t.members.iter().map(|m| (m.snapshot, t.id.as_str())));
    }
    let snapshots = scan
        .catalog
        .snapshots
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let timeline = timeline_of.get(&i).filter(|_| !in_doubt.contains(&i));
            listed(s, timeline.map(|&id| id.to_owned()), in_chain.contains(&i))
        })
        .collect();
    let mut restorable = Vec::new();
    for t in &scan.timelines.all {
        for range in chain::restorable(&scan.catalog, t, &known) {
            restorable.push(restorable_range(&scan, t, range));
        }
    }
    Ok(Outcome {
        identity,
        snapshots,
        latest_revision: match newest {
            Some(t) => t.last(&scan.catalog, &scan.contents),
            None => scan.catalog.latest_revision(),
        },
        restorable,
        problems,
    })
}

/// Whether a damaged snapshot would stop `compact`: it needs all that are in doubt, and its chain.
fn is_blocked(scan: &Scan) -> bool {
    let unreadable = &scan.contents.unreadable;
    if unreadable.is_empty() {
        return false;
    }
    if unreadable.keys().any(|i| scan.doubtful.contains(i)) {
        return true;
    }
    // The chain that it would choose before it reads.
    let chosen = Timelines::build(&scan.catalog, &NamesOnly).map(|by_names| {
        let timeline = by_names.newest(&scan.catalog)?;
        chain::choose(&scan.catalog, timeline, None, &scan.contents.known_bases())
    });
    match chosen {
        Ok(Ok(Choice::Found(c))) => {
            let links = c.deltas.iter().map(|l| l.snapshot);
            links.chain([c.base]).any(|i| unreadable.contains_key(&i))
        }
        Ok(Ok(Choice::Look(i))) => unreadable.contains_key(&i),
        _ => false,
    }
}

fn path(scan: &Scan, i: usize) -> String {
    scan.catalog.snapshots[i].path.clone()
}

fn problem(e: &Error, snapshots: Vec<String>) -> Problem {
    Problem {
        reason: e.reason().as_str(),
        message: e.to_string(),
        snapshots,
    }
}

fn problems(scan: &Scan, deep: bool) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    let catalog = &scan.catalog;
    if !catalog.foreign.is_empty() {
        problems.push(Problem {
            reason: "ForeignObject",
            message: "names that are not those of snapshots: left alone".to_owned(),
            snapshots: catalog.foreign.clone(),
        });
    }
    for (&i, e) in &scan.contents.unreadable {
        problems.push(problem(e, vec![path(scan, i)]));
    }
    if !deep && !scan.doubtful.is_empty() {
        problems.push(Problem {
            reason: "TimelinesUnverified",
            message: "revisions do not only grow in order of creation: two streams, a late compaction, or a forked history; `deltafold list --deep` tells".to_owned(),
            snapshots: scan.doubtful.iter().map(|&i| path(scan, i)).collect(),
        });
    }
    for (&i, survey) in &scan.contents.surveys {
        let name = &catalog.snapshots[i].name;
        if survey.last > name.last {
            problems.push(Problem {
                reason: "RevisionPastName",
                message: format!(
                    "it holds revisions up to {}, its name says {}: no harm, fulls of a running etcd may",
                    survey.last, name.last
                ),
                snapshots: vec![path(scan, i)],
            });
        }
    }
    // Where revisions grow no timeline was looked for; a full can still tell of another history.
    let mut since_full: Vec<usize> = Vec::new();
    for i in catalog.usable() {
        let is_full = catalog.snapshots[i].name.kind == Kind::Full;
        if is_full {
            for &before in since_full.iter().filter(|b| !scan.doubtful.contains(b)) {
                if let Some(r) = scan.contents.disagreement(before, i)? {
                    problems.push(Problem {
                        reason: Reason::HistoryMismatch.as_str(),
                        message: format!("they disagree from revision {r} on: the history forked there, and the later one is taken"),
                        snapshots: vec![path(scan, before), path(scan, i)],
                    });
                }
            }
            since_full.clear();
        }
        since_full.push(i);
    }
    Ok(problems)
}

fn listed(s: &Snapshot, timeline: Option<String>, in_chain: bool) -> Listed {
    Listed {
        name: s.name.to_string(),
        path: s.path.clone(),
        kind: s.name.kind.as_str(),
        start_revision: s.name.start,
        last_revision: s.name.last,
        created: s.name.created_at(),
        bytes: s.bytes,
        compression: s.name.compression.as_str(),
        is_final: s.name.is_final,
        encrypted: s.name.is_encrypted,
        excluded: s.excluded,
        timeline,
        in_chain,
    }
}

fn restorable_range(scan: &Scan, timeline: &Timeline, (first, last): Range) -> Restorable {
    let name = |i: usize| &scan.catalog.snapshots[i].name;
    let survey = |i: usize| scan.contents.surveys.get(&i);
    let members = || timeline.members.iter().map(|m| m.snapshot);
    // The oldest full of the range, and the snapshots that end or pass its end.
    let first_time = members()
        .filter(|&i| name(i).kind == Kind::Full && name(i).last >= first && name(i).last <= last)
        .map(|i| name(i).created_at())
        .min()
        .unwrap_or_default();
    let last_time = members()
        .filter(|&i| {
            let reaches = survey(i).map_or(name(i).last, |s| s.last.max(name(i).last));
            name(i).start <= last && reaches >= last
        })
        .map(|i| {
            survey(i)
                .and_then(|s| s.last_time)
                .unwrap_or_else(|| name(i).created_at())
        })
        .min()
        .unwrap_or(first_time);
    Restorable {
        timeline: timeline.id.clone(),
        first_revision: first,
        last_revision: last,
        first_time,
        last_time: last_time.max(first_time),
    }
}
