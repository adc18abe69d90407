// Makes elements. Texts become text nodes and nothing else: what they hold is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const el = (name, attributes = {}, ...children) =>
  make(document.createElement(name), attributes, children);

export const svg = (name, attributes = {}, ...children) =>
  make(document.createElementNS(SVG, name), attributes, children);

export const byId = (id) => document.getElementById(id);

// Puts new children into an element; what had the keyboard's focus has it again, by `data-focus`.
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  if (focused === undefined) return;
  for (const candidate of element.querySelectorAll("[data-focus]")) {
    if (candidate.dataset.focus === focused) candidate.focus({ preventScroll: true });
  }
}

export function fillRows(body, rows, columns, empty) {
  fill(body, ...(rows.length ? rows : [el("tr", {}, el("td", { class: "empty", colspan: columns }, empty))]));
}

const UNITS = ["", "k", "M", "G", "T"];

export function short(value) {
  let unit = 0;
  while (Math.abs(value) >= (unit ? 999.5 : 9999.5) && unit < UNITS.length - 1) [value, unit] = [value / 1000, unit + 1];
  const digits = unit === 0 && Number.isInteger(value) ? 0 : Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return value.toLocaleString(undefined, { maximumFractionDigits: digits }) + (UNITS[unit] && ` ${UNITS[unit]}`);
}

export const bytes = (value) => `${(value / 1e9).toLocaleString(undefined, { maximumFractionDigits: 1 })} GB`;

export const percent = (value) => `${Math.round(value)} %`;

export function lasting(seconds) {
  if (seconds < 0) seconds = 0;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

// The seconds between two times as RQ writes them; null where one is not there.
export const between = (from, to) => (from && to ? (Date.parse(to) - Date.parse(from)) / 1000 : null);
