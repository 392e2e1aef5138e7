//! Measures the controller with many policies on a real API server: requests, CPU, memory, and the time from
//! a crossed threshold to its Job.
//!
//! `cargo bench --bench controller` prints the tables of docs/design/measurements.md, each row next to its
//! goal; `--scale 10` makes a tenth of the policies and of the renewals, for a quick look. Nine tenths of the
//! policies share one namespace, "the crowd"; the others are spread over small tenants. All schedules are
//! yearly and Kubernetes' own controllers do not run, so no CronJob fires and no Job ends. A proxy counts
//! every request of the controller.

mod measure;
#[path = "../../tests/support/mod.rs"]
mod support;

use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use measure::{Latencies, Phase, creates_job, goal, is_work, job_times, usage};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::controller::Controller;
use support::kube::{Api, Body, Refused};
use support::namespace::{Kubernetes, TestNamespace, moment};
use support::proxy::{Call, Proxy};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const MINUTE: Duration = Duration::from_secs(60);
/// The largest number of concurrent requests of the bench itself.
const MAX_REQUESTS: usize = 16;
/// The number of small tenants, each with a namespace.
const TENANTS: usize = 5;
/// The controller counts as idle if it does nothing for this long.
const QUIET: Duration = Duration::from_secs(3);
/// A Job that does not exist after this time counts as missing.
const JOB_TIMEOUT: Duration = MINUTE;

#[derive(Parser)]
struct Args {
    /// Number of policies; each has two Leases
    #[arg(long, default_value_t = 10_000)]
    policies: usize,
    /// Renewals of Leases per minute
    #[arg(long, default_value_t = 4_000)]
    renewals: usize,
    /// Divide the policies and renewals by this number
    #[arg(long, default_value_t = 1)]
    scale: usize,
    /// Percentage of policies with four CronJobs: full, delta, gc, verify; the others have the first two
    #[arg(long, default_value_t = 100)]
    four: usize,
    /// Minutes of renewals, for each kind
    #[arg(long, default_value_t = 2)]
    minutes: u32,
    /// Thresholds to cross: first ten per second, then the same number at once
    #[arg(long, default_value_t = 300)]
    crossings: usize,
    /// Seconds of crossings by the small tenants, one per second
    #[arg(long, default_value_t = 60)]
    seconds: usize,
    /// Policies that the controller reconciles at once while it creates everything
    #[arg(long, default_value_t = 16)]
    workers: usize,
    /// The controller's limit of Jobs
    #[arg(long, default_value_t = 10_000)]
    max_jobs: usize,
    /// Measure this program instead of the one that was built
    #[arg(long, default_value = env!("CARGO_BIN_EXE_deltafold"))]
    program: PathBuf,
    /// Ignored; Cargo adds it.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A policy, identified by its number.
#[derive(Clone, Copy)]
struct Policy(usize);

impl Policy {
    fn name(self) -> String {
        format!("etcd-{:05}", self.0)
    }

    fn is_in_crowd(self) -> bool {
        !self.0.is_multiple_of(10)
    }

    fn namespace(self) -> String {
        match self.is_in_crowd() {
            true => "crowd".to_owned(),
            false => format!("tenant-{}", self.0 / 10 % TENANTS),
        }
    }

    fn path(self) -> String {
        format!(
            "/apis/deltafold.io/v1alpha1/namespaces/{}/etcdbackuppolicies",
            self.namespace()
        )
    }

    fn leases(self) -> String {
        format!(
            "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
            self.namespace()
        )
    }

    /// Returns a Lease as a Job leaves it after it has saved a snapshot.
    fn lease(self, kind: &str, revision: i64) -> Value {
        json!({
            "metadata": {"name": format!("{}-{kind}-snap", self.name())},
            "spec": {"holderIdentity": revision.to_string(), "renewTime": moment(0)},
        })
    }

