// The shell: navigation, search, live status, theme, key, shortcuts. Pages are modules of ./pages.

import { adoptKey, decoded, key } from "./api.js";
import { h, icon, put, say } from "./dom.js";
import { Feed } from "./feed.js";
import { link } from "./format.js";
import { askKey, showHelp, toast } from "./dialogs.js";
import { startTheme, switchTheme } from "./theme.js";
import controlPage from "./pages/control.js";
import decisionsPage from "./pages/decisions.js";
import fleetPage from "./pages/fleet.js";
import flowsPage from "./pages/flows.js";
import healthPage from "./pages/health.js";
import instancePage from "./pages/instance.js";
import requestPage from "./pages/request.js";
import sessionPage from "./pages/session.js";
import shadowPage from "./pages/shadow.js";

const PAGES = {
  fleet: { title: "Fleet", make: fleetPage },
  decisions: { title: "Decisions", make: decisionsPage },
  flows: { title: "Hand-offs", make: flowsPage },
  shadow: { title: "Shadow policies", make: shadowPage },
  health: { title: "Health", make: healthPage },
  control: { title: "Control", make: controlPage },
  instance: { title: "Instance", make: instancePage, under: "fleet" },
  request: { title: "Request", make: requestPage, under: "decisions" },
  session: { title: "Session", make: sessionPage, under: "decisions" },
};
const SHOWN = ["fleet", "decisions", "flows", "shadow", "health", "control"];
const STATUS = {
  connecting: ["", "Connecting"],
  live: ["good", "Live"],
  retrying: ["warn", "Reconnecting"],
  key: ["bad", "Key needed"],
  refused: ["bad", "Not allowed"],
};

const feed = new Feed();
const main = h("main", { id: "main", tabindex: -1 });
const status = h("span", { class: "pill", role: "status", id: "status" }, "Connecting");
const notice = h("div", { class: "banner bad", hidden: true, role: "alert" });
const search = h("input", {
  class: "search", type: "search", id: "search", placeholder: "Find a request or session id", "aria-label": "Find a request or session id", autocomplete: "off", spellcheck: "false",
});
const links = Object.fromEntries(
  SHOWN.map((name, at) => [name, h("a", { href: `#/${name}` }, icon(name), PAGES[name].title, h("kbd", null, at + 1))]),
);
const policyLine = h("span", { id: "policy-line" });
const viewersLine = h("span");
const workerLine = h("span", { id: "worker-line" });
let page = null;

function shell() {
  const form = h("form", { role: "search", onsubmit: find }, search, h("kbd", { "aria-hidden": "true" }, "/"));
  put(
    document.getElementById("shell"),
    h(
      "aside",
      { class: "side" },
      h("a", { class: "brand", href: "#/fleet" }, h("img", { src: new URL("icon.svg", import.meta.url).href, alt: "" }), "warmroute"),
      h("nav", { "aria-label": "Pages" }, SHOWN.map((name) => links[name]), h("a", { href: "../docs" }, icon("api"), "API")),
      h("div", { class: "foot" }, policyLine, workerLine, viewersLine),
    ),
    h(
      "div",
      { class: "page" },
      h(
        "div",
        { class: "top" },
        form,
        h("span", { class: "spacer" }),
        status,
        h("button", { class: "icon", type: "button", id: "key-button", "aria-label": "Admin key", title: "Admin key (k)", onclick: changeKey }, icon("key")),
        h("button", { class: "icon", type: "button", id: "theme-button", "aria-label": "Light or dark", title: "Light or dark (t)", onclick: switchTheme }, icon("theme")),
        h("button", { class: "icon", type: "button", id: "help-button", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)", onclick: showHelp }, "?"),
      ),
      main,
    ),
  );
}

function find(event) {
  event.preventDefault();
  const wanted = search.value.trim();
  if (!wanted) return;
  const known = feed.decisions.some((each) => each.session_id === wanted);
  location.hash = link(known ? "session" : "request", wanted);
  search.value = "";
}

async function changeKey() {
  const entered = await askKey(key.get() !== "");
  if (entered === null) return;
  key.set(entered);
  feed.restart();
  open();
}

function open() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const chosen = PAGES[name] ? name : "fleet";
  page?.close?.();
  const id = decoded(rest.join("/"));
  page = PAGES[chosen].make({ feed, id, toast, changeKey });
  put(main, notice, page.element);
  for (const each of SHOWN) {
    const current = each === chosen || each === PAGES[chosen].under;
    links[each].toggleAttribute("aria-current", current);
    if (current) links[each].setAttribute("aria-current", "page");
  }
  document.title = `${id ? `${id} · ` : ""}${PAGES[chosen].title} · warmroute`;
  if (feed.state) page.update?.(feed);
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

function refresh() {
  if (document.hidden) return; // a tab in the background costs its browser nothing
  const [kind, text] = STATUS[feed.status];
  status.className = `pill ${kind}`;
  say(status, text);
  notice.hidden = feed.status === "live" || feed.status === "connecting";
  if (!notice.hidden) {
    const what = { retrying: "No live data.", key: "This proxy needs an admin key.", refused: "No access." }[feed.status];
    const more = feed.status === "retrying" && feed.state ? " The figures below are the last ones received; connecting again." : "";
    const button = feed.status === "key" ? h("button", { type: "button", onclick: changeKey }, "Enter the key") : null;
    put(notice, h("strong", null, what), h("span", null, feed.problem + more), button);
  }
  if (feed.state) {
    const proxy = feed.state.proxy;
    say(policyLine, `Policy ${proxy.policy}, planner ${proxy.planner}`);
    say(workerLine, proxy.worker === null ? "" : `Figures of worker ${proxy.worker} of ${proxy.workers} alone`);
    say(viewersLine, `${proxy.viewers} viewer${proxy.viewers === 1 ? "" : "s"}`);
    page?.update?.(feed);
  }
}

function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= SHOWN.length) location.hash = `#/${SHOWN[number - 1]}`;
  else if (event.key === "/") search.focus();
  else if (event.key === "t") switchTheme();
  else if (event.key === "k") changeKey();
  else if (event.key === "?") showHelp();
  else if (!page?.key?.(event.key)) return;
  event.preventDefault();
}

adoptKey();
startTheme();
shell();
open();
feed.addEventListener("change", refresh);
document.addEventListener("visibilitychange", refresh);
addEventListener("hashchange", () => {
  adoptKey();
  open();
});
addEventListener("keydown", shortcut);
feed.run();
