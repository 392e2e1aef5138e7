//! Claims: only one policy may use the location of a backup, and only one the snapshot Leases.
//!
//! Within a namespace, the policy that claimed it first has it. The claim is recorded in the status, and ends
//! when the spec names another location. Between namespaces there are no claims; a shared location is only
//! reported. This module sorts policies into groups of contenders, and does not write claims: `plan::policy`,
//! which calls it, does.

use super::table::{Groups, Rank};
use crate::controller::api::{Claim, Claimed, EtcdBackupPolicy, StoreSpec, StoreVolume};
use crate::controller::jobs;
use crate::controller::names::{Key, key};
use crate::controller::times::utc;
use chrono::{DateTime, SecondsFormat, Utc};
use kube::ResourceExt;

/// Returns the location of a policy's backup: the URL, with the server and account of the options. Settings
/// in a Secret are unknown here. For a local store, the whole volume is the location, because every Pod
/// mounts all of it.
pub fn location(policy: &EtcdBackupPolicy) -> String {
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
            let mut location = jobs::plain_url(&store.url);
            for (name, value) in server_options(store) {
                location += &format!(" {name}={value}");
            }
            location
        }
    }
}

/// Returns the options that name the server or the account of a store, without the prefixes of the providers.
fn server_options(store: &StoreSpec) -> impl Iterator<Item = (&str, &str)> {
    const NAMES: [&str; 3] = ["endpoint", "endpoint_url", "account_name"];
    store.options.iter().filter_map(|(key, value)| {
        let name = NAMES.into_iter().find(|name| key.ends_with(name))?;
        Some((name.trim_end_matches("_url"), value.trim_end_matches('/')))
    })
}

/// Returns the text that identifies what a policy claims: the location of its backup, or its Lease prefix.
pub fn claimed_value(policy: &EtcdBackupPolicy, what: Claimed) -> String {
    match what {
        Claimed::Store => location(policy),
        Claimed::Leases => jobs::lease_prefix(policy).to_owned(),
    }
}

/// Returns the claim of a policy on what its spec names, if it has one.
pub fn claim(policy: &EtcdBackupPolicy, what: Claimed) -> Option<Claim> {
    let status = policy.status.as_ref()?;
    let of = claimed_value(policy, what);
    let mut claims = status.claims.iter();
    claims.find(|c| c.what == what && c.of == of).cloned()
}

/// Returns the rank of a policy among the contenders. Those with a claim come first, by the age of the claim;
/// then the others, by the age of the policy. The table sorts equal ranks by name.
fn rank(policy: &EtcdBackupPolicy, what: Claimed) -> Rank {
    let claim = claim(policy, what);
    let created = policy.metadata.creation_timestamp.as_ref().map(utc);
    let text = |time: Option<DateTime<Utc>>| match time {
        Some(time) => time.to_rfc3339_opts(SecondsFormat::Secs, true),
        None => String::new(),
    };
    let has_no_claim = u8::from(claim.is_none()).to_string();
    vec![has_no_claim, text(claim.map(|c| c.since)), text(created)]
}

/// Returns the group of a namespace's policies that compete with this one for a location or for Leases.
pub fn contenders(policy: &EtcdBackupPolicy, what: Claimed) -> Key {
    let namespace = policy.namespace().unwrap_or_default();
    let group: &str = what.into();
    (format!("{group} {namespace}"), claimed_value(policy, what))
}

/// Returns the group of all namespaces' policies with this one's location, sorted by namespace.
pub fn same_location(policy: &EtcdBackupPolicy) -> Key {
    ("everywhere".to_owned(), location(policy))
}

/// Returns the group of a namespace's policies with this Lease prefix.
pub fn lease_users(namespace: &str, prefix: &str) -> Key {
    let group: &str = Claimed::Leases.into();
    (format!("{group} {namespace}"), prefix.to_owned())
}

