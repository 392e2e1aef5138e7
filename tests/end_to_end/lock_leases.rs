//! A lock that is a Lease on a real API server: concurrent threads and processes, dead holders, an outage.

use crate::support::etcd::Etcd;
use crate::support::kube::{Apiserver, TOKEN};
use crate::support::lock_suite::{self, NAME, Place, SHORT, held, wait_until};
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use deltafold::Reason;
use deltafold::base::Cancel;
use tempfile::TempDir;
use tokio::runtime::Runtime;

const SPACE: &str = "backup";

/// The servers of the Lease. They end when this is dropped.
struct Servers {
    rt: Runtime,
    folder: TempDir,
    server: Option<Apiserver>,
    etcd: Etcd,
}

impl Servers {
    fn start() -> Self {
        let rt = Runtime::new().unwrap();
        let folder = scratch::folder().unwrap();
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
        let server = rt.block_on(Apiserver::start(&etcd));
        rt.block_on(server.create_namespace(SPACE));
        Servers {
            rt,
            folder,
            server: Some(server),
            etcd,
        }
    }

    fn place(&self) -> Place {
        let kubeconfig = self.folder.path().join("kubeconfig");
        let server = self.server.as_ref().unwrap();
        server.lasting_kubeconfig(&kubeconfig, SPACE, TOKEN);
        Place::lease(&kubeconfig)
    }
}

#[test]
fn threads_take_turns_everywhere() {
    let servers = Servers::start();
    lock_suite::threads_take_turns(servers.rt.handle(), &servers.place());
}

#[test]
fn one_that_is_alive_is_not_waited_for_and_one_that_gives_back_is_followed_at_once() {
    let servers = Servers::start();
    lock_suite::the_living_are_not_waited_for(servers.rt.handle(), &servers.place());
}

/// Run as a process by the tests below.
#[test]
fn a_process_of_its_own() {
    lock_suite::a_process_of_its_own();
}

#[test]
fn processes_take_turns_and_those_that_are_killed_block_nobody_for_good() {
    let servers = Servers::start();
    let log = servers.folder.path().join("log");
    lock_suite::processes_take_turns(module_path!(), &servers.place(), &log);
}

#[test]
fn a_lock_survives_an_outage_of_the_api_server() {
    let mut servers = Servers::start();
    let place = servers.place();
    let handle = servers.rt.handle().clone();
    let mut lock = place.lock(&handle, &Cancel::default(), "holder", SHORT);
    let held = held(lock.try_acquire().unwrap());
    let port = servers.server.as_ref().unwrap().port();
    servers.server = None;
    wait_until("it has expired", || !held.is_held());
    let e = held.check().unwrap_err();
    assert_eq!(e.reason(), Reason::LockHeld, "{e}");
    let e = held.renew().unwrap_err();
    assert_eq!(e.reason(), Reason::KubernetesUnreachable, "{e}");
    let server = servers
        .rt
        .block_on(Apiserver::start_at(port, &servers.etcd));
    wait_until("it goes on", || held.is_held());
    // The Lease has client-go's fields, and other fields stay as they are.
    let mut lease = servers.rt.block_on(server.lease(SPACE, NAME)).unwrap();
    let spec = &lease["spec"];
    assert!(
        spec["holderIdentity"]
            .as_str()
            .unwrap()
            .starts_with("holder_"),
        "{lease}"
    );
    assert_eq!(spec["leaseDurationSeconds"], 2);
    assert!(
        spec["acquireTime"].is_string() && spec["renewTime"].is_string(),
        "{lease}"
    );
    lease["metadata"]["labels"] = serde_json::json!({"others": "stay"});
    while servers
        .rt
        .block_on(server.replace_lease(SPACE, &lease))
        .is_err()
    {
        let now = servers.rt.block_on(server.lease(SPACE, NAME)).unwrap();
        lease["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"].clone();
        lease["spec"] = now["spec"].clone();
    }
    held.renew().unwrap();
    held.release().unwrap();
    let lease = servers.rt.block_on(server.lease(SPACE, NAME)).unwrap();
    assert_eq!(lease["metadata"]["labels"]["others"], "stay");
    assert_eq!(lease["spec"]["holderIdentity"], "");
}
