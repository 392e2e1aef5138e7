//! Waits until what was recovered is ready.

use super::{RecoveredState, Told};
use crate::base::Cancel;
use crate::error::Result;
use crate::kubernetes::live_objects::{Answer, LiveObjects, ObjectId};
use serde_json::{Map, Value};
use std::time::{Duration, Instant};

/// The pause before the objects are looked at again.
const PAUSE: Duration = Duration::from_secs(1);

/// Looks at workloads and claims until all are ready, or the time is over. `objects` are places in the report and names.
pub(super) fn until_ready(
    cluster: &mut LiveObjects,
    cancel: &Cancel,
    timeout: Duration,
    objects: &[(usize, &ObjectId)],
    state: &mut RecoveredState,
    tell: &mut dyn FnMut(Told<'_>) -> Result<()>,
) -> Result<()> {
    let begun = Instant::now();
    let kinds = [
        "Deployment",
        "StatefulSet",
        "DaemonSet",
        "PersistentVolumeClaim",
    ];
    let waited = objects
        .iter()
        .filter(|(_, id)| kinds.contains(&id.kind.as_str()));
    let mut waited: Vec<_> = waited.map(|(nth, id)| (*nth, *id, String::new())).collect();
    loop {
        let mut still = Vec::new();
        for (nth, id, before) in waited {
            let Answer::Done(live) = cluster.get(id)? else {
                state.objects[nth].ready = Some(false);
                continue;
            };
            let (is_ready, how) = readiness(&live);
            state.objects[nth].ready = Some(is_ready);
            if how != before {
                tell(Told::Waiting(&format!(
                    "{}: {how}",
                    state.objects[nth].object
                )))?;
            }
            if !is_ready {
                still.push((nth, id, how));
            }
        }
        if still.is_empty() || begun.elapsed() >= timeout {
            return Ok(());
        }
        waited = still;
        cancel.check()?;
        std::thread::sleep(PAUSE);
    }
}

/// Returns whether an object is ready, and how far it is.
fn readiness(object: &Map<String, Value>) -> (bool, String) {
    let number = |part: &str, field: &str| object.get(part)?.get(field)?.as_i64();
    let generation = number("metadata", "generation");
    let is_seen = generation <= number("status", "observedGeneration");
    let replicas = number("spec", "replicas").unwrap_or(1);
    let (ready, wanted) = match object.get("kind").and_then(Value::as_str) {
        Some("Deployment") => (number("status", "availableReplicas"), Some(replicas)),
        Some("StatefulSet") => (number("status", "readyReplicas"), Some(replicas)),
        Some("DaemonSet") => (
            number("status", "numberAvailable"),
            number("status", "desiredNumberScheduled"),
        ),
        _ => {
            let phase = object.get("status").and_then(|s| s.get("phase"));
            let phase = phase.and_then(Value::as_str).unwrap_or("Pending");
            return (phase == "Bound", phase.to_owned());
        }
    };
    let (ready, wanted) = (ready.unwrap_or(0), wanted.unwrap_or(0));
    (
        is_seen && ready >= wanted,
        format!("{ready} of {wanted} ready"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_controller_has_not_seen_is_not_ready() {
        let told = |object: Value| readiness(object.as_object().unwrap());
        let web = |generation: i64, observed: i64, available: i64| {
            told(json!({
                "kind": "Deployment", "metadata": {"generation": generation}, "spec": {"replicas": 2},
                "status": {"observedGeneration": observed, "availableReplicas": available},
            }))
        };
        assert_eq!(web(2, 1, 2), (false, "2 of 2 ready".to_owned()));
        assert_eq!(web(2, 2, 1), (false, "1 of 2 ready".to_owned()));
        assert_eq!(web(2, 2, 2), (true, "2 of 2 ready".to_owned()));
        let created = told(json!({"kind": "StatefulSet", "metadata": {"generation": 1}}));
        assert_eq!(created, (false, "0 of 1 ready".to_owned()));
        let bound = told(json!({"kind": "PersistentVolumeClaim", "status": {"phase": "Bound"}}));
        assert_eq!(bound, (true, "Bound".to_owned()));
    }
}
