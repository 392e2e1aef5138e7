//! What a policy must have for itself: the place of its backup, and its snapshot Leases. And who has it.
//!
//! Within a namespace the policy that claimed it first has it; a claim is in the status, and ends when the policy
//! wants another place. Other namespaces are others' business: only that there is one is told.

use super::table::{Groups, Rank};
use crate::controller::api::{
    Claim, Claimed, ConditionStatus, EtcdBackupPolicy, StoreSpec, StoreVolume,
};
use crate::controller::jobs;
use crate::controller::names::{Key, key};
use crate::controller::times::utc;
use chrono::{DateTime, SecondsFormat, Utc};
use kube::ResourceExt;

/// Where a policy's backup is, as one text: by URL, and the server and account that the options name. What only a
/// Secret tells is not known here. A local volume is mounted whole, whatever the URL says.
pub fn place(policy: &EtcdBackupPolicy) -> String {
    let store = &policy.spec.store;
    let volume = store.volume.clone().unwrap_or_default();
    match volume {
        StoreVolume {
            persistent_volume_claim: Some(claim),
            ..
        } => format!("claim {} {claim}", policy.namespace().unwrap_or_default()),
        StoreVolume {
            host_path: Some(path),
            ..
        } => format!("folder {}", path.trim_end_matches('/')),
        StoreVolume { .. } => {
            let mut place = jobs::plain_url(&store.url);
            for (what, value) in server(store) {
                place += &format!(" {what}={value}");
            }
            place
        }
    }
}

/// What the options tell of where a store is.
fn server(store: &StoreSpec) -> impl Iterator<Item = (&str, &str)> {
    store.options.iter().filter_map(|(key, value)| {
        let whats = ["endpoint", "endpoint_url", "account_name"];
        let what = whats.into_iter().find(|what| key.ends_with(what))?;
        Some((what.trim_end_matches("_url"), value.trim_end_matches('/')))
    })
}

/// What a policy wants to have for itself.
pub fn wanted(policy: &EtcdBackupPolicy, what: Claimed) -> String {
    match what {
        Claimed::Store => place(policy),
        Claimed::Leases => jobs::lease_prefix(policy).to_owned(),
    }
}

/// The claim of a policy on what it wants, if it has one.
pub fn claim(policy: &EtcdBackupPolicy, what: Claimed) -> Option<Claim> {
    let status = policy.status.as_ref()?;
    let of = wanted(policy, what);
    let mut claims = status.claims.iter();
    if let Some(claim) = claims.find(|c| c.what == what) {
        return (claim.of == of).then(|| claim.clone());
    }
    // 0.1 wrote none: what was carried out has it since it was created.
    let ready = status.condition("Ready");
    let was_ready = ready.is_some_and(|c| c.status == ConditionStatus::True);
    let since = policy.metadata.creation_timestamp.as_ref().map(utc)?;
    let is_so = was_ready && status.observed_generation == policy.metadata.generation;
    is_so.then_some(Claim { what, of, since })
}

/// First those with a claim, the oldest claim first; then by age, then by name.
fn rank(policy: &EtcdBackupPolicy, what: Claimed) -> Rank {
    let claim = claim(policy, what);
    let created = policy.metadata.creation_timestamp.as_ref().map(utc);
    let text = |t: Option<DateTime<Utc>>| {
        t.map_or(String::new(), |t| {
            t.to_rfc3339_opts(SecondsFormat::Secs, true)
        })
    };
    let has_none = u8::from(claim.is_none()).to_string();
    vec![has_none, text(claim.map(|c| c.since)), text(created)]
}

/// The policies of a namespace that want the same.
pub fn rivals(policy: &EtcdBackupPolicy, what: Claimed) -> Key {
    let namespace = policy.namespace().unwrap_or_default();
    let group: &str = what.into();
    (format!("{group} {namespace}"), wanted(policy, what))
}

/// The policies of all namespaces whose backups are in one place, in the order of their namespaces.
pub fn everywhere(policy: &EtcdBackupPolicy) -> Key {
    ("everywhere".to_owned(), place(policy))
}

/// The policies of a namespace with this prefix of snapshot Leases.
pub fn with_leases(namespace: &str, prefix: &str) -> Key {
    let group: &str = Claimed::Leases.into();
    (format!("{group} {namespace}"), prefix.to_owned())
}

/// The policies whose etcd is behind a Service.
pub fn behind((namespace, service): &Key) -> Key {
    (format!("Service {namespace}"), service.clone())
}

/// The groups of a policy.
pub(super) fn groups(policy: &EtcdBackupPolicy) -> Groups {
    let mut groups: Groups = services(policy)
        .iter()
        .map(|service| (behind(service), Rank::new()))
        .collect();
    if policy.metadata.deletion_timestamp.is_none() {
        for what in [Claimed::Store, Claimed::Leases] {
            groups.push((rivals(policy, what), rank(policy, what)));
        }
        groups.push((everywhere(policy), vec![key(policy).0]));
    }
    groups
}

