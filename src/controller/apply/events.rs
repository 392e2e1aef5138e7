//! Events: what people are told of policies and tasks, beside their statuses. They may get lost.
//!
//! They are written in the background, a few at a time: nothing waits for them. If too many of a namespace are waiting,
//! new ones of it are only logged.

use super::{PATIENCE, Writer};
use crate::base::causes::causes;
use crate::base::lock;
use crate::controller::plan::PlannedEvent;
use futures::stream::StreamExt;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// So many of one namespace wait at most.
const WAITING: usize = 100;
/// So many are written at once.
const AT_ONCE: usize = 4;

/// Where to tell people.
#[derive(Debug)]
pub struct Events {
    waiting: UnboundedSender<(Event, ObjectReference)>,
    counts: Arc<Counts>,
}

/// How many wait, by namespace.
type Counts = Mutex<HashMap<String, usize>>;

impl Events {
    /// With what writes them, which has to be run.
    pub fn new(
        client: kube::Client,
        identity: &str,
        writer: Arc<Writer>,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let reporter = Reporter {
            controller: "deltafold".to_owned(),
            instance: Some(identity.to_owned()),
        };
        let (waiting, events) = unbounded_channel();
        let recorder = Recorder::new(client, reporter);
        let counts = Arc::<Counts>::default();
        let publish = publish(recorder, events, writer, counts.clone());
        (Events { waiting, counts }, publish)
    }

    /// Tells what was decided about an object, and why.
    pub fn tell<K: Resource<DynamicType = ()>>(&self, object: &K, note: &PlannedEvent) {
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
            note: Some(short(text)),
            action: note.action.to_owned(),
            secondary: None,
        };
        {
            let mut counts = lock(&self.counts);
            let count = counts.entry(namespace.to_owned()).or_default();
            if *count >= WAITING {
                tracing::warn!(namespace, name, "an Event is left out: too many wait");
                return;
            }
            *count += 1;
        }
        // Without a receiver all has ended.
        let _ = self.waiting.send((event, reference));
    }
}

async fn publish(
    recorder: Recorder,
    mut events: UnboundedReceiver<(Event, ObjectReference)>,
    writer: Arc<Writer>,
    counts: Arc<Counts>,
) {
    let events = futures::stream::poll_fn(|cx| events.poll_recv(cx));
    let published = events.for_each_concurrent(AT_ONCE, |(event, reference)| {
        let (recorder, writer, counts) = (&recorder, &writer, &counts);
        async move {
            let namespace = reference.namespace.clone().unwrap_or_default();
            if let Entry::Occupied(mut count) = lock(counts).entry(namespace.clone()) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
            if !writer.leads() {
                return;
            }
            let published = recorder.publish(&event, &reference);
            let why = match tokio::time::timeout(PATIENCE, published).await {
                Ok(Ok(())) => return,
                Ok(Err(e)) => causes(&e),
                Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
            };
            let name = reference.name.unwrap_or_default();
            tracing::warn!(namespace, name, "an Event could not be written: {why}");
        }
    });
    published.await;
}

/// As long as the API takes it for a note.
fn short(note: &str) -> String {
    const LONGEST: usize = 1000;
    match note.char_indices().nth(LONGEST) {
        None => note.to_owned(),
        Some((at, _)) => format!("{}…", &note[..at]),
    }
}
