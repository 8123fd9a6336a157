// Time lines of requests: stages of `stages_ms` on a common axis.

import { h, svg } from "./dom.js";
import { brief, link, seconds } from "./format.js";

const LANE = 26;
const WIDTH = 980;
const LABEL = 150;

export const STAGES = {
  parse: "read and parsed", held: "held by admission", queued: "queued", prefill_leg: "prefill on P", decode_leg: "pull and first token on D", first: "prefill, first token", decode: "decode",
};

/** Segments of a breakdown row: [[stage, begin, end], ...] in ms after its arrival. */
export function segments(row) {
  const stages = row.stages_ms ?? {};
  const total = stages.total ?? 0;
  const found = [];
  let at = 0;
  const add = (stage, end) => {
    const until = Math.min(Math.max(end, at), Math.max(total, at));
    if (until > at) found.push([stage, at, until]);
    at = until;
  };
  add("parse", stages.parse ?? 0);
  if (stages.held) add("held", at + stages.held);
  if (stages.queued) add("queued", at + stages.queued);
  if (stages.first_byte !== undefined) {
    if (row.prefill_instance && stages.prefill_leg) {
      const pulled = stages.decode_leg_first_byte ?? 0;
      add("prefill_leg", pulled ? stages.first_byte - pulled : at + stages.prefill_leg);
      add("decode_leg", stages.first_byte);
    } else add("first", stages.first_byte);
    add("decode", total);
  } else add("first", total);
  return found;
}

/** A drawing of rows, one lane each; arrivals decide where they begin. */
export function timeline(rows) {
  const begins = Math.min(...rows.map((row) => row.arrived_unix_s));
  const ends = Math.max(...rows.map((row) => row.arrived_unix_s + (row.stages_ms?.total ?? 0) / 1000));
  const spanS = Math.max(ends - begins, 0.001);
  const scale = (WIDTH - LABEL - 60) / spanS;
  const x = (s) => LABEL + (s - begins) * scale;
  const height = rows.length * LANE + 28;
  const lanes = rows.map((row, number) => {
    const y = number * LANE + 4;
    const label = row.prefill_instance ? `${row.prefill_instance} → ${row.instance}` : (row.instance ?? row.outcome);
    const total = (row.stages_ms?.total ?? 0) / 1000;
    const bars = segments(row).map(([stage, from, to]) =>
      svg("rect", { class: `stage-${stage}`, "data-stage": stage, x: x(row.arrived_unix_s + from / 1000).toFixed(2), y: y + 3, width: Math.max(1, ((to - from) / 1000) * scale).toFixed(2), height: LANE - 10, rx: 2 }, svg("title", null, `${STAGES[stage]}: ${seconds((to - from) / 1000)}`)),
    );
    return svg(
      "a",
      { href: link("request", row.request_id), "aria-label": `request ${row.request_id}, ${seconds(total)}` },
      svg("rect", { class: "lane", x: LABEL, y, width: WIDTH - LABEL - 60, height: LANE - 4, rx: 3 }),
      svg("text", { class: "strong", x: 0, y: y + 15 }, brief(label, 22)),
      bars,
      svg("text", { x: Math.min(x(row.arrived_unix_s + total) + 5, WIDTH - 54), y: y + 15 }, seconds(total)),
    );
  });
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) =>
    svg("text", { x: LABEL + part * spanS * scale, y: height - 6, "text-anchor": part === 0 ? "start" : "middle" }, seconds(part * spanS)),
  );
  const used = new Set(rows.flatMap((row) => segments(row).map(([stage]) => stage)));
  return h(
    "div",
    { class: "stack" },
    h("div", { class: "legend" }, Object.entries(STAGES).filter(([stage]) => used.has(stage)).map(([stage, text]) => h("span", { class: `stage-${stage}` }, h("i"), text))),
    svg("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${height}`, width: "100%", role: "group", "aria-label": "Time line" }, lanes, ticks),
  );
}
