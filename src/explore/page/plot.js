// The time bar: the plot of changes with its axis, deletions, fulls, gaps and damage on it, the range, and the slider.

import { byId, count, h, once, shortTime, svg } from "./dom.js";

const WIDTH = 1000;
const HEIGHT = 90;
const STEPS = 1000;
const BARS = 250;
/** The distances of times on the axis, in seconds. Days and more begin at midnight. */
const DISTANCES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000, 7776000, 31536000];
const slider = byId("slider");
const plot = byId("plot");

/** Where the bars begin: milliseconds or revisions. */
let edges = [];
let isTime = false;
/** What drawPlot was given, and the answer that is drawn. */
let drawn = null;
/** The moment that is shown. */
let shown = null;

const first = () => edges[0];
const last = () => edges[edges.length - 1];
const textOf = (value) => (isTime ? new Date(value).toISOString() : String(Math.round(value)));
const shownEdge = (value) => (isTime ? shortTime(textOf(value)) : `revision ${Math.round(value)}`);
const valueAt = (share) => first() + (last() - first()) * share;
const clamped = (share) => Math.min(1, Math.max(0, share));

/** The share of the plot of a time or a revision: from 0 to 1 if it is in the plot. */
function wideShare(at) {
  const value = isTime ? Date.parse(at.time ?? "") : at.revision;
  // Only the states before the first known time have none.
  if (Number.isNaN(value)) return 0;
  return last() <= first() ? 1 : (value - first()) / (last() - first());
}

/** What the slider means: a time or a revision, for the API. */
export function sliderMoment() {
  const position = Number(slider.value) / STEPS;
  if ((position >= 1 && !drawn?.isRange) || edges.length === 0) return null;
  return textOf(valueAt(position));
}

/** Shows a moment: { revision, time }. */
export function showMoment(at, isNewest) {
  shown = { at, isNewest };
  const time = at.time ? shortTime(at.time) : `revision ${at.revision}`;
  byId("moment").textContent = `${time}${isNewest ? " · newest" : ""}`;
  byId("revision").textContent = at.time ? `revision ${at.revision}` : "";
  slider.setAttribute("aria-valuetext", `${time}, revision ${at.revision}`);
  if (!drawn) return;
  const wide = isNewest && !drawn.isRange ? 1 : wideShare(at);
  const place = clamped(wide);
  if (document.activeElement !== slider) slider.value = String(Math.round(place * STEPS));
  byId("cursor")?.setAttribute("x", String(place * WIDTH - 1));
  byId("cursor")?.setAttribute("visibility", wide === place ? "visible" : "hidden");
}

