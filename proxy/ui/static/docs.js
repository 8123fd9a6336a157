// The API's description, rendered from /openapi.json.

import * as api from "./api.js";
import { askKey } from "./dialogs.js";
import { empty, h, put } from "./dom.js";
import { startTheme } from "./theme.js";

const main = document.getElementById("docs");

function typeOf(schema, document) {
  if (!schema) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map((each) => typeOf(each, document)).join(" | ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.type === "array") return `array of ${typeOf(schema.items, document)}`;
  return schema.type ?? "any";
}

function resolve(schema, document) {
  return schema?.$ref ? document.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function list(entries) {
  return h(
    "table",
    null,
    h("tbody", null, entries.map(([name, type, required, text]) => h("tr", null, h("td", null, h("code", null, name), required ? " *" : ""), h("td", { class: "faint" }, type), h("td", { class: "wrap" }, text)))),
  );
}

function endpoint(path, method, operation, document) {
  const parameters = (operation.parameters ?? []).map((each) => [`${each.name} (${each.in})`, typeOf(each.schema, document), each.required, each.description ?? each.schema?.description ?? ""]);
  const body = resolve(operation.requestBody?.content?.["application/json"]?.schema, document);
  const fields = Object.entries(body?.properties ?? {}).map(([name, schema]) => [name, typeOf(schema, document), (body.required ?? []).includes(name), schema.description ?? ""]);
  const answers = Object.entries(operation.responses ?? {}).map(([status, each]) => [status, "", false, each.description ?? ""]);
  return h(
    "details",
    { class: "endpoint", "data-path": path },
    h("summary", null, h("span", { class: "method" }, method.toUpperCase()), h("code", null, path), "  ", h("span", { class: "faint" }, operation.summary ?? "")),
    operation.description ? h("p", null, operation.description) : null,
    parameters.length ? [h("h3", null, "Parameters"), list(parameters)] : null,
    fields.length ? [h("h3", null, "Body"), list(fields)] : null,
    h("h3", null, "Answers"),
    list(answers),
  );
}

function group(path) {
  return path.startsWith("/v1") || !/^\/(instances|policy|admission|explain|stats|breakdown|metrics|reload|cache-killers|shadow|meters|health|ready)/.test(path) ? "For clients" : "For operators";
}

async function read() {
  try {
    const document = await api.get("/openapi.json");
    const groups = { "For operators": [], "For clients": [] };
    for (const [path, methods] of Object.entries(document.paths)) {
      for (const [method, operation] of Object.entries(methods)) groups[group(path)].push(endpoint(path, method, operation, document));
    }
    put(
      main,
      h("div", { class: "stack" }, h("h1", null, `${document.info.title} API`), h("p", { class: "faint" }, h("a", { href: "ui/" }, "Dashboard"), " · ", h("a", { href: "openapi.json" }, "openapi.json"), " · * required"),
        Object.entries(groups).map(([name, found]) => h("section", { class: "panel" }, h("header", null, h("h2", null, name), h("span", { class: "faint" }, `${found.length} endpoints`)), h("div", { class: "flush" }, found)))),
    );
  } catch (error) {
    const ask = async () => {
      const entered = await askKey(api.key.get() !== "");
      if (entered === null) return;
      api.key.set(entered);
      read();
    };
    put(main, h("section", { class: "panel" }, error.status === 401 ? h("div", { class: "empty" }, h("strong", null, "An admin key is needed"), h("button", { type: "button", onclick: ask }, "Enter the key")) : empty("The description cannot be read", error.message)));
  }
}

startTheme();
read();
