// The page. The address has what is chosen, after #. If that changes, the page is drawn anew.

import { ask, ApiError, byId, command, count, counted, debounced, download, failure, h, naming, onSubmit, refuse, scrolled, shortTime, size, table, takeToken, timeZone, valued } from "./dom.js";
import { drawChains } from "./chains.js";
import { drawPlot, onPlot, showMoment, sliderMoment, zoom, zoomIn } from "./time.js";

/** The backup, as /api/backup has it. */
let backup = null;
/** What is chosen: the moment, the view, and what it shows. */
takeToken();
let chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
/** The moment that is shown: { revision, time, is_complete }. */
let at = null;
/** The kinds of the backup. */
let kinds = [];
let pending = new AbortController();
let openNamespaces = new Set();
/** The rows of a search, what was searched for, and which row is selected. */
let found = { rows: [], text: null, picked: 0 };
/** Whether the first row is opened as soon as it is found. */
let opensFirst = false;
/** The object that was drawn last. */
let shownId = null;

const tree = byId("tree");
const list = byId("list");
const detail = byId("detail");

/** Changes what is chosen. The address follows, so that a link keeps the moment and the object. */
function choose(changes) {
  const next = { ...chosen, ...changes };
  for (const key of Object.keys(next)) if (next[key] === null || next[key] === "") delete next[key];
  // The address tells of the change later: another one may come before.
  chosen = next;
  location.hash = new URLSearchParams(next).toString();
}

const sourceFlags = () => [backup.flag, backup.name];
const view = () => chosen.view ?? "objects";
const bytesOf = (snapshots) => snapshots.reduce((sum, snapshot) => sum + snapshot.bytes, 0);

/** Names a kind, with its group if another one has the same name. */
function kindLabel(id) {
  const kind = kinds[id];
  const isAlone = kinds.filter((other) => other.kind === kind.kind).length === 1;
  return isAlone || !kind.group ? kind.kind : `${kind.kind} (${kind.group})`;
}

async function draw() {
  pending.abort();
  pending = new AbortController();
  const { signal } = pending;
  if (backup?.phase !== "ready") return;
  for (const link of byId("views").querySelectorAll("a")) link.ariaCurrent = link.dataset.view === view() ? "page" : null;
  document.body.dataset.view = chosen.q && view() === "objects" ? "search" : view();
  try {
    const state = await ask("state", { at: chosen.at }, signal);
    at = state;
    showMoment(at, !chosen.at || at.revision === backup.window.last_revision);
    drawTree(state);
    if (!chosen.q) found = { rows: [], text: null, picked: 0 };
    const parts = { objects: chosen.q ? drawSearch : drawObjects, deleted: drawDeleted, backup: drawBackup };
    await parts[view()](signal);
    pick(0);
    byId("problem").replaceChildren();
  } catch (error) {
    if (error.name === "AbortError") return;
    list.removeAttribute("aria-busy");
    byId("problem").replaceChildren(failure(error));
    // What was shown before is of another moment.
    if (error.reason === "RevisionGap") for (const part of [tree, list, detail]) part.replaceChildren();
  }
}

// The tree.

function drawTree(state) {
  if (view() !== "objects" || chosen.q) {
    tree.replaceChildren();
    return;
  }
  const parts = [];
  for (const namespace of state.namespaces) {
    const isCurrent = (kind) => chosen.namespace === (namespace.name || "-") && Number(chosen.kind) === kind;
    const ids = Object.keys(namespace.kinds).map(Number);
    ids.sort((a, b) => kindLabel(a).localeCompare(kindLabel(b)));
    const buttons = ids.map((kind) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            "aria-current": isCurrent(kind) ? "true" : null,
            onclick: () => choose({ namespace: namespace.name || "-", kind, other: null, id: null, q: null, offset: null }),
          },
          counted(kindLabel(kind), namespace.kinds[kind]),
        ),
      ),
    );
    const name = namespace.name || "without a namespace";
    const summary = h("summary", {}, counted(name, namespace.count));
    const isOpen = openNamespaces.has(name) || chosen.namespace === (namespace.name || "-") || state.namespaces.length === 1;
    const details = h("details", { open: isOpen }, summary, h("ul", {}, buttons));
    details.addEventListener("toggle", () => (details.open ? openNamespaces.add(name) : openNamespaces.delete(name)));
    parts.push(details);
  }
  if (state.more_namespaces > 0) parts.push(h("p", { class: "empty" }, `and ${count(state.more_namespaces, "more namespace")}: search for their names`));
  if (state.other_keys > 0) {
    const open = () => choose({ other: "true", namespace: null, kind: null, id: null, q: null, offset: null });
    parts.push(h("button", { type: "button", class: "other", "aria-current": chosen.other ? "true" : null, onclick: open }, counted("other keys", state.other_keys)));
  }
  if (parts.length === 0) parts.push(h("p", { class: "empty" }, "There is nothing at this moment. Move the slider to the right."));
  tree.replaceChildren(...parts);
}

