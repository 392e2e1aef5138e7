// The time bar: the plot of changes with its axis, the snapshots, gaps and damage on it, zoom, and the slider.

import { ask, byId, count, h, shortTime, svg } from "./dom.js";

const WIDTH = 1000;
const HEIGHT = 90;
const STEPS = 1000;
/** Where the axis has times, as shares of the plot. */
const TICKS = [0, 0.25, 0.5, 0.75, 1];
const slider = byId("slider");
const plot = byId("plot");

/** Where the bars begin: milliseconds or revisions. */
let edges = [];
let isTime = false;
/** What drawPlot was given, and the answer that is drawn. */
let drawn = null;
/** The edges that are zoomed to; null for the whole window. */
let zoomed = null;
/** The moment that is shown. */
let shown = null;

const first = () => edges[0];
const last = () => edges[edges.length - 1];
const textOf = (value) => (isTime ? new Date(value).toISOString() : String(Math.round(value)));
const shownEdge = (value) => (isTime ? shortTime(textOf(value)) : `revision ${Math.round(value)}`);
const valueAt = (share) => first() + (last() - first()) * share;

/** The share of the plot of a time or a revision: from 0 to 1 if it is in the plot. */
function wideShare(at) {
  const value = isTime ? Date.parse(at.time ?? "") : at.revision;
  // Only the states before the first known time have none.
  if (Number.isNaN(value)) return 0;
  return last() <= first() ? 1 : (value - first()) / (last() - first());
}

const share = (at) => Math.min(1, Math.max(0, wideShare(at)));

/** What the slider means: a time or a revision, for the API. */
export function sliderMoment() {
  const position = Number(slider.value) / STEPS;
  if ((position >= 1 && !zoomed) || edges.length === 0) return null;
  return textOf(valueAt(position));
}

/** Shows a moment: { revision, time, is_complete }. */
export function showMoment(at, isNewest) {
  shown = { at, isNewest };
  const text = `revision ${at.revision} · ${shortTime(at.time)}${isNewest ? " · newest" : ""}`;
  byId("moment").textContent = text;
  slider.setAttribute("aria-valuetext", text);
  const place = isNewest && !zoomed ? 1 : share(at);
  if (document.activeElement !== slider) slider.value = String(Math.round(place * STEPS));
  byId("cursor")?.setAttribute("x", String(place * WIDTH - 1));
  byId("cursor")?.setAttribute("visibility", zoomed && wideShare(at) !== place ? "hidden" : "visible");
}

/** Draws the plot. `snapshots` is from `list`. */
export async function drawPlot(window, snapshots) {
  const [from, to] = zoomed ?? [null, null];
  const density = await ask("density", { bars: 250, from, to });
  isTime = density.edges[0].includes("T");
  edges = density.edges.map((edge) => (isTime ? Date.parse(edge) : Number(edge)));
  const bars = edges.length - 1;
  const sums = Array.from({ length: bars }, (_, bar) => density.kinds.reduce((sum, kind) => sum + kind.counts[bar], 0));
  // The square root keeps small changes visible beside a large one.
  const most = Math.sqrt(Math.max(1, ...sums));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 14}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const add = (name, x, y, width, height) => picture.append(svg("rect", { x, y, width, height, class: name }));
  for (const place of TICKS) add("tick", place * (WIDTH - 1), 0, 1, HEIGHT);
  for (let bar = 0; bar < bars; bar += 1) {
    let top = HEIGHT;
    const scale = sums[bar] === 0 ? 0 : (Math.sqrt(sums[bar]) / most) * HEIGHT / sums[bar];
    density.kinds.forEach((kind, nth) => {
      const height = kind.counts[bar] * scale;
      if (height === 0) return;
      top -= height;
      add(`kind${nth}`, (bar * WIDTH) / bars, top, WIDTH / bars - 0.5, height);
    });
  }
  // What hovering tells of the marks: the share from, the share to, and a text.
  const marks = [];
  for (const gap of density.gaps) {
    const [begin, end] = gap.map((edge) => wideShare({ time: edge, revision: Number(edge) }));
    if (end < 0 || begin > 1) continue;
    const x = Math.max(0, begin) * WIDTH;
    add("gap", x, 0, Math.max(2, Math.min(1, end) * WIDTH - x), HEIGHT);
    marks.push([begin, end, "nothing is known"]);
  }
  for (const snapshot of isTime ? snapshots : []) {
    const at = wideShare({ time: snapshot.created });
    // The newest snapshot may have been taken after the last change.
    if (zoomed && (at < 0 || at > 1)) continue;
    const x = Math.min(1, Math.max(0, at)) * WIDTH;
    const isForked = snapshot.timeline !== null && snapshot.timeline !== window.timeline;
    const full = snapshot.kind === "Full";
    add(isForked ? "forked" : full ? "full" : "delta", x - (full ? 1.5 : 0.5), HEIGHT + 2, full ? 3 : 1, full ? 12 : 7);
    marks.push([x / WIDTH, x / WIDTH, `${full ? "full" : "delta"} up to revision ${snapshot.last_revision}`]);
  }
  for (const snapshot of window.damaged) {
    const at = wideShare({ time: snapshot.created, revision: snapshot.last_revision });
    if (zoomed && (at < 0 || at > 1)) continue;
    const x = Math.min(1, Math.max(0, at)) * WIDTH;
    add("damaged", Math.min(WIDTH - 4, x), 0, 4, HEIGHT + 14);
    marks.push([x / WIDTH, x / WIDTH, `damaged: ${snapshot.path}`]);
  }
  picture.append(svg("rect", { id: "cursor", x: WIDTH - 1, y: 0, width: 2, height: HEIGHT + 14, class: "cursor" }));
  const band = picture.appendChild(svg("rect", { y: 0, x: 0, width: 0, height: HEIGHT, class: "band" }));
  const label = h("p", { class: "label", "aria-hidden": "true", hidden: true });
  plot.replaceChildren(picture, label);
  drawn = { window, snapshots, density, sums, marks, band, label };
  plot.setAttribute("aria-label", `${count(sums.reduce((a, b) => a + b, 0), "change")} from ${shownEdge(first())} to ${shownEdge(last())}, ${Math.round(most * most)} at most in a bar`);
  drawAxis(Math.round(most * most));
  drawLegend();
  slider.disabled = last() <= first();
  byId("whole").hidden = !zoomed;
  if (shown) showMoment(shown.at, shown.isNewest);
}