/** Draws the plot of a range: two edges of it, or nothing for the whole window. `snapshots` is from `list`. */
export async function drawPlot(window, snapshots, [from, to], signal) {
  const density = await once("density", { bars: BARS, from, to }, signal);
  isTime = density.edges[0].includes("T");
  edges = density.edges.map((edge) => (isTime ? Date.parse(edge) : Number(edge)));
  const sums = Array.from({ length: BARS }, (_, bar) => density.kinds.reduce((sum, kind) => sum + kind.counts[bar], 0));
  // The logarithm keeps small changes visible beside a spike.
  const most = Math.log2(1 + Math.max(1, ...sums));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 14}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const add = (name, x, y, width, height) => picture.append(svg("rect", { x, y, width, height, class: name }));
  const ticks = ticksOf();
  for (const [place] of ticks) add("tick", place * (WIDTH - 1), 0, 1, HEIGHT);
  for (let bar = 0; bar < BARS; bar += 1) {
    let top = HEIGHT;
    const x = (bar * WIDTH) / BARS;
    const scale = sums[bar] === 0 ? 0 : (Math.log2(1 + sums[bar]) / most) * (HEIGHT - 8) / sums[bar];
    density.kinds.forEach((kind, nth) => {
      const height = kind.counts[bar] * scale;
      if (height === 0) return;
      top -= height;
      add(`kind${nth}`, x, top, WIDTH / BARS - 0.5, height);
    });
    if (density.deleted[bar] > 0) add("deletions", x, Math.max(0, top - 6), WIDTH / BARS - 0.5, 5);
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
  const isRange = Boolean(from || to);
  const mark = (name, at, text, y, width, height) => {
    const wide = wideShare(at);
    // The newest snapshot may have been taken after the last change.
    if (isRange && (wide < 0 || wide > 1)) return;
    const x = clamped(wide) * WIDTH;
    add(name, Math.min(WIDTH - width, x), y, width, height);
    marks.push([x / WIDTH, x / WIDTH, text]);
  };
  for (const snapshot of isTime ? snapshots.filter((s) => s.kind === "Full") : []) {
    const isForked = snapshot.timeline !== null && snapshot.timeline !== window.timeline;
    mark(isForked ? "forked" : "full", { time: snapshot.created }, `full up to revision ${snapshot.last_revision}`, HEIGHT + 2, 3, 12);
  }
  for (const snapshot of window.damaged) {
    const at = { time: snapshot.created, revision: snapshot.last_revision };
    mark("damaged", at, `damaged: ${snapshot.path}`, 0, 4, HEIGHT + 14);
  }
  picture.append(svg("rect", { id: "cursor", x: WIDTH - 1, y: 0, width: 2, height: HEIGHT + 14, class: "cursor" }));
  const band = picture.appendChild(svg("rect", { y: 0, x: 0, width: 0, height: HEIGHT, class: "band" }));
  const label = h("p", { class: "label", "aria-hidden": "true", hidden: true });
  plot.replaceChildren(picture, label);
  drawn = { window, snapshots, density, sums, marks, band, label, isRange };
  const sum = (counts) => counts.reduce((a, b) => a + b, 0);
  plot.setAttribute("aria-label", `${count(sum(sums), "change")}, ${count(sum(density.deleted), "deletion")} among them, from ${shownEdge(first())} to ${shownEdge(last())}`);
  drawAxis(ticks);
  drawLegend();
  slider.disabled = last() <= first();
  byId("whole").hidden = !isRange;
  byId("from").value = from ? shownEdge(first()).replace("revision ", "") : "";
  byId("to").value = to ? shownEdge(last()).replace("revision ", "") : "";
  if (shown) showMoment(shown.at, shown.isNewest);
}

/** The round times or revisions of the axis: their shares, and texts. */
function ticksOf() {
  const span = last() - first();
  if (span <= 0) return [];
  // A text takes about 170 pixels.
  const most = Math.max(1, Math.floor(plot.clientWidth / 170));
  if (!isTime) {
    const power = 10 ** Math.floor(Math.log10(span / most));
    const step = [1, 2, 5, 10].map((n) => Math.max(1, n * power)).find((n) => span / n <= most) ?? span;
    const begin = Math.ceil(first() / step);
    const number = Math.floor(last() / step) - begin + 1;
    return Array.from({ length: Math.max(0, number) }, (_, nth) => ticked((begin + nth) * step));
  }
  const step = (DISTANCES.find((distance) => span / (distance * 1000) <= most) ?? span) * 1000;
  const ticks = [];
  // Local midnight is a round time of every distance.
  const midnight = new Date(first());
  midnight.setHours(0, 0, 0, 0);
  for (let at = midnight.getTime() + Math.ceil((first() - midnight.getTime()) / step) * step; at <= last() && ticks.length <= most; at += step) ticks.push(ticked(at));
  return ticks;
}

const ticked = (value) => [(value - first()) / (last() - first()), shownEdge(value)];

/** The times below the plot. The first one has the date. */
function drawAxis(ticks) {
  const isOfDay = isTime && last() - first() < 48 * 3600 * 1000;
  const texts = ticks.map(([place, text], nth) => {
    const day = text.slice(0, 10);
    const isNew = nth === 0 || day !== ticks[nth - 1][1].slice(0, 10);
    const short = isTime ? text.replace(/:00$/, "") : text;
    const tick = h("li", {}, isOfDay && !isNew ? short.slice(11) : short);
    // Texts stand below their lines, and stay inside of the plot: half of one is at most this wide.
    const half = short.length * 4 + (isOfDay && !isNew ? -40 : 4);
    tick.style.left = `clamp(${Math.max(half, 24)}px, ${place * 100}%, calc(100% - ${Math.max(half, 24)}px))`;
    return tick;
  });
  byId("axis").replaceChildren(...texts);
}

