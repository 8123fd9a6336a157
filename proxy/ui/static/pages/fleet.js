// The fleet at a glance: figures, charts, one card per instance.

import { h, put, say } from "../dom.js";
import { lineChart } from "../charts.js";
import { count, link, ms, rate, seconds, share, words } from "../format.js";
import { CLASSES, conditionOf, figure, meter } from "../parts.js";

const DENSE_FROM = 25;
const NAME_END = 7;

function makeCard(name) {
  // Names of one fleet differ at the end, so a long one loses its middle.
  const kept = name.length > 2 * NAME_END ? name.length - NAME_END : name.length;
  const parts = {
    name: h("span", { class: "name", title: name }, h("span", { class: "cut" }, name.slice(0, kept)), h("span", null, name.slice(kept))), state: h("span", { class: "pill" }), role: h("span", { class: "tag" }),
    load: h("span"), bar: h("span", { class: "meter" }), kv: h("span", { class: "soft end" }), kvBar: h("span", { class: "meter" }),
    hit: h("span", { class: "soft" }), first: h("span", { class: "soft end" }), sessions: h("span", { class: "soft" }), queue: h("span", { class: "soft end" }),
    error: h("div", { class: "error" }),
  };
  const element = h(
    "a",
    { class: "card", href: link("instance", name), "data-instance": name },
    h("div", { class: "row" }, parts.name, h("span", { class: "end" }, parts.state)),
    h("div", { class: "row" }, parts.load, h("span", { class: "end optional" }, parts.role)),
    h("div", { class: "row" }, parts.bar),
    h("div", { class: "row" }, h("span", { class: "soft" }, "KV"), parts.kvBar, parts.kv),
    h("div", { class: "row optional" }, parts.hit, parts.first),
    h("div", { class: "row optional" }, parts.sessions, parts.queue),
    parts.error,
  );
  return { element, parts };
}

function updateCard({ element, parts }, row, busiest) {
  const [kind, word] = conditionOf(row);
  element.className = `card ${kind === "good" ? "" : kind}`;
  parts.state.className = `pill ${kind}`;
  say(parts.state, word);
  say(parts.role, words(row.role));
  say(parts.load, `${row.requests} in flight`);
  const scale = Math.max(busiest, 8);
  const known = CLASSES.reduce((sum, each) => sum + (row.in_flight[each] ?? 0), 0);
  const bars = CLASSES.map((each) => [(row.in_flight[each] ?? 0) / scale, each]);
  bars.push([Math.max(0, row.requests - known) / scale, ""]);
  const classes = CLASSES.map((each) => `${row.in_flight[each] ?? 0} ${each}`).join(", ");
  put(parts.bar, meter(bars, `in flight: ${classes}`));
  parts.bar.title = classes;
  const use = row.engine.kv_usage;
  put(parts.kvBar, meter([[use, use > 0.9 ? "high" : ""]], `KV use ${share(use)}`));
  say(parts.kv, share(use));
  say(parts.hit, `hit rate ${share(row.recent?.hit_rate)}`);
  say(parts.first, `first token ${ms(row.recent?.first_byte_ms)}`);
  say(parts.sessions, `${count(row.sessions)} sessions`);
  const reported = row.engine.running !== null || row.engine.waiting !== null;
  say(parts.queue, reported ? `engine ${count(row.engine.running)} + ${count(row.engine.waiting)} waiting` : "engine: no figures");
  const trouble = kind === "good" ? "" : (row.recycle_wanted ?? row.last_error ?? row.breaker.why ?? "");
  say(parts.error, trouble);
  parts.error.hidden = trouble === "";
}

