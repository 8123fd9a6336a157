// Draining an instance, after a question.

import * as api from "./api.js";
import { confirmed } from "./dialogs.js";
import { h } from "./dom.js";

/** A button that drains an instance, or ends that; `done` is called after it. */
export function drainButton(row, toast, changeKey, done = () => {}) {
  const verb = row.draining ? "undrain" : "drain";
  async function act() {
    const wanted = row.draining || (await confirmed(`Drain ${row.name}?`, "It receives no new requests; running ones finish. Its sessions are placed on other instances.", "Drain"));
    if (!wanted) return;
    try {
      await api.send("POST", `/instances/${encodeURIComponent(row.name)}/${verb}`);
      toast(row.draining ? `${row.name} receives requests again` : `${row.name} drains`);
      done();
    } catch (error) {
      toast(error.message, true);
      if (error.status === 401) changeKey();
    }
  }
  return h("button", { type: "button", "data-drain": row.name, disabled: row.leaving, onclick: act }, row.draining ? "Undrain" : "Drain");
}