function drawLegend() {
  const { window, snapshots, density } = drawn;
  const forks = snapshots.some((s) => s.timeline !== null && s.timeline !== window.timeline);
  const total = (counts) => counts.reduce((a, b) => a + b, 0);
  const kinds = density.kinds.map((kind, nth) => [`kind${nth}`, `${kind.kind ?? "others"} ${total(kind.counts).toLocaleString("en")}`, total(kind.counts) > 0]);
  const deleted = total(density.deleted);
  const marks = [
    ["deletions", `deletions ${deleted.toLocaleString("en")}`, deleted > 0],
    ["full", "full snapshots", snapshots.length > 0],
    ["gap", "nothing is known", density.gaps.length > 0],
    ["damaged", "a damaged snapshot", window.damaged.length > 0],
    ["forked", "other timelines", forks],
  ];
  const legend = [...kinds, ...marks].filter(([, , isThere]) => isThere);
  byId("legend").replaceChildren(...legend.map(([name, text]) => h("li", { class: name }, text)));
  const spans = window.missing.map(([begin, end]) => (begin === end ? `${begin}` : `${begin} to ${end}`));
  byId("incomplete").hidden = spans.length === 0;
  byId("incomplete").textContent = `Nothing is known of revision ${spans.join(", ")}: snapshots are missing or damaged, until a full snapshot tells the state again.`;
  const damage = window.damaged.map((snapshot) => h("p", { class: "warning" }, `Changes of a damaged snapshot are not shown: ${snapshot.message}`));
  byId("damage").replaceChildren(...damage);
}

// The range, and what is under the pointer.

/** Returns the edges between two shares of the plot; nothing if it would have no bars. */
function rangeOf(from, to) {
  // Bars of less than a millisecond or a revision show nothing more.
  return valueAt(to) - valueAt(from) < 25 ? null : { from: textOf(valueAt(from)), to: textOf(valueAt(to)) };
}

/** Returns the half of the plot around the moment that is shown. */
export function half() {
  if (!drawn || !shown) return null;
  const middle = Math.min(0.75, Math.max(0.25, shown.isNewest ? 1 : clamped(wideShare(shown.at))));
  return rangeOf(middle - 0.25, middle + 0.25);
}

/** Listens to the pointer on the plot. `go` gets the moment that is clicked, and `choose` the range that is dragged over. */
export function onPlot(go, choose) {
  let begin = null;
  const place = (event) => clamped((event.clientX - plot.getBoundingClientRect().left) / plot.clientWidth);
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
    if (to - from <= 0.005) go(textOf(valueAt(to)));
    else if (rangeOf(from, to)) choose(rangeOf(from, to));
  });
  plot.addEventListener("pointercancel", stop);
  plot.addEventListener("pointerleave", () => drawn && (drawn.label.hidden = true));
}

function showLabel(at) {
  const { density, sums, marks, label } = drawn;
  const bar = Math.min(sums.length - 1, Math.floor(at * sums.length));
  const kinds = density.kinds.map((kind) => [kind.kind ?? "others", kind.counts[bar]]).filter(([, n]) => n > 0);
  const near = marks.filter(([from, to]) => from - 0.004 <= at && at <= to + 0.004).map(([, , text]) => text);
  const changes = kinds.map(([kind, n]) => `${kind} ${n.toLocaleString("en")}`).join(", ");
  const deleted = density.deleted[bar] > 0 ? `${density.deleted[bar]} deleted` : null;
  label.textContent = [shownEdge(edges[bar]), changes || "no changes", deleted, ...near.slice(0, 3)].filter(Boolean).join(" · ");
  label.hidden = false;
  // It stays inside of the plot.
  label.style.left = at < 0.5 ? `${at * 100}%` : "auto";
  label.style.right = at < 0.5 ? "auto" : `${(1 - at) * 100}%`;
}
