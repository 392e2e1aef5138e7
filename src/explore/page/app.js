// The page: what is drawn when something is chosen, and its controls.

import { ask, ApiError, byId, copyButton, count, debounced, failure, h, once, onSubmit, refuse, shortTime, size, takeToken, timeZone } from "./dom.js";
import { bytesOf, drawBackup } from "./backup.js";
import { drawDetail } from "./detail.js";
import { drawChanges, drawDeleted } from "./lines.js";
import { drawObjects, drawSearch, drawTree } from "./objects.js";
import { drawPlot, half, onPlot, showMoment, sliderMoment } from "./plot.js";
import { choose, page, range, readAddress, view } from "./state.js";

const [tree, list, detail] = ["tree", "list", "detail"].map(byId);
const LISTS = { changes: drawChanges, objects: drawObjects, search: drawSearch, deleted: drawDeleted, backup: drawBackup };
/** What a list depends on: the same list is not drawn again when an object is opened. */
const LISTED = {
  changes: ["from", "to", "ckind", "cspace", "cword", "only", "offset"],
  objects: ["at", "namespace", "kind", "other", "offset", "word", "sort", "desc"],
  search: ["at", "q", "within"],
  deleted: ["from", "to"],
  backup: [],
};

/** What is cancelled when something else is chosen. */
let pending = new AbortController();
/** The moment that is shown: { revision, time }. */
let at = null;
/** The rows of the list that can be opened: { element, key, open }. */
let rows = [];
/** What was listed, and which row of a search is picked. */
let listed = null;
let picked = 0;
/** Whether the first row of a search is opened as soon as it is found. */
let opensFirst = false;

takeToken();
readAddress();

async function draw() {
  pending.abort();
  pending = new AbortController();
  const { signal } = pending;
  if (page.backup?.phase !== "ready") return;
  for (const link of byId("views").querySelectorAll("a")) link.ariaCurrent = link.dataset.view === view() ? "page" : null;
  document.body.dataset.view = view();
  document.body.dataset.open = String(Boolean(page.chosen.id));
  try {
    const { window, overview } = page.backup;
    await Promise.all([drawMoment(signal), drawList(signal), drawOpened(signal), drawPlot(window, overview?.listed.snapshots ?? [], [page.chosen.from, page.chosen.to], signal)]);
    byId("problem").replaceChildren();
  } catch (error) {
    if (signal.aborted) return;
    pending.abort();
    listed = null;
    byId("problem").replaceChildren(failure(error));
    if (error.status === 401) document.body.dataset.view = "closed";
    // What was shown before is of another moment.
    if (error.reason === "RevisionGap") for (const part of [tree, list, detail]) part.replaceChildren();
  }
}

async function drawMoment(signal) {
  const state = await once("state", { at: page.chosen.at }, signal);
  at = state;
  const isNewest = !page.chosen.at || at.revision === page.backup.window.last_revision;
  showMoment(at, isNewest);
  for (const id of ["next", "newest"]) byId(id).disabled = isNewest;
  if (view() === "objects") drawTree(tree, state);
}

async function drawList(signal) {
  const name = view();
  const key = JSON.stringify([name, page.backup.overview !== null, ...LISTED[name].map((part) => page.chosen[part])]);
  if (key !== listed) {
    const focus = list.contains(document.activeElement) ? document.activeElement.closest("label")?.textContent : null;
    list.ariaBusy = "true";
    const drawn = await LISTS[name](list, signal);
    if (signal.aborted) return;
    [rows, listed, picked] = [drawn, key, 0];
    list.ariaBusy = null;
    list.scrollTop = 0;
    const label = focus && [...list.querySelectorAll("label")].find((other) => other.textContent === focus);
    label?.querySelector("input, select").focus();
  }
  markRows();
  if (opensFirst && name === "search") rows[0]?.open();
  opensFirst = false;
}

