// Conditions with their remedies, and the meters of each instance.

import * as api from "../api.js";
import { empty, h, panel, put, say, table } from "../dom.js";
import { count, share, words } from "../format.js";
import { instanceLink, pill } from "../parts.js";

const METERS_EVERY_MS = 3_000;

function conditionRow(each) {
  return h(
    "div",
    { class: "condition", "data-condition": each.name },
    pill(each.ok ? "good" : "bad", each.ok ? "ok" : "not met"),
    h("strong", null, words(each.name)),
    h("span", null, each.detail),
    each.ok || !each.remedy ? null : h("span", { class: "remedy" }, "Remedy: ", each.remedy),
  );
}

function meters(answer) {
  const fleet = answer.fleet;
  const facts = [["achieved", fleet.achieved], ["reachable: the best instance for each request", fleet.reachable], ["ceiling: one unlimited cache", fleet.ceiling], ...Object.entries(fleet.loss ?? {}).map(([name, value]) => [`lost by ${name}`, value])];
  const rows = Object.entries(answer.instances).map(([name, row]) => [
    instanceLink(name), share(row.prediction_error), words(row.index_trust), count(row.ledger_requests), `${count(row.engine_running)} + ${count(row.engine_waiting)}`,
    share(row.transfer_error), row.drift?.length ? h("span", { class: "bad-text" }, row.drift.map(words).join(", ")) : "none",
  ]);
  return [
    h("div", { class: "inner" }, h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, share(value)))))),
    h("div", { class: "flush" }, table(["Instance", "Prediction error", "Index", "Ledger", "Engine: running + waiting", "Transfer error", "Drift"], rows, ["Prediction error", "Ledger", "Transfer error"])),
  ];
}

export default function healthPage() {
  const summary = h("span", { class: "faint" });
  const list = h("div", { id: "conditions" });
  const truth = h("div", { id: "meters" }, empty("Reading the meters", ""));
  let shown = "";

  async function read() {
    try {
      put(truth, meters(await api.get("/meters")));
    } catch (error) {
      put(truth, error.status === 404 ? empty("This proxy has no meters", "GET /meters is not among its endpoints.") : empty("The meters cannot be read", error.message));
    }
  }
  read();
  const timer = setInterval(read, METERS_EVERY_MS);
  return {
    element: h(
      "div",
      { class: "stack", id: "page-health" },
      h("div", { class: "head" }, h("h1", null, "Health"), summary, h("p", null, "Conditions are those of GET /ready?verbose.")),
      panel("Conditions", null, h("div", { class: "flush" }, list)),
      panel("Truth: predictions against reports of the engines", null, truth),
    ),
    update(feed) {
      const known = feed.state.conditions;
      const text = JSON.stringify(known);
      if (text === shown) return;
      shown = text;
      const broken = known.filter((each) => !each.ok);
      say(summary, broken.length ? `${broken.length} of ${known.length} not met` : `all ${known.length} met`);
      put(list, [...broken, ...known.filter((each) => each.ok)].map(conditionRow));
    },
    close: () => clearInterval(timer),
  };
}
