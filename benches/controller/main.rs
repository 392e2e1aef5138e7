//! What the controller costs with many policies, and how soon a crossed threshold is a Job: on a real API server.
//!
//! `cargo bench --bench controller` prints the tables of ARCHITECTURE.md, each row next to its goal; `--scale 10` makes a
//! tenth of the policies and of the renewals, for a quick look. Nine tenths of the policies share one namespace, the
//! crowd; the others are spread over small tenants. All schedules are yearly and Kubernetes' own controllers do not run:
//! no CronJob fires and no Job ends. A proxy counts every request of the controller.

mod measure;
#[path = "../../tests/support/mod.rs"]
mod support;

use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use measure::{Crossed, Phase, counts, goal, jobs_made, makes_job, used};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::controller::Controller;
use support::faulty_proxy::{Call, Proxy};
use support::kube::{Api, Body, Refused};
use support::namespace::{Kubernetes, TestNamespace, moment};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const MINUTE: Duration = Duration::from_secs(60);
/// Requests of the bench itself at once.
const AT_ONCE: usize = 16;
const TENANTS: usize = 5;
/// The controller has looked at everything if it does nothing for so long.
const QUIET: Duration = Duration::from_secs(3);
/// A Job that is not there after so long counts as one that never comes.
const PATIENCE: Duration = MINUTE;

#[derive(Parser)]
struct Args {
    /// Policies; each has two Leases
    #[arg(long, default_value_t = 10_000)]
    policies: usize,
    /// Renewals of Leases a minute
    #[arg(long, default_value_t = 4_000)]
    renewals: usize,
    /// Make so many times fewer policies and renewals
    #[arg(long, default_value_t = 1)]
    scale: usize,
    /// How many of 100 policies have four CronJobs: full, delta, gc, verify; the others have the first two
    #[arg(long, default_value_t = 100)]
    four: usize,
    /// Minutes of renewals, of each kind
    #[arg(long, default_value_t = 2)]
    minutes: u32,
    /// Thresholds that are crossed, ten a second and then at once
    #[arg(long, default_value_t = 300)]
    crossings: usize,
    /// Seconds of crossings of the small tenants, one a second
    #[arg(long, default_value_t = 60)]
    seconds: usize,
    /// Policies that the controller looks after at once while everything is made
    #[arg(long, default_value_t = 16)]
    workers: usize,
    /// Jobs that may be there at once
    #[arg(long, default_value_t = 10_000)]
    max_jobs: usize,
    /// Measure another program than the one that was built
    #[arg(long, default_value = env!("CARGO_BIN_EXE_deltafold"))]
    program: PathBuf,
    /// Cargo gives it.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A policy by its number.
#[derive(Clone, Copy)]
struct Policy(usize);

impl Policy {
    fn name(self) -> String {
        format!("etcd-{:05}", self.0)
    }

    fn is_of_crowd(self) -> bool {
        !self.0.is_multiple_of(10)
    }

