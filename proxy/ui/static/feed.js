// The live feed: server-sent events read with fetch, which can send the key, unlike EventSource.

import { address, headers, refuse } from "./api.js";

const POINTS = 300;
const DECISIONS = 300;
const SILENCE_MS = 5_000;
const LONGEST_WAIT_MS = 5_000;
const HIDDEN = new Error("the tab is in the background");

/** Wait until the tab is shown. */
async function shown() {
  while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

/** Split a stream of text into events; `take(text)` returns those that are complete. */
export function eventReader() {
  let rest = "";
  return (text) => {
    const parts = (rest + text).split(/\r?\n\r?\n/);
    rest = parts.pop();
    const events = [];
    for (const part of parts) {
      const event = { type: "message", data: "" };
      for (const line of part.split(/\r?\n/)) {
        if (line.startsWith("event:")) event.type = line.slice(6).trim();
        else if (line.startsWith("data:")) event.data += line.slice(5).trim();
      }
      if (event.data) events.push(event);
    }
    return events;
  };
}

/** State of the proxy, kept up to date. `status` is connecting, live, retrying, key or refused. */
export class Feed extends EventTarget {
  status = "connecting";
  problem = "";
  state = null;
  points = [];
  decisions = [];
  leftOut = 0;
  #wake = null;
  #abort = null;

  /**
   * Connect while the tab is shown, and again after every end; returns never. Browsers open six connections to a host
   * at most, in all tabs together: a feed for each tab would keep the seventh from loading.
   */
  async run() {
    let waitMs = 500;
    for (;;) {
      await shown();
      try {
        await this.#connect(() => (waitMs = 500));
        this.#set("retrying", "The proxy ended the stream.");
      } catch (error) {
        if (this.#abort.signal.reason === HIDDEN) {
          this.#set("connecting", "");
          continue;
        }
        if (error.status === 401) this.#set("key", error.message);
        else if (error.status === 403 || error.status === 404) this.#set("refused", error.message);
        else this.#set("retrying", error.status ? error.message : "The proxy does not answer.");
      }
      await this.#sleep(this.status === "key" || this.status === "refused" ? 60_000 : waitMs);
      waitMs = Math.min(waitMs * 1.6, LONGEST_WAIT_MS);
    }
  }

  /** Connect at once, with another key. */
  restart() {
    this.#abort?.abort();
    this.#wake?.();
  }

  async #connect(onLive) {
    const abort = (this.#abort = new AbortController());
    let watchdog = setTimeout(() => abort.abort(), 3 * SILENCE_MS);
    const hide = () => document.hidden && abort.abort(HIDDEN);
    document.addEventListener("visibilitychange", hide);
    try {
      const response = await fetch(address("/ui/feed"), { headers: headers(), signal: abort.signal, cache: "no-store" });
      if (!response.ok) await refuse(response);
      const take = eventReader();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
        for (const event of take(value)) {
          if (event.type === "end") return;
          this.#accept(event.type, JSON.parse(event.data));
          onLive();
        }
      }
    } finally {
      document.removeEventListener("visibilitychange", hide);
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  #accept(type, message) {
    const first = type === "start";
    this.state = message;
    this.points = (first ? [] : this.points).concat(message.points).slice(-POINTS);
    const newest = message.decisions.slice().reverse();
    this.decisions = (first ? newest : newest.concat(this.decisions)).slice(0, DECISIONS);
    this.leftOut = message.decisions_left_out;
    this.#set("live", "");
  }

  #set(status, problem) {
    this.status = status;
    this.problem = problem;
    this.dispatchEvent(new Event("change"));
  }

  async #sleep(forMs) {
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, forMs);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
