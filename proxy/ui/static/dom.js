// Elements without HTML in strings: every text that others chose goes through text nodes.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value" || name === "disabled" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** An HTML element; `on...` are listeners, null and false are left out. */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element. */
export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Replace the content of an element. */
export function put(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Set a text if it differs, so that a message per second does not disturb selections. */
export function say(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** A panel with a title. */
export function panel(title, extra, ...content) {
  return h("section", { class: "panel" }, h("header", null, h("h2", null, title), extra), content);
}

/** A table from column titles and rows of cells; numeric columns by title in `numbers`. */
export function table(columns, rows, numbers = []) {
  const right = new Set(numbers);
  const cell = (content, at) => h("td", { class: right.has(columns[at]) ? "number" : null }, content);
  return h(
    "table",
    null,
    h("thead", null, h("tr", null, columns.map((name) => h("th", { scope: "col", class: right.has(name) ? "number" : null }, name)))),
    h("tbody", null, rows.map((row) => (row instanceof Node ? row : h("tr", null, row.map(cell))))),
  );
}

/** A message in place of content. */
export function empty(title, text) {
  return h("div", { class: "empty" }, h("strong", null, title), text);
}

const ICONS = {
  fleet: "M2 2h5v5H2zM9 2h5v5H9zM2 9h5v5H2zM9 9h5v5H9z",
  decisions: "M2 4h12M2 8h12M2 12h8",
  flows: "M2 4h4c4 0 2 8 6 8h2M11 9l3 3-3 3",
  shadow: "M6 2a5 5 0 1 0 0 10A5 5 0 0 0 6 2zM10 5a5 5 0 1 1-5 8",
  health: "M1 8h3l2-5 3 10 2-5h4",
  control: "M2 4h7M13 4h1M2 12h2M8 12h6M9 2v4M6 10v4",
  api: "M5 4L1 8l4 4M11 4l4 4-4 4",
  theme: "M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12",
  key: "M10 2a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM7 9l-5 5M4 12l2 2",
};

/** A small icon; decoration only. */
export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
    svg("path", { d: ICONS[name], fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linejoin": "round" }),
  );
}
