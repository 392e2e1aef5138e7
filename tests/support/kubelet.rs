//! A kubelet for tests: runs the Pods of a namespace as processes of the program under test, on this machine.
//!
//! There are no containers: volumes are folders of the test, and their mount paths in arguments and variables
//! are replaced. Everything else works as on a node: Secrets, service accounts, signals, exit codes,
//! termination messages, the Pods' status. A test can also decide how Pods end.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::etcd::Signal;
use super::kube::{Api, Body, write_kubeconfig};
use super::namespace::{TestNamespace, name};
use super::process::{Process, free_port};

/// The label of the Pods that this kubelet runs.
const OURS: &str = "app.kubernetes.io/name=deltafold";
/// The longest termination message that Kubernetes keeps, in bytes.
const LONGEST_MESSAGE: usize = 4096;
/// The path of a service account's token.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// What happens to a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The program runs.
    Run,
    /// The image is being pulled, as long as this is the plan.
    Hold,
    /// The Pod runs and does nothing, as long as this is the plan.
    Hang,
    /// The Pod ends soon, with this exit code and termination message.
    Exit(i32, String),
}

/// A Pod that has started to run.
#[derive(Clone, Debug)]
pub struct Ran {
    pub pod: String,
    pub labels: BTreeMap<String, String>,
    /// The arguments of the Pod, before replacement.
    pub args: Vec<String>,
    pub began: Instant,
    pub ended: Option<(Instant, i32)>,
    /// The file of its output.
    pub log: PathBuf,
}

impl Ran {
    fn has(&self, labels: &[(String, String)]) -> bool {
        labels.iter().all(|(k, v)| self.labels.get(k) == Some(v))
    }
}

/// An order to the process of a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    GoOn,
    /// The Pod was deleted: end the process.
    End,
    /// The Pod is gone: kill the process.
    Kill,
}

type Labels = Vec<(String, String)>;

#[derive(Debug)]
struct Shared {
    api: Api,
    namespace: String,
    root: PathBuf,
    /// The last plan that matches a Pod applies.
    plans: watch::Sender<Vec<(Labels, Plan)>>,
    pods: Mutex<BTreeMap<String, watch::Sender<Order>>>,
    ran: Mutex<Vec<Ran>>,
    /// Labels of Pods to kill, in the order of the requests.
    kills: watch::Sender<Vec<Labels>>,
}

/// The kubelet. It ends with all its processes when it is dropped.
#[derive(Debug)]
pub struct Kubelet {
    shared: Arc<Shared>,
    watch: JoinHandle<()>,
}

