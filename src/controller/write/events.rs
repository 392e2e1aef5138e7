//! Kubernetes Events about policies and tasks. Each is also logged.
//!
//! They are written in the background, a few at a time, and no reconciliation waits for them. They may be lost: if too
//! many are waiting, a new one is only logged.

use super::{FIELD_MANAGER, Failure, Writer, patch_params, with_timeout};
use crate::base::hash::short_hash;
use crate::base::printable;
use crate::controller::decide::PlannedEvent;
use crate::controller::names::NamespacedName;
use futures::channel::mpsc::{Receiver, Sender, channel};
use futures::stream::StreamExt;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PostParams};
use kube::{Api, Resource};
use serde_json::json;
use std::sync::{Arc, Mutex};

/// The most waiting Events.
const MAX_WAITING: usize = 1000;
/// The most Events that are written concurrently.
const MAX_CONCURRENT: usize = 4;
/// The name of this controller in Events.
const REPORTER: &str = "deltafold";

/// The queue of Events.
#[derive(Debug)]
pub struct Events {
    queue: Mutex<Sender<Event>>,
    identity: String,
}

impl Events {
    /// Returns a queue, and the future that writes its Events, which the caller must run.
    pub fn new(
        client: kube::Client,
        identity: &str,
        writer: Arc<Writer>,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (queue, events) = channel(MAX_WAITING);
        let events_queue = Events {
            queue: Mutex::new(queue),
            identity: identity.to_owned(),
        };
        (events_queue, publish_all(client, writer, events))
    }

    /// Logs a note about an object, and queues it as an Event.
    pub fn publish<K: Resource<DynamicType = ()>>(&self, object: &K, note: &PlannedEvent) {
        let reference = object.object_ref(&());
        let namespace = reference.namespace.clone().unwrap_or_default();
        let name = reference.name.clone().unwrap_or_default();
        let kind = reference.kind.clone().unwrap_or_default();
        let (reason, text) = (&note.reason, &note.text);
        if note.warning {
            tracing::warn!(kind, namespace, name, reason, "{text}");
        } else {
            tracing::info!(kind, namespace, name, reason, "{text}");
        }
        let event = self.event(reference, note);
        if crate::base::lock(&self.queue).try_send(event).is_err() {
            tracing::warn!(namespace, name, "an Event is dropped: too many are waiting");
        }
    }

    fn event(&self, reference: ObjectReference, note: &PlannedEvent) -> Event {
        let now = Timestamp::now();
        let uid = reference.uid.as_deref().unwrap_or_default();
        // The same note about the same object has the same name, so that Kubernetes counts it.
        let id = short_hash(format!("{uid}/{}/{}", note.reason, note.text), 8);
        Event {
            metadata: ObjectMeta {
                name: Some(format!(
                    "{}.{id}",
                    reference.name.as_deref().unwrap_or_default()
                )),
                namespace: reference.namespace.clone(),
                ..ObjectMeta::default()
            },
            involved_object: reference,
            type_: Some(if note.warning { "Warning" } else { "Normal" }.to_owned()),
            reason: Some(note.reason.clone()),
            action: Some(note.action.to_owned()),
            message: Some(printable::message(note.text.clone())),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            event_time: Some(MicroTime(now)),
            count: Some(1),
            source: Some(EventSource {
                component: Some(REPORTER.to_owned()),
                host: None,
            }),
            reporting_component: Some(REPORTER.to_owned()),
            reporting_instance: Some(self.identity.clone()),
            ..Event::default()
        }
    }
}

async fn publish_all(client: kube::Client, writer: Arc<Writer>, events: Receiver<Event>) {
    let published = events.for_each_concurrent(MAX_CONCURRENT, |event| {
        let (client, writer) = (client.clone(), writer.clone());
        async move {
            let name = NamespacedName::of(&event);
            // Only the leader writes.
            if writer.leads()
                && let Err(failure) = publish(client, event).await
            {
                tracing::warn!("{failure}: {name}");
            }
        }
    });
    published.await;
}

/// Writes an Event, or counts it if it exists.
async fn publish(client: kube::Client, event: Event) -> Result<(), Failure> {
    let name = NamespacedName::of(&event);
    let api: Api<Event> = Api::namespaced(client, &name.namespace);
    let params = PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    };
    match with_timeout("write an Event", api.create(&params, &event)).await {
        Err(failure) if failure.is_conflict() => {}
        created => return created.map(drop),
    }
    let Some(existing) = with_timeout("read an Event", api.get_opt(&name.name)).await? else {
        return Ok(());
    };
    let counted = json!({
        "count": existing.count.unwrap_or(1).saturating_add(1),
        "lastTimestamp": event.last_timestamp,
    });
    let patch = Patch::Merge(&counted);
    with_timeout(
        "count an Event",
        api.patch(&name.name, &patch_params(), &patch),
    )
    .await?;
    Ok(())
}