    async fn renew(self, api: &Api, kind: &str, revision: i64) -> Result<()> {
        let path = format!("{}/{}-{kind}-snap", self.leases(), self.name());
        discard(api.merge(&path, &self.lease(kind, revision)).await)
    }

    fn object(self, args: &Args) -> Value {
        const YEARLY: &str = "0 0 1 1 *";
        let mut object = json!({
            "apiVersion": "deltafold.io/v1alpha1",
            "kind": "EtcdBackupPolicy",
            "metadata": {"name": self.name()},
            "spec": {
                "etcd": {"endpoints": [format!("https://{}:2379", self.name())]},
                "store": {
                    "url": format!("s3://backups/{}", self.name()),
                    "secretRef": {"name": "store"},
                },
                "snapshot": {"fullSchedule": YEARLY, "deltaSchedule": YEARLY},
            },
        });
        // By tens, so that the crowd and the tenants have the same percentage.
        if self.0 / 10 % 100 < args.four {
            object["spec"]["retention"] = json!({"policy": "Exponential", "schedule": YEARLY});
            object["spec"]["verify"] = json!({"schedule": YEARLY});
        }
        object
    }
}

fn discard(response: std::result::Result<Value, Refused>) -> Result<()> {
    response.map(drop).map_err(|e| e.to_string().into())
}

/// Runs futures in their order, at most [`MAX_REQUESTS`] at once.
async fn run_all<F: Future<Output = Result<()>>>(futures: impl Iterator<Item = F>) -> Result<()> {
    let results = stream::iter(futures).buffered(MAX_REQUESTS);
    results.try_for_each(|()| async { Ok(()) }).await
}

/// The arguments and the servers of the bench.
struct Bench {
    args: Args,
    api: Api,
    proxy: Proxy,
    space: TestNamespace,
    policies: Vec<Policy>,
    /// The revision of each policy's newest delta.
    revisions: Vec<AtomicI64>,
}

impl Bench {
    fn crowd(&self) -> Vec<Policy> {
        let policies = self.policies.iter().copied();
        policies.filter(|p| p.is_in_crowd()).collect()
    }

    fn tenants(&self) -> Vec<Policy> {
        let policies = self.policies.iter().copied();
        policies.filter(|p| !p.is_in_crowd()).collect()
    }

    /// Creates the namespaces with their Secret, policies and Leases.
    async fn create(&self) -> Result<()> {
        let create = async |path: &str, object: &Value| {
            let body = Some((Body::Json, object));
            discard(self.api.ask(Method::POST, path, body).await)
        };
        let namespaces: BTreeSet<String> = self.policies.iter().map(|p| p.namespace()).collect();
        for name in namespaces {
            let namespace = json!({"metadata": {"name": name}});
            create("/api/v1/namespaces", &namespace).await?;
            let secret = json!({
                "metadata": {"name": "store"},
                "stringData": {"accessKeyID": "id", "secretAccessKey": "key", "region": "r"},
            });
            create(&format!("/api/v1/namespaces/{name}/secrets"), &secret).await?;
        }
        run_all(self.policies.iter().map(|policy| async {
            create(&policy.leases(), &policy.lease("full", 100)).await?;
            create(&policy.leases(), &policy.lease("delta", 100)).await?;
            create(&policy.path(), &policy.object(&self.args)).await
        }))
        .await
    }

    async fn start(&self, args: &[&str]) -> Controller {
        Controller::of_all(&self.proxy, &self.space, args).await
    }

    async fn start_with_max_jobs(&self) -> Controller {
        let max_jobs = format!("--max-jobs={}", self.args.max_jobs);
        self.start(&[&max_jobs]).await
    }

