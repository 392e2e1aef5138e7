// The objects of a moment: the tree, the list of a kind, and search.

import { command, count, counted, h, naming, once, table, timeCell, valued } from "./dom.js";
import { bound, choose, kindLabel, kinds, page, sourceFlags } from "./state.js";

const openNamespaces = new Set();

/** Draws the namespaces and kinds of a state. */
export function drawTree(tree, state) {
  const { chosen } = page;
  const parts = [];
  for (const namespace of state.namespaces) {
    const isCurrent = (kind) => chosen.namespace === (namespace.name || "-") && Number(chosen.kind) === kind;
    const ids = Object.keys(namespace.kinds).map(Number);
    ids.sort((a, b) => kindLabel(a).localeCompare(kindLabel(b)));
    const open = (kind) => choose({ namespace: namespace.name || "-", kind, other: null, id: null, offset: null, word: null, sort: null, desc: null });
    const buttons = ids.map((kind) => h("li", {}, h("button", { type: "button", "aria-current": isCurrent(kind) ? "true" : null, onclick: () => open(kind) }, counted(kindLabel(kind), namespace.kinds[kind]))));
    const name = namespace.name || "without a namespace";
    const isOpen = openNamespaces.has(name) || chosen.namespace === (namespace.name || "-") || state.namespaces.length === 1;
    const details = h("details", { open: isOpen }, h("summary", {}, counted(name, namespace.count)), h("ul", {}, buttons));
    details.addEventListener("toggle", () => (details.open ? openNamespaces.add(name) : openNamespaces.delete(name)));
    parts.push(details);
  }
  if (state.more_namespaces > 0) parts.push(h("p", { class: "empty" }, `and ${count(state.more_namespaces, "more namespace")}: search for their names`));
  if (state.other_keys > 0) {
    const open = () => choose({ other: "true", namespace: null, kind: null, id: null, offset: null, word: null, sort: null });
    parts.push(h("button", { type: "button", class: "other", "aria-current": chosen.other ? "true" : null, onclick: open }, counted("other keys", state.other_keys)));
  }
  if (parts.length === 0) parts.push(h("p", { class: "empty" }, "There is nothing at this moment. Move the slider to the right."));
  tree.replaceChildren(...parts);
}

/** Draws the objects of a kind, and returns the rows that can be opened. */
export async function drawObjects(list, signal) {
  const { chosen } = page;
  if (!chosen.namespace && !chosen.other) {
    list.replaceChildren(h("p", { class: "empty" }, "Choose a kind in a namespace, or search with /."));
    return [];
  }
  const offset = Number(chosen.offset ?? 0);
  const namespace = chosen.namespace === "-" ? "" : chosen.namespace;
  const found = await once("objects", { at: chosen.at, namespace, kind: chosen.kind, other: chosen.other, offset, q: chosen.word, sort: chosen.sort, descending: chosen.desc }, signal);
  const rows = found.objects.map((object) => {
    const open = () => choose({ id: object.id, with: null, before: null });
    const button = h("button", { type: "button", tabindex: "-1" }, object.name);
    const cells = found.columns.map((_, nth) => h("td", { title: object.cells[nth] ?? "", translate: "no" }, object.cells[nth] ?? ""));
    const row = h("tr", { class: "line", onclick: open }, h("td", { title: object.name, translate: "no" }, button), cells, timeCell(object.time));
    return { element: row, key: object.id, open };
  });
  const head = (text, column) => {
    const isSorted = (chosen.sort ?? "") === column;
    const sort = () => choose({ sort: column, desc: isSorted && !chosen.desc ? "true" : null, offset: null });
    const mark = isSorted ? (chosen.desc ? " ▼" : " ▲") : "";
    return h("th", { scope: "col", "aria-sort": isSorted ? (chosen.desc ? "descending" : "ascending") : null }, h("button", { type: "button", onclick: sort }, text + mark));
  };
  const heads = [head(chosen.other ? "Key" : kindLabel(Number(chosen.kind)), ""), ...found.columns.map((column) => head(column, column)), head("Changed", "CHANGED")];
  const shown = found.objects.length;
  const more = [];
  if (offset > 0) more.push(h("button", { type: "button", onclick: () => choose({ offset: Math.max(0, offset - 1000) || null }) }, "Earlier ones"));
  if (offset + shown < found.total) more.push(h("button", { type: "button", onclick: () => choose({ offset: offset + shown }) }, "Later ones"));
  const spanned = shown < found.total ? `${(offset + 1).toLocaleString("en")} to ${(offset + shown).toLocaleString("en")} of ${found.total.toLocaleString("en")}` : count(found.total, "object");
  const word = h("input", { type: "text", size: 14, autocomplete: "off", placeholder: "in names" });
  const elements = rows.map((row) => row.element);
  list.replaceChildren(
    h("div", { class: "row filter" }, h("label", {}, "Filter ", bound(word, "word")), h("span", { class: "range", role: "status" }, spanned, more)),
    shown > 0 ? table(heads, elements, { class: "cut objects" }) : h("p", { class: "empty" }, chosen.word ? "None has this in its name." : "There are none at this moment. Move the slider to see when there were some."),
    command(getCommand(found.revision)),
  );
  return rows;
}

/** The command that prints the list. */
function getCommand(revision) {
  const { chosen } = page;
  const when = ["--revision", String(revision), ...sourceFlags()];
  if (chosen.other) return ["deltafold", "get", "--prefix", "", ...when];
  const namespace = chosen.namespace === "-" ? [] : valued("-n", chosen.namespace);
  const kind = kinds()[chosen.kind];
  return kind ? ["deltafold", "get", ...naming(kind.reference, [...namespace, ...when])] : ["deltafold", "export", ...namespace, ...when];
}

/** Draws what a search finds, and returns the rows that can be opened. */
export async function drawSearch(list, signal) {
  const { chosen } = page;
  // Nothing of another search stays.
  list.replaceChildren(h("p", { class: "range", role: "status" }, `Searching for “${chosen.q}” …`));
  const answer = await once("search", { at: chosen.at, q: chosen.q, within: chosen.within ?? "names" }, signal);
  const absences = { deleted: "deleted at ", missing: "deleted by ", created: "created at " };
  const rows = answer.objects.map((object, nth) => {
    const open = () => choose({ id: object.id, at: object.absence === "created" ? object.revision : chosen.at, with: null, before: null, tab: null });
    const texts = [object.kind === null ? "key" : kindLabel(object.kind), object.namespace, object.name];
    const cells = texts.map((text, column) => {
      const content = column === 2 ? h("button", { type: "button", tabindex: "-1" }, text) : text;
      return h("td", { title: text, translate: column === 0 ? null : "no" }, content);
    });
    return { element: h("tr", { id: `row${nth}`, class: "line", onclick: open }, cells, timeCell(object.time, absences[object.absence])), key: object.id, open };
  });
  const shown = rows.length < answer.total ? `the first ${rows.length.toLocaleString("en")} of ${count(answer.total, "object")}` : count(answer.total, "object");
  const elements = rows.map((row) => row.element);
  const grid = table(["Kind", "Namespace", "Name", "Changed"], elements, { id: "found", class: "cut", role: "grid", "aria-label": "Found objects" });
  const none = `Nothing matches “${chosen.q}”${chosen.within ? " at this moment. Search elsewhere, or move the slider." : " at any time."}`;
  list.replaceChildren(
    h("p", { class: "range", role: "status" }, rows.length > 0 ? shown : none),
    rows.length > 0 ? grid : "",
    chosen.within ? "" : command(["deltafold", "search", ...naming(chosen.q, sourceFlags())]),
  );
  return rows;
}
