// Line charts as SVG, without a library.

import { h, put, svg } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 640;
const HEIGHT = 190;
const LEFT = 52;
const BOTTOM = 22;
const TOP = 8;
const SHORTEST_S = 60;
const LONGEST_S = 300;

/** A round number not below `value`, even half of it: 1, 2, 4, 6 or 8 times a power of ten. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function pathOf(points, x, y) {
  let path = "";
  let pen = "M";
  for (const [at, value] of points) {
    if (value === null || value === undefined) {
      pen = "M";
      continue;
    }
    path += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

/** A chart. `series`: [{name, field}]; `format`: values as text; `top`: fixed maximum; `least`: smallest one. Returns {element, update}. */
export function lineChart({ title, series, format, top = null, least = 0 }) {
  const figure = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const values = series.map(() => h("b", null, "–"));
  const legend = h(
    "div",
    { class: "legend" },
    series.map((each, at) => h("span", { class: `swatch-${at + 1}` }, h("i"), each.name, " ", values[at])),
  );
  const element = h("section", { class: "panel" }, h("header", null, h("h2", null, title), h("span", { class: "spacer" }), legend), h("div", { class: "inner" }, figure));
  let shown = [];
  let cursor = null;

  function draw() {
    const width = Math.max(280, Math.round(figure.clientWidth || WIDTH));
    figure.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const last = shown.length ? shown[shown.length - 1].unix_s : Date.now() / 1000;
    // A short history fills the width: nothing is known before it.
    const spanS = Math.min(LONGEST_S, Math.max(SHORTEST_S, shown.length ? last - shown[0].unix_s : 0));
    const first = last - spanS;
    const highest = Math.max(0, ...shown.flatMap((point) => series.map((each) => point[each.field] ?? 0)));
    const limit = top ?? Math.max(least, ceiling(highest));
    const x = (at) => LEFT + ((at - first) / spanS) * (width - LEFT - 8);
    const y = (value) => TOP + (1 - Math.min(value / limit, 1)) * (HEIGHT - TOP - BOTTOM);
    const grid = [0, 0.5, 1].map((part) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - 8, y1: y(part * limit), y2: y(part * limit) }),
      svg("text", { x: LEFT - 8, y: y(part * limit) + 4, "text-anchor": "end" }, format(part * limit)),
    ]);
    const times = [0, 0.5, 1].map((part) =>
      svg("text", { x: x(first + part * spanS), y: HEIGHT - 5, "text-anchor": ["start", "middle", "end"][part * 2] }, clock(first + part * spanS)),
    );
    const lines = series.map((each, at) =>
      svg("path", { class: `stroke-${at + 1} dash-${at + 1}`, d: pathOf(shown.map((point) => [point.unix_s, point[each.field]]), x, y) }),
    );
    const inside = shown.filter((point) => point.unix_s >= first);
    const point = cursor === null ? inside[inside.length - 1] : nearest(inside, first + ((cursor - LEFT) / (width - LEFT - 8)) * spanS);
    const mark = cursor !== null && point ? svg("line", { class: "cursor", x1: x(point.unix_s), x2: x(point.unix_s), y1: TOP, y2: HEIGHT - BOTTOM }) : null;
    put(figure, grid, times, mark, lines);
    values.forEach((value, at) => (value.textContent = format(point?.[series[at].field])));
    const latest = shown[shown.length - 1];
    figure.setAttribute("aria-label", `${title}: ${series.map((each) => `${each.name} ${format(latest?.[each.field])}`).join(", ")}`);
  }

  figure.addEventListener("pointermove", (event) => {
    cursor = event.offsetX;
    draw();
  });
  figure.addEventListener("pointerleave", () => {
    cursor = null;
    draw();
  });
  return {
    element,
    update(points) {
      shown = points;
      draw();
    },
  };
}

function nearest(points, at) {
  return points.reduce((best, point) => (best && Math.abs(best.unix_s - at) <= Math.abs(point.unix_s - at) ? best : point), null);
}
