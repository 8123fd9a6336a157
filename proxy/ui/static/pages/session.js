// One session: its turns on a common time line.

import * as api from "../api.js";
import { empty, h, panel, put, table } from "../dom.js";
import { clock, count, ms, seconds, share, words } from "../format.js";
import { classTag, figure, hitRate, instanceLink, outcome, problem, requestLink } from "../parts.js";
import { timeline } from "../timeline.js";

const SHOWN = 200;
const DRAWN = 40;

function content(rows, more) {
  const turns = rows.slice().sort((a, b) => a.arrived_unix_s - b.arrived_unix_s);
  const sum = (field) => turns.reduce((all, row) => all + (row[field] ?? 0), 0);
  const reported = turns.filter((row) => row.actual_cached_tokens !== null && row.prompt_tokens);
  const places = turns.map((row) => row.instance).filter(Boolean);
  const moves = places.filter((name, at) => at > 0 && name !== places[at - 1]).length;
  const [first] = turns;
  const ended = Math.max(...turns.map((row) => row.arrived_unix_s + (row.stages_ms.total ?? 0) / 1000));
  const figures = [
    ["Turns", count(turns.length), "", "figure-turns"], ["Hit rate", share(hitRate(reported.reduce((all, row) => all + row.actual_cached_tokens, 0), reported.reduce((all, row) => all + row.prompt_tokens, 0))), "", "figure-session-hit"],
    ["Instances", count(new Set(places).size), `${moves} moves`, "figure-instances"], ["Held", seconds(sum("held_s")), "", "figure-session-held"],
    ["Longest prompt", count(Math.max(...turns.map((row) => row.prompt_tokens ?? 0))), "tokens", "figure-prompt"], ["Lasted", seconds(ended - first.arrived_unix_s), "", "figure-lasted"],
  ].map(([label, value, note, id]) => {
    const made = figure(label, id);
    made.set(value, "", note);
    return made.element;
  });
  const columns = ["Turn", "Arrived", "Request", "Class", "Instance", "Reason", "Prompt", "Cached", "First token", "Total", "Outcome", "Cache killer"];
  const lines = turns.map((row, at) => [
    at + 1, clock(row.arrived_unix_s), requestLink(row.request_id), classTag(row.class), row.prefill_instance ? [instanceLink(row.prefill_instance), " → ", instanceLink(row.instance)] : instanceLink(row.instance), words(row.reason),
    count(row.prompt_tokens), share(hitRate(row.actual_cached_tokens, row.prompt_tokens)), ms(row.stages_ms.first_byte), ms(row.stages_ms.total), outcome(row), words(row.cache_killer),
  ]);
  const newest = `These are the newest ${count(turns.length)} turns; GET /breakdown has the ones before.`;
  return [
    more ? h("div", { class: "banner", id: "newest" }, h("span", null, newest)) : null,
    h("div", { class: "figures" }, figures),
    panel("Time line", turns.length > DRAWN ? h("span", { class: "faint" }, `the last ${DRAWN} turns`) : null, h("div", { class: "inner", id: "timeline" }, timeline(turns.slice(-DRAWN)))),
    panel("Turns", null, h("div", { class: "flush", id: "turns" }, table(columns, lines, ["Turn", "Prompt", "Cached", "First token", "Total"]))),
  ];
}

export default function sessionPage({ id, changeKey }) {
  const body = h("div", { class: "stack" }, empty("Reading the session", ""));

  async function read() {
    try {
      const { rows } = await api.get(`/breakdown?limit=${SHOWN + 1}&session_id=${encodeURIComponent(id)}`);
      put(body, rows.length ? content(rows.slice(0, SHOWN), rows.length > SHOWN) : h("section", { class: "panel" }, empty("No such session", "None of its requests has ended, or they are no longer among those kept in memory (breakdown.capacity).")));
    } catch (error) {
      put(body, h("section", { class: "panel" }, problem(error, changeKey)));
    }
  }
  read();
  return {
    element: h("div", { class: "stack", id: "page-session" }, h("div", { class: "head" }, h("h1", null, "Session"), h("code", { id: "title" }, id), h("span", { class: "spacer" }), h("button", { type: "button", onclick: read }, "Read again")), body),
    key(name) {
      if (name === "r") read();
      return name === "r";
    },
  };
}
