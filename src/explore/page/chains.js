// The backup as a picture: each full with the deltas that follow it, by size.

import { h, shortTime, size, svg } from "./dom.js";

const WIDTH = 1000;
const HEIGHT = 80;
const MOST = 1000;

/** Draws the snapshots in the order of their creation. `gone` has the paths of those that gc would remove. */
export function drawChains(snapshots, gone, open) {
  const shown = snapshots.slice(-MOST);
  const most = Math.sqrt(Math.max(1, ...shown.map((snapshot) => snapshot.bytes)));
  const step = WIDTH / Math.max(shown.length, 30);
  const bars = shown.map((snapshot, nth) => {
    const isFull = snapshot.kind === "Full";
    const height = Math.max(3, (Math.sqrt(snapshot.bytes) / most) * HEIGHT);
    const kind = gone.has(snapshot.path) ? "gone" : snapshot.in_chain ? "chain" : "kept";
    const place = { x: nth * step, y: HEIGHT - height, width: Math.max(1, step * (isFull ? 0.9 : 0.6)), height };
    const bar = svg("rect", { ...place, class: `${isFull ? "isfull" : "isdelta"} ${kind}` });
    const revisions = isFull ? snapshot.last_revision : `${snapshot.start_revision} to ${snapshot.last_revision}`;
    bar.append(svg("title", {}, `${isFull ? "full" : "delta"} ${revisions} · ${shortTime(snapshot.created)} · ${size(snapshot.bytes)}`));
    bar.addEventListener("click", () => open(snapshot));
    return bar;
  });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": "Snapshots by size, in the order of their creation; the table below has the same", class: "chains" }, ...bars);
  const legend = [
    ["full", "a full"],
    ["delta", "a delta"],
    ["chain", "in the newest chain"],
    ["gone", "gc would remove it"],
  ];
  const older = snapshots.length > MOST ? h("p", { class: "facts" }, `The newest ${MOST} of ${snapshots.length}.`) : null;
  return h("div", { class: "picture" }, picture, h("ul", { class: "legend" }, legend.map(([name, text]) => h("li", { class: name }, text))), older);
}
