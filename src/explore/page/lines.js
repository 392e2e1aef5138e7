// What changed in the range, one line a change; and what was deleted.

import { command, count, counted, h, once, shortTime, table, timeCell, valued } from "./dom.js";
import { bound, choose, kindLabel, kinds, page, range, rangeFlags, shortName, sourceFlags } from "./state.js";

/** What happened, in the words of `deltafold log`. */
function what(line) {
  const words = { created: "created", changed: "changed", deleted: line.recorded ? "deleted" : "deleted by then, which is not recorded" };
  const by = line.managers.length > 0 ? ` by ${line.managers.join(", ")}` : "";
  const fields = line.fields.length > 0 ? `: ${line.fields.join(", ")}` : "";
  const more = line.more_fields > 0 ? `, and ${line.more_fields} more` : "";
  const owner = line.change === "deleted" && line.owner ? ` (of ${line.owner.kind}/${line.owner.name})` : "";
  return words[line.change] + by + fields + more + owner;
}

/** The marks between the changes of an answer: the revision that they stand before, and a text. */
function marksOf(from, to) {
  const { missing, walls } = page.backup.window;
  const gaps = missing.map(([first, last]) => [first, `Nothing is known of revision ${first === last ? first : `${first} to ${last}`}: snapshots are missing or damaged.`]);
  const turns = walls.map((wall) => [wall.after_revision + 1, `etcd was set back to revision ${wall.after_revision}: --timeline ${wall.left} has what came after it there.`]);
  const marks = [...gaps, ...turns].filter(([at]) => from.revision < at && at <= to.revision);
  return marks.sort((a, b) => b[0] - a[0]);
}

/** Draws the changes, and returns the rows that can be opened. */
export async function drawChanges(list, signal) {
  const { chosen } = page;
  const offset = Number(chosen.offset ?? 0);
  const filter = { namespace: chosen.cspace, kind: chosen.ckind, q: chosen.cword, only: chosen.only, offset };
  const answer = await once("log", { ...range(), ...filter }, signal);
  const rows = [];
  const elements = [];
  const marks = marksOf(answer.from, answer.to);
  const isLast = offset + answer.lines.length >= answer.total;
  const addMarks = (after) => {
    while (marks.length > 0 && marks[0][0] > after) elements.push(h("tr", { class: "mark" }, h("td", { colspan: 4 }, marks.shift()[1])));
  };
  for (const line of answer.lines) {
    if (elements.length > 0 || offset === 0) addMarks(line.revision);
    else while (marks.length > 0 && marks[0][0] > line.revision) marks.shift();
    const key = `${line.id} ${line.revision}`;
    const open = () => choose({ id: line.id, at: line.revision, tab: line.change === "changed" ? "compare" : null, with: line.change === "changed" ? line.before : null, before: null });
    const button = h("button", { type: "button", tabindex: "-1" }, shortName(line));
    const cell = (text, name, child = text) => h("td", { title: text, class: name, translate: "no" }, child);
    const row = h("tr", { class: `line ${line.change}`, onclick: open }, timeCell(line.time), cell(line.namespace || "–", "space"), cell(shortName(line), "name", button), cell(what(line), "what"));
    rows.push({ element: row, key, open });
    elements.push(row);
  }
  if (isLast) addMarks(-1);
  const kind = h("select", {}, h("option", { value: "" }, "all kinds"), kinds().map((_, id) => [kindLabel(id), id]).sort(([a], [b]) => a.localeCompare(b)).map(([label, id]) => h("option", { value: id }, label)));
  const only = h("select", {}, [["", "all changes"], ["created", "created"], ["changed", "changed"], ["deleted", "deleted"]].map(([value, text]) => h("option", { value }, text)));
  const space = h("input", { type: "text", size: 14, autocomplete: "off", placeholder: "all" });
  const word = h("input", { type: "text", size: 14, autocomplete: "off", placeholder: "any" });
  const form = h(
    "div",
    { class: "row filter", role: "group", "aria-label": "Filter" },
    h("label", {}, "Show ", bound(only, "only")),
    h("label", {}, "of ", bound(kind, "ckind")),
    h("label", {}, "in namespace ", bound(space, "cspace")),
    h("label", {}, "whose name has ", bound(word, "cword")),
  );
  const more = [];
  if (offset > 0) more.push(h("button", { type: "button", onclick: () => choose({ offset: Math.max(0, offset - 500) || null }) }, "Newer ones"));
  if (!isLast) more.push(h("button", { type: "button", onclick: () => choose({ offset: offset + answer.lines.length }) }, "Older ones"));
  const shown = isLast && offset === 0 ? count(answer.total, "change") : `${(offset + 1).toLocaleString("en")} to ${(offset + answer.lines.length).toLocaleString("en")} of ${count(answer.total, "change")}`;
  const omitted = answer.has_omitted ? "; Events and Leases are hidden: choose the kind to see them" : "";
  const flags = [...(chosen.only ? ["--only", chosen.only] : []), ...(chosen.cspace ? valued("-n", chosen.cspace) : [])];
  const since = chosen.from ? [] : ["--since", "1"];
  list.replaceChildren(
    form,
    h("p", { class: "range", role: "status" }, `${shown}, newest first${omitted}`, more),
    elements.length > 0 ? table(["Time", "Namespace", "Object", "Change"], elements, { class: "cut lines" }) : h("p", { class: "empty" }, "Nothing was changed in this range. Choose another one, or Whole time."),
    command(["deltafold", "log", ...(chosen.ckind && kinds()[chosen.ckind] ? [kinds()[chosen.ckind].reference] : []), ...flags, ...since, ...rangeFlags(), ...sourceFlags()]),
  );
  return rows;
}

