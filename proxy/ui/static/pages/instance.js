// One instance: its row of GET /instances, and its latest requests.

import { empty, h, panel, put, say, table } from "../dom.js";
import { drainButton } from "../drain.js";
import { count, moment, ms, share, words } from "../format.js";
import { CLASSES, conditionOf, DECISION_COLUMNS, DECISION_NUMBERS, decisionCells, pill } from "../parts.js";

function facts(row) {
  const events = row.kv_events;
  return [
    ["URL", row.url], ["Role", words(row.role)], ["Models", (row.models ?? ["unknown"]).join(", ")], ["In flight", `${row.requests}, ${row.prefilling} before the first token`],
    ...CLASSES.map((each) => [`In flight, ${each}`, count(row.in_flight[each] ?? 0)]),
    ["Prompt tokens to prefill", count(row.pending_prefill_tokens)], ["Tokens decoding", count(row.decoding_tokens)], ["Tokens held for pulls", count(row.held_tokens)],
    ["Sessions", count(row.sessions)], ["Engine: running + waiting", `${count(row.engine.running)} + ${count(row.engine.waiting)}`], ["KV use", share(row.engine.kv_usage)], ["KV pool", `${count(row.engine.kv_capacity_tokens)} tokens`],
    ["Index", `${count(row.index_blocks)} of ${count(row.index_capacity_blocks)} blocks`], ["KV events", events ? (events.trusted ? "trusted" : `not trusted: ${words(events.not_trusted_because)}`) : "not followed"],
    ["Hit rate, last minute", share(row.recent?.hit_rate)], ["First token, mean of last minute", ms(row.recent?.first_byte_ms)], ["Finished, last minute", count(row.recent?.finished ?? 0)], ["Failed, last minute", count(row.recent?.failed ?? 0)],
    ["Breaker", `${words(row.breaker.state)}, opened ${row.breaker.openings} times`], ["Restarts", count(row.restarts)], ["Prefill time", row.slowness === null ? "as elsewhere" : `${row.slowness.toFixed(2)} times that of the middle instance`], ["Engine started", moment(row.started_unix_s)], ["Last error", row.last_error ?? "none"],
  ];
}

export default function instancePage({ id, toast, changeKey }) {
  const state = h("span");
  const action = h("span");
  const list = h("dl", { class: "facts", id: "facts" });
  const latest = h("div", { class: "flush" });
  const values = new Map();
  let shown = "";

  return {
    element: h(
      "div",
      { class: "stack", id: "page-instance" },
      h("div", { class: "head" }, h("h1", null, id), state, h("span", { class: "spacer" }), action),
      h("section", { class: "panel" }, h("div", { class: "inner" }, list)),
      panel("Latest requests", null, latest),
    ),
    update(feed) {
      const row = feed.state.instances.find((each) => each.name === id);
      if (!row) {
        put(list, empty("No such instance", "It left the fleet, or never was part of it."));
        put(state);
        put(action);
        values.clear();
        shown = "";
        return;
      }
      if (!values.size) put(list);
      const [kind, word] = conditionOf(row);
      const key = `${kind} ${word} ${row.draining} ${row.leaving}`;
      if (key !== shown) {
        shown = key;
        put(state, pill(kind, word));
        put(action, drainButton(row, toast, changeKey));
      }
      for (const [name, value] of facts(row)) {
        if (!values.has(name)) {
          values.set(name, h("dd"));
          list.append(h("div", { "data-fact": name }, h("dt", null, name), values.get(name)));
        }
        say(values.get(name), value);
      }
      const rows = feed.decisions.filter((each) => each.instance === id || each.prefill_instance === id).slice(0, 30);
      if (!latest.contains(document.activeElement)) put(latest, rows.length ? table(DECISION_COLUMNS, rows.map(decisionCells), DECISION_NUMBERS) : empty("No requests yet", ""));
    },
  };
}