/** The key of the row that is open. */
const openKey = () => (["changes", "deleted"].includes(view()) ? `${page.chosen.id} ${page.chosen.at}` : page.chosen.id);

/** Marks the row of the object that is open, and in a search the one that Enter opens. */
function markRows() {
  for (const row of rows) row.element.ariaCurrent = row.key === openKey() ? "true" : null;
  const isSearch = view() === "search";
  if (isSearch) rows.forEach((row, nth) => (row.element.ariaSelected = String(nth === picked)));
  const query = byId("query");
  query.ariaExpanded = String(isSearch && rows.length > 0);
  query.setAttribute("aria-controls", isSearch && rows.length > 0 ? "found" : "list");
  query.setAttribute("aria-activedescendant", isSearch ? (rows[picked]?.element.id ?? "") : "");
}

/** The object that was drawn last. */
let shownId = null;

async function drawOpened(signal) {
  await drawDetail(detail, signal);
  // Below the list it would not be seen.
  if (page.chosen.id && shownId !== page.chosen.id) {
    detail.scrollTop = 0;
    if (matchMedia("(max-width: 900px)").matches) detail.scrollIntoView();
  }
  shownId = page.chosen.id ?? null;
}

// Controls.

/**
 * Calls `go` with the moment in a field, or says beside it why there is none. With `begins`, a span begins at it. Returns whether
 * there is one.
 */
async function goIfKnown(field, go, begins = false) {
  const { timeZone: zone } = Intl.DateTimeFormat().resolvedOptions();
  const { at: moment, refusal } = await ask("moment", { q: field.value, zone, begins });
  const { first_revision: revision, first_time: time } = page.backup.window;
  const isEarly = /^\d*$/.test(moment) ? moment !== "" && Number(moment) < revision : Date.parse(moment) < Math.floor(Date.parse(time) / 1000) * 1000;
  const reason = refusal ?? (isEarly ? `The backup begins at ${shortTime(time)}, revision ${revision}` : null);
  refuse(field, reason);
  if (!reason) go(moment);
  return !reason;
}

/** Calls `act`, and shows why it failed. */
const tried = (act) => async () => {
  try {
    await act();
  } catch (error) {
    byId("problem").replaceChildren(failure(error));
  }
};

const stepTo = (back) => tried(async () => choose({ at: String((await ask("step", { at: at?.revision, back })).revision) }))();
const chooseRange = ({ from, to }) => choose({ from, to, offset: null, at: null, view: ["objects", "backup"].includes(page.chosen.view) ? null : page.chosen.view, q: null });
const wholeTime = () => choose({ from: null, to: null, offset: null });

byId("slider").addEventListener("input", debounced(30, () => choose({ at: sliderMoment(), before: null })));
byId("previous").addEventListener("click", () => stepTo(true));
byId("next").addEventListener("click", () => stepTo(false));
byId("newest").addEventListener("click", () => choose({ at: null }));
byId("whole").addEventListener("click", wholeTime);
onSubmit(byId("go"), tried(() => goIfKnown(byId("where"), (moment) => choose({ at: moment, before: null }))));
onSubmit(
  byId("range"),
  tried(async () => {
    const given = { from: null, to: null };
    for (const name of ["from", "to"]) {
      if (byId(name).value.trim() && !(await goIfKnown(byId(name), (moment) => (given[name] = moment), name === "from"))) return;
    }
    chooseRange(given);
  }),
);
onPlot((moment) => choose({ at: moment, before: null }), chooseRange);
byId("link").replaceWith(Object.assign(copyButton("Copy link", link), { id: "link", disabled: true }));

/** The address of what is shown, at this moment also when the backup has grown. */
function link() {
  const parameters = new URLSearchParams(page.chosen);
  if (at) parameters.set("at", at.revision);
  return `${location.origin}/#${parameters}`;
}