// The list of objects.

async function drawObjects(signal) {
  const offset = Number(chosen.offset ?? 0);
  let found = null;
  if (chosen.namespace || chosen.other) {
    const namespace = chosen.namespace === "-" ? "" : chosen.namespace;
    const parameters = { at: at.revision, kind: chosen.kind, other: chosen.other, offset };
    // An empty namespace is a value here.
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined));
    if (namespace !== undefined) query.set("namespace", namespace);
    found = await ask(`objects?${query}`, {}, signal);
  }
  if (found === null) {
    list.replaceChildren(h("p", { class: "empty" }, "Choose a kind in a namespace, or search with /."));
  } else {
    list.replaceChildren(objectTable(found, offset));
  }
  await drawDetail(signal);
}

function objectTable(found, offset) {
  if (found.total === 0) return h("p", { class: "empty" }, "There are none at this moment. Move the slider to see when there were some.");
  const rows = found.objects.map((object) => {
    const open = () => choose({ id: object.id, from: null });
    const button = h("button", { type: "button", "aria-current": chosen.id === object.id ? "true" : null, "data-id": object.id, onclick: open, translate: "no" }, object.name);
    return h("tr", {}, h("td", {}, button), h("td", { class: "when" }, shortTime(object.time)));
  });
  const heads = [chosen.other ? "Key" : kindLabel(Number(chosen.kind)), "Changed"];
  const shown = found.objects.length;
  const more = [];
  if (offset > 0) more.push(h("button", { type: "button", onclick: () => choose({ offset: Math.max(0, offset - 1000) || null }) }, "Earlier ones"));
  if (offset + shown < found.total) more.push(h("button", { type: "button", onclick: () => choose({ offset: offset + shown }) }, "Later ones"));
  const range = shown < found.total ? `${(offset + 1).toLocaleString("en")} to ${(offset + shown).toLocaleString("en")} of ${found.total.toLocaleString("en")}` : count(found.total, "object");
  return h(
    "div",
    {},
    h("p", { class: "range" }, range, more),
    table(heads, rows),
    command(getCommand()),
  );
}

// Search: the field has the focus, and the arrow keys select a row.

/** Names the kind of a listed object. */
const kindOf = (object) => (object.kind === null ? "key" : kindLabel(object.kind));
/** What is chosen with a listed object: its kind in its namespace is listed beside it. */
const chosenWith = (object) => ({ view: null, q: null, offset: null, from: null, before: null, id: object.id, other: object.kind === null ? "true" : null, namespace: object.kind === null ? null : object.namespace || "-", kind: object.kind });

async function drawSearch(signal) {
  detail.replaceChildren();
  list.setAttribute("aria-busy", "true");
  const answer = await ask("search", { at: at.revision, q: chosen.q, within: chosen.within ?? "names" }, signal);
  list.removeAttribute("aria-busy");
  const absences = { deleted: "deleted at ", missing: "deleted by ", created: "created at " };
  const rows = answer.objects.map((object, nth) => {
    // What is gone has no YAML at this moment.
    const open = () => {
      choose({ ...chosenWith(object), tab: object.absence ? "life" : null });
      // What is not displayed takes no focus.
      document.body.dataset.view = "objects";
      detail.focus();
    };
    const texts = [kindOf(object), object.namespace, object.name, (absences[object.absence] ?? "") + shortTime(object.time)];
    const cells = texts.map((text, column) => {
      const content = column === 2 ? h("button", { type: "button", tabindex: -1, "data-id": object.id }, text) : text;
      return h("td", { title: text, translate: column === 0 ? null : "no", class: column === 3 ? "when" : null }, content);
    });
    return h("tr", { id: `row${nth}`, onclick: open }, cells);
  });
  const shown = rows.length < answer.total ? `the first ${rows.length.toLocaleString("en")} of ${count(answer.total, "object")}` : count(answer.total, "object");
  const grid = table(["Kind", "Namespace", "Name", "Changed"], rows, { id: "found", class: "cut", role: "grid", "aria-label": "Found objects" });
  const none = `Nothing matches “${chosen.q}”${chosen.within ? " at this moment. Search elsewhere, or move the slider." : " at any time."}`;
  list.replaceChildren(h("p", { class: "range", role: "status" }, rows.length > 0 ? shown : none), rows.length > 0 ? grid : "");
  found = { rows, text: chosen.q, picked: found.text === chosen.q ? found.picked : 0 };
  if (opensFirst) rows[0]?.click();
  opensFirst = false;
}

