// Shadow policies beside the one that decides.

import * as api from "../api.js";
import { empty, h, panel, put, table } from "../dom.js";
import { clock, count, seconds, share, words } from "../format.js";
import { instanceLink, meter, problem, requestLink } from "../parts.js";

const EVERY_MS = 2_000;

function comparison(policies) {
  const numbers = ["Requests", "Regret, total", "Regret, mean", "Hit tokens given away", "Failures", "µs per decision"];
  const rows = policies.map((row) => [
    [h("strong", null, row.name), row.paused ? h("span", { class: "tag" }, "paused") : null], row.part, count(row.requests),
    meter([[row.agreement ?? 0, ""]], `agreement ${share(row.agreement)}`), share(row.agreement),
    seconds(row.regret_s?.total), seconds(row.regret_s?.mean), count(row.hit_tokens_given_away),
    row.failures ? h("span", { class: "bad-text", title: row.last_error ?? "" }, count(row.failures)) : "0",
    row.decision_us_mean === null || row.decision_us_mean === undefined ? "–" : row.decision_us_mean.toFixed(1),
  ]);
  return table(["Shadow", "Part", "Requests", "Agreement", "", ...numbers.slice(1)], rows, numbers);
}

function verdict(other, live) {
  if (!other) return "–";
  if (other.agreed ?? other.instance === live.instance) return h("span", { class: "faint" }, "the same");
  const choice = other.answer ? words(other.answer) : other.instance ? instanceLink(other.instance) : words(other.reason);
  const regret = other.regret_s ? ` ${other.regret_s > 0 ? "+" : ""}${seconds(other.regret_s)}` : null;
  return [choice, regret ? h("span", { class: "faint" }, regret) : null];
}

function latest(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.shadow)))];
  return table(
    ["Time", "Request", "Live", ...names],
    rows.map((row) => [
      clock(row.unix_s), requestLink(row.request_id), [instanceLink(row.live.instance), h("span", { class: "faint" }, ` ${words(row.live.reason)}`)],
      ...names.map((name) => verdict(row.shadow[name], row.live)),
    ]),
  );
}

export default function shadowPage({ changeKey, toast }) {
  const body = h("div", { class: "stack" }, empty("Reading the shadow policies", ""));
  const choice = h("div");
  let offered = false;

  /** Which policies to compare; made once, so that it keeps what is being chosen. */
  async function offer(answer) {
    if (offered) return;
    offered = true;
    const { known_policies: names } = await api.get("/policy");
    const shadows = new Set(answer.policies.filter((row) => row.part === "policy").map((row) => row.name));
    const boxes = names.map((name) => h("input", { type: "checkbox", name, checked: shadows.has(name) }));
    async function apply(event) {
      event.preventDefault();
      const policies = boxes.filter((box) => box.checked).map((box) => box.name);
      try {
        await api.send("PUT", "/shadow", { policies });
        toast(policies.length ? `In the shadow: ${policies.join(", ")}` : "No shadow policies");
        await read();
      } catch (error) {
        toast(error.message, true);
        if (error.status === 401) changeKey();
      }
    }
    put(
      choice,
      panel(
        "Compare",
        null,
        h("form", { class: "inner stack", onsubmit: apply }, h("div", { class: "legend" }, boxes.map((box) => h("label", { class: "check" }, box, box.name))), h("div", { class: "actions start" }, h("button", { type: "submit", id: "apply-shadow" }, "Apply"), h("span", { class: "faint" }, "Policies that stay keep their figures. Planners and admission rules: PUT /shadow."))),
      ),
    );
  }

  async function read() {
    try {
      const answer = await api.get("/shadow");
      await offer(answer);
      if (!answer.enabled || !answer.policies.length) {
        put(body, h("section", { class: "panel" }, empty("No shadow policies are set", "Choose policies below: they decide every request too, without effect.")));
        return;
      }
      put(
        body,
        panel(`${count(answer.requests)} requests compared`, answer.skipped ? h("span", { class: "faint" }, `${count(answer.skipped)} skipped`) : null, h("div", { class: "flush", id: "shadows" }, comparison(answer.policies))),
        panel("Latest", h("span", { class: "faint" }, "seconds: cost of the live decision above the shadow's"), h("div", { class: "flush", id: "shadow-latest" }, answer.latest.length ? latest(answer.latest) : empty("Nothing yet", ""))),
      );
    } catch (error) {
      put(body, h("section", { class: "panel" }, error.status === 404 ? empty("This proxy has no shadow policies", "GET /shadow is not among its endpoints.") : problem(error, changeKey)));
    }
  }
  read();
  const timer = setInterval(read, EVERY_MS);
  return {
    element: h("div", { class: "stack", id: "page-shadow" }, h("div", { class: "head" }, h("h1", null, "Shadow policies"), h("p", null, "Other policies decide the same requests without effect. Agreement: they chose the same. Regret: the cost of the live decision above theirs, by the live policy's own estimate.")), body, choice),
    close: () => clearInterval(timer),
  };
}
