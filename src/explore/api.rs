//! The JSON API behind the page, and the page itself. docs/design/explore.md documents it.
//!
//! Every answer about contents comes from the index; until it is there, such a request is answered with 503. `guard`
//! has checked the request.

use super::index::{Index, Key};
use super::store::Overview;
use super::views::{
    Changes, Comparison, Density, Filter, Given, Life, LineFilter, Lines, Objects, Search, Show,
    Shown, State as Tree, Table, Window, any_revision_of, revision_of, step,
};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::objects::EncryptionKeys;
use crate::objects::names::NameSearch;
use crate::ops::read::log::Happened;
use crate::prefix::open::BackupLocation;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use axum::{Json, Router};
use base64_simd::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::{Arc, OnceLock};

/// The modules of the page's program.
const SCRIPTS: [(&str, &str); 8] = [
    ("/app.js", include_str!("page/app.js")),
    ("/backup.js", include_str!("page/backup.js")),
    ("/detail.js", include_str!("page/detail.js")),
    ("/dom.js", include_str!("page/dom.js")),
    ("/lines.js", include_str!("page/lines.js")),
    ("/objects.js", include_str!("page/objects.js")),
    ("/plot.js", include_str!("page/plot.js")),
    ("/state.js", include_str!("page/state.js")),
];

/// What all requests share.
pub(super) struct Shared {
    pub(super) backup: BackupLocation,
    /// What opens objects that an API server has encrypted.
    pub(super) keys: EncryptionKeys,
    /// What the store holds; nothing for a plain snapshot file.
    pub(super) overview: OnceLock<Result<Overview>>,
    pub(super) index: OnceLock<Result<Index>>,
}

/// The parameters of all requests.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Parameters {
    /// A revision or a time.
    at: Option<String>,
    from: Option<String>,
    to: Option<String>,
    /// A key: its bytes in base64, for URLs.
    id: String,
    namespace: Option<String>,
    kind: Option<u16>,
    other: bool,
    offset: usize,
    q: String,
    /// The time zone of the browser.
    zone: Option<String>,
    /// Whether a span begins at the moment.
    begins: bool,
    within: String,
    secrets: bool,
    clean: bool,
    managers: bool,
    before: Option<i64>,
    brief: bool,
    bars: Option<usize>,
    back: bool,
    sort: String,
    descending: bool,
    only: Option<Happened>,
}

impl Parameters {
    fn key<'i>(&self, index: &'i Index) -> Result<&'i Key> {
        let bytes = URL_SAFE_NO_PAD.decode_to_vec(&self.id);
        let key = bytes.ok().and_then(|bytes| index.key(&bytes));
        key.ok_or_else(|| Reason::KeyNotFound.error("the backup has no such key at any time"))
    }

    fn revision(&self, index: &Index) -> Result<Revision> {
        revision_of(index, self.at.as_deref())
    }

    fn show<'k>(&self, shared: &'k Shared) -> Show<'k> {
        Show {
            keys: &shared.keys,
            has_secrets: self.secrets,
            is_clean: self.clean,
            has_managers: self.managers,
        }
    }
}

/// Returns the routes, without the guard.
pub(super) fn routes() -> Router<Arc<Shared>> {
    let mut router = Router::new();
    let file = |kind, content| get(move || async move { ([(CONTENT_TYPE, kind)], content) });
    for (path, content) in SCRIPTS {
        router = router.route(path, file("text/javascript; charset=utf-8", content));
    }
    let (page, style) = (
        include_str!("page/index.html"),
        include_str!("page/style.css"),
    );
    router
        .route("/", file("text/html; charset=utf-8", page))
        .route("/style.css", file("text/css; charset=utf-8", style))
        .route("/api/backup", get(backup))
        .route(
            "/api/density",
            view(|_, index, p| {
                let range = p.from.as_deref().zip(p.to.as_deref());
                Density::of(index, p.bars.unwrap_or(200), range)
            }),
        )
        .route(
            "/api/state",
            view(|_, index, p| Ok(Tree::of(index, p.revision(index)?))),
        )
        .route(
            "/api/step",
            view(|_, index, p| {
                let from = any_revision_of(index, p.at.as_deref())?;
                Ok(step(index, from, !p.back))
            }),
        )
        .route(
            "/api/objects",
            view(|shared, index, p| {
                let filter = Filter {
                    namespace: p.namespace.clone(),
                    kind: p.kind,
                    is_other: p.other,
                    offset: p.offset,
                    word: p.q.to_lowercase(),
                    sort: p.sort.clone(),
                    is_descending: p.descending,
                };
                Table::of(index, &shared.keys, p.revision(index)?, &filter)
            }),
        )
        .route(
            "/api/search",
            view(|shared, index, p| {
                let search = Search::parse(&p.q, &p.within)?;
                let revision = p.revision(index)?;
                Objects::search(index, &shared.keys, revision, &search)
            }),
        )
        .route(
            "/api/object",
            view(|shared, index, p| {
                let revision = p.revision(index)?;
                Ok(Shown::of(index, p.key(index)?, revision, &p.show(shared))?.cut())
            }),
        )
        .route(
            "/api/life",
            view(|shared, index, p| {
                Life::of(
                    index,
                    p.key(index)?,
                    p.before.map(Revision),
                    &p.show(shared),
                    p.brief,
                )
            }),
        )
        .route(
            "/api/diff",
            view(|shared, index, p| {
                let (key, show) = (p.key(index)?, p.show(shared));
                let side = |text: &Option<String>| {
                    let revision = revision_of(index, text.as_deref())?;
                    Ok(Shown::of(index, key, revision, &show)?.cut())
                };
                Ok(Comparison::of(side(&p.from)?, side(&p.to)?))
            }),
        )
        .route(
            "/api/log",
            view(|shared, index, p| {
                let from = any_revision_of(index, p.from.as_deref().or(Some("0")))?;
                let to = any_revision_of(index, p.to.as_deref())?;
                let filter = LineFilter {
                    namespace: p.namespace.clone(),
                    kind: p.kind,
                    only: p.only,
                    words: NameSearch::parse(&p.q),
                    offset: p.offset,
                };
                Lines::of(index, &shared.keys, from, to, &filter)
            }),
        )
        .route(
            "/api/changes",
            view(|shared, index, p| {
                let from = any_revision_of(index, p.from.as_deref())?;
                let to = any_revision_of(index, p.to.as_deref())?;
                Changes::of(index, &shared.keys, from, to)
            }),
        )
        .route(
            "/api/moment",
            view(|_, _, p| Ok(Given::of(&p.q, p.zone.as_deref(), p.begins))),
        )
        .route("/api/yaml", get(download))
}