/** Selects another row, and marks it. */
function pick(step) {
  const { rows } = found;
  found.picked = Math.max(0, Math.min(rows.length - 1, found.picked + step));
  rows.forEach((row, nth) => row.setAttribute("aria-selected", String(nth === found.picked)));
  const query = byId("query");
  query.setAttribute("aria-expanded", String(rows.length > 0));
  query.setAttribute("aria-controls", rows.length > 0 ? "found" : "list");
  query.setAttribute("aria-activedescendant", rows[found.picked]?.id ?? "");
  if (step !== 0) rows[found.picked]?.scrollIntoView({ block: "nearest" });
}

/** The command that prints the list. */
function getCommand() {
  const when = ["--revision", String(at.revision), ...sourceFlags()];
  if (chosen.other) return ["deltafold", "get", "--prefix", "", ...when];
  const kind = kinds[Number(chosen.kind)];
  const reference = kind?.reference ?? "key";
  const namespace = chosen.namespace === "-" ? [] : valued("-n", chosen.namespace);
  return ["deltafold", "get", ...naming(reference, [...namespace, ...when])];
}

// One object.

const tabs = [
  ["yaml", "YAML"],
  ["compare", "Compare"],
  ["life", "Life"],
];

async function drawDetail(signal) {
  if (!chosen.id) {
    detail.replaceChildren();
    return;
  }
  const tab = chosen.tab ?? "yaml";
  const show = { id: chosen.id, secrets: chosen.secrets, clean: chosen.clean, managers: chosen.managers };
  const object = await ask("object", { ...show, at: at.revision }, signal);
  const links = tabs.map(([name, text]) =>
    h("button", { type: "button", "aria-pressed": String(tab === name), "data-tab": name, onclick: () => choose({ tab: name === "yaml" ? null : name }) }, text),
  );
  const flag = (name, text) => {
    const box = h("input", { type: "checkbox", onchange: (event) => choose({ [name]: event.target.checked ? "true" : null }) });
    box.checked = Boolean(chosen[name]);
    return h("label", { class: "flag" }, box, ` ${text}`);
  };
  const options = [object.is_secret || chosen.secrets ? flag("secrets", "Show the values of Secrets") : null, flag("clean", "Only what a user sets"), flag("managers", "Managers")];
  const body = await { yaml: drawYaml, compare: drawComparison, life: drawLife }[tab](object, show, signal);
  const isOpen = document.activeElement?.dataset?.tab;
  detail.replaceChildren(
    h("h2", { translate: "no" }, object.reference),
    h("p", { class: "row tabs" }, links, h("span", { class: "spread" }), options.filter(Boolean)),
    ...body,
  );
  if (isOpen) detail.querySelector(`[data-tab="${isOpen}"]`)?.focus();
  // Below the list it would not be seen.
  if (shownId !== chosen.id && matchMedia("(max-width: 1100px)").matches) detail.scrollIntoView();
  shownId = chosen.id;
}

function facts(object) {
  if (!object.record) return null;
  const { create_revision: created, version, lease, bytes } = object.record;
  const parts = [`changed at revision ${object.object.revision} (${shortTime(object.object.time)})`, `created at ${created}`, count(version, "write"), size(bytes)];
  if (lease !== 0) parts.push(`lease ${lease.toString(16)}`);
  return h("p", { class: "facts" }, parts.join(" · "));
}