impl Kubelet {
    /// Runs the Pods of a namespace from now on.
    pub async fn start(space: &TestNamespace) -> Self {
        let shared = Arc::new(Shared {
            api: space.api.clone(),
            namespace: space.name.clone(),
            root: space.folder("kubelet"),
            plans: watch::Sender::new(Vec::new()),
            pods: Mutex::default(),
            ran: Mutex::default(),
            kills: watch::Sender::new(Vec::new()),
        });
        let client = shared.api.library().await;
        let pods: kube::Api<Pod> = kube::Api::namespaced(client, &shared.namespace);
        let of_pods = shared.clone();
        let watch = tokio::spawn(async move {
            let mut events = watcher(pods, watcher::Config::default().labels(OURS)).boxed();
            while let Some(event) = events.next().await {
                match event {
                    Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => {
                        of_pods.see(&pod);
                    }
                    Ok(watcher::Event::Delete(pod)) => {
                        of_pods.order(&pod, Order::Kill);
                    }
                    Ok(_) => {}
                    // The API server may be down for a while.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        });
        Self { shared, watch }
    }

    /// Sets the plan for Pods with these labels (`[("work", "compaction")]`), including those that wait or hang
    /// now.
    pub fn plan(&self, labels: &[(&str, &str)], plan: Plan) {
        let labels = ours(labels);
        self.shared
            .plans
            .send_modify(|plans| plans.push((labels, plan)));
    }

    /// Kills the processes of matching Pods, as a node does when it is out of memory.
    pub fn kill(&self, labels: &[(&str, &str)]) {
        let labels = ours(labels);
        self.shared.kills.send_modify(|kills| kills.push(labels));
    }

    /// Returns every matching Pod that has started to run.
    pub fn ran(&self, labels: &[(&str, &str)]) -> Vec<Ran> {
        let labels = ours(labels);
        let ran = self.shared.ran.lock().expect("nobody panicked");
        ran.iter().filter(|r| r.has(&labels)).cloned().collect()
    }

    /// Returns the largest number of matching Pods that ran at the same time.
    pub fn most_at_once(&self, labels: &[(&str, &str)]) -> usize {
        let ran = self.ran(labels);
        let runs_at = |at: Instant| {
            let runs = |r: &&Ran| r.began <= at && r.ended.is_none_or(|(end, _)| end > at);
            ran.iter().filter(runs).count()
        };
        ran.iter().map(|r| runs_at(r.began)).max().unwrap_or(0)
    }

    /// Returns the folder that stands for a PersistentVolumeClaim.
    pub fn claim(&self, name: &str) -> PathBuf {
        self.shared.claim(name)
    }

    /// Returns the output of all Pods, for a test that failed.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        for ran in self.ran(&[]) {
            let log = fs::read(&ran.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).into_owned();
            text.push_str(&format!("--- {} {:?}\n{log}\n", ran.pod, ran.args));
        }
        text
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.watch.abort();
        let pods = self.shared.pods.lock().expect("nobody panicked");
        for order in pods.values() {
            order.send_replace(Order::Kill);
        }
    }
}

fn ours(labels: &[(&str, &str)]) -> Labels {
    let ours = labels.iter();
    ours.map(|(k, v)| (format!("deltafold.io/{k}"), (*v).to_owned()))
        .collect()
}

/// Returns a termination message in the form of our Jobs.
pub fn message(command: &str, code: i32, reason: &str, text: &str) -> String {
    let failed = code != 0;
    json!({
        "command": command,
        "status": if failed { "Failed" } else { "Succeeded" },
        "code": code,
        "reason": failed.then_some(reason),
        "retry": failed.then_some([69, 74, 75].contains(&code)),
        "message": failed.then_some(text),
        "seconds": 0.1,
        "finished_at": chrono::Utc::now().to_rfc3339(),
    })
    .to_string()
}

/// The plan of a Pod that succeeds.
pub fn done() -> Plan {
    Plan::Exit(0, message("compact", 0, "", ""))
}

impl Shared {
    fn see(self: &Arc<Self>, pod: &Pod) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let deleted = pod.metadata.deletion_timestamp.is_some();
        if deleted {
            self.order(pod, Order::End);
        }
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        if phase.is_some_and(|phase| phase != "Pending") {
            return;
        }
        let mut pods = self.pods.lock().expect("nobody panicked");
        if pods.contains_key(&uid) || deleted {
            return;
        }
        let (sender, order) = watch::channel(Order::GoOn);
        pods.insert(uid, sender);
        drop(pods);
        let object = serde_json::to_value(pod).expect("JSON");
        tokio::spawn(self.clone().care_for(object, order));
    }

    fn order(&self, pod: &Pod, order: Order) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let pods = self.pods.lock().expect("nobody panicked");
        if let Some(sender) = pods.get(uid) {
            sender.send_if_modified(|o| {
                let more = *o < order;
                *o = (*o).max(order);
                more
            });
        }
    }

    fn claim(&self, name: &str) -> PathBuf {
        let folder = self.root.join("claims").join(name);
        fs::create_dir_all(&folder).expect("a folder for the claim");
        folder
    }

    fn path(&self, pod: &Value) -> String {
        format!("/api/v1/namespaces/{}/pods/{}", self.namespace, name(pod))
    }

    fn plan(&self, pod: &Value) -> Plan {
        let plans = self.plans.borrow();
        let fits = |labels: &Labels| {
            let has = |(k, v): &(String, String)| pod["metadata"]["labels"][k] == v.as_str();
            labels.iter().all(has)
        };
        let plan = plans.iter().rfind(|(labels, _)| fits(labels));
        plan.map_or(Plan::Run, |(_, plan)| plan.clone())
    }

