//! Kubernetes Events about policies and tasks. Each is also logged.
//!
//! They are written in the background, a few at a time, and no reconcile waits for them. They may be lost: if
//! too many of a namespace are waiting, a new one is only logged. Called by the loop in `controller`.

use super::{API_TIMEOUT, Writer, timeout_text};
use crate::base::causes::causes;
use crate::base::{lock, printable};
use crate::controller::plan::PlannedEvent;
use futures::stream::StreamExt;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// The most waiting Events of one namespace.
const MAX_WAITING: usize = 100;
/// The most Events that are written concurrently.
const MAX_CONCURRENT: usize = 4;

/// The queue of Events.
#[derive(Debug)]
pub struct Events {
    queue: UnboundedSender<(Event, ObjectReference)>,
    counts: Arc<Counts>,
}

/// The number of waiting Events, by namespace.
type Counts = Mutex<HashMap<String, usize>>;

impl Events {
    /// Returns a queue, and the future that writes its Events, which the caller must run.
    pub fn new(
        client: kube::Client,
        identity: &str,
        writer: Arc<Writer>,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let reporter = Reporter {
            controller: "deltafold".to_owned(),
            instance: Some(identity.to_owned()),
        };
        let (queue, events) = unbounded_channel();
        let publisher = Publisher {
            recorder: Recorder::new(client, reporter),
            writer,
            counts: Arc::default(),
        };
        let counts = publisher.counts.clone();
        (Events { queue, counts }, publisher.publish_all(events))
    }

    /// Logs a note about an object, and queues it as an Event.
    pub fn publish<K: Resource<DynamicType = ()>>(&self, object: &K, note: &PlannedEvent) {
        let reference = object.object_ref(&());
        let namespace = reference.namespace.as_deref().unwrap_or_default();
        let name = reference.name.as_deref().unwrap_or_default();
        let kind = reference.kind.as_deref().unwrap_or_default();
        let (reason, text) = (&note.reason, &note.text);
        match note.warning {
            true => tracing::warn!(kind, namespace, name, reason, "{text}"),
            false => tracing::info!(kind, namespace, name, reason, "{text}"),
        }
        let event = Event {
            type_: match note.warning {
                true => EventType::Warning,
                false => EventType::Normal,
            },
            reason: note.reason.clone(),
            note: Some(printable::message(text.to_owned())),
            action: note.action.to_owned(),
            secondary: None,
        };
        {
            let mut counts = lock(&self.counts);
            let count = counts.entry(namespace.to_owned()).or_default();
            if *count >= MAX_WAITING {
                tracing::warn!(namespace, name, "an Event is dropped: too many are waiting");
                return;
            }
            *count += 1;
        }
        // This fails only after the publisher has ended, with the controller.
        let _ = self.queue.send((event, reference));
    }
}

/// The writer of queued Events.
struct Publisher {
    recorder: Recorder,
    writer: Arc<Writer>,
    counts: Arc<Counts>,
}

impl Publisher {
    async fn publish_all(self, mut events: UnboundedReceiver<(Event, ObjectReference)>) {
        let events = futures::stream::poll_fn(|cx| events.poll_recv(cx));
        let published = events.for_each_concurrent(MAX_CONCURRENT, |(event, reference)| {
            self.publish(event, reference)
        });
        published.await;
    }

    /// Writes an Event, if this replica is the leader. A failure is only logged.
    async fn publish(&self, event: Event, reference: ObjectReference) {
        let namespace = reference.namespace.clone().unwrap_or_default();
        self.uncount(&namespace);
        if !self.writer.leads() {
            return;
        }
        let published = self.recorder.publish(&event, &reference);
        let cause = match tokio::time::timeout(API_TIMEOUT, published).await {
            Ok(Ok(())) => return,
            Ok(Err(e)) => causes(&e),
            Err(_) => timeout_text(),
        };
        let name = reference.name.unwrap_or_default();
        tracing::warn!(namespace, name, "cannot write an Event: {cause}");
    }

    fn uncount(&self, namespace: &str) {
        if let Entry::Occupied(mut count) = lock(&self.counts).entry(namespace.to_owned()) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}