    /// Waits until a new controller watches every resource that it has listed.
    async fn wait_for_watches(&self, controller: &Controller) -> Result<()> {
        while !self.proxy.look(all_listed_are_watched) {
            // Fails if the process has ended.
            usage(controller.id())?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Waits until the controller is idle: it sends no request and uses no CPU. Returns when that began.
    async fn wait_until_idle(&self, controller: &Controller) -> Result<Instant> {
        let (mut last_busy, mut before) = (Instant::now(), (0, 0.0));
        while last_busy.elapsed() < QUIET {
            tokio::time::sleep(Duration::from_millis(250)).await;
            let requests = |calls: &[Call]| calls.iter().filter(|c| is_work(c)).count();
            let now = (
                self.proxy.look(requests),
                usage(controller.id())?.cpu_seconds,
            );
            if now.0 != before.0 || now.1 - before.1 > 0.03 {
                last_busy = Instant::now();
            }
            before = now;
        }
        Ok(last_busy)
    }

    /// Renews both Leases of one policy after the other at the rate of the arguments. Never ends.
    async fn renew(&self, policies: &[Policy], events: i64, renewed: &AtomicUsize) -> Result<()> {
        let interval = MINUTE * 2 / u32::try_from(self.args.renewals)?;
        let began = Instant::now();
        let slots = policies.iter().cycle().zip(1_u32..);
        run_all(slots.map(|(policy, slot)| async move {
            tokio::time::sleep_until((began + interval * slot).into()).await;
            let delta = self.revisions[policy.0].fetch_add(events, Ordering::Relaxed) + events;
            policy.renew(&self.api, "full", 100).await?;
            policy.renew(&self.api, "delta", delta).await?;
            renewed.fetch_add(2, Ordering::Relaxed);
            Ok(())
        }))
        .await
    }

    /// Patches one policy of the crowd after the other, as fast as the API server allows. Never ends.
    async fn flood(&self, flood: Flood, patched: &AtomicUsize) -> Result<()> {
        let crowd = self.crowd();
        let all = (1_usize..).flat_map(|round| crowd.iter().map(move |p| (round, p)));
        run_all(all.map(|(round, policy)| async move {
            let patch = match flood {
                Flood::None => return std::future::pending().await,
                Flood::Labels => json!({"metadata": {"labels": {"round": round.to_string()}}}),
                // The time zone is part of every CronJob of the policy.
                Flood::Specs => {
                    let zone = ["Etc/UTC", "Europe/Berlin"][round % 2];
                    json!({"spec": {"snapshot": {"timeZone": zone}}})
                }
            };
            let path = format!("{}/{}", policy.path(), policy.name());
            discard(self.api.merge(&path, &patch).await)?;
            patched.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }))
        .await
    }

    /// Crosses the thresholds of policies at this interval, and waits for their Jobs.
    async fn cross(&self, policies: &[Policy], interval: Duration) -> Result<Latencies> {
        let began = Instant::now();
        let renewals = policies
            .iter()
            .zip(0_u32..)
            .map(|(policy, slot)| async move {
                tokio::time::sleep_until((began + interval * slot).into()).await;
                let sent = Instant::now();
                policy.renew(&self.api, "delta", 5_000_000).await?;
                Result::Ok((policy.name(), sent))
            });
        let renewals = stream::iter(renewals).buffered(MAX_REQUESTS);
        let renewals: Vec<(String, Instant)> = renewals.try_collect().await?;
        let last = Instant::now();
        let jobs = |calls: &[Call]| calls.iter().filter(|c| creates_job(c)).count();
        while self.proxy.look(jobs) < renewals.len() && last.elapsed() < JOB_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let created = self.proxy.look(job_times);
        let mut latencies = Latencies::default();
        for (name, sent) in renewals {
            let seconds_since = |start| match created.get(&name) {
                Some(at) => at.saturating_duration_since(start).as_secs_f64(),
                None => f64::INFINITY,
            };
            latencies.seconds.push(seconds_since(sent));
            latencies.all = latencies.all.max(seconds_since(began));
        }
        latencies.seconds.sort_by(f64::total_cmp);
        Ok(latencies)
    }

    /// Prints a row of crossed thresholds, while the Leases of other policies are renewed and the crowd is
    /// changed.
    async fn crossings(
        &self,
        controller: &Controller,
        work: &str,
        policies: &[Policy],
        interval: Duration,
        others: &[Policy],
        flood: Flood,
    ) -> Result<()> {
        let phase = Phase::begin(Some(controller), &self.proxy)?;
        let (renewed, patched) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let latencies = tokio::select! {
            latencies = self.cross(policies, interval) => latencies?,
            ended = self.renew(others, 0, &renewed) => return Err(format!("renewals: {ended:?}").into()),
            ended = self.flood(flood, &patched) => return Err(format!("the flood: {ended:?}").into()),
        };
        let patched = patched.into_inner();
        let cost = phase.end(work, controller, &self.proxy, Instant::now())?;
        let work = match patched {
            0 => work.to_owned(),
            n => format!("{work} ({:.0} a second)", n as f64 / cost.seconds),
        };
        let goal = match interval.is_zero() {
            true => goal("all ≤ 10 s", latencies.all <= 10.0),
            false => goal("p99 ≤ 1 s", latencies.percentile(0.99) <= 1.0),
        };
        println!(
            "| {work} | {} | {} | {} | {:.1} s | {} MiB | {goal} |",
            latencies.seconds.len(),
            latencies.cells(),
            cost.requests,
            cost.cpu_seconds,
            cost.usage.peak,
        );
        Ok(())
    }

    /// Prints both tables.
    async fn run(&self) -> Result<()> {
        let args = &self.args;
        let began = Instant::now();
        self.create().await?;
        let cron_jobs = self.policies.iter().map(|p| p.object(args));
        let cron_jobs = cron_jobs.map(|p| 2 + 2 * usize::from(p["spec"]["verify"].is_object()));
        println!(
            "{} policies, {} Leases, {} CronJobs, {} renewals a minute; policies and Leases made in {:.0} s\n",
            self.policies.len(),
            2 * self.policies.len(),
            cron_jobs.sum::<usize>(),
            args.renewals,
            began.elapsed().as_secs_f64()
        );
        println!(
            "| the controller | for | requests | writes | CPU | for 1,000 renewals | resident | peak | goals |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        let work = format!("makes everything, {} policies at once", args.workers);
        let phase = Phase::begin(None, &self.proxy)?;
        let workers = format!("--policy-workers={}", args.workers);
        let mut first = self.start(&[&workers]).await;
        self.wait_for_watches(&first).await?;
        let idle_since = self.wait_until_idle(&first).await?;
        let cost = phase.end(&work, &first, &self.proxy, idle_since)?;
        cost.row(&work, 0, &[]);

        first.stop();
        let mut second = self.take_over("is started again").await?;

        let phase = Phase::begin(Some(&second), &self.proxy)?;
        tokio::time::sleep(MINUTE).await;
        let cost = phase.end("nothing happens", &second, &self.proxy, Instant::now())?;
        let goals = [
            goal("0 requests", cost.requests == 0),
            cost.writes_nothing(),
        ];
        cost.row("nothing happens", 0, &goals);

        for (work, events) in [
            ("Leases are renewed, nothing is new", 0),
            ("Leases are renewed, each time with a delta", 10),
        ] {
            let phase = Phase::begin(Some(&second), &self.proxy)?;
            let renewed = AtomicUsize::new(0);
            let renewals = self.renew(&self.policies, events, &renewed);
            // The renewals end only by the time-out or an error.
            if let Ok(ended) = tokio::time::timeout(MINUTE * args.minutes, renewals).await {
                ended?;
            }
            let cost = phase.end(work, &second, &self.proxy, Instant::now())?;
            let mut goals = vec![cost.fits()];
            if events == 0 {
                goals.push(cost.writes_nothing());
            }
            let renewed = renewed.into_inner();
            let per_minute = renewed as f64 * 60.0 / cost.seconds;
            let work = format!("{work} ({per_minute:.0} a minute)");
            cost.row(&work, renewed, &goals);
            self.wait_until_idle(&second).await?;
        }
        let began = Instant::now();
        let scraped = second.asked("/metrics").map_or(0, |(_, body)| body.len());
        let took = began.elapsed().as_secs_f64();
        eprintln!("a scrape of /metrics: {scraped} bytes in {took:.2} s");

        second.kill();
        let third = self
            .take_over("takes over from one that was killed")
            .await?;
        self.cross_thresholds(&third).await
    }

    /// Starts a controller after another one has reconciled everything, and prints its row.
    async fn take_over(&self, work: &str) -> Result<Controller> {
        let phase = Phase::begin(None, &self.proxy)?;
        let controller = self.start_with_max_jobs().await;
        self.wait_for_watches(&controller).await?;
        let idle_since = self.wait_until_idle(&controller).await?;
        let cost = phase.end(work, &controller, &self.proxy, idle_since)?;
        let goals = [cost.within_a_minute(), cost.writes_nothing(), cost.fits()];
        cost.row(work, 0, &goals);
        Ok(controller)
    }

    /// Prints the table of crossed thresholds.
    async fn cross_thresholds(&self, controller: &Controller) -> Result<()> {
        println!();
        println!(
            "| thresholds crossed | Jobs | p50 | p99 | longest | all after | requests | CPU | peak | goal |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|");
        let crowd = self.crowd();
        let count = self.args.crossings.min(crowd.len() / 3);
        let (evenly, rest) = crowd.split_at(count);
        let (at_once, others) = rest.split_at(count);
        let (interval, none) = (Duration::from_millis(100), Flood::None);
        self.crossings(controller, "ten a second", evenly, interval, others, none)
            .await?;
        self.crossings(controller, "at once", at_once, Duration::ZERO, others, none)
            .await?;

        let tenants = self.tenants();
        let count = self.args.seconds.min(tenants.len() / 3);
        let floods = [
            (none, "one a second, of small tenants"),
            (Flood::Labels, "the same while the crowd's labels change"),
            (Flood::Specs, "the same while the crowd's specs change"),
        ];
        for ((flood, work), policies) in floods.into_iter().zip(tenants.chunks(count)) {
            let second = Duration::from_secs(1);
            self.crossings(controller, work, policies, second, others, flood)
                .await?;
            if flood == Flood::Labels {
                self.wait_until_idle(controller).await?;
            }
        }
        Ok(())
    }
}

/// Whether every resource that was listed is watched, by the answered calls.
fn all_listed_are_watched(calls: &[Call]) -> bool {
    let resources = |verb: &str| {
        let calls = calls.iter();
        let calls = calls.filter(|c| c.answered.is_some() && c.verb == verb);
        calls.map(|c| &c.resource).collect::<BTreeSet<_>>()
    };
    let watched = resources("watch");
    !watched.is_empty() && resources("list").is_subset(&watched)
}

/// The part of the crowd's policies that is changed while thresholds are crossed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flood {
    None,
    Labels,
    Specs,
}

fn main() -> Result<()> {
    let mut args = Args::parse();
    args.policies /= args.scale;
    args.renewals /= args.scale;
    let _ = support::PROGRAM.set(args.program.clone());
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let Kubernetes {
            folder: _folder,
            etcd: _etcd,
            server,
            controllers,
        } = Kubernetes::start().await;
        let space = TestNamespace::on(&server.api(), "controller").await;
        drop(controllers);
        let bench = Bench {
            api: server.api(),
            proxy: Proxy::start(&server.url()),
            space,
            policies: (0..args.policies).map(Policy).collect(),
            revisions: (0..args.policies).map(|_| AtomicI64::new(100)).collect(),
            args,
        };
        bench.run().await
    })
}
