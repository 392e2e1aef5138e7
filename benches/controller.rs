//! What the controller costs with many policies, and how soon a crossed threshold is a Job: on a real API server.
//!
//! 1,000 policies in ten namespaces and their 2,000 Leases, each renewed once a minute; every request of the
//! controller is counted on its way. `cargo bench --bench controller` prints the tables of ARCHITECTURE.md; a
//! number among the arguments is that of the policies.

#[path = "../tests/support/mod.rs"]
mod support;

use futures::StreamExt as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::controller::Controller;
use support::kube::{Api, Body};
use support::proxy::Proxy;
use support::space::{Kubernetes, Space, moment, name};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const NAMESPACES: usize = 10;
const MINUTE: Duration = Duration::from_secs(60);
/// Requests of the bench itself at once.
const AT_ONCE: usize = 8;

/// A policy by its number.
#[derive(Clone, Copy)]
struct Numbered(usize);

impl Numbered {
    fn name(self) -> String {
        format!("etcd-{:04}", self.0)
    }

    fn namespace(self) -> String {
        format!("scale-{}", self.0 % NAMESPACES)
    }

    fn lease(self, kind: &str) -> String {
        format!(
            "/apis/coordination.k8s.io/v1/namespaces/{}/leases/{}-{kind}-snap",
            self.namespace(),
            self.name()
        )
    }

    /// As a Job that has saved something renews it.
    async fn renew(self, api: &Api, kind: &str, revision: i64) -> Result<()> {
        let patch = json!({
            "metadata": {"name": format!("{}-{kind}-snap", self.name())},
            "spec": {"holderIdentity": revision.to_string(), "renewTime": moment(0)},
        });
        let renewed = api.merge(&self.lease(kind), &patch).await;
        renewed.map(drop).map_err(|e| e.to_string().into())
    }
}

async fn for_all<F: Future<Output = Result<()>>>(
    count: usize,
    act: impl Fn(Numbered) -> F,
) -> Result<()> {
    let acts = (0..count).map(|n| act(Numbered(n)));
    let mut done = futures::stream::iter(acts).buffer_unordered(AT_ONCE);
    while let Some(result) = done.next().await {
        result?;
    }
    Ok(())
}

/// What a process has used so far.
#[derive(Clone, Copy)]
struct Used {
    cpu_seconds: f64,
    resident: u64,
    anonymous: u64,
}

fn used(pid: u32) -> Result<Used> {
    /// Of /proc, on Linux everywhere.
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').ok_or("a stat")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<f64>().ok());
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = |key: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(key))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    Ok(Used {
        cpu_seconds: (ticks(11).ok_or("utime")? + ticks(12).ok_or("stime")?) / TICKS_A_SECOND,
        resident: kib("VmRSS:").ok_or("VmRSS")? << 10,
        anonymous: kib("RssAnon:").ok_or("RssAnon")? << 10,
    })
}

/// What the controller did in a while.
struct Phase<'a> {
    what: &'a str,
    began: Instant,
    before: Used,
}

impl<'a> Phase<'a> {
    fn begin(what: &'a str, controller: &Controller, proxy: &Proxy) -> Result<Self> {
        proxy.forget();
        Ok(Self {
            what,
            began: Instant::now(),
            before: used(controller.id())?,
        })
    }

    fn end(self, controller: &Controller, proxy: &Proxy) -> Result<()> {
        let seconds = self.began.elapsed().as_secs_f64();
        let now = used(controller.id())?;
        let counts = proxy.counts();
        // The leadership is renewed by the clock, whatever else happens.
        let leader = proxy
            .calls()
            .iter()
            .filter(|c| c.name.contains("controller") && c.resource == "leases")
            .count();
        let calls: usize = counts.values().sum::<usize>() - leader;
        println!(
            "| {} | {seconds:.0} s | {:.2} | {} MiB | {} MiB | {calls} |",
            self.what,
            (now.cpu_seconds - self.before.cpu_seconds) / seconds * 60.0,
            now.resident >> 20,
            now.anonymous >> 20,
        );
        let mut told: BTreeMap<String, usize> = BTreeMap::new();
        for ((verb, resource), count) in counts {
            *told.entry(format!("{verb} {resource}")).or_default() += count;
        }
        let told: Vec<String> = told.iter().map(|(k, n)| format!("{k} {n}")).collect();
        eprintln!("{}: {} (leadership: {leader})", self.what, told.join(", "));
        Ok(())
    }
}

