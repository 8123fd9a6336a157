// Parts that several pages show.

import { ApiError } from "./api.js";
import { empty, h } from "./dom.js";
import { brief, clock, count, link, ms, share, words } from "./format.js";

export const CLASSES = ["WARM", "MEDIUM", "HEAVY"];

/** State of an instance: [kind, word]; the worst one counts. */
export function conditionOf(row) {
  if (!row.healthy) return ["bad", row.breaker.state === "open" ? "breaker open" : "down"];
  if (row.leaving) return ["warn", "leaving"];
  if (row.draining) return ["warn", "draining"];
  if (row.recycle_wanted) return ["warn", "recycle"];
  if (row.breaker.state !== "closed") return ["warn", `breaker ${words(row.breaker.state)}`];
  return ["good", "healthy"];
}

export const pill = (kind, text) => h("span", { class: `pill ${kind}` }, text);
export const classTag = (name) => (name ? h("span", { class: `tag ${name}` }, name) : "–");
export const requestLink = (id) => h("a", { href: link("request", id), class: "mono", title: id }, brief(id));
export const sessionLink = (id) => (id ? h("a", { href: link("session", id), class: "mono", title: id }, brief(id, 18)) : h("span", { class: "faint" }, "–"));
export const instanceLink = (name) => (name ? h("a", { href: link("instance", name) }, name) : "–");

/** A horizontal bar of parts: [[share of one, class], ...]. */
export function meter(parts, label) {
  return h(
    "div",
    { class: "meter", role: "img", "aria-label": label },
    parts.map(([part, kind]) => h("i", { class: kind, style: { width: `${Math.max(0, Math.min(1, part)) * 100}%` } })),
  );
}

/** Share of a prompt that was cached, or null. */
export const hitRate = (cached, prompt) => (prompt && cached !== null && cached !== undefined ? cached / prompt : null);

/** Outcome as a coloured word. */
export function outcome(row) {
  if (row.outcome === "ok") return h("span", { class: "good-text" }, "ok");
  return h("span", { class: row.outcome === "client_gone" ? "faint" : "bad-text", title: row.error ?? "" }, words(row.outcome));
}

export const DECISION_COLUMNS = ["Time", "Request", "Session", "Class", "Instance", "Reason", "Prompt", "Cached", "First token", "Total", "Outcome"];
export const DECISION_NUMBERS = ["Prompt", "Cached", "First token", "Total"];

/** Cells of a decision from the feed. */
export function decisionCells(row) {
  const where = row.prefill_instance ? [instanceLink(row.prefill_instance), " → ", instanceLink(row.instance)] : instanceLink(row.instance);
  return [
    h("span", { class: "faint" }, clock(row.ended_unix_s)),
    requestLink(row.request_id),
    sessionLink(row.session_id),
    classTag(row.class),
    where,
    words(row.reason),
    count(row.prompt_tokens),
    share(hitRate(row.cached_tokens, row.prompt_tokens)),
    ms(row.first_byte_ms),
    ms(row.total_ms),
    outcome(row),
  ];
}

/** A figure with label, value and note; `set(value, unit, note)` changes it. */
export function figure(label, id) {
  const value = h("span", null, "–");
  const unit = h("small");
  const note = h("div", { class: "note" });
  const element = h("div", { class: "figure", id }, h("div", { class: "label" }, label), h("div", { class: "value" }, value, unit), note);
  return {
    element,
    set(text, unitText = "", noteText = "") {
      if (value.textContent !== text) value.textContent = text;
      if (unit.textContent !== unitText) unit.textContent = unitText;
      if (note.textContent !== noteText) note.textContent = noteText;
    },
  };
}

/** A failed request to the proxy, as content of a page. */
export function problem(error, changeKey) {
  if (error instanceof ApiError && error.status === 401) {
    return h("div", { class: "empty" }, h("strong", null, "An admin key is needed"), h("button", { type: "button", onclick: changeKey }, "Enter the key"));
  }
  return empty(error instanceof ApiError ? `The proxy answered ${error.status}` : "The proxy does not answer", error instanceof ApiError ? error.message : "The page tries again when it is opened again.");
}
