// Requests to the proxy that served the page, with the admin key of this tab.

const KEY = "warmroute-admin-key";
/** The proxy's own paths: the page is at ui/. */
const root = new URL(".", import.meta.url.replace(/ui\/static\/.*$/, ""));

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A part of an address as text; as it is where it is not percent-encoded. */
export function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Take a key from the address (`#key=...`), which the demo prints, and remove it from there. */
export function adoptKey() {
  const found = /^#key=([^&]+)/.exec(location.hash);
  if (!found) return;
  key.set(decoded(found[1]));
  history.replaceState(null, "", location.pathname + location.search + "#/fleet");
}

export function headers(more = {}) {
  return key.get() ? { ...more, authorization: `Bearer ${key.get()}` } : more;
}

export const address = (path) => new URL(path.replace(/^\//, ""), root).href;

/** Throw the ApiError of an answer that is not 2xx; a proxy before ours may have sent it. */
export async function refuse(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    error = {};
  }
  throw new ApiError(response.status, error.message ?? `${response.status} ${response.statusText}`, error.code);
}

async function call(method, path, body, signal) {
  const json = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetch(address(path), {
    method,
    headers: headers(json),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: signal ?? AbortSignal.timeout(15_000),
    cache: "no-store",
  });
  return response.ok ? response.json() : refuse(response);
}

export const get = (path, signal) => call("GET", path, undefined, signal);
export const send = (method, path, body) => call(method, path, body);

/** `GET /ready?verbose` answers 503 with a body while no instance serves. */
export async function conditions() {
  const response = await fetch(address("/ready?verbose"), { signal: AbortSignal.timeout(15_000), cache: "no-store" });
  return response.status === 503 || response.ok ? response.json() : refuse(response);
}