const search = (opens) => {
  opensFirst = opens;
  choose({ q: byId("query").value, within: byId("within").value === "names" ? null : byId("within").value, offset: null, id: null });
};
onSubmit(byId("search"), () => (byId("query").value === page.chosen.q && listed ? rows[picked]?.open() : search(byId("query").value !== "")));
byId("query").addEventListener("input", debounced(200, () => byId("query").value !== (page.chosen.q ?? "") && search(false)));
byId("query").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
  if (!step || view() !== "search") return;
  event.preventDefault();
  picked = Math.max(0, Math.min(rows.length - 1, picked + step));
  markRows();
  rows[picked]?.element.scrollIntoView({ block: "nearest" });
});
byId("within").addEventListener("change", () => search(false));
for (const anchor of byId("views").querySelectorAll("a")) {
  anchor.addEventListener("click", (event) => {
    event.preventDefault();
    choose({ view: anchor.dataset.view === "changes" ? null : anchor.dataset.view, q: null, offset: null, id: null });
  });
}
byId("keys").addEventListener("click", () => byId("help").showModal());

/** Opens another row of the list. */
function neighbour(step) {
  const here = rows.findIndex((row) => row.key === openKey());
  const row = rows[Math.min(rows.length - 1, Math.max(0, here + step))];
  row?.open();
  row?.element.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping || byId("help").open) return;
  const keys = {
    "/": () => byId("query").focus(),
    t: () => byId("slider").focus(),
    "+": () => half() && chooseRange(half()),
    Escape: () => (page.chosen.id ? choose({ id: null, with: null, tab: null }) : wholeTime()),
    "[": () => stepTo(true),
    "]": () => stepTo(false),
    j: () => neighbour(1),
    k: () => neighbour(-1),
    y: () => choose({ tab: null }),
    c: () => choose({ tab: "compare" }),
    l: () => choose({ tab: "life" }),
    "?": () => byId("help").showModal(),
  };
  const act = keys[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

window.addEventListener("hashchange", () => {
  takeToken();
  readAddress();
  showQuery();
  for (const form of [byId("go"), byId("range")]) for (const field of form.querySelectorAll("input")) refuse(field, null);
  byId("where").value = "";
  draw();
});

/** Shows what is searched for; leaves alone what is being written. */
function showQuery() {
  if (page.chosen.q && document.activeElement === byId("query")) return;
  byId("query").value = page.chosen.q ?? "";
  byId("within").value = page.chosen.within ?? "names";
}

/** Asks how far the backup is, until it is ready. */
async function load() {
  const status = byId("status");
  try {
    page.backup = await ask("backup");
  } catch (error) {
    status.textContent = "";
    byId("problem").replaceChildren(failure(error));
    if (error.status === 401) document.body.dataset.view = "closed";
    if (error instanceof ApiError && error.status === 503) setTimeout(load, 2000);
    return;
  }
  const { backup } = page;
  byId("problem").replaceChildren();
  byId("name").textContent = backup.name;
  document.title = `deltafold explore · ${backup.name}`;
  if (backup.phase === "reading") {
    const known = backup.overview ? ` of ${size(bytesOf(backup.overview.listed.snapshots))} at most` : "";
    status.textContent = `Reading the backup: ${size(backup.read_bytes)}${known}`;
    setTimeout(load, 150);
    return;
  }
  if (backup.phase === "failed") {
    status.textContent = "The backup cannot be read";
    byId("problem").replaceChildren(h("p", { class: "failure", role: "alert" }, `${backup.error.reason}: ${backup.error.message}`));
    return;
  }
  const { window } = backup;
  status.textContent = `deltafold ${backup.version} · ${count(window.keys, "key")}, ${count(window.versions, "version")}`;
  for (const id of ["previous", "next", "newest", "link"]) byId(id).disabled = false;
  byId("zone").textContent = timeZone(window.last_time);
  showQuery();
  // The list of snapshots may come after the index: all is drawn again then.
  if (backup.flag === "--store" && !backup.overview && !backup.overview_error) setTimeout(load, 500);
  await draw();
}

load();