function drawYaml(object) {
  if (!object.object) {
    return [h("p", { class: "empty" }, "It does not exist at this moment. "), h("button", { type: "button", onclick: () => choose({ tab: "life" }) }, "Show its life")];
  }
  const { id, secrets, clean, managers } = chosen;
  const file = { id, at: at.revision, secrets, clean, managers };
  const flags = ["--revision", String(at.revision), ...sourceFlags()];
  if (kinds[object.object.kind]?.reference) flags.push("-o", "yaml");
  if (chosen.clean) flags.push("--clean");
  return [
    facts(object),
    object.not_decoded ? h("p", { class: "warning" }, object.not_decoded) : null,
    object.is_cut ? h("p", { class: "warning" }, "The value is very long: only its beginning is shown. The download has all of it.") : null,
    h("pre", { class: "yaml", tabindex: "0", "aria-label": "The object as YAML", translate: "no" }, object.text),
    h("p", { class: "row" }, h("button", { type: "button", onclick: () => download("yaml", file) }, "Download YAML")),
    command(["deltafold", "get", ...naming(object.reference, flags)]),
    kinds[object.object.kind]?.reference ? command(["deltafold", "recover", ...naming(object.reference, ["--revision", String(at.revision), ...sourceFlags()])]) : null,
  ].filter(Boolean);
}

async function drawComparison(object, show, signal) {
  const life = await ask("life", { ...show, before: at.revision + 1, brief: true }, signal);
  const older = life.versions.find((version) => version.revision < (object.object?.revision ?? at.revision));
  // The last change of what a user sets, if nothing else is asked for.
  const change = chosen.from || !object.object ? null : life.last_change;
  const from = chosen.from ?? String(change?.from ?? older?.revision ?? backup.window.first_revision);
  const to = change?.revision ?? at.revision;
  const comparison = await ask("diff", { ...show, from, to }, signal);
  const select = h(
    "select",
    { onchange: (event) => choose({ from: event.target.value }), "data-tab": "from" },
    life.versions.map((version) => h("option", { value: version.revision }, `revision ${version.revision} · ${shortTime(version.time)} · ${version.change}`)),
  );
  select.value = from;
  const other = h("input", { type: "text", size: 18, placeholder: "revision or time", autocomplete: "off", "aria-label": "Another moment: a revision or a time" });
  const form = h("form", { class: "row" }, h("label", {}, "Compare with ", select), h("span", {}, "or"), other, h("button", {}, "Show"));
  onSubmit(form, () => goIfKnown(other, (from) => choose({ from })));
  const isSame = comparison.rows.every((row) => row.change === "same");
  const rows = diffRows(comparison.rows);
  const label = (side) => `revision ${side.revision} · ${shortTime(side.time)}${side.object ? "" : " · does not exist"}`;
  return [
    form,
    change ? h("p", { class: "facts" }, `The last change of more than the status, ${changeText(change)}:`) : null,
    change ? fieldList(change) : null,
    change ? h("p", { class: "facts" }, AUDIT) : null,
    isSame ? h("p", { class: "empty" }, "Both are the same.") : null,
    comparison.is_cut ? h("p", { class: "warning" }, "The object is very long: only its beginning is compared.") : null,
    scrolled("Both moments side by side", table([label(comparison.from), label(comparison.to)], rows, { class: "diff", translate: "no" })),
    command(["deltafold", "diff", ...valued("--prefix", object.key), "--from", String(comparison.from.revision), "--to", String(to), ...sourceFlags()]),
  ].filter(Boolean);
}

/** The lines around changes; those between are shown on demand. */
function diffRows(rows) {
  const cell = (text, side) => h("td", { class: text === null ? "none" : side }, text ?? "");
  const line = (row) => h("tr", { class: row.change }, cell(row.left, "left"), cell(row.right, "right"));
  const isNear = (nth) => rows.slice(Math.max(0, nth - 3), nth + 4).some((row) => row.change !== "same");
  const parts = [];
  for (let nth = 0; nth < rows.length; nth += 1) {
    const begin = nth;
    while (nth < rows.length && !isNear(nth)) nth += 1;
    const same = rows.slice(begin, nth);
    if (same.length > 0) {
      const more = h("tr", { class: "more" });
      const open = () => more.replaceWith(...same.map(line));
      more.append(h("td", { colspan: 2 }, h("button", { type: "button", onclick: open }, `${count(same.length, "equal line")}: show`)));
      parts.push(more);
    }
    if (nth < rows.length) parts.push(line(rows[nth]));
  }
  return parts;
}