    /// Handles a Pod from its binding to its end.
    async fn care_for(self: Arc<Self>, pod: Value, mut order: watch::Receiver<Order>) {
        let path = self.path(&pod);
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name(&pod)},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "here"},
        });
        let at = format!("{path}/binding");
        let binding = Some((Body::Json, &binding));
        let mut was_away = false;
        while let Err(refused) = self.api.ask(Method::POST, &at, binding).await {
            match refused.code {
                // The API server may be down for a while.
                0 | 403 | 429 | 500.. => {
                    was_away = true;
                    tokio::time::sleep(5 * PAUSE).await;
                }
                // The binding succeeded, and its response was lost.
                409 if was_away => break,
                // The Pod was deleted meanwhile.
                _ => return,
            }
        }
        let mut plans = self.plans.subscribe();
        while self.plan(&pod) == Plan::Hold && *order.borrow() == Order::GoOn {
            tokio::select! {
                _ = plans.changed() => {}
                _ = order.changed() => {}
            }
        }
        let restarts = pod["spec"]["restartPolicy"] != "Never";
        for run in 0.. {
            if *order.borrow() != Order::GoOn {
                // The Pod never ran.
                self.tell(&pod, run, State::Ended(End::of(143))).await;
                break;
            }
            let end = self.run(&pod, run, &mut order).await;
            if *order.borrow() == Order::Kill {
                break;
            }
            if restarts && *order.borrow() == Order::GoOn {
                tokio::time::sleep(10 * PAUSE).await;
                continue;
            }
            self.tell(&pod, run, State::Ended(end)).await;
            break;
        }
        // The kubelet removes a deleted Pod when its process has ended.
        loop {
            match *order.borrow_and_update() {
                Order::Kill => return,
                Order::End => break,
                Order::GoOn => {}
            }
            if order.changed().await.is_err() {
                return;
            }
        }
        let now = json!({
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod["metadata"]["uid"]},
        });
        let _ = self
            .api
            .ask(Method::DELETE, &path, Some((Body::Json, &now)))
            .await;
    }

    async fn run(&self, pod: &Value, run: usize, order: &mut watch::Receiver<Order>) -> End {
        let folder = self.root.join("pods").join(name(pod));
        fs::create_dir_all(&folder).expect("a folder for the Pod");
        let log = folder.join(format!("log-{run}"));
        let labels = || serde_json::from_value(pod["metadata"]["labels"].clone()).expect("labels");
        let at = {
            let mut ran = self.ran.lock().expect("nobody panicked");
            ran.push(Ran {
                pod: name(pod).to_owned(),
                labels: labels(),
                args: texts(&pod["spec"]["containers"][0]["args"]),
                began: Instant::now(),
                ended: None,
                log: log.clone(),
            });
            ran.len() - 1
        };
        let end = self.run_containers(pod, run, &folder, &log, order).await;
        let mut ran = self.ran.lock().expect("nobody panicked");
        ran[at].ended = Some((Instant::now(), end.code));
        end
    }

    /// Runs the containers one after the other. The last one counts if those before it succeed.
    async fn run_containers(
        &self,
        pod: &Value,
        run: usize,
        folder: &Path,
        log: &Path,
        order: &mut watch::Receiver<Order>,
    ) -> End {
        let labels: BTreeMap<String, String> =
            serde_json::from_value(pod["metadata"]["labels"].clone()).expect("labels");
        let mut kills = self.kills.subscribe();
        let known = kills.borrow_and_update().len();
        let killed = move |kills: &[Labels]| {
            let has = |wanted: &Labels| wanted.iter().all(|(k, v)| labels.get(k) == Some(v));
            kills[known..].iter().any(has)
        };
        let volumes = loop {
            // As on a node: the Pod waits until its volumes can be mounted.
            match self.volumes(pod, folder).await {
                Ok(volumes) => break volumes,
                Err(err) => {
                    if *order.borrow() != Order::GoOn {
                        return End::of(143);
                    }
                    let _ = fs::write(log, err);
                    tokio::time::sleep(5 * PAUSE).await;
                }
            }
        };
        self.tell(pod, run, State::Running).await;
        let mut plans = self.plans.subscribe();
        loop {
            match self.plan(pod) {
                Plan::Exit(code, message) => {
                    tokio::time::sleep(PAUSE).await;
                    return End {
                        code,
                        message,
                        before: false,
                    };
                }
                Plan::Run => break,
                Plan::Hold | Plan::Hang => {
                    tokio::select! {
                        _ = plans.changed() => {}
                        _ = kills.changed() => {}
                        _ = order.changed() => {}
                    }
                    if killed(&kills.borrow()) {
                        return End::of(137);
                    }
                    if *order.borrow() != Order::GoOn {
                        return End::of(143);
                    }
                }
            }
        }
        let is_killed = || killed(&kills.borrow());
        for container in list(&pod["spec"]["initContainers"]) {
            let end = self.process(pod, container, &volumes, folder, log, order, &is_killed);
            let end = end.await;
            if end.code != 0 {
                return End {
                    before: true,
                    ..end
                };
            }
        }
        let container = &pod["spec"]["containers"][0];
        let end = self.process(pod, container, &volumes, folder, log, order, &is_killed);
        end.await
    }

    /// Runs a container's process to its end.
    #[allow(clippy::too_many_arguments)]
    async fn process(
        &self,
        pod: &Value,
        container: &Value,
        volumes: &BTreeMap<String, PathBuf>,
        folder: &Path,
        log: &Path,
        order: &watch::Receiver<Order>,
        is_killed: &(dyn Fn() -> bool + Sync),
    ) -> End {
        let mut command = loop {
            match self.command(pod, container, volumes, folder).await {
                Ok(command) => break command,
                Err(err) => {
                    if *order.borrow() != Order::GoOn {
                        return End::of(143);
                    }
                    let _ = fs::write(log, err);
                    tokio::time::sleep(5 * PAUSE).await;
                }
            }
        };
        let termination = folder.join("termination-log");
        File::create(&termination).expect("a file for the message");
        let out = File::options().append(true).create(true).open(log);
        let out = out.expect("a file for what it says");
        let err = out.try_clone().expect("the same file");
        let mut process =
            Process::spawn_to(&mut command, out, err, log).unwrap_or_else(|err| panic!("{err}"));
        let mut told: Option<Instant> = None;
        let status = loop {
            if let Some(status) = process.ended_within(Duration::ZERO) {
                break status;
            }
            let wanted = *order.borrow();
            if is_killed()
                || wanted == Order::Kill
                || told.is_some_and(|told| told.elapsed() > GRACE)
            {
                process.signal(Signal::KILL);
            } else if wanted == Order::End && told.is_none() {
                process.signal(Signal::TERM);
                told = Some(Instant::now());
            }
            tokio::time::sleep(PAUSE).await;
        };
        use std::os::unix::process::ExitStatusExt as _;
        let code = status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        let mut message = fs::read(&termination).unwrap_or_default();
        message.truncate(LONGEST_MESSAGE);
        let policy = &container["terminationMessagePolicy"];
        if message.is_empty() && code != 0 && policy == "FallbackToLogsOnError" {
            let said = fs::read(log).unwrap_or_default();
            message = said[said.len().saturating_sub(2048)..].to_vec();
        }
        End {
            code,
            message: String::from_utf8_lossy(&message).into_owned(),
            before: false,
        }
    }

    /// Builds the command for a container.
    async fn command(
        &self,
        pod: &Value,
        container: &Value,
        volumes: &BTreeMap<String, PathBuf>,
        folder: &Path,
    ) -> Result<Command, String> {
        let mut mounts: Vec<(String, PathBuf)> = Vec::new();
        let mut has_account = false;
        for mount in list(&container["volumeMounts"]) {
            let at = text(&mount["mountPath"]);
            if at == ACCOUNT {
                has_account = true;
                continue;
            }
            let volume = text(&mount["name"]);
            let there = volumes.get(&volume).ok_or("a mount without a volume")?;
            mounts.push((at, there.join(text(&mount["subPath"]))));
        }
        let message_path = text(&container["terminationMessagePath"]);
        mounts.push((message_path, folder.join("termination-log")));
        // The longest path first: one may be inside another.
        mounts.sort_by_key(|(at, _)| std::cmp::Reverse(at.len()));
        let here = |text: &str| moved(text, &mounts);

        let mut command = super::deltafold();
        command.env_clear().current_dir(folder);
        // The root file system of these Pods is read-only.
        command.env("TMPDIR", "/nonexistent");
        command.env("HOSTNAME", name(pod));
        let config = folder.join("kubeconfig");
        if has_account {
            let account = text(&pod["spec"]["serviceAccountName"]);
            let token = self.api.token(&self.namespace, &account).await;
            let token = token.map_err(|err| err.to_string())?;
            write_kubeconfig(&config, self.api.url(), &self.namespace, &token);
        }
        command.env("KUBECONFIG", &config);
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
        command.env("KUBERNETES_SERVICE_PORT", "9");
        let variables = self.variables(pod, container).await?;
        for (variable, value) in &variables {
            command.env(variable, here(value));
        }
        // The first word is the program of the image, whatever its name.
        let mut args: Vec<String> = texts(&container["command"]).into_iter().skip(1).collect();
        args.extend(texts(&container["args"]));
        if let Some(at) = args.iter().position(|a| a == "--metrics-bind-address") {
            // All Pods share the addresses of this machine.
            args[at + 1] = format!("127.0.0.1:{}", free_port());
        }
        for arg in &mut args {
            if arg.starts_with("--metrics-bind-address=") {
                *arg = format!("--metrics-bind-address=127.0.0.1:{}", free_port());
            }
        }
        command.args(args.iter().map(|arg| here(&expanded(arg, &variables))));
        Ok(command)
    }

    async fn volumes(
        &self,
        pod: &Value,
        folder: &Path,
    ) -> Result<BTreeMap<String, PathBuf>, String> {
        let mut volumes = BTreeMap::new();
        for volume in list(&pod["spec"]["volumes"]) {
            let name = text(&volume["name"]);
            let own = folder.join("volumes").join(&name);
            let there = if let Some(secret) = volume.get("secret") {
                // The path ends in the Secret's name, as in the Pod: messages mention it.
                let own = own.join(text(&secret["secretName"]));
                self.write_secret(secret, &own).await?;
                own
            } else if let Some(path) = volume["hostPath"]["path"].as_str() {
                PathBuf::from(path)
            } else if let Some(claim) = volume["persistentVolumeClaim"]["claimName"].as_str() {
                self.claim(claim)
            } else if volume.get("emptyDir").is_some() {
                fs::create_dir_all(&own).expect("a folder for a volume");
                own
            } else {
                // The volume of the service account.
                continue;
            };
            volumes.insert(name, there);
        }
        Ok(volumes)
    }

    async fn write_secret(&self, volume: &Value, folder: &Path) -> Result<(), String> {
        fs::create_dir_all(folder).expect("a folder for a volume");
        let data = match self.secret(&text(&volume["secretName"])).await {
            Ok(data) => data,
            Err(_) if volume["optional"] == true => return Ok(()),
            Err(err) => return Err(err),
        };
        let chosen = list(&volume["items"]);
        for (key, content) in &data {
            let path = match chosen.is_empty() {
                true => Some(key.clone()),
                false => {
                    let item = chosen.iter().find(|i| i["key"] == key.as_str());
                    item.map(|item| text(&item["path"]))
                }
            };
            let Some(path) = path else { continue };
            fs::write(folder.join(path), content).expect("write a Secret");
        }
        let missing = chosen.iter().find(|i| !data.contains_key(&text(&i["key"])));
        match missing {
            Some(item) if volume["optional"] != true => {
                Err(format!("the Secret has no {}", item["key"]))
            }
            _ => Ok(()),
        }
    }

    async fn secret(&self, name: &str) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let path = format!("/api/v1/namespaces/{}/secrets/{name}", self.namespace);
        let secret = self.api.ask(Method::GET, &path, None).await;
        let secret = secret.map_err(|err| err.to_string())?;
        let data = secret["data"].as_object().into_iter().flatten();
        let decoded = data.map(|(key, value)| {
            let bytes = BASE64.decode(value.as_str().unwrap_or_default());
            (key.clone(), bytes.expect("base64"))
        });
        Ok(decoded.collect())
    }

    async fn variables(
        &self,
        pod: &Value,
        container: &Value,
    ) -> Result<Vec<(String, String)>, String> {
        let mut variables = Vec::new();
        for from in list(&container["envFrom"]) {
            let data = self.secret(&text(&from["secretRef"]["name"])).await?;
            for (key, value) in data {
                variables.push((key, String::from_utf8_lossy(&value).into_owned()));
            }
        }
        for variable in list(&container["env"]) {
            let from = &variable["valueFrom"];
            let value = if let Some(field) = from["fieldRef"]["fieldPath"].as_str() {
                let path = format!("/{}", field.replace('.', "/"));
                text(pod.pointer(&path).unwrap_or(&Value::Null))
            } else if let Some(secret) = from.get("secretKeyRef") {
                let data = self.secret(&text(&secret["name"])).await?;
                match data.get(&text(&secret["key"])) {
                    Some(value) => String::from_utf8_lossy(value).into_owned(),
                    None if secret["optional"] == true => continue,
                    None => return Err(format!("the Secret has no {}", secret["key"])),
                }
            } else {
                expanded(&text(&variable["value"]), &variables)
            };
            variables.push((text(&variable["name"]), value));
        }
        Ok(variables)
    }

    /// Writes the Pod's status. The API server may be down for a while.
    async fn tell(&self, pod: &Value, run: usize, state: State) {
        let container = &pod["spec"]["containers"][0];
        let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true);
        let (phase, ready, ended) = match &state {
            State::Running => ("Running", true, json!({"running": {"startedAt": now}})),
            State::Ended(End { code, message, .. }) => {
                let reason = match code {
                    0 => "Completed",
                    _ => "Error",
                };
                let ended = json!({"terminated": {
                    "exitCode": code, "reason": reason, "message": message,
                    "startedAt": now, "finishedAt": now,
                }});
                let phase = match code {
                    0 => "Succeeded",
                    _ => "Failed",
                };
                (phase, false, ended)
            }
        };
        let condition = |type_: &str, is: bool| {
            json!({
                "type": type_,
                "status": if is { "True" } else { "False" },
                "lastTransitionTime": now,
            })
        };
        let told = |container: &Value, state: &Value| {
            json!({
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "started": ready,
                "restartCount": run,
                "state": state,
            })
        };
        let mut before = json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
        let mut own = ended;
        if matches!(&state, State::Ended(end) if end.before) {
            // In this case the container that counts never started.
            before = std::mem::replace(&mut own, json!({"waiting": {"reason": "PodInitializing"}}));
        }
        let befores = list(&pod["spec"]["initContainers"]).iter();
        let befores: Vec<Value> = befores.map(|c| told(c, &before)).collect();
        let status = json!({"status": {
            "phase": phase,
            "startTime": now,
            "conditions": [
                condition("PodScheduled", true),
                condition("Initialized", true),
                condition("ContainersReady", ready),
                condition("Ready", ready),
            ],
            "initContainerStatuses": befores,
            "containerStatuses": [told(container, &own)],
        }});
        let path = format!("{}/status", self.path(pod));
        let started = Instant::now();
        loop {
            match self.api.merge(&path, &status).await {
                Ok(_) => return,
                Err(refused) if refused.code == 404 => return,
                Err(_) if started.elapsed() < Duration::from_secs(60) => {
                    tokio::time::sleep(5 * PAUSE).await;
                }
                Err(refused) => panic!("the status of {}: {refused}", name(pod)),
            }
        }
    }
}

