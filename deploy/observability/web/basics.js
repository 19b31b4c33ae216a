// What all parts of the page share: its data, and numbers as text.
const $ = (id) => document.getElementById(id);
// Absolute: a page that was opened with a key in its address may not ask for relative ones.
const address = `${location.origin}${location.pathname.replace(/\/+$/, "")}/data`;
const LAYERS_NUMBERED = 16, RANKS_NUMBERED = 8;

let points = [], column = {}, heat = null, last = null;
let timer = 0, failedSince = 0, hovered = null;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toPrecision(digits)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toPrecision(digits)} k`;
  if (Math.abs(value) >= 100) return Math.round(value).toString();
  return Number(value.toPrecision(digits)).toString();
}

function seconds(value) {
  if (value === null || value === undefined) return ["–", ""];
  if (value === 0) return ["0", ""];
  if (value < 1e-3) return [number(value * 1e6, 2), "µs"];
  if (value < 1) return [number(value * 1e3, value < 0.1 ? 2 : 3), "ms"];
  return [number(value), "s"];
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${at ? value.toPrecision(3) : value} ${units[at]}`;
}

const time = (value) => seconds(value).join(" ").trim();
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`);
const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const get = (point, name) => point[column[name]];