/// The backup as a whole, and how far it was read.
#[derive(Serialize)]
struct Backup<'a> {
    /// The URL or path.
    name: String,
    /// The flag that names it: `--store` or `--snapshot`.
    flag: &'static str,
    version: &'static str,
    /// `reading`, `ready` or `failed`.
    phase: &'static str,
    /// Bytes that have been read from the store.
    read_bytes: u64,
    /// Why it failed.
    error: Option<ErrorBody>,
    /// What the index covers, once it is ready.
    window: Option<Window>,
    /// What the store holds; null until it is known, and for a plain snapshot file.
    overview: Option<&'a Overview>,
    /// Why what the store holds is not known.
    overview_error: Option<ErrorBody>,
}

async fn backup(State(shared): State<Arc<Shared>>) -> Response {
    let index = shared.index.get();
    let (phase, error) = match index {
        None => ("reading", None),
        Some(Ok(_)) => ("ready", None),
        Some(Err(e)) => ("failed", Some(ErrorBody::of(e))),
    };
    let overview = shared.overview.get();
    Json(Backup {
        name: shared.backup.name(),
        flag: match shared.backup {
            BackupLocation::File(..) => "--snapshot",
            _ => "--store",
        },
        version: env!("CARGO_PKG_VERSION"),
        phase,
        read_bytes: shared.backup.context().store.bytes_read(),
        error,
        window: index.and_then(|index| index.as_ref().ok()).map(Window::of),
        overview: overview.and_then(|overview| overview.as_ref().ok()),
        overview_error: overview
            .and_then(|overview| overview.as_ref().err())
            .map(ErrorBody::of),
    })
    .into_response()
}

/// An error in an answer.
#[derive(Debug, Serialize)]
struct ErrorBody {
    reason: &'static str,
    message: String,
}

impl ErrorBody {
    fn of(e: &Error) -> Self {
        ErrorBody {
            reason: e.reason().as_str(),
            message: e.to_string(),
        }
    }
}

fn error_response(e: &Error) -> Response {
    let status = match e.reason() {
        Reason::Usage => StatusCode::BAD_REQUEST,
        Reason::KeyNotFound => StatusCode::NOT_FOUND,
        Reason::RevisionGap => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, Json(json!({"error": ErrorBody::of(e)}))).into_response()
}

/// Calls `work` with the index on a thread that may block.
async fn with_index(
    shared: Arc<Shared>,
    work: impl FnOnce(&Shared, &Index) -> Result<Response> + Send + 'static,
) -> Response {
    let work = move || match shared.index.get() {
        Some(Ok(index)) => work(&shared, index).unwrap_or_else(|e| error_response(&e)),
        Some(Err(e)) => error_response(e),
        None => {
            let text = "the backup is still being read\n";
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    };
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| error_response(&Error::internal(e.to_string())))
}

/// Returns the route to a part of the index.
fn view<T: Serialize + 'static>(
    show: fn(&Shared, &Index, &Parameters) -> Result<T>,
) -> MethodRouter<Arc<Shared>> {
    get(
        move |State(shared): State<Arc<Shared>>, Query(p): Query<Parameters>| {
            with_index(shared, move |shared, index| {
                Ok(Json(show(shared, index, &p)?).into_response())
            })
        },
    )
}

/// Answers with an object as a YAML file.
async fn download(State(shared): State<Arc<Shared>>, Query(p): Query<Parameters>) -> Response {
    let show = move |shared: &Shared, index: &Index| {
        let revision = p.revision(index)?;
        let shown = Shown::of(index, p.key(index)?, revision, &p.show(shared))?;
        if shown.is_secret && !p.secrets {
            return Err(Reason::Usage.error(
                "the values of a Secret are hidden, so the file could not be applied: show them first",
            ));
        }
        if let Some(why) = shown.not_decoded().filter(|_| p.clean) {
            return Err(Reason::NotDecoded.error(why));
        }
        let file = format!("attachment; filename=\"{}\"", shown.file_name());
        let headers = [
            (CONTENT_TYPE, "application/yaml; charset=utf-8".to_owned()),
            (CONTENT_DISPOSITION, file),
        ];
        Ok((headers, shown.into_text()).into_response())
    };
    with_index(shared, show).await
}