enum State {
    Running,
    Ended(End),
}

/// The end of a Pod.
struct End {
    code: i32,
    message: String,
    /// Whether an earlier container failed.
    before: bool,
}

impl End {
    /// An end without a termination message.
    fn of(code: i32) -> Self {
        Self {
            code,
            message: String::new(),
            before: false,
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn texts(value: &Value) -> Vec<String> {
    list(value).iter().map(text).collect()
}

/// Replaces `$(NAME)` as Kubernetes does.
pub fn expanded(text: &str, variables: &[(String, String)]) -> String {
    let mut expanded = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        expanded.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(behind) = rest.strip_prefix("$$") {
            expanded.push('$');
            rest = behind;
            continue;
        }
        let named = rest.strip_prefix("$(").and_then(|r| r.split_once(')'));
        let found = named.and_then(|(name, behind)| {
            let (_, value) = variables.iter().rfind(|(n, _)| n == name)?;
            Some((value, behind))
        });
        match found {
            Some((value, behind)) => {
                expanded.push_str(value);
                rest = behind;
            }
            None => {
                expanded.push('$');
                rest = &rest[1..];
            }
        }
    }
    expanded.push_str(rest);
    expanded
}

/// Replaces mount paths, the longest first, by the folders on this machine.
pub fn moved(text: &str, mounts: &[(String, PathBuf)]) -> String {
    let mut moved = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        // A path starts at the beginning or after a separator.
        let begins = match moved.chars().last() {
            None => true,
            Some(before) => "=:,\n ".contains(before) || before == '/' && moved.ends_with("://"),
        };
        let found = mounts.iter().filter(|_| begins).find(|(at, _)| {
            rest.strip_prefix(at.as_str())
                .is_some_and(|behind| behind.is_empty() || behind.starts_with(['/', ',', '\n']))
        });
        match found {
            Some((at, there)) => {
                moved.push_str(there.to_str().expect("a plain path").trim_end_matches('/'));
                rest = &rest[at.len()..];
            }
            None => {
                let c = rest.chars().next().expect("there is more");
                moved.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    moved
}
