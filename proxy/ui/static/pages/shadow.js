// Shadow policies beside the one that decides.

import * as api from "../api.js";
import { empty, h, panel, put, table } from "../dom.js";
import { clock, count, seconds, share, words } from "../format.js";
import { instanceLink, meter, problem, requestLink } from "../parts.js";

const EVERY_MS = 2_000;

function comparison(policies) {
  const numbers = ["Requests", "Regret, total", "Regret, mean", "Hit tokens given away", "Failures", "µs per decision"];
  const rows = policies.map((row) => [
    h("strong", null, row.name), row.part, count(row.requests),
    h("div", { class: "row" }, meter([[row.agreement ?? 0, ""]], `agreement ${share(row.agreement)}`)), share(row.agreement),
    seconds(row.regret_s?.total), seconds(row.regret_s?.mean), count(row.hit_tokens_given_away),
    row.failures ? h("span", { class: "bad-text", title: row.last_error ?? "" }, count(row.failures)) : "0", Number(row.decision_us_mean ?? 0).toFixed(1),
  ]);
  return table(["Shadow", "Part", "Requests", "Agreement", "", ...numbers.slice(1)], rows, numbers);
}

function latest(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.shadow)))];
  return table(
    ["Time", "Request", "Live", ...names],
    rows.map((row) => [
      clock(row.unix_s), requestLink(row.request_id), [instanceLink(row.live.instance), h("span", { class: "faint" }, ` ${words(row.live.reason)}`)],
      ...names.map((name) => {
        const other = row.shadow[name];
        if (!other) return "–";
        const same = other.instance === row.live.instance;
        return [same ? h("span", { class: "faint" }, "the same") : instanceLink(other.instance), same || !other.regret_s ? null : h("span", { class: "faint" }, ` ${other.regret_s > 0 ? "+" : ""}${seconds(other.regret_s)}`)];
      }),
    ]),
  );
}

export default function shadowPage({ changeKey }) {
  const body = h("div", { class: "stack" }, empty("Reading the shadow policies", ""));

  async function read() {
    try {
      const answer = await api.get("/shadow");
      if (!answer.enabled || !answer.policies.length) {
        put(body, h("section", { class: "panel" }, empty("No shadow policies are set", "PUT /shadow with {\"policies\": [\"linear\"]} lets others decide every request too, without effect.")));
        return;
      }
      put(
        body,
        panel(`${count(answer.requests)} requests compared`, answer.skipped ? h("span", { class: "faint" }, `${count(answer.skipped)} skipped`) : null, h("div", { class: "flush" }, comparison(answer.policies))),
        panel("Latest", h("span", { class: "faint" }, "seconds: cost of the live decision above the shadow's"), h("div", { class: "flush" }, answer.latest.length ? latest(answer.latest) : empty("Nothing yet", ""))),
      );
    } catch (error) {
      put(body, h("section", { class: "panel" }, error.status === 404 ? empty("This proxy has no shadow policies", "GET /shadow is not among its endpoints.") : problem(error, changeKey)));
    }
  }
  read();
  const timer = setInterval(read, EVERY_MS);
  return {
    element: h("div", { class: "stack", id: "page-shadow" }, h("div", { class: "head" }, h("h1", null, "Shadow policies"), h("p", null, "Other policies decide the same requests without effect. Agreement: they chose the same; regret: what the live decision cost more, by the live policy's own estimate.")), body),
    close: () => clearInterval(timer),
  };
}