/** Draws what was deleted in the range, by namespace. */
export async function drawDeleted(list, signal) {
  const changes = await once("changes", { from: page.chosen.from ?? String(page.backup.window.first_revision), to: page.chosen.to }, signal);
  const rows = [];
  const parts = changes.namespaces
    .filter((namespace) => namespace.deleted > 0)
    .map((namespace) => {
      const title = `${namespace.name || "without a namespace"}${namespace.is_deleted ? " · the namespace was deleted" : ""}`;
      const newest = [...namespace.objects].sort((a, b) => b.revision - a.revision);
      const elements = newest.map((object) => {
        const open = () => choose({ id: object.id, at: object.revision, tab: null, with: null, before: null });
        const owner = object.owner ? `${object.owner.kind}/${object.owner.name}` : "";
        const cell = (text, child = text) => h("td", { title: text, translate: "no" }, child);
        const name = h("button", { type: "button", tabindex: "-1" }, object.name);
        const again = object.is_recreated ? " (exists again)" : "";
        const kind = object.kind === null ? "key" : kindLabel(object.kind);
        const row = h("tr", { class: `line deleted ${owner ? "owned" : ""}`, onclick: open }, cell(kind), cell(object.name + again, [name, again]), cell(owner), timeCell(object.time));
        rows.push({ element: row, key: `${object.id} ${object.revision}`, open });
        return row;
      });
      const items = [];
      const left = namespace.deleted - namespace.deleted_events - namespace.objects.length;
      if (left > 0) items.push(h("p", {}, `and ${left.toLocaleString("en")} more: choose a shorter range`));
      if (namespace.deleted_events > 0) items.push(h("p", {}, `${count(namespace.deleted_events, "Event")}, which expire`));
      return h("details", { open: !namespace.is_deleted && namespace.deleted <= 20 }, h("summary", {}, counted(title, namespace.deleted)), elements.length > 0 ? table(["Kind", "Name", "Owner", "Deleted"], elements, { class: "cut" }) : null, items);
    });
  const sum = changes.namespaces.reduce((all, namespace) => all + namespace.deleted - namespace.deleted_events, 0);
  if (parts.length > 0) parts.unshift(h("p", { class: "range", role: "status" }, `${count(sum, "object")} deleted ${page.chosen.from ? `from ${shortTime(changes.from.time)}` : "since the oldest state"} to ${shortTime(changes.to.time)}, newest first. What has an owner is made anew by it.`));
  else parts.push(h("p", { class: "empty" }, "Nothing was deleted in this range. Choose another one, or Whole time."));
  list.replaceChildren(...parts, command(["deltafold", "deleted", ...rangeFlags(), ...sourceFlags()]));
  return rows;
}