export default function fleetPage() {
  const figures = {
    rate: figure("Requests per second", "figure-rate"), flight: figure("In flight", "figure-flight"), held: figure("Held", "figure-held"),
    hit: figure("Hit rate", "figure-hit"), first: figure("First token, median", "figure-first"), failed: figure("Failed, last minute", "figure-failed"),
  };
  const latency = lineChart({
    title: "Time to the first token",
    series: [{ name: "median", field: "first_byte_p50_ms" }, { name: "95th percentile", field: "first_byte_p95_ms" }],
    format: ms,
  });
  const hits = lineChart({ title: "Hit rate", series: [{ name: "cached of prompt tokens", field: "hit_rate" }], format: share, top: 1 });
  const total = lineChart({ title: "Requests", series: [{ name: "per second", field: "requests" }, { name: "failed", field: "failed" }], format: rate });
  const waiting = lineChart({
    title: "In flight and held",
    series: [{ name: "in flight", field: "in_flight" }, { name: "held", field: "held" }],
    format: count,
    least: 2, // half of 1 is no count
  });
  const map = h("div", { class: "map", id: "map" });
  const conditions = h("div", { hidden: true });
  const legend = h("div", { class: "legend" }, CLASSES.map((each) => h("span", { class: `swatch-${each}` }, h("i"), each)));
  const summary = h("span", { class: "faint", id: "fleet-summary" });
  const cards = new Map();

  function update(feed) {
    const { instances, proxy, conditions: known } = feed.state;
    const last = feed.points.slice(-10);
    const point = feed.points[feed.points.length - 1];
    const { minute } = feed.state;
    figures.rate.set(last.length ? rate(last.reduce((sum, each) => sum + each.requests, 0) / last.length) : "–", "/s", `${count(proxy.finished)} finished`);
    figures.flight.set(count(proxy.in_flight), "", `${count(proxy.sessions)} sessions`);
    figures.held.set(count(proxy.held), "", proxy.queued ? `${count(proxy.queued)} queued` : words(proxy.admission));
    figures.hit.set(share(point?.hit_rate), "", "of prompt tokens, 10 s");
    const [value, unit = ""] = ms(point?.first_byte_p50_ms).split(" ");
    figures.first.set(value, unit, `95 %: ${ms(point?.first_byte_p95_ms)}`);
    // Before a minute has been watched, the figure says how many seconds it covers.
    figures.failed.set(count(minute.failed), "", `of ${count(minute.finished)}${minute.seconds < 60 ? ` in ${minute.seconds} s` : ""}`);
    for (const chart of [latency, hits, total, waiting]) chart.update(feed.points);

    const broken = known.filter((each) => !each.ok);
    conditions.hidden = broken.length === 0;
    put(conditions, broken.length ? h("a", { class: "banner", href: "#/health" }, h("strong", null, `${broken.length} condition${broken.length > 1 ? "s" : ""} not met`), broken.map((each) => each.detail).join("; ")) : null);

    const busiest = Math.max(0, ...instances.map((row) => row.requests));
    map.classList.toggle("dense", instances.length >= DENSE_FROM);
    const names = new Set(instances.map((row) => row.name));
    for (const [name, card] of cards) {
      if (names.has(name)) continue;
      card.element.remove();
      cards.delete(name);
    }
    for (const row of instances) {
      if (!cards.has(row.name)) {
        cards.set(row.name, makeCard(row.name));
        map.append(cards.get(row.name).element);
      }
      updateCard(cards.get(row.name), row, busiest);
    }
    const healthy = instances.filter((row) => row.healthy).length;
    say(summary, `${healthy} of ${instances.length} healthy${proxy.event_loop_late_s > 0.1 ? `, event loop late by ${seconds(proxy.event_loop_late_s)}` : ""}`);
  }

  return {
    element: h(
      "div",
      { class: "stack", id: "page-fleet" },
      h("div", { class: "head" }, h("h1", null, "Fleet"), summary, h("span", { class: "spacer" }), legend),
      conditions,
      h("div", { class: "figures" }, Object.values(figures).map((each) => each.element)),
      map,
      h("div", { class: "columns" }, latency.element, hits.element, total.element, waiting.element),
    ),
    update,
  };
}
