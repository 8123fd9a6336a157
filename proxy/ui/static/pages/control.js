// Policy, planner and admission rule, and draining.

import * as api from "../api.js";
import { h, panel, put, table } from "../dom.js";
import { drainButton } from "../drain.js";
import { count, seconds } from "../format.js";
import { conditionOf, instanceLink, pill, problem } from "../parts.js";

function chooser(label, id, names, current) {
  const select = h("select", { id }, names.map((name) => h("option", { value: name }, name)));
  select.value = current;
  return { select, field: h("label", { class: "field" }, label, select) };
}

function parametersOf(values) {
  const entries = Object.entries(values ?? {});
  if (!entries.length) return h("span", { class: "faint" }, "no parameters");
  return h("dl", { class: "facts" }, entries.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, typeof value === "object" ? JSON.stringify(value) : String(value)))));
}

function readJson(text) {
  if (!text.trim()) return {};
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("parameters are an object");
  return value;
}

export default function controlPage({ toast, changeKey }) {
  const policies = h("div", { class: "inner stack" });
  const admission = h("div", { class: "inner stack" });
  const instances = h("div", { class: "flush" });
  const line = h("div", { class: "flush" });
  let shown = "";

  async function apply(path, body, said) {
    try {
      await api.send("PUT", path, body);
      toast(said);
      await read();
    } catch (error) {
      toast(error.message, true);
      if (error.status === 401) changeKey();
    }
  }

  function policyForm(now) {
    const policy = chooser("Routing policy", "policy", now.known_policies, now.name);
    const planner = chooser("Offload planner", "planner", now.known_planners, now.planner);
    const field = (id) => h("textarea", { id, rows: 2, placeholder: "{} – parameters as JSON; empty: the defaults", "aria-label": "Parameters as JSON", spellcheck: "false" });
    const [params, plannerParams] = [field("policy-params"), field("planner-params")];
    const send = (event) => {
      event.preventDefault();
      try {
        const body = {};
        if (policy.select.value !== now.name || params.value.trim()) Object.assign(body, { name: policy.select.value, params: readJson(params.value) });
        if (planner.select.value !== now.planner || plannerParams.value.trim()) Object.assign(body, { planner: planner.select.value, planner_params: readJson(plannerParams.value) });
        if (Object.keys(body).length) apply("/policy", body, `${policy.select.value} decides, planner ${planner.select.value}`);
        else toast("Nothing to change");
      } catch (error) {
        toast(`Parameters: ${error.message}`, true);
      }
    };
    return h(
      "form",
      { class: "stack", onsubmit: send },
      h("div", { class: "columns" }, h("div", { class: "stack" }, policy.field, params, parametersOf(now.params)), h("div", { class: "stack" }, planner.field, plannerParams, parametersOf(now.planner_params))),
      h("div", { class: "actions start" }, h("button", { class: "primary", type: "submit", id: "apply-policy" }, "Apply"), h("span", { class: "faint" }, "Index, sessions and requests in flight stay.")),
    );
  }

  function admissionForm(now) {
    const names = now.known_rules;
    const rule = chooser("Admission rule", "admission", names.includes(now.name) ? names : [now.name, ...names], now.name);
    const send = (event) => {
      event.preventDefault();
      apply("/admission", { name: rule.select.value }, `${rule.select.value} admits`);
    };
    return h("form", { class: "stack", onsubmit: send }, rule.field, parametersOf({ ...now.params, max_hold_s: now.max_hold_s, max_held: now.max_held }), h("div", { class: "actions start" }, h("button", { type: "submit", id: "apply-admission" }, "Apply")));
  }

  async function read() {
    try {
      const [policy, rule] = await Promise.all([api.get("/policy"), api.get("/admission")]);
      put(policies, policyForm(policy));
      put(admission, admissionForm(rule));
    } catch (error) {
      put(policies, problem(error, changeKey));
    }
  }

  async function readLine() {
    try {
      const { holding } = await api.get("/stats");
      const rows = holding.line.map((each) => [each.request_id, each.session_id ?? "–", seconds(each.held_s), each.sentence]);
      const others = holding.held - rows.length;
      put(
        line,
        rows.length ? table(["Request", "Session", "Held", "Reason"], rows, ["Held"]) : h("div", { class: "empty" }, "No request is held."),
        others > 0 ? h("p", { class: "faint", id: "held-others" }, `and ${count(others)} more behind them, ${count(holding.held)} in all; the longest is held for ${seconds(holding.longest_held_s)}`) : null,
      );
    } catch (error) {
      put(line, problem(error, changeKey));
    }
  }

  read();
  readLine();
  const timer = setInterval(readLine, 2_000);
  return {
    element: h(
      "div",
      { class: "stack", id: "page-control" },
      h("div", { class: "head" }, h("h1", null, "Control"), h("p", null, "Changes apply to requests that arrive afterwards, and last until the proxy restarts. Draining needs an admin key.")),
      panel("Policy", null, policies),
      h("div", { class: "columns" }, panel("Admission", null, admission), panel("Held requests", null, line)),
      panel("Instances", null, instances),
    ),
    update(feed) {
      const rows = feed.state.instances;
      const text = JSON.stringify(rows.map((row) => [row.name, row.requests, row.sessions, row.draining, row.leaving, row.healthy]));
      if (text === shown || (instances.contains(document.activeElement) && rows.length === instances.querySelectorAll("[data-drain]").length && !changedState(rows))) return;
      shown = text;
      put(
        instances,
        table(
          ["Instance", "State", "In flight", "Sessions", ""],
          rows.map((row) => [instanceLink(row.name), pill(...conditionOf(row)), count(row.requests), count(row.sessions), h("div", { class: "actions" }, drainButton(row, toast, changeKey))]),
          ["In flight", "Sessions"],
        ),
      );
    },
    close: () => clearInterval(timer),
  };

  function changedState(rows) {
    return rows.some((row) => instances.querySelector(`[data-drain="${CSS.escape(row.name)}"]`)?.textContent !== (row.draining ? "Undrain" : "Drain"));
  }
}
