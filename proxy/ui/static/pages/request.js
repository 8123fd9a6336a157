// One request: where it went and why, its time line, every candidate's score.

import * as api from "../api.js";
import { empty, h, panel, put, table } from "../dom.js";
import { count, link, moment, ms, seconds, share, words } from "../format.js";
import { classTag, hitRate, instanceLink, outcome, problem, sessionLink } from "../parts.js";
import { timeline } from "../timeline.js";

function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  return Number.isInteger(value) ? count(value) : Number(value.toPrecision(4)).toString();
}

function facts(row) {
  return [
    ["Outcome", [outcome(row), ` (${row.status})`]], ["Arrived", moment(row.arrived_unix_s)], ["Session", sessionLink(row.session_id)], ["Session from", row.session_source ?? "–"], ["Tenant", row.tenant ?? "–"],
    ["Policy", row.policy ?? "–"], ["Class", classTag(row.class)], ["Decode on", instanceLink(row.instance)], ["Reason", words(row.reason)], ["Prefill on", row.prefill_instance ? instanceLink(row.prefill_instance) : row.policy ? "the same instance" : "–"],
    ["Planner", `${row.planner || "–"}: ${words(row.offload_reason)}`], ["Admission", `${words(row.admission)}${row.held_s ? `, held ${seconds(row.held_s)}` : ""}`],
    ["Prompt", `${count(row.prompt_tokens)} tokens`], ["Predicted cached", `${count(row.predicted_cached_tokens)} tokens`], ["Cached, by the engine", `${count(row.actual_cached_tokens)} tokens, ${share(hitRate(row.actual_cached_tokens, row.prompt_tokens))}`],
    ["Completion", `${count(row.completion_tokens)} tokens`], ["First token", ms(row.stages_ms.first_byte)], ["Total", ms(row.stages_ms.total)], ["Endpoint", row.endpoint], ["Cache killer", words(row.cache_killer)],
  ];
}

function scores(row) {
  const inputs = [...new Set(row.scores.flatMap((each) => Object.keys(each.inputs ?? {})))];
  const lines = row.scores.map((each) => {
    const chosen = each.instance === row.instance;
    const cells = [[instanceLink(each.instance), chosen ? " ✓" : ""], number(each.score), count(each.cached_tokens), ...inputs.map((name) => number(each.inputs?.[name])), each.skipped ? words(each.skipped) : ""];
    return h("tr", { class: chosen ? "best" : null }, cells.map((cell, at) => h("td", { class: at > 0 && at < cells.length - 1 ? "number" : null }, cell)));
  });
  const columns = ["Instance", "Score", "Cached", ...inputs.map(words), "Skipped"];
  return table(columns, lines, columns.slice(1, -1));
}

function content(row) {
  return [
    row.error ? h("div", { class: "banner bad", id: "error" }, h("strong", null, "Error"), h("span", null, row.error)) : null,
    h("section", { class: "panel" }, h("div", { class: "inner" }, h("dl", { class: "facts", id: "facts" }, facts(row).map(([name, value]) => h("div", { "data-fact": name }, h("dt", null, name), h("dd", null, value)))))),
    panel("Time line", null, h("div", { class: "inner", id: "timeline" }, timeline([row]))),
    panel("Candidates", h("span", { class: "faint" }, "scores of the policy when it decided"), h("div", { class: "flush", id: "scores" }, row.scores.length ? scores(row) : empty("No candidates", "It was not routed, or the policy gives no scores."))),
    Object.keys(row.legs).length
      ? panel("Predicted and actual times", null, h("div", { class: "flush" }, table(["Leg", "Predicted", "Actual"], Object.entries(row.legs).map(([name, leg]) => [words(name), seconds(leg.predicted_s), seconds(leg.actual_s)]), ["Predicted", "Actual"])))
      : null,
    row.attempts.length ? panel("Failed attempts", null, h("div", { class: "flush" }, table(["Instance", "Error"], row.attempts.map((each) => [each.instance, h("span", { class: "bad-text" }, each.error)])))) : null,
    h("section", { class: "panel" }, h("div", { class: "inner" }, h("details", null, h("summary", null, "The whole row as JSON"), h("pre", { class: "raw" }, JSON.stringify(row, null, 2))))),
  ];
}

export default function requestPage({ id, changeKey }) {
  const body = h("div", { class: "stack" }, empty("Reading the request", ""));

  async function read() {
    try {
      const { rows } = await api.get(`/breakdown?limit=1&request_id=${encodeURIComponent(id)}`);
      if (rows.length) put(body, content(rows[0]));
      else {
        const turns = await api.get(`/breakdown?limit=1&session_id=${encodeURIComponent(id)}`);
        if (turns.rows.length) location.replace(link("session", id));
        else put(body, h("section", { class: "panel" }, empty("No such request or session", "It has not ended yet, or is no longer among those kept in memory (breakdown.capacity).")));
      }
    } catch (error) {
      put(body, h("section", { class: "panel" }, problem(error, changeKey)));
    }
  }
  read();
  return {
    element: h("div", { class: "stack", id: "page-request" }, h("div", { class: "head" }, h("h1", null, "Request"), h("code", { id: "title" }, id), h("span", { class: "spacer" }), h("button", { type: "button", onclick: read }, "Read again")), body),
    key(name) {
      if (name === "r") read();
      return name === "r";
    },
  };
}
