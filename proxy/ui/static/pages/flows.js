// Hand-offs of the last minute: from the instance that prefilled to the one that decoded.

import { empty, h, put, say, svg, table } from "../dom.js";
import { count, share } from "../format.js";
import { instanceLink } from "../parts.js";

const ROW = 34;
const WIDTH = 860;
const NODE = 168;

function drawing(flows) {
  const sides = [[...new Set(flows.map((flow) => flow.from))].sort(), [...new Set(flows.map((flow) => flow.to))].sort()];
  const height = Math.max(sides[0].length, sides[1].length) * ROW + 24;
  const at = sides.map((names) => new Map(names.map((name, place) => [name, 24 + (place + 0.5) * ((height - 24) / names.length)])));
  const most = Math.max(...flows.map((flow) => flow.requests));
  const node = (side, name) => {
    const y = at[side].get(name);
    const x = side ? WIDTH - NODE : 0;
    const total = flows.filter((flow) => (side ? flow.to : flow.from) === name).reduce((sum, flow) => sum + flow.requests, 0);
    return [
      svg("rect", { class: "node", x: x + 0.5, y: y - 12, width: NODE - 1, height: 24, rx: 6 }),
      svg("text", { x: x + 10, y: y + 4 }, name.length > 18 ? `${name.slice(0, 17)}…` : name),
      svg("text", { class: "faint", x: x + NODE - 10, y: y + 4, "text-anchor": "end" }, count(total)),
    ];
  };
  return svg(
    "svg",
    { class: "flows", viewBox: `0 0 ${WIDTH} ${height}`, width: "100%", role: "img", "aria-label": "Hand-offs between instances" },
    svg("text", { class: "faint", x: 0, y: 10 }, "prefill on"),
    svg("text", { class: "faint", x: WIDTH, y: 10, "text-anchor": "end" }, "decode on"),
    flows.map((flow) => {
      const [from, to] = [at[0].get(flow.from), at[1].get(flow.to)];
      const middle = WIDTH / 2;
      const path = svg("path", { class: "flow", d: `M${NODE} ${from}C${middle} ${from} ${middle} ${to} ${WIDTH - NODE} ${to}` });
      path.style.setProperty("stroke-width", `${1.5 + (flow.requests / most) * 12}px`);
      path.append(svg("title", null, `${flow.from} → ${flow.to}: ${flow.requests} requests`));
      return path;
    }),
    sides[0].map((name) => node(0, name)),
    sides[1].map((name) => node(1, name)),
  );
}

export default function flowsPage() {
  const figure = h("div", { class: "inner" });
  const rows = h("div", { class: "flush" });
  const note = h("span", { class: "faint", id: "flows-summary" });
  return {
    element: h(
      "div",
      { class: "stack", id: "page-flows" },
      h("div", { class: "head" }, h("h1", null, "Hand-offs"), note, h("p", null, "Requests of the last minute whose prompt one instance computed and another decoded.")),
      h("section", { class: "panel" }, figure, rows),
    ),
    update(feed) {
      const { flows, instances, proxy } = feed.state;
      const finished = instances.reduce((sum, row) => sum + (row.recent?.finished ?? 0), 0);
      const moved = flows.reduce((sum, flow) => sum + flow.requests, 0);
      say(note, `${count(moved)} of ${count(finished)} requests (${share(finished ? moved / finished : 0)})`);
      if (!flows.length) {
        put(figure, empty("No hand-offs in the last minute", proxy.planner === "never" ? "The planner “never” offloads nothing; the control page switches it." : `The planner “${proxy.planner}” found none that pays.`));
        put(rows);
        return;
      }
      put(figure, drawing(flows));
      put(rows, table(["Prefill on", "Decode on", "Requests", "Prompt tokens"], flows.map((flow) => [instanceLink(flow.from), instanceLink(flow.to), count(flow.requests), count(flow.tokens)]), ["Requests", "Prompt tokens"]));
    },
  };
}