/// Renews every Lease once a minute, evenly, for so many minutes. Revisions move where `events` is not 0.
async fn renew_all(
    api: &Api,
    count: usize,
    minutes: u32,
    events: i64,
    revisions: &mut [i64],
) -> Result<()> {
    for _ in 0..minutes {
        let began = Instant::now();
        let slots = (0..count).map(|n| {
            let due = MINUTE.mul_f64(n as f64 / count as f64);
            revisions[n] += events;
            let revision = revisions[n];
            async move {
                tokio::time::sleep((began + due).saturating_duration_since(Instant::now())).await;
                let policy = Numbered(n);
                policy.renew(api, "full", 100).await?;
                policy.renew(api, "delta", revision).await
            }
        });
        let mut done = futures::stream::iter(slots).buffered(AT_ONCE);
        while let Some(result) = done.next().await {
            result?;
        }
        tokio::time::sleep(MINUTE.saturating_sub(began.elapsed())).await;
    }
    Ok(())
}

fn percentile(sorted: &[f64], part: f64) -> f64 {
    let at = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len());
    sorted[at - 1]
}

/// Crosses the thresholds of some policies, with this pause between; from each write's answer to the request that
/// creates the Job.
async fn cross(
    api: &Api,
    proxy: &Proxy,
    policies: std::ops::Range<usize>,
    pause: Duration,
    what: &str,
) -> Result<()> {
    proxy.forget();
    let count = policies.len();
    let mut crossed: BTreeMap<String, Instant> = BTreeMap::new();
    let began = Instant::now();
    let slots = policies.enumerate().map(|(at, n)| async move {
        let due = began + pause * u32::try_from(at).unwrap_or(u32::MAX);
        tokio::time::sleep(due.saturating_duration_since(Instant::now())).await;
        let policy = Numbered(n);
        let asked = Instant::now();
        policy.renew(api, "delta", 5_000_000).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>((policy.name(), asked))
    });
    let mut done = futures::stream::iter(slots).buffered(AT_ONCE);
    while let Some(result) = done.next().await {
        let (name, at) = result?;
        crossed.insert(name, at);
    }
    let made = || {
        let calls = proxy.calls().into_iter();
        calls
            .filter(|c| c.verb == "create" && c.resource == "jobs" && c.status == 201)
            .filter_map(|c| {
                let job = c.json();
                let policy = job["metadata"]["labels"]["deltafold.io/policy"].as_str()?;
                Some((policy.to_owned(), c.answered?))
            })
            .collect::<BTreeMap<String, Instant>>()
    };
    let patience = Instant::now();
    let made = loop {
        let made = made();
        if made.len() >= count {
            break made;
        }
        if patience.elapsed() > 5 * MINUTE {
            return Err(format!("{} of {count} Jobs", made.len()).into());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let mut millis: Vec<f64> = crossed
        .iter()
        .filter_map(|(policy, at)| {
            let made = made.get(policy)?;
            Some(made.saturating_duration_since(*at).as_secs_f64() * 1000.0)
        })
        .collect();
    millis.sort_by(f64::total_cmp);
    println!(
        "| {what} | {} | {:.0} ms | {:.0} ms | {:.0} ms |",
        millis.len(),
        percentile(&millis, 0.5),
        percentile(&millis, 0.99),
        percentile(&millis, 1.0)
    );
    Ok(())
}

async fn create_all(api: &Api, count: usize) -> Result<()> {
    for n in 0..NAMESPACES {
        let object = json!({"metadata": {"name": format!("scale-{n}")}});
        api.ask(
            reqwest::Method::POST,
            "/api/v1/namespaces",
            Some((Body::Json, &object)),
        )
        .await
        .map_err(|e| e.to_string())?;
    }
    for_all(count, |policy| async move {
        let object = json!({
            "apiVersion": "deltafold.io/v1alpha1",
            "kind": "EtcdBackupPolicy",
            "metadata": {"name": policy.name()},
            "spec": {
                "etcd": {"endpoints": [format!("https://{}:2379", policy.name())]},
                "store": {"url": format!("s3://backups/{}", policy.name())},
                // None of them comes while this runs.
                "snapshot": {"fullSchedule": "0 0 1 1 *", "deltaSchedule": "0 0 1 1 *"},
            },
        });
        let path = format!(
            "/apis/deltafold.io/v1alpha1/namespaces/{}/etcdbackuppolicies",
            policy.namespace()
        );
        let created = api
            .ask(reqwest::Method::POST, &path, Some((Body::Json, &object)))
            .await;
        created.map(drop).map_err(|e| e.to_string().into())
    })
    .await
}

/// Until the controller has written nothing for a while, after something that makes it write.
async fn wait_until_quiet(proxy: &Proxy) {
    let works = || proxy.calls().iter().filter(|c| c.works()).count();
    let mut before = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let now = works();
        if now == before && now > 0 {
            return;
        }
        before = now;
    }
}

async fn run(count: usize, minutes: u32) -> Result<()> {
    let kubernetes = Kubernetes::start().await;
    let api = kubernetes.server.api();
    let space = Space::on(&api, "controller").await;
    create_all(&api, count).await?;
    let proxy = Proxy::start(api.url()).await;
    println!(
        "| {count} policies, {} Leases | for | CPU seconds a minute | resident | anonymous | requests |",
        2 * count
    );
    println!("|---|---|---|---|---|---|");
    let args = ["--max-jobs", "0"];
    let mut controller = Controller::of_all(&proxy, &space, &args).await;
    let phase = Phase::begin("the first look: all is made", &controller, &proxy)?;
    controller.wait_until_ready().await;
    wait_until_quiet(&proxy).await;
    phase.end(&controller, &proxy)?;

    let mut revisions = vec![100; count];
    renew_all(&api, count, 1, 10, &mut revisions).await?;
    wait_until_quiet(&proxy).await;

    let phase = Phase::begin("nothing happens", &controller, &proxy)?;
    tokio::time::sleep(MINUTE).await;
    phase.end(&controller, &proxy)?;

    let phase = Phase::begin(
        "every Lease is renewed once a minute, nothing is new",
        &controller,
        &proxy,
    )?;
    renew_all(&api, count, minutes, 0, &mut revisions).await?;
    phase.end(&controller, &proxy)?;

    let phase = Phase::begin(
        "every Lease is renewed once a minute, each time with a delta",
        &controller,
        &proxy,
    )?;
    renew_all(&api, count, minutes, 10, &mut revisions).await?;
    phase.end(&controller, &proxy)?;

    controller.kill();
    let mut controller = Controller::of_all(&proxy, &space, &args).await;
    let phase = Phase::begin("another controller takes over", &controller, &proxy)?;
    controller.wait_until_ready().await;
    wait_until_quiet(&proxy).await;
    phase.end(&controller, &proxy)?;

    println!();
    println!("| thresholds crossed | Jobs | p50 | p99 | longest |");
    println!("|---|---|---|---|---|");
    let (some, more) = (count * 3 / 10, count * 6 / 10);
    let going = AtomicBool::new(true);
    // All others go on meanwhile.
    let others = async {
        while going.load(Ordering::Relaxed) {
            for (n, &revision) in revisions.iter().enumerate().take(count).skip(more) {
                if !going.load(Ordering::Relaxed) {
                    break;
                }
                Numbered(n).renew(&api, "delta", revision).await?;
                tokio::time::sleep(MINUTE / u32::try_from(2 * count)?).await;
            }
        }
        Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    };
    let crossings = async {
        let pause = Duration::from_millis(100);
        let result = async {
            cross(&api, &proxy, 0..some, pause, "ten a second").await?;
            cross(&api, &proxy, some..more, Duration::ZERO, "all at once").await
        };
        let result = result.await;
        going.store(false, Ordering::Relaxed);
        result
    };
    let (others, crossings) = tokio::join!(others, crossings);
    others?;
    crossings?;
    let jobs = proxy.calls();
    let names: Vec<Value> = jobs
        .iter()
        .filter(|c| c.verb == "create" && c.resource == "jobs")
        .map(|c| c.json())
        .collect();
    let mut distinct: Vec<&str> = names.iter().map(name).collect();
    distinct.sort_unstable();
    distinct.dedup();
    eprintln!("{} Jobs asked for, {} names", names.len(), distinct.len());
    Ok(())
}

fn main() -> Result<()> {
    let wanted = std::env::args().skip(1).filter_map(|a| a.parse().ok());
    let wanted: Vec<usize> = wanted.collect();
    let count = wanted.first().copied().unwrap_or(1000);
    let minutes = wanted.get(1).copied().unwrap_or(3);
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(run(count, u32::try_from(minutes)?))
}
