// One object: as YAML, compared with another moment, and its life.

import { command, copyButton, count, download, h, naming, once, scrolled, shortTime, size, table, textOf, valued } from "./dom.js";
import { bound, choose, kinds, page, sourceFlags } from "./state.js";

const TABS = [
  ["yaml", "YAML"],
  ["compare", "Compare"],
  ["life", "Life"],
];
/** What a reader misses in each view of changes. */
const AUDIT = "A manager is a program. etcd does not store which person made a change: the audit log of the API server does.";

/** Draws the object that is chosen. */
export async function drawDetail(detail, signal) {
  const { chosen } = page;
  if (!chosen.id) {
    detail.replaceChildren();
    return;
  }
  const { id, secrets, clean, managers } = chosen;
  const show = { id, secrets, clean, managers };
  const now = await once("object", { ...show, at: chosen.at }, signal);
  // What was deleted is shown as it was last.
  const object = now.object || !now.gone ? now : await once("object", { ...show, at: now.gone.before }, signal);
  const tab = chosen.tab ?? "yaml";
  const body = await { yaml: drawYaml, compare: drawComparison, life: drawLife }[tab](object, now, show, signal);
  const tabs = TABS.map(([name, text]) => h("button", { type: "button", "aria-pressed": String(tab === name), "data-tab": name, onclick: () => choose({ tab: name === "yaml" ? null : name }) }, text));
  const flag = (name, text) => h("label", { class: "flag" }, bound(h("input", { type: "checkbox" }), name, true), ` ${text}`);
  const focused = document.activeElement?.dataset?.tab;
  detail.replaceChildren(
    h("p", { class: "row top" }, h("strong", { translate: "no" }, object.reference), h("span", { class: "spread" }), h("button", { type: "button", id: "close", onclick: () => choose({ id: null, with: null, tab: null }) }, "Close")),
    when(object, now),
    h("p", { class: "row" }, copies(object), h("span", { class: "spread" }), tabs),
    recovery(object),
    h("p", { class: "row" }, object.is_secret || secrets ? flag("secrets", "Show the values of Secrets") : null, flag("clean", "Only what a user sets"), flag("managers", "Managers")),
    ...body.filter(Boolean),
  );
  if (focused) detail.querySelector(`[data-tab="${focused}"]`)?.focus();
}

/** Of which moment the object is. */
function when(object, now) {
  if (object !== now) return h("p", { class: "warning", id: "gone" }, `Deleted at ${shortTime(now.gone.time)} (revision ${now.gone.revision}). This is as it was last, at revision ${object.revision}.`);
  if (!object.object) return h("p", { class: "warning" }, "It does not exist at this moment.");
  const { create_revision: created, version, lease, bytes } = object.record;
  const parts = [`changed at ${shortTime(object.object.time)}, revision ${object.object.revision}`, `created at revision ${created}`, count(version, "write"), size(bytes)];
  if (lease !== 0) parts.push(`lease ${lease.toString(16)}`);
  return h("p", { class: "facts" }, parts.join(" · "));
}

/** Buttons that take the object along. */
function copies(object) {
  if (!object.object) return [];
  const { id, secrets, clean, managers } = page.chosen;
  const at = object.revision;
  const isKubernetes = Boolean(kinds()[object.object.kind]) && !object.not_decoded;
  const hasValues = object.is_secret ? ", with its values" : "";
  const text = () => textOf("yaml", { id, at, clean: "true", secrets: object.is_secret ? "true" : null });
  return [
    isKubernetes ? Object.assign(copyButton(`Copy for kubectl apply${hasValues}`, text), { className: "first" }) : null,
    h("button", { type: "button", onclick: () => download("yaml", { id, at, secrets, clean, managers }) }, "Download YAML"),
  ];
}

/** The command that brings the object back. */
function recovery(object) {
  if (!object.object || !kinds()[object.object.kind]) return "";
  const words = ["deltafold", "recover", ...naming(object.reference, ["--revision", String(object.revision), ...sourceFlags()])];
  return h("div", {}, h("span", { class: "facts" }, "To bring it back:"), command(words));
}

function drawYaml(object) {
  if (!object.object) return [h("button", { type: "button", onclick: () => choose({ tab: "life" }) }, "Show its life")];
  const flags = ["--revision", String(object.revision), ...sourceFlags()];
  const isKubernetes = Boolean(kinds()[object.object.kind]?.reference);
  const format = [...(isKubernetes ? ["-o", "yaml"] : []), ...(page.chosen.clean ? ["--clean"] : [])];
  return [
    object.not_decoded ? h("p", { class: "warning" }, object.not_decoded) : null,
    object.is_cut ? h("p", { class: "warning" }, "The value is very long: only its beginning is shown. The download has all of it.") : null,
    h("pre", { class: "yaml", tabindex: "0", "aria-label": "The object as YAML", translate: "no" }, object.text),
    command(["deltafold", "get", ...naming(object.reference, [...flags, ...format])]),
  ];
}

