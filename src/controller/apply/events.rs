//! Events: what people are told of policies and tasks, beside their statuses. They may get lost.
//!
//! They are written in the background, a few at a time: nothing waits for them. If too many are waiting, new ones are
//! only logged.

use super::{PATIENCE, Writer};
use crate::base::causes::causes;
use crate::controller::plan::Note;
use futures::stream::StreamExt;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use std::sync::Arc;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// So many wait at most.
const WAITING: usize = 1000;
/// So many are written at once.
const AT_ONCE: usize = 4;

/// Where to tell people.
#[derive(Debug)]
pub struct Events {
    waiting: Sender<(Event, ObjectReference)>,
}

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
        let (waiting, events) = channel(WAITING);
        let recorder = Recorder::new(client, reporter);
        (Events { waiting }, publish(recorder, events, writer))
    }

    /// Tells what was decided about an object, and why.
    pub fn tell<K: Resource<DynamicType = ()>>(&self, object: &K, note: &Note) {
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
        if self.waiting.try_send((event, reference.clone())).is_err() {
            tracing::warn!(namespace, name, "an Event is left out: too many wait");
        }
    }
}

async fn publish(
    recorder: Recorder,
    mut events: Receiver<(Event, ObjectReference)>,
    writer: Arc<Writer>,
) {
    let events = futures::stream::poll_fn(|cx| events.poll_recv(cx));
    let published = events.for_each_concurrent(AT_ONCE, |(event, reference)| {
        let (recorder, writer) = (&recorder, &writer);
        async move {
            if !writer.leads() {
                return;
            }
            let published = recorder.publish(&event, &reference);
            let why = match tokio::time::timeout(PATIENCE, published).await {
                Ok(Ok(())) => return,
                Ok(Err(e)) => causes(&e),
                Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
            };
            let namespace = reference.namespace.unwrap_or_default();
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
