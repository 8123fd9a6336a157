// The stream of decisions, newest first.

import { empty, h, put, say, table } from "../dom.js";
import { CLASSES, DECISION_COLUMNS, DECISION_NUMBERS, decisionCells } from "../parts.js";

const SHOWN = 100;

export default function decisionsPage() {
  let paused = false;
  let feed = null;
  let decisions = []; // those of the moment of a pause, until it ends
  const text = h("input", { type: "search", id: "filter", placeholder: "instance, reason, session …", "aria-label": "Filter", oninput: () => draw() });
  const wanted = h("select", { id: "filter-class", "aria-label": "Class", onchange: () => draw() }, h("option", { value: "" }, "every class"), CLASSES.map((each) => h("option", { value: each }, each)));
  const pause = h("button", { type: "button", id: "pause", "aria-pressed": "false", onclick: () => toggle() }, "Pause");
  const note = h("span", { class: "faint" });
  const body = h("div", { class: "flush" });

  function toggle() {
    paused = !paused;
    say(pause, paused ? "Resume" : "Pause");
    pause.setAttribute("aria-pressed", String(paused));
    if (!paused) draw();
  }

  function draw() {
    if (!feed) return;
    if (!paused) decisions = feed.decisions;
    const needle = text.value.trim().toLowerCase();
    const rows = decisions.filter(
      (row) =>
        (!wanted.value || row.class === wanted.value) &&
        (!needle || [row.request_id, row.session_id, row.instance, row.prefill_instance, row.reason, row.outcome, row.policy, row.tenant].some((each) => String(each ?? "").toLowerCase().includes(needle))),
    );
    const shown = rows.slice(0, SHOWN);
    say(note, feed.leftOut ? `a sample: ${feed.leftOut} more in the last second` : "");
    if (!decisions.length) put(body, empty("No requests yet", "Decisions appear here as requests end."));
    else if (!shown.length) put(body, empty("Nothing matches", "Change the filter."));
    else put(body, table(DECISION_COLUMNS, shown.map(decisionCells), DECISION_NUMBERS));
  }

  return {
    element: h(
      "div",
      { class: "stack", id: "page-decisions" },
      h("div", { class: "head" }, h("h1", null, "Decisions"), note, h("span", { class: "spacer" }), text, wanted, pause),
      h("section", { class: "panel" }, body),
    ),
    update(next) {
      feed = next;
      if (!paused && !body.contains(document.activeElement)) draw();
    },
    key(name) {
      if (name === "p") toggle();
      return name === "p";
    },
  };
}