/** What a reader misses in each view of changes. */
const AUDIT = "A manager is a program. etcd does not store which person made a change: the audit log of the API server does.";
/** When a version was written, and by whom. */
const changeText = (version) => shortTime(version.time) + (version.managers.length ? ` by ${version.managers.join(", ")}` : "");
const fieldList = (version) => (version.fields.length ? h("ul", { class: "fields", translate: "no" }, version.fields.map((field) => h("li", {}, field))) : null);

async function drawLife(object, show, signal) {
  const life = await ask("life", { ...show, before: chosen.before }, signal);
  const kept = life.versions.filter((version) => version.is_of_user || !chosen.clean);
  const hidden = life.versions.length - kept.length;
  const versions = kept.map((version) => {
    const go = () => choose({ at: String(version.revision), tab: version.change === "deleted" || version.change === "missing" ? "life" : null });
    const words = { created: "created", changed: "changed", deleted: "deleted", missing: "gone by then: the deletion is not recorded" };
    return h(
      "li",
      { class: version.change, "aria-current": version.revision === object.object?.revision ? "true" : null },
      h("p", {}, h("button", { type: "button", onclick: go }, `revision ${version.revision}`), ` ${shortTime(version.time)} · ${words[version.change]}`, version.managers.length ? ` by ${version.managers.join(", ")}` : ""),
      fieldList(version),
    );
  });
  const last = life.versions[life.versions.length - 1];
  const isMore = last && life.versions.length < life.total && life.versions.length >= 200;
  return [
    h("p", { class: "facts" }, count(life.total, "version"), hidden > 0 ? `: ${hidden.toLocaleString("en")} of them changed nothing that a user sets, and are hidden` : ""),
    h("p", { class: "facts" }, AUDIT),
    h("ol", { class: "life" }, versions),
    isMore ? h("button", { type: "button", onclick: () => choose({ before: last.revision }) }, "Older versions") : null,
    life.events.length ? h("h3", {}, "Events about it") : null,
    life.events.length ? h("ul", { class: "events", translate: "no" }, life.events.map((event) => h("li", {}, `${shortTime(event.time)} · ${event.text}`))) : null,
    command(["deltafold", "history", ...naming(object.reference, sourceFlags())]),
  ].filter(Boolean);
}

// What was deleted.

async function drawDeleted(signal) {
  const from = chosen.from ?? String(backup.window.first_revision);
  list.replaceChildren();
  detail.replaceChildren();
  const changes = await ask("changes", { from, to: at.revision }, signal);
  const input = h("input", { type: "text", size: 22, value: /^\d+$/.test(from) ? from : shortTime(from), id: "since", autocomplete: "off" });
  const form = h("form", { class: "row" }, h("label", {}, "Deleted since ", input), h("span", {}, `(revision ${changes.from.revision} · ${shortTime(changes.from.time)}) until the moment of the slider`), h("button", {}, "Show"));
  onSubmit(form, () => goIfKnown(input, (from) => choose({ from }), true));
  const parts = changes.namespaces
    .filter((namespace) => namespace.deleted > 0)
    .map((namespace) => {
      const title = `${namespace.name || "without a namespace"}${namespace.is_deleted ? " · the namespace was deleted" : ""}`;
      const rows = namespace.objects.map((object) => {
        const open = () => choose({ ...chosenWith(object), at: String(object.before), tab: null });
        const owner = object.owner ? `${object.owner.kind}/${object.owner.name}` : "";
        const cell = (text, child = text) => h("td", { title: text, translate: "no" }, child);
        const name = h("button", { type: "button", onclick: open }, object.name);
        const again = object.is_recreated ? " (exists again)" : "";
        return h("tr", {}, cell(kindOf(object)), cell(object.name + again, [name, again]), cell(owner), h("td", { class: "when" }, shortTime(object.time)));
      });
      const items = [];
      const left = namespace.deleted - namespace.deleted_events - namespace.objects.length;
      if (left > 0) items.push(h("p", {}, `and ${left.toLocaleString("en")} more: choose a shorter range`));
      if (namespace.deleted_events > 0) items.push(h("p", {}, `${count(namespace.deleted_events, "Event")}, which expire`));
      return h("details", { open: !namespace.is_deleted && namespace.deleted <= 20 }, h("summary", {}, counted(title, namespace.deleted)), rows.length > 0 ? table(["Kind", "Name", "Owner", "Deleted"], rows, { class: "cut" }) : null, items);
    });
  if (parts.length === 0) parts.push(h("p", { class: "empty" }, "Nothing was deleted in this range. Give an earlier moment."));
  list.replaceChildren(form, ...parts, command(["deltafold", "deleted", "--since", String(changes.from.revision), "--until", String(at.revision), ...sourceFlags()]));
}

