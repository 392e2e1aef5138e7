// The backup itself: its health, and its snapshots as a picture and as a table.

import { count, h, scrolled, shortTime, size, svg, table } from "./dom.js";
import { choose, page } from "./state.js";

const WIDTH = 1000;
const HEIGHT = 80;
const MOST = 1000;

export const bytesOf = (snapshots) => snapshots.reduce((sum, snapshot) => sum + snapshot.bytes, 0);

const isFull = (snapshot) => snapshot.kind === "Full";
const revisions = (snapshot) => (isFull(snapshot) ? `${snapshot.last_revision}` : `${snapshot.start_revision} to ${snapshot.last_revision}`);
const go = (snapshot) => choose({ view: "objects", at: String(snapshot.last_revision) });

/** Draws the backup. */
export function drawBackup(list) {
  const { window, overview, overview_error: error } = page.backup;
  const row = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
  const rows = [
    row("Timeline", window.timeline ?? "a plain snapshot file"),
    row("Revisions", `${window.first_revision} to ${window.last_revision}`),
    row("Times", `${shortTime(window.first_time)} to ${shortTime(window.last_time)}`),
    row("Keys and versions", `${count(window.keys, "key")}, ${count(window.versions, "version")}`),
  ];
  if (window.missing.length > 0) rows.push(row("Not recorded", window.missing.map(([first, last]) => `${first} to ${last}`).join(", ")));
  const warnings = [...window.warnings, ...(error ? [error.message] : [])];
  const parts = [];
  if (overview) {
    const { listed, status } = overview;
    rows.push(row("Health", h("strong", { class: status.verdict === "Healthy" ? null : "warning" }, `${status.verdict}${status.message ? `: ${status.message}` : ""}`)));
    for (const verified of status.verifications) {
      rows.push(row(`Verified (${verified.level})`, `${shortTime(verified.time)}: ${verified.result}${verified.reason ? `, ${verified.reason}` : ""}, up to revision ${verified.revision ?? "unknown"}`));
    }
    if (status.verifications.length === 0) rows.push(row("Verified", "never, as far as the store tells"));
    warnings.push(...listed.problems.map((problem) => `${problem.reason}: ${problem.message}`));
    parts.push(h("h3", {}, `${count(listed.snapshots.length, "snapshot")}, ${size(bytesOf(listed.snapshots))}`), picture(listed.snapshots), snapshotTable(listed.snapshots));
  }
  list.replaceChildren(h("h2", {}, "The backup"), h("dl", {}, rows.flat()), ...warnings.map((warning) => h("p", { class: "warning" }, warning)), ...parts);
  return [];
}

/** Each full with the deltas that follow it, by size, in the order of their creation. */
function picture(snapshots) {
  const shown = snapshots.slice(-MOST);
  const most = Math.sqrt(Math.max(1, ...shown.map((snapshot) => snapshot.bytes)));
  const step = WIDTH / Math.max(shown.length, 30);
  const bars = shown.map((snapshot, nth) => {
    const height = Math.max(3, (Math.sqrt(snapshot.bytes) / most) * HEIGHT);
    const place = { x: nth * step, y: HEIGHT - height, width: Math.max(1, step * (isFull(snapshot) ? 0.9 : 0.6)), height };
    const bar = svg("rect", { ...place, class: `${isFull(snapshot) ? "isfull" : "isdelta"} ${snapshot.in_chain ? "chain" : "kept"}` });
    bar.append(svg("title", {}, `${isFull(snapshot) ? "full" : "delta"} ${revisions(snapshot)} · ${shortTime(snapshot.created)} · ${size(snapshot.bytes)}`));
    bar.addEventListener("click", () => go(snapshot));
    return bar;
  });
  const label = "Snapshots by size, in the order of their creation; the table below has the same";
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label, class: "chains" }, ...bars);
  const legend = [
    ["full", "a full"],
    ["delta", "a delta"],
    ["chain", "in the newest chain"],
  ];
  const older = snapshots.length > MOST ? h("p", { class: "facts" }, `The newest ${MOST} of ${snapshots.length}.`) : null;
  return h("div", { class: "picture" }, drawing, h("ul", { class: "legend" }, legend.map(([name, text]) => h("li", { class: name }, text))), older);
}

function snapshotTable(snapshots) {
  const rows = snapshots.slice(-2000).reverse().map((snapshot) => {
    const remarks = [snapshot.in_chain ? "in the newest chain" : "", snapshot.excluded ? "excluded" : "", snapshot.encrypted ? "encrypted" : "", snapshot.locked_until ? `locked until ${shortTime(snapshot.locked_until)}` : ""];
    return h(
      "tr",
      {},
      h("td", {}, h("button", { type: "button", onclick: () => go(snapshot) }, isFull(snapshot) ? "full" : "delta")),
      h("td", { class: "when" }, shortTime(snapshot.created)),
      h("td", {}, revisions(snapshot)),
      h("td", { class: "count" }, size(snapshot.bytes)),
      h("td", {}, remarks.filter(Boolean).join(", ")),
    );
  });
  return scrolled("Snapshots", table(["Kind", "Taken", "Revisions", "Size", "Remarks"], rows));
}