/// Returns the group of the policies whose etcd is behind a Service.
pub fn behind_service((namespace, service): &Key) -> Key {
    (format!("Service {namespace}"), service.clone())
}

/// Returns the groups of a policy.
pub(super) fn groups(policy: &EtcdBackupPolicy) -> Groups {
    let mut groups: Groups = services(policy)
        .iter()
        .map(|service| (behind_service(service), Rank::new()))
        .collect();
    if policy.metadata.deletion_timestamp.is_none() {
        for what in [Claimed::Store, Claimed::Leases] {
            groups.push((contenders(policy, what), rank(policy, what)));
        }
        groups.push((same_location(policy), vec![key(policy).0]));
    }
    groups
}

/// Returns the Services of a policy's endpoints, by namespace and name.
fn services(policy: &EtcdBackupPolicy) -> Vec<Key> {
    let own_namespace = policy.namespace().unwrap_or_default();
    let endpoints = policy.spec.etcd.iter().flat_map(|etcd| &etcd.endpoints);
    let services = endpoints.filter_map(|endpoint| service(endpoint, &own_namespace));
    services.collect()
}

/// Returns the Service of an endpoint; `None` if its host is an IP address or a name outside of the cluster.
fn service(endpoint: &str, own_namespace: &str) -> Option<Key> {
    let host = endpoint.split("://").last()?.split(['/', ':']).next()?;
    if host.is_empty() || host.parse::<std::net::IpAddr>().is_ok() {
        return None;
    }
    let parts: Vec<&str> = host.split('.').collect();
    let (namespace, service) = match parts.iter().position(|p| *p == "svc") {
        // SERVICE.NAMESPACE.svc, or POD.SERVICE.NAMESPACE.svc if the Service is headless.
        Some(at) if at >= 2 => (parts[at - 1], parts[at - 2]),
        Some(_) => return None,
        None => match parts.as_slice() {
            [service] => (own_namespace, *service),
            [service, namespace] => (*namespace, *service),
            _ => return None,
        },
    };
    Some((namespace.to_owned(), service.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::EtcdBackupPolicySpec;

    #[test]
    fn an_endpoint_names_its_service() {
        let parsed = |endpoint: &str| service(endpoint, "own");
        let named = |namespace: &str, name: &str| Some((namespace.to_owned(), name.to_owned()));
        assert_eq!(parsed("https://etcd:2379"), named("own", "etcd"));
        assert_eq!(parsed("https://etcd.kube:2379"), named("kube", "etcd"));
        assert_eq!(parsed("http://etcd.kube.svc:2379"), named("kube", "etcd"));
        assert_eq!(
            parsed("https://etcd-0.etcd-peer.kube.svc.cluster.local:2379"),
            named("kube", "etcd-peer")
        );
        for none in [
            "http://127.0.0.1:2379",
            "https://svc",
            "https://a.b.example.com:2379",
            "",
        ] {
            assert_eq!(parsed(none), None, "{none}");
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
    fn equal_locations_have_equal_texts() {
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
            // For a local store, the volume counts, not the URL.
            (
                at("file:///one", &[], folder("/data/")),
                at("file:///two", &[], folder("/data")),
            ),
        ];
        for (a, b) in same {
            let (a, b) = (policy("x", a), policy("y", b));
            assert!(
                location(&a) == location(&b),
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
            // The policies have different namespaces, so these are two PersistentVolumeClaims.
            (
                at("file:///one", &[], claim("c")),
                at("file:///one", &[], claim("c")),
            ),
        ];
        for (a, b) in others {
            let (a, b) = (policy("x", a), policy("y", b));
            assert!(
                location(&a) != location(&b),
                "{:?} {:?}",
                a.spec.store,
                b.spec.store
            );
        }
        let one = policy("x", at("file:///one", &[], claim("c")));
        let two = policy("x", at("file:///two", &[], claim("c")));
        assert_eq!(location(&one), location(&two));
    }
}