// The backup itself.

async function drawBackup(signal) {
  detail.replaceChildren();
  const { window, overview } = backup;
  const row = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  const rows = [
    row("Timeline", window.timeline ?? "a plain snapshot file"),
    row("Revisions", `${window.first_revision} to ${window.last_revision}`),
    row("Times", `${shortTime(window.first_time)} to ${shortTime(window.last_time)}`),
    row("Keys and versions", `${count(window.keys, "key")}, ${count(window.versions, "version")}`),
  ];
  if (window.missing.length > 0) rows.push(row("Not recorded", window.missing.map(([first, last]) => `${first} to ${last}`).join(", ")));
  const parts = [];
  const moment = ["--revision", String(at.revision)];
  const commands = [command(["deltafold", "restore", ...sourceFlags(), ...moment, "--data-dir", "/var/lib/etcd"])];
  if (overview) {
    const { listed, status } = overview;
    const snapshots = listed.snapshots;
    const go = (snapshot) => choose({ view: null, at: String(snapshot.last_revision) });
    rows.push(row("Health", `${status.verdict}${status.message ? `: ${status.message}` : ""}`));
    for (const verified of status.verifications) {
      rows.push(row(`Verified (${verified.level})`, `${shortTime(verified.time)}: ${verified.result}${verified.reason ? `, ${verified.reason}` : ""}, up to revision ${verified.revision ?? "unknown"}`));
    }
    if (status.verifications.length === 0) rows.push(row("Verified", "never, as far as the store tells"));
    const warnings = [...window.warnings, ...listed.problems.map((problem) => `${problem.reason}: ${problem.message}`)];
    const removed = chosen.policy ? await ask("gc", { policy: chosen.policy }, signal) : null;
    const gone = new Map((removed?.objects ?? []).filter((object) => object.decision === "Delete").map((object) => [object.path, object.explanation]));
    const select = h("select", { onchange: (event) => choose({ policy: event.target.value }) }, [["", "nothing"], ["exponential", "exponential"], ["limit", "limit"]].map(([value, text]) => h("option", { value }, text)));
    select.value = chosen.policy ?? "";
    parts.push(
      ...warnings.map((warning) => h("p", { class: "warning" }, warning)),
      h("h3", {}, `${count(snapshots.length, "snapshot")}, ${size(bytesOf(snapshots))}`),
      drawChains(snapshots, gone, go),
      h("p", { class: "row" }, h("label", {}, "Mark what gc would remove with the policy ", select), removed ? `${gone.size} of ${count(removed.objects.length, "object")} would go: ${size(removed.freed_bytes)}` : ""),
      snapshotTable(snapshots, gone, go),
    );
    if (chosen.policy) commands.push(command(["deltafold", "gc", ...sourceFlags(), "--policy", chosen.policy]));
    commands.push(command(["deltafold", "compact", ...sourceFlags()]));
    commands.push(command(["deltafold", "verify", ...sourceFlags()]));
  } else {
    const warnings = [...window.warnings, ...(backup.overview_error ? [backup.overview_error.message] : [])];
    parts.push(...warnings.map((warning) => h("p", { class: "warning" }, warning)));
  }
  list.replaceChildren(h("h2", {}, "The backup"), h("dl", {}, rows.flat()), ...parts, h("h3", {}, "Commands"), ...commands);
}

function snapshotTable(snapshots, gone, go) {
  const rows = snapshots.slice(-2000).reverse().map((snapshot) => {
    const isFull = snapshot.kind === "Full";
    const remarks = [
      snapshot.in_chain ? "in the newest chain" : "",
      snapshot.excluded ? "excluded" : "",
      snapshot.encrypted ? "encrypted" : "",
      snapshot.locked_until ? `locked until ${shortTime(snapshot.locked_until)}` : "",
      gone.has(snapshot.path) ? `gc would remove it: ${gone.get(snapshot.path)}` : "",
    ];
    return h(
      "tr",
      {},
      h("td", {}, h("button", { type: "button", onclick: () => go(snapshot) }, isFull ? "full" : "delta")),
      h("td", { class: "when" }, shortTime(snapshot.created)),
      h("td", {}, isFull ? `${snapshot.last_revision}` : `${snapshot.start_revision} to ${snapshot.last_revision}`),
      h("td", { class: "count" }, size(snapshot.bytes)),
      h("td", {}, remarks.filter(Boolean).join(", ")),
    );
  });
  return scrolled("Snapshots", table(["Kind", "Taken", "Revisions", "Size", "Remarks"], rows));
}