/** The times below the plot, and how high its highest bar is. */
function drawAxis(most) {
  const isShort = isTime && last() - first() < 24 * 3600 * 1000;
  const ticks = TICKS.map((place, nth) => {
    const text = shownEdge(valueAt(place));
    const tick = h("li", {}, isShort && nth > 0 ? text.slice(11) : text);
    tick.style.left = `${place * 100}%`;
    tick.style.transform = `translateX(-${place * 100}%)`;
    return tick;
  });
  byId("axis").replaceChildren(...(last() > first() ? ticks : []));
  byId("most").textContent = `highest bar: ${count(most, "change")}`;
}

function drawLegend() {
  const { window, snapshots, density } = drawn;
  const forks = snapshots.some((s) => s.timeline !== null && s.timeline !== window.timeline);
  const total = (kind) => kind.counts.reduce((a, b) => a + b, 0).toLocaleString("en");
  const legend = density.kinds.map((kind, nth) => h("li", { class: `kind${nth}` }, `${kind.kind ?? "others"} ${total(kind)}`));
  const also = [
    ["full", "full snapshots", snapshots.length > 0],
    ["delta", "deltas", snapshots.length > 0],
    ["gap", "nothing is known", density.gaps.length > 0],
    ["damaged", "a damaged snapshot", window.damaged.length > 0],
    ["forked", "other timelines", forks],
  ];
  legend.push(...also.filter(([, , isThere]) => isThere).map(([name, text]) => h("li", { class: name }, text)));
  byId("legend").replaceChildren(...legend);
  const spans = window.missing.map(([begin, end]) => (begin === end ? `${begin}` : `${begin} to ${end}`));
  byId("incomplete").hidden = spans.length === 0;
  byId("incomplete").textContent = `Nothing is known of revision ${spans.join(", ")}: snapshots are missing or damaged, until a full snapshot tells the state again.`;
  const damage = window.damaged.map((snapshot) => h("p", { class: "warning" }, `Changes of a damaged snapshot are not shown: ${snapshot.message}`));
  byId("damage").replaceChildren(...damage);
}

// Zoom, and what is under the pointer.

/** Zooms to two shares of the plot; to the whole window without them. */
export function zoom(from, to) {
  if (!drawn || (from === undefined && !zoomed)) return;
  // Bars of less than a millisecond or a revision show nothing more.
  if (valueAt(to) - valueAt(from) < 25) return;
  zoomed = from === undefined ? null : [textOf(valueAt(from)), textOf(valueAt(to))];
  drawPlot(drawn.window, drawn.snapshots);
}

/** Zooms to the half of the plot around the moment that is shown. */
export function zoomIn() {
  if (!shown) return;
  const middle = Math.min(0.75, Math.max(0.25, shown.isNewest ? 1 : share(shown.at)));
  zoom(middle - 0.25, middle + 0.25);
}

/** Listens to the pointer on the plot. `go` gets the moment that is clicked. */
export function onPlot(go) {
  let begin = null;
  const place = (event) => Math.min(1, Math.max(0, (event.clientX - plot.getBoundingClientRect().left) / plot.clientWidth));
  const stop = () => {
    begin = null;
    drawn?.band.setAttribute("width", "0");
  };
  plot.addEventListener("pointerdown", (event) => {
    if (!drawn || event.button !== 0) return;
    begin = place(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!drawn) return;
    const at = place(event);
    showLabel(at);
    if (begin === null) return;
    drawn.band.setAttribute("x", String(Math.min(begin, at) * WIDTH));
    drawn.band.setAttribute("width", String(Math.abs(at - begin) * WIDTH));
  });
  plot.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const [from, to] = [begin, place(event)].sort((a, b) => a - b);
    stop();
    if (to - from > 0.005) zoom(from, to);
    else go(textOf(valueAt(to)));
  });
  plot.addEventListener("pointercancel", stop);
  plot.addEventListener("pointerleave", () => drawn && (drawn.label.hidden = true));
  byId("whole").addEventListener("click", () => zoom());
}

function showLabel(at) {
  const { density, sums, marks, label } = drawn;
  const bar = Math.min(sums.length - 1, Math.floor(at * sums.length));
  const kinds = density.kinds.map((kind) => [kind.kind ?? "others", kind.counts[bar]]).filter(([, n]) => n > 0);
  const near = marks.filter(([from, to]) => from - 0.004 <= at && at <= to + 0.004).map(([, , text]) => text);
  const changes = kinds.map(([kind, n]) => `${kind} ${n.toLocaleString("en")}`).join(", ");
  label.textContent = [shownEdge(edges[bar]), changes || "no changes", ...near.slice(0, 3)].join(" · ");
  label.hidden = false;
  // It stays inside of the plot.
  label.style.left = at < 0.5 ? `${at * 100}%` : "auto";
  label.style.right = at < 0.5 ? "auto" : `${(1 - at) * 100}%`;
}
