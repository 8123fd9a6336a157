// Numbers and times as texts; a dash for what is not known.

const DASH = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** Milliseconds. */
export function ms(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  if (value < 10) return `${value.toFixed(1)} ms`;
  return value < 1000 ? `${Math.round(value)} ms` : seconds(value / 1000);
}

/** Seconds. */
export function seconds(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** A count, shortened: 12,345 is 12.3k. */
export function count(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size < 10_000) return Math.round(value).toLocaleString("en");
  if (size < 1e6) return `${(value / 1e3).toFixed(size < 1e5 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(size < 1e8 ? 1 : 0)}M`;
}

/** A share of one, in percent. */
export function share(value) {
  return known(value) ? `${(value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %` : DASH;
}

/** A rate per second. */
export function rate(value) {
  return known(value) ? value.toFixed(value > 0 && value < 10 ? 1 : 0) : DASH;
}

/** Time of day. */
export function clock(unixS) {
  return known(unixS) ? new Date(unixS * 1000).toLocaleTimeString("en-GB") : DASH;
}

/** Date and time. */
export function moment(unixS) {
  return known(unixS) ? new Date(unixS * 1000).toLocaleString("en-GB") : DASH;
}

/** An enumeration's value as words. */
export function words(value) {
  return value ? String(value).replaceAll("_", " ") : DASH;
}

/** A long identifier's beginning. */
export function brief(value, length = 14) {
  const text = String(value ?? "");
  return text.length > length ? `${text.slice(0, length)}…` : text;
}

/** Hash of a page. */
export const link = (page, id) => `#/${page}/${encodeURIComponent(id)}`;
