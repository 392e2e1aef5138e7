//! A lock that is a Lease on a real API server: concurrent threads and processes, dead holders, an outage.

use crate::support::kube::{Apiserver, TOKEN, write_kubeconfig};
use crate::support::lock_suite::{self, NAME, Place, SHORT, held, wait_until};
use crate::support::namespace::Alone;
use deltafold::Reason;
use deltafold::base::Cancel;
use tokio::runtime::Runtime;

/// The servers of the Lease. They end when this is dropped.
struct Servers {
    alone: Alone,
    rt: Runtime,
}

impl Servers {
    fn start() -> Self {
        let rt = Runtime::new().unwrap();
        let alone = rt.block_on(Alone::start());
        Servers { alone, rt }
    }

    fn place(&self) -> Place {
        let kubeconfig = self.alone.folder.path().join("kubeconfig");
        let space = &self.alone.space;
        write_kubeconfig(&kubeconfig, space.api.url(), &space.name, TOKEN);
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
    let log = servers.alone.folder.path().join("log");
    lock_suite::processes_take_turns(module_path!(), &servers.place(), &log);
}

#[test]
fn a_lock_survives_an_outage_of_the_api_server() {
    let servers = Servers::start();
    let place = servers.place();
    let Servers { alone, rt } = servers;
    let handle = rt.handle().clone();
    let mut lock = place.lock(&handle, &Cancel::default(), "holder", SHORT);
    let held = held(lock.try_acquire().unwrap());
    let Alone {
        server,
        etcd,
        space,
        folder: _folder,
    } = alone;
    let port = server.port();
    drop(server);
    wait_until("it has expired", || !held.is_held());
    let e = held.check().unwrap_err();
    assert_eq!(e.reason(), Reason::LockHeld, "{e}");
    let e = held.renew().unwrap_err();
    assert_eq!(e.reason(), Reason::KubernetesUnreachable, "{e}");
    let _server = rt.block_on(Apiserver::start_at(port, &etcd));
    wait_until("it goes on", || held.is_held());
    // The Lease has client-go's fields, and other fields stay as they are.
    let mut lease = rt.block_on(space.must_get("leases", NAME));
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
    while rt.block_on(space.replace("leases", &lease)).is_err() {
        let now = rt.block_on(space.must_get("leases", NAME));
        lease["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"].clone();
        lease["spec"] = now["spec"].clone();
    }
    held.renew().unwrap();
    held.release().unwrap();
    let lease = rt.block_on(space.must_get("leases", NAME));
    assert_eq!(lease["metadata"]["labels"]["others"], "stay");
    assert_eq!(lease["spec"]["holderIdentity"], "");
}