// Controls.

/** Calls `go` with the moment in a field, or says beside it why there is none. With `begins`, a span begins at it. */
async function goIfKnown(field, go, begins = false) {
  const { timeZone: zone } = Intl.DateTimeFormat().resolvedOptions();
  const { at: moment, refusal } = await ask("moment", { q: field.value, zone, begins });
  const { first_revision: revision, first_time: time } = backup.window;
  const isEarly = /^\d*$/.test(moment) ? moment !== "" && Number(moment) < revision : Date.parse(moment) < Math.floor(Date.parse(time) / 1000) * 1000;
  const reason = refusal ?? (isEarly ? `The backup begins at revision ${revision} · ${shortTime(time)}` : null);
  refuse(field, reason);
  if (!reason) go(moment);
}

async function stepTo(back) {
  if (!at) return;
  const next = await ask("step", { at: at.revision, back });
  choose({ at: String(next.revision) });
}

const slider = byId("slider");
slider.addEventListener("input", debounced(30, () => choose({ at: sliderMoment(), before: null })));
byId("previous").addEventListener("click", () => stepTo(true));
byId("next").addEventListener("click", () => stepTo(false));
byId("newest").addEventListener("click", () => choose({ at: null }));
onSubmit(byId("go"), () => goIfKnown(byId("where"), (moment) => choose({ at: moment })));
onPlot((moment) => choose({ at: moment, before: null }));
const search = (opens) => {
  opensFirst = opens;
  choose({ view: null, q: byId("query").value, within: byId("within").value === "names" ? null : byId("within").value, offset: null });
};
onSubmit(byId("search"), () => (byId("query").value === found.text ? found.rows[found.picked]?.click() : search(byId("query").value !== "")));
byId("query").addEventListener("input", debounced(200, () => byId("query").value !== (chosen.q ?? "") && search(false)));
byId("query").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
  if (!step) return;
  event.preventDefault();
  pick(step);
});
byId("within").addEventListener("change", () => search(false));
for (const link of byId("views").querySelectorAll("a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    choose({ view: link.dataset.view === "objects" ? null : link.dataset.view });
  });
}
byId("keys").addEventListener("click", () => byId("help").showModal());

/** Moves to another object of the list. */
function neighbour(step) {
  const buttons = [...list.querySelectorAll("button[data-id]")];
  const here = buttons.findIndex((button) => button.dataset.id === chosen.id);
  buttons[Math.min(buttons.length - 1, Math.max(0, here + step))]?.click();
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input:not([type=range]):not([type=checkbox]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping || byId("help").open) return;
  const keys = {
    "/": () => byId("query").focus(),
    t: () => slider.focus(),
    "+": zoomIn,
    Escape: () => zoom(),
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
  chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  showQuery();
  draw();
});

/** Shows what is searched for; leaves alone what is being written. */
function showQuery() {
  if (chosen.q && document.activeElement === byId("query")) return;
  byId("query").value = chosen.q ?? "";
  byId("within").value = chosen.within ?? "names";
}

/** Whether the plot and the search have been drawn. */
let isDrawn = false;

/** Asks how far the backup is, until it is ready. */
async function load() {
  const status = byId("status");
  try {
    backup = await ask("backup");
  } catch (error) {
    status.textContent = "";
    byId("problem").replaceChildren(failure(error));
    if (!(error instanceof ApiError) || error.status === 503) setTimeout(load, 2000);
    return;
  }
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
  kinds = window.kinds;
  status.textContent = `deltafold ${backup.version} · ${count(window.keys, "key")}, ${count(window.versions, "version")}`;
  // The list of snapshots may come after the index: all is drawn again then.
  const isComplete = backup.overview || backup.overview_error || backup.flag !== "--store";
  if (!isComplete) setTimeout(load, 500);
  if (isDrawn && !isComplete) return;
  if (!isDrawn) {
    for (const id of ["previous", "next", "newest"]) byId(id).disabled = false;
    byId("zone").textContent = timeZone(window.last_time);
    showQuery();
  }
  isDrawn = true;
  await drawPlot(window, backup.overview ? backup.overview.listed.snapshots : []);
  await draw();
}

load();