async function drawComparison(object, now, show, signal) {
  const { chosen } = page;
  const life = await once("life", { ...show, before: now.revision + 1, brief: true }, signal);
  const older = life.versions.find((version) => version.revision < (now.object?.revision ?? now.revision));
  // The last change of what a user sets, if nothing else is asked for.
  const change = chosen.with || !now.object ? null : life.last_change;
  const other = chosen.with ?? String(change?.from ?? older?.revision ?? page.backup.window.first_revision);
  const here = change?.revision ?? now.revision;
  const isLater = other === "now" || Number(other) > here;
  const sides = isLater ? { from: here, to: other === "now" ? null : other } : { from: other, to: here };
  const comparison = await once("diff", { ...show, ...sides }, signal);
  const versions = life.versions.map((version) => h("option", { value: version.revision }, `${shortTime(version.time)} · revision ${version.revision} · ${version.change}`));
  const select = bound(h("select", { "data-tab": "with" }, h("option", { value: "now" }, "now: the newest state"), versions), "with");
  select.value = other;
  const isSame = comparison.rows.every((row) => row.change === "same");
  const label = (side) => `${shortTime(side.time)} · revision ${side.revision}${side.object ? "" : " · does not exist"}`;
  const to = isLater ? comparison.to.revision : here;
  return [
    h("p", { class: "row" }, h("label", {}, "Compare with ", select)),
    change ? h("p", { class: "facts" }, `The last change of more than the status, ${changeText(change)}:`) : null,
    change ? fieldList(change) : null,
    isSame ? h("p", { class: "empty" }, "Both are the same.") : null,
    comparison.is_cut ? h("p", { class: "warning" }, "The object is very long: only its beginning is compared.") : null,
    scrolled("Both moments side by side", table([label(comparison.from), label(comparison.to)], diffRows(comparison.rows), { class: "diff", translate: "no" })),
    command(["deltafold", "diff", ...valued("--prefix", object.key), "--from", String(comparison.from.revision), "--to", String(to), ...sourceFlags()]),
  ];
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

/** When a version was written, and by whom. */
const changeText = (version) => shortTime(version.time) + (version.managers.length ? ` by ${version.managers.join(", ")}` : "");
const fieldList = (version) => (version.fields.length ? h("ul", { class: "fields", translate: "no" }, version.fields.map((field) => h("li", {}, field))) : null);

async function drawLife(object, now, show, signal) {
  const { chosen } = page;
  const life = await once("life", { ...show, before: chosen.before }, signal);
  const kept = life.versions.filter((version) => version.is_of_user || !chosen.clean);
  const hidden = life.versions.length - kept.length;
  const words = { created: "created", changed: "changed", deleted: "deleted", missing: "gone by then: the deletion is not recorded" };
  const versions = kept.map((version) => {
    const go = () => choose({ at: String(version.revision), with: null, tab: null });
    const text = ` ${words[version.change]}${version.managers.length ? ` by ${version.managers.join(", ")}` : ""} · revision ${version.revision}`;
    return h("li", { class: version.change, "aria-current": version.revision === now.object?.revision ? "true" : null }, h("p", {}, h("button", { type: "button", "data-revision": version.revision, onclick: go }, shortTime(version.time)), text), fieldList(version));
  });
  const last = life.versions[life.versions.length - 1];
  const isMore = last && life.versions.length < life.total && life.versions.length >= 200;
  const events = life.events.map((event) => h("li", {}, `${shortTime(event.time)} · ${event.text}`));
  return [
    h("p", { class: "facts" }, count(life.total, "version"), hidden > 0 ? `: ${hidden.toLocaleString("en")} of them changed nothing that a user sets, and are hidden` : ""),
    h("p", { class: "facts" }, AUDIT),
    h("ol", { class: "life" }, versions),
    isMore ? h("button", { type: "button", onclick: () => choose({ before: last.revision }) }, "Older versions") : null,
    events.length ? h("h3", {}, "Events about it") : null,
    events.length ? h("ul", { class: "events", translate: "no" }, events) : null,
    command(["deltafold", "history", ...naming(object.reference, sourceFlags())]),
  ];
}
