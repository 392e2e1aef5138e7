// The time bar: the plot of changes, the snapshots and gaps on its axis, and the slider.

import { ask, byId, count, h, shortTime, svg } from "./dom.js";

const WIDTH = 1000;
const HEIGHT = 90;
const STEPS = 1000;
const slider = byId("slider");

/** Where the bars begin: milliseconds or revisions. */
let edges = [];
let isTime = false;

/** The share of the window, from 0 to 1, of a time or a revision. */
function share(at) {
  const value = isTime ? Date.parse(at.time ?? "") : at.revision;
  const [first, last] = [edges[0], edges[edges.length - 1]];
  // Only the states before the first known time have none.
  if (Number.isNaN(value)) return 0;
  return last <= first ? 1 : Math.min(1, Math.max(0, (value - first) / (last - first)));
}

/** What the slider means: a time or a revision, for the API. */
export function sliderMoment() {
  const position = Number(slider.value) / STEPS;
  if (position >= 1 || edges.length === 0) return null;
  const at = edges[0] + (edges[edges.length - 1] - edges[0]) * position;
  return isTime ? new Date(at).toISOString() : String(Math.round(at));
}

/** Shows a moment: { revision, time, is_complete }. */
export function showMoment(at, isNewest) {
  const text = `revision ${at.revision} · ${shortTime(at.time)}${isNewest ? " · newest" : ""}`;
  byId("moment").textContent = text;
  slider.setAttribute("aria-valuetext", text);
  if (document.activeElement !== slider) slider.value = String(Math.round((isNewest ? 1 : share(at)) * STEPS));
  const cursor = byId("cursor");
  if (cursor) cursor.setAttribute("x", String((isNewest ? 1 : share(at)) * WIDTH - 1));
  const incomplete = byId("incomplete");
  incomplete.hidden = at.is_complete;
  incomplete.textContent = at.is_complete
    ? ""
    : "Changes are missing here: no snapshot holds those up to this revision. What is shown may be older than the moment.";
}

/** Draws the plot. `snapshots` is from `list`. */
export async function drawPlot(window, snapshots) {
  const density = await ask("density", { bars: 250 });
  isTime = density.edges[0].includes("T");
  edges = density.edges.map((edge) => (isTime ? Date.parse(edge) : Number(edge)));
  const bars = density.edges.length - 1;
  const sums = Array.from({ length: bars }, (_, bar) => density.kinds.reduce((sum, kind) => sum + kind.counts[bar], 0));
  // The square root keeps small changes visible beside a large one.
  const most = Math.sqrt(Math.max(1, ...sums));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 14}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (let bar = 0; bar < bars; bar += 1) {
    let top = HEIGHT;
    const scale = sums[bar] === 0 ? 0 : (Math.sqrt(sums[bar]) / most) * HEIGHT / sums[bar];
    density.kinds.forEach((kind, nth) => {
      const height = kind.counts[bar] * scale;
      if (height === 0) return;
      top -= height;
      const place = { x: (bar * WIDTH) / bars, y: top, width: WIDTH / bars - 0.5, height };
      picture.append(svg("rect", { ...place, class: `kind${nth}` }));
    });
  }
  for (const gap of density.gaps) {
    const [from, to] = gap.map((edge) => share({ time: edge, revision: Number(edge) }) * WIDTH);
    picture.append(svg("rect", { x: from, y: 0, width: Math.max(2, to - from), height: HEIGHT, class: "gap" }));
  }
  for (const snapshot of isTime ? snapshots : []) {
    const x = share({ time: snapshot.created }) * WIDTH;
    const isForked = snapshot.timeline !== null && snapshot.timeline !== window.timeline;
    const full = snapshot.kind === "Full";
    const mark = { x: x - (full ? 1.5 : 0.5), y: HEIGHT + 2, width: full ? 3 : 1, height: full ? 12 : 7 };
    picture.append(svg("rect", { ...mark, class: isForked ? "forked" : full ? "full" : "delta" }));
  }
  picture.append(svg("rect", { id: "cursor", x: WIDTH - 1, y: 0, width: 2, height: HEIGHT + 14, class: "cursor" }));
  byId("plot").replaceChildren(picture);
  const total = sums.reduce((a, b) => a + b, 0);
  byId("plot").setAttribute(
    "aria-label",
    `${count(total, "change")} from ${shortTime(window.first_time)} to ${shortTime(window.last_time)}`,
  );
  const forks = snapshots.some((s) => s.timeline !== null && s.timeline !== window.timeline);
  const legend = density.kinds.map((kind, nth) => {
    const sum = kind.counts.reduce((a, b) => a + b, 0);
    return h("li", { class: `kind${nth}` }, `${kind.kind ?? "others"} ${sum.toLocaleString("en")}`);
  });
  const also = [
    ["full", "full snapshots", snapshots.length > 0],
    ["delta", "deltas", snapshots.length > 0],
    ["gap", "changes are missing", density.gaps.length > 0],
    ["forked", "other timelines", forks],
  ];
  legend.push(...also.filter(([, , isThere]) => isThere).map(([name, text]) => h("li", { class: name }, text)));
  byId("legend").replaceChildren(...legend);
  slider.disabled = edges[edges.length - 1] <= edges[0];
}