    fn namespace(self) -> String {
        match self.is_of_crowd() {
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

    /// As a Job leaves it that has saved something.
    fn lease(self, kind: &str, revision: i64) -> Value {
        json!({
            "metadata": {"name": format!("{}-{kind}-snap", self.name())},
            "spec": {"holderIdentity": revision.to_string(), "renewTime": moment(0)},
        })
    }

    async fn renew(self, api: &Api, kind: &str, revision: i64) -> Result<()> {
        let path = format!("{}/{}-{kind}-snap", self.leases(), self.name());
        done(api.merge(&path, &self.lease(kind, revision)).await)
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
        // Tens, so that crowd and tenants have the same share.
        if self.0 / 10 % 100 < args.four {
            object["spec"]["retention"] = json!({"policy": "Exponential", "schedule": YEARLY});
            object["spec"]["verify"] = json!({"schedule": YEARLY});
        }
        object
    }
}

fn done(answer: std::result::Result<Value, Refused>) -> Result<()> {
    answer.map(drop).map_err(|e| e.to_string().into())
}

/// Some at once, begun in their order.
async fn each<F: Future<Output = Result<()>>>(acts: impl Iterator<Item = F>) -> Result<()> {
    let acts = stream::iter(acts).buffered(AT_ONCE);
    acts.try_for_each(|()| async { Ok(()) }).await
}

struct Bench {
    args: Args,
    api: Api,
    proxy: Proxy,
    space: TestNamespace,
    policies: Vec<Policy>,
    /// Of each policy's newest delta.
    revisions: Vec<AtomicI64>,
}

impl Bench {
    fn of_crowd(&self, is: bool) -> Vec<Policy> {
        let policies = self.policies.iter().copied();
        policies.filter(|p| p.is_of_crowd() == is).collect()
    }

    /// Namespaces with their Secret, policies and Leases.
    async fn create(&self) -> Result<()> {
        let create = async |path: &str, object: &Value| {
            let body = Some((Body::Json, object));
            done(self.api.ask(Method::POST, path, body).await)
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
        each(self.policies.iter().map(|policy| async {
            create(&policy.leases(), &policy.lease("full", 100)).await?;
            create(&policy.leases(), &policy.lease("delta", 100)).await?;
            create(&policy.path(), &policy.object(&self.args)).await
        }))
        .await
    }

    async fn start(&self, args: &[&str]) -> Controller {
        Controller::of_all(&self.proxy, &self.space, args).await
    }

    async fn start_as_usual(&self) -> Controller {
        let max_jobs = format!("--max-jobs={}", self.args.max_jobs);
        self.start(&[&max_jobs]).await
    }

    /// Waits until a new controller watches all that it has listed.
    async fn wait_until_it_watches(&self, controller: &Controller) -> Result<()> {
        let watches = |calls: &[Call]| {
            let answered = || calls.iter().filter(|c| c.answered.is_some());
            let of = |verb| {
                let calls = answered().filter(|c| c.verb == verb);
                calls.map(|c| &c.resource).collect::<BTreeSet<_>>()
            };
            let watched = of("watch");
            !watched.is_empty() && of("list").is_subset(&watched)
        };
        while !self.proxy.look(watches) {
            // Fails if the process has ended.
            used(controller.id())?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Waits until the controller asks for nothing and computes nothing; returns when that began.
    async fn settle(&self, controller: &Controller) -> Result<Instant> {
        let (mut busy, mut before) = (Instant::now(), (0, 0.0));
        while busy.elapsed() < QUIET {
            tokio::time::sleep(Duration::from_millis(250)).await;
            let requests = |calls: &[Call]| calls.iter().filter(|c| counts(c)).count();
            let now = (
                self.proxy.look(requests),
                used(controller.id())?.cpu_seconds,
            );
            if now.0 != before.0 || now.1 - before.1 > 0.03 {
                busy = Instant::now();
            }
            before = now;
        }
        Ok(busy)
    }

    /// Renews both Leases of one policy after the other, evenly, at the rate of the arguments; for ever.
    async fn renew(&self, policies: &[Policy], events: i64, renewed: &AtomicUsize) -> Result<()> {
        let pause = MINUTE * 2 / u32::try_from(self.args.renewals)?;
        let began = Instant::now();
        let slots = policies.iter().cycle().zip(1_u32..);
        each(slots.map(|(policy, at)| async move {
            tokio::time::sleep_until((began + pause * at).into()).await;
            let delta = self.revisions[policy.0].fetch_add(events, Ordering::Relaxed) + events;
            policy.renew(&self.api, "full", 100).await?;
            policy.renew(&self.api, "delta", delta).await?;
            renewed.fetch_add(2, Ordering::Relaxed);
            Ok(())
        }))
        .await
    }

    /// Patches one policy after the other as fast as the API server takes it; for ever.
    async fn flood(&self, flood: Flood, patched: &AtomicUsize) -> Result<()> {
        let crowd = self.of_crowd(true);
        let all = (1_usize..).flat_map(|round| crowd.iter().map(move |p| (round, p)));
        each(all.map(|(round, policy)| async move {
            let patch = match flood {
                Flood::None => return std::future::pending().await,
                Flood::Labels => json!({"metadata": {"labels": {"round": round.to_string()}}}),
                // It is in every CronJob of the policy.
                Flood::Specs => {
                    let zone = ["Etc/UTC", "Europe/Berlin"][round % 2];
                    json!({"spec": {"snapshot": {"timeZone": zone}}})
                }
            };
            let path = format!("{}/{}", policy.path(), policy.name());
            done(self.api.merge(&path, &patch).await)?;
            patched.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }))
        .await
    }

    /// Crosses the thresholds of policies, with this pause between.
    async fn cross(&self, policies: &[Policy], pause: Duration) -> Result<Crossed> {
        let began = Instant::now();
        let slots = policies.iter().zip(0_u32..).map(|(policy, at)| async move {
            tokio::time::sleep_until((began + pause * at).into()).await;
            let asked = Instant::now();
            policy.renew(&self.api, "delta", 5_000_000).await?;
            Result::Ok((policy.name(), asked))
        });
        let slots = stream::iter(slots).buffered(AT_ONCE);
        let asked: Vec<(String, Instant)> = slots.try_collect().await?;
        let last = Instant::now();
        let count = |calls: &[Call]| calls.iter().filter(|c| makes_job(c)).count();
        while self.proxy.look(count) < asked.len() && last.elapsed() < PATIENCE {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let made = self.proxy.look(jobs_made);
        let mut crossed = Crossed::default();
        for (name, asked) in asked {
            let seconds = |since| match made.get(&name) {
                Some(at) => at.saturating_duration_since(since).as_secs_f64(),
                None => f64::INFINITY,
            };
            crossed.latencies.push(seconds(asked));
            crossed.all = crossed.all.max(seconds(began));
        }
        crossed.latencies.sort_by(f64::total_cmp);
        Ok(crossed)
    }

    /// A row of thresholds that are crossed while other policies are renewed, and others changed.
    async fn crossings(
        &self,
        controller: &Controller,
        what: &str,
        policies: &[Policy],
        pause: Duration,
        others: &[Policy],
        flood: Flood,
    ) -> Result<()> {
        let phase = Phase::begin(Some(controller), &self.proxy)?;
        let (renewed, patched) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let crossed = tokio::select! {
            crossed = self.cross(policies, pause) => crossed?,
            ended = self.renew(others, 0, &renewed) => return Err(format!("renewals: {ended:?}").into()),
            ended = self.flood(flood, &patched) => return Err(format!("the flood: {ended:?}").into()),
        };
        let patched = patched.into_inner();
        let cost = phase.end(what, controller, &self.proxy, Instant::now())?;
        let what = match patched {
            0 => what.to_owned(),
            n => format!("{what} ({:.0} a second)", n as f64 / cost.seconds),
        };
        let goal = match pause.is_zero() {
            true => goal("all ≤ 10 s", crossed.all <= 10.0),
            false => goal("p99 ≤ 1 s", crossed.percentile(0.99) <= 1.0),
        };
        println!(
            "| {what} | {} | {} | {} | {:.1} s | {} MiB | {goal} |",
            crossed.latencies.len(),
            crossed.times(),
            cost.requests,
            cost.cpu_seconds,
            cost.used.peak,
        );
        Ok(())
    }

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
        let what = format!("makes everything, {} policies at once", args.workers);
        let phase = Phase::begin(None, &self.proxy)?;
        let workers = format!("--policy-workers={}", args.workers);
        let mut first = self.start(&[&workers]).await;
        self.wait_until_it_watches(&first).await?;
        let at = self.settle(&first).await?;
        let cost = phase.end(&what, &first, &self.proxy, at)?;
        cost.row(&what, 0, &[]);

        first.stop();
        let mut second = self.takes_over("is started again").await?;

        let phase = Phase::begin(Some(&second), &self.proxy)?;
        tokio::time::sleep(MINUTE).await;
        let cost = phase.end("nothing happens", &second, &self.proxy, Instant::now())?;
        let goals = [
            goal("0 requests", cost.requests == 0),
            cost.writes_nothing(),
        ];
        cost.row("nothing happens", 0, &goals);

        for (what, events) in [
            ("Leases are renewed, nothing is new", 0),
            ("Leases are renewed, each time with a delta", 10),
        ] {
            let phase = Phase::begin(Some(&second), &self.proxy)?;
            let renewed = AtomicUsize::new(0);
            let renewals = self.renew(&self.policies, events, &renewed);
            // They do not end by themselves.
            if let Ok(ended) = tokio::time::timeout(MINUTE * args.minutes, renewals).await {
                ended?;
            }
            let cost = phase.end(what, &second, &self.proxy, Instant::now())?;
            let mut goals = vec![cost.fits()];
            if events == 0 {
                goals.push(cost.writes_nothing());
            }
            let renewed = renewed.into_inner();
            let a_minute = renewed as f64 * 60.0 / cost.seconds;
            cost.row(&format!("{what} ({a_minute:.0} a minute)"), renewed, &goals);
            self.settle(&second).await?;
        }
        let began = Instant::now();
        let scraped = second.asked("/metrics").map_or(0, |(_, body)| body.len());
        let took = began.elapsed().as_secs_f64();
        eprintln!("a scrape of /metrics: {scraped} bytes in {took:.2} s");

        second.kill();
        let third = self
            .takes_over("takes over from one that was killed")
            .await?;
        self.cross_thresholds(&third).await
    }

    /// A new controller; everything was looked at by another one before.
    async fn takes_over(&self, what: &str) -> Result<Controller> {
        let phase = Phase::begin(None, &self.proxy)?;
        let controller = self.start_as_usual().await;
        self.wait_until_it_watches(&controller).await?;
        let at = self.settle(&controller).await?;
        let cost = phase.end(what, &controller, &self.proxy, at)?;
        let goals = [cost.within_a_minute(), cost.writes_nothing(), cost.fits()];
        cost.row(what, 0, &goals);
        Ok(controller)
    }

    async fn cross_thresholds(&self, controller: &Controller) -> Result<()> {
        println!();
        println!(
            "| thresholds crossed | Jobs | p50 | p99 | longest | all after | requests | CPU | peak | goal |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|");
        let crowd = self.of_crowd(true);
        let some = self.args.crossings.min(crowd.len() / 3);
        let (evenly, rest) = crowd.split_at(some);
        let (at_once, others) = rest.split_at(some);
        let (pause, none) = (Duration::from_millis(100), Flood::None);
        self.crossings(controller, "ten a second", evenly, pause, others, none)
            .await?;
        self.crossings(controller, "at once", at_once, Duration::ZERO, others, none)
            .await?;

        let small = self.of_crowd(false);
        let some = self.args.seconds.min(small.len() / 3);
        let floods = [
            (none, "one a second, of small tenants"),
            (Flood::Labels, "the same while the crowd's labels change"),
            (Flood::Specs, "the same while the crowd's specs change"),
        ];
        for ((flood, what), policies) in floods.into_iter().zip(small.chunks(some)) {
            let second = Duration::from_secs(1);
            self.crossings(controller, what, policies, second, others, flood)
                .await?;
            if flood == Flood::Labels {
                self.settle(controller).await?;
            }
        }
        Ok(())
    }
}

/// What is changed of the crowd's policies meanwhile.
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
            proxy: Proxy::start(&server.url()).await,
            space,
            policies: (0..args.policies).map(Policy).collect(),
            revisions: (0..args.policies).map(|_| AtomicI64::new(100)).collect(),
            args,
        };
        bench.run().await
    })
}
