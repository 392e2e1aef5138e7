//! A lock by a Kubernetes Lease: stores the record of [`crate::store::lock`] in a Lease.
//!
//! It uses the same fields as client-go's leader election, so that `kubectl get lease` shows the lease
//! holder. The rules of taking a lock are in `store::lock`.

use super::{Client, failure, is_conflict};
use crate::error::{Error, Reason, Result};
use crate::store::lock::{ConditionalWrite, Lock, LockRecord, LockStore, RecordVersion};
use async_trait::async_trait;
use chrono::{DateTime, Utc};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// Returns the lock that this Lease stores. If the holder does not renew it for `duration`, the holder counts
/// as dead.
pub fn lock(client: &Client, name: &str, identity: &str, duration: Duration) -> Lock {
    let store = LeaseLock {
        leases: client.leases(),
        name: name.to_owned(),
        full: client.name(name),
    };
    let (handle, cancel) = (client.handle().clone(), client.cancel().clone());
    Lock::on(Arc::new(store), identity, duration, handle, cancel)
}

struct LeaseLock {
    leases: Api<Lease>,
    name: String,
    full: String,
}

/// Converts a time to the type of Leases.
pub(super) fn micro_time(time: DateTime<Utc>) -> MicroTime {
    MicroTime(Timestamp::from_microsecond(time.timestamp_micros()).unwrap_or_default())
}

/// Converts a time from the type of Leases.
pub(super) fn time(micro_time: &MicroTime) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micro_time.0.as_microsecond()).unwrap_or_default()
}

/// The separator of the identity and our token in `holderIdentity`, as in client-go.
const TOKEN_SEPARATOR: char = '_';

fn holder(record: &LockRecord) -> String {
    if record.token.is_empty() {
        record.holder_identity.clone()
    } else {
        format!(
            "{}{TOKEN_SEPARATOR}{}",
            record.holder_identity, record.token
        )
    }
}

fn spec(record: &LockRecord) -> LeaseSpec {
    let number = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
    LeaseSpec {
        holder_identity: Some(holder(record)),
        acquire_time: Some(micro_time(record.acquire_time)),
        renew_time: Some(micro_time(record.renew_time)),
        lease_duration_seconds: Some(number(record.lease_duration_seconds)),
        lease_transitions: Some(number(record.lease_transitions)),
        ..LeaseSpec::default()
    }
}

fn record(lease: &Lease) -> LockRecord {
    let number = |n: Option<i32>| u32::try_from(n.unwrap_or_default()).unwrap_or_default();
    let spec = lease.spec.clone().unwrap_or_default();
    let holder = spec.holder_identity.unwrap_or_default();
    let (identity, token) = holder
        .rsplit_once(TOKEN_SEPARATOR)
        .unwrap_or((holder.as_str(), ""));
    let at = |t: Option<MicroTime>| t.as_ref().map(time).unwrap_or_default();
    LockRecord {
        holder_identity: identity.to_owned(),
        acquire_time: at(spec.acquire_time),
        renew_time: at(spec.renew_time),
        lease_duration_seconds: number(spec.lease_duration_seconds),
        lease_transitions: number(spec.lease_transitions),
        token: token.to_owned(),
    }
}

impl LeaseLock {
    /// Turns the result of a write into ours: a conflict is not an error.
    fn written<T>(&self, result: Result<T, kube::Error>) -> Result<ConditionalWrite> {
        match result {
            Ok(_) => Ok(ConditionalWrite::Done),
            Err(e) if is_conflict(&e) => Ok(ConditionalWrite::Refused),
            Err(e) => Err(self.failed("write", &e)),
        }
    }

    fn failed(&self, operation: &str, e: &kube::Error) -> Error {
        failure(&format!("{operation} the lock, {}", self.full), e)
    }
}

#[async_trait]
impl LockStore for LeaseLock {
    fn name(&self) -> String {
        self.full.clone()
    }

    async fn read(&self) -> Result<Option<(LockRecord, RecordVersion)>> {
        let lease = self.leases.get_opt(&self.name).await;
        let lease = lease.map_err(|e| self.failed("read", &e))?;
        Ok(lease.map(|lease| {
            let version = RecordVersion {
                e_tag: None,
                version: lease.metadata.resource_version.clone(),
            };
            (record(&lease), version)
        }))
    }

    async fn create(&self, record: &LockRecord) -> Result<ConditionalWrite> {
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(spec(record)),
        };
        self.written(self.leases.create(&PostParams::default(), &lease).await)
    }

    async fn update(
        &self,
        record: &LockRecord,
        version: &RecordVersion,
    ) -> Result<ConditionalWrite> {
        // Other fields of the Lease stay. The resource version causes a conflict if somebody else has written
        // it.
        let patch = Patch::Merge(json!({
            "metadata": {"resourceVersion": version.version},
            "spec": spec(record),
        }));
        let params = PatchParams::default();
        self.written(self.leases.patch(&self.name, &params, &patch).await)
    }

    fn unanswered(&self) -> Reason {
        Reason::KubernetesUnreachable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_being_stored_in_a_lease() {
        let at = |micros| DateTime::from_timestamp_micros(micros).unwrap();
        let of = |identity: &str, token: &str| LockRecord {
            holder_identity: identity.to_owned(),
            acquire_time: at(1_790_000_000_000_001),
            renew_time: at(1_790_000_007_123_456),
            lease_duration_seconds: 30,
            lease_transitions: 7,
            token: token.to_owned(),
        };
        for r in [of("pod_0.1", "00c0ffee"), of("pod-0", "00"), of("", "")] {
            let lease = Lease {
                spec: Some(spec(&r)),
                ..Lease::default()
            };
            assert_eq!(record(&lease), r);
            let text = serde_json::to_string(&lease).unwrap();
            assert_eq!(record(&serde_json::from_str(&text).unwrap()), r, "{text}");
        }
        // An empty Lease has no holder.
        assert_eq!(record(&Lease::default()).holder_identity, "");
    }
}