/// The Services that a policy's endpoints name, by namespace and name.
fn services(policy: &EtcdBackupPolicy) -> Vec<Key> {
    let own = policy.namespace().unwrap_or_default();
    let endpoints = policy.spec.etcd.iter().flat_map(|etcd| &etcd.endpoints);
    let services = endpoints.filter_map(|endpoint| service(endpoint, &own));
    services.collect()
}

fn service(endpoint: &str, own_namespace: &str) -> Option<Key> {
    let host = endpoint.split("://").last()?.split(['/', ':']).next()?;
    if host.is_empty() || host.parse::<std::net::IpAddr>().is_ok() {
        return None;
    }
    let parts: Vec<&str> = host.split('.').collect();
    let found = match parts.iter().position(|p| *p == "svc") {
        // SERVICE.NAMESPACE.svc, or POD.SERVICE.NAMESPACE.svc of a headless one.
        Some(at) if at >= 2 => (parts[at - 1], parts[at - 2]),
        Some(_) => return None,
        None => match parts.as_slice() {
            [service] => (own_namespace, *service),
            [service, namespace] => (*namespace, *service),
            _ => return None,
        },
    };
    Some((found.0.to_owned(), found.1.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::EtcdBackupPolicySpec;

    #[test]
    fn an_endpoint_names_its_service() {
        let found = |endpoint: &str| service(endpoint, "own");
        let named = |namespace: &str, name: &str| Some((namespace.to_owned(), name.to_owned()));
        assert_eq!(found("https://etcd:2379"), named("own", "etcd"));
        assert_eq!(found("https://etcd.kube:2379"), named("kube", "etcd"));
        assert_eq!(found("http://etcd.kube.svc:2379"), named("kube", "etcd"));
        assert_eq!(
            found("https://etcd-0.etcd-peer.kube.svc.cluster.local:2379"),
            named("kube", "etcd-peer")
        );
        for none in [
            "http://127.0.0.1:2379",
            "https://svc",
            "https://a.b.example.com:2379",
            "",
        ] {
            assert_eq!(found(none), None, "{none}");
        }
    }

    fn policy(namespace: &str, store: StoreSpec) -> EtcdBackupPolicy {
        let spec = EtcdBackupPolicySpec {
            store,
            ..EtcdBackupPolicySpec::default()
        };
        let mut policy = EtcdBackupPolicy::new("p", spec);
        policy.metadata.namespace = Some(namespace.to_owned());
        policy
    }

    fn at(url: &str, options: &[(&str, &str)], volume: Option<StoreVolume>) -> StoreSpec {
        let options = options
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        StoreSpec {
            url: url.to_owned(),
            options: options.collect(),
            volume,
            ..StoreSpec::default()
        }
    }

    #[test]
    fn one_place_by_several_names() {
        let claim = |name: &str| {
            Some(StoreVolume {
                persistent_volume_claim: Some(name.to_owned()),
                host_path: None,
            })
        };
        let folder = |path: &str| {
            Some(StoreVolume {
                persistent_volume_claim: None,
                host_path: Some(path.to_owned()),
            })
        };
        let here = |url: &str| at(url, &[], None);
        let server = |name: &str| at("s3://b/p", &[("aws_endpoint", name)], None);
        let account = |name: &str| at("az://b/p", &[("azure_storage_account_name", name)], None);
        let same = [
            (here("s3://b/p"), here("s3://b/p/")),
            (here("s3://b/p"), here("s3a://b/p")),
            (here("az://b/p"), here("abfss://b/p")),
            (server("http://a:1"), server("http://a:1/")),
            // The whole volume is the store.
            (
                at("file:///one", &[], folder("/data/")),
                at("file:///two", &[], folder("/data")),
            ),
        ];
        for (a, b) in same {
            let (a, b) = (policy("x", a), policy("y", b));
            assert!(
                place(&a) == place(&b),
                "{:?} {:?}",
                a.spec.store,
                b.spec.store
            );
        }
        let others = [
            (here("s3://b/p"), here("s3://b/q")),
            (here("s3://b/p"), here("gs://b/p")),
            (server("http://a:1"), server("http://b:1")),
            (account("a"), account("b")),
            (
                at("file:///one", &[], folder("/data/a")),
                at("file:///one", &[], folder("/data/b")),
            ),
            // A claim is one of its namespace.
            (
                at("file:///one", &[], claim("c")),
                at("file:///one", &[], claim("c")),
            ),
        ];
        for (a, b) in others {
            let (a, b) = (policy("x", a), policy("y", b));
            assert!(
                place(&a) != place(&b),
                "{:?} {:?}",
                a.spec.store,
                b.spec.store
            );
        }
        let one = policy("x", at("file:///one", &[], claim("c")));
        let two = policy("x", at("file:///two", &[], claim("c")));
        assert_eq!(place(&one), place(&two));
    }
}
