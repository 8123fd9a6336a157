// Dialogs and short messages.

import { h } from "./dom.js";

/** Show a modal dialog; resolves with what `close(value)` got, or null. `content(close)` makes its elements. */
function modal(title, content) {
  return new Promise((resolve) => {
    let result = null;
    const dialog = h("dialog", { "aria-label": title });
    const close = (value) => {
      result = value;
      dialog.close();
    };
    dialog.append(h("h2", null, title), ...content(close));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Ask for an admin key: the text, empty to remove the known one, or null if it stays. */
export function askKey(known) {
  return modal("Admin key", (close) => {
    const field = h("input", { type: "password", id: "key-field", autocomplete: "off", "aria-label": "Admin key", placeholder: "wr-…" });
    return [
      h("p", null, "It is kept for this tab until it is closed, and sent to this proxy alone. `warmroute key new` makes one."),
      h(
        "form",
        {
          onsubmit: (event) => {
            event.preventDefault();
            close(field.value.trim());
          },
        },
        field,
        h(
          "div",
          { class: "actions" },
          known ? h("button", { type: "button", class: "danger", onclick: () => close("") }, "Remove the key") : null,
          h("button", { type: "button", onclick: () => close(null) }, "Cancel"),
          h("button", { class: "primary", type: "submit" }, "Use this key"),
        ),
      ),
    ];
  });
}

/** Ask before something that changes the fleet; true to do it. */
export async function confirmed(title, text, action) {
  const answer = await modal(title, (close) => [
    h("p", null, text),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: () => close(false) }, "Cancel"),
      h("button", { type: "button", class: "primary", id: "confirm", onclick: () => close(true) }, action),
    ),
  ]);
  return answer === true;
}

const SHORTCUTS = [
  ["1 – 6", "Pages: fleet, decisions, hand-offs, shadow policies, health, control"],
  ["/", "Find a request or session"],
  ["p", "Pause or resume the stream of decisions"],
  ["r", "Read a request's or session's page again"],
  ["t", "Light or dark"],
  ["k", "Admin key"],
  ["Tab, Enter", "Next link or button, open it"],
  ["Esc", "Close a dialog, leave a field"],
  ["?", "This list"],
];

export function showHelp() {
  return modal("Keyboard shortcuts", (close) => [
    h("div", { class: "keys" }, SHORTCUTS.map(([keys, text]) => [h("kbd", null, keys), h("span", null, text)])),
    h("div", { class: "actions" }, h("button", { class: "primary", type: "button", onclick: () => close(null) }, "Close")),
  ]);
}

let timer = 0;

/** Show a message for a few seconds. */
export function toast(text, bad = false) {
  document.querySelector(".toast")?.remove();
  clearTimeout(timer);
  const element = h("div", { class: `toast ${bad ? "bad" : ""}`, role: bad ? "alert" : "status" }, text);
  document.body.append(element);
  timer = setTimeout(() => element.remove(), bad ? 9000 : 4000);
}
