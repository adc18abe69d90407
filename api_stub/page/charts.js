// Small line charts in SVG: with a cursor for the mouse and for the arrow keys.

import { el, fill, svg } from "/page/assets/dom.js";

const WIDTH = 560, HEIGHT = 170, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const BUCKETS = 280;
const CLASSES = ["one", "two"];

// `series`: [{ name, of: (row) => number }]; `most`: what the axis reaches at least.
export class Chart {
  constructor(title, series, format, most = 0) {
    Object.assign(this, { title, series, format, most, points: [], at: null });
    this.caption = el("figcaption");
    this.picture = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0,
      onpointermove: (event) => this.point(this.nearest(event)),
      onpointerleave: () => this.point(null),
      onblur: () => this.point(null),
      onkeydown: (event) => this.key(event),
    });
    this.element = el("figure", {}, this.caption, this.picture);
  }

  // `rows` are samples with their time `at`, the oldest first; shown from one time to another.
  draw(rows, from, to) {
    [this.from, this.to] = [from, to];
    this.points = averages(rows.filter((row) => row.at >= from), from, (to - from) / BUCKETS, this.series);
    this.top = nice(Math.max(this.most, ...this.points.flatMap((point) => point.values)));
    const paths = this.series.map((_, number) => svg("path", { class: CLASSES[number], d: this.path(number) }));
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    fill(this.picture, ...this.axes(), ...paths, this.cursor);
    this.point(this.at !== null && this.at < this.points.length ? this.at : null);
  }

  x(at) { return LEFT + ((at - this.from) / (this.to - this.from)) * (WIDTH - LEFT - RIGHT); }

  y(value) { return HEIGHT - BOTTOM - (value / this.top) * (HEIGHT - TOP - BOTTOM); }

  path(number) {
    const gap = Math.max(45, 2.5 * (this.to - this.from) / BUCKETS); // longer than this, nobody looked
    let last = -Infinity;
    return this.points.map(({ at, values }) => {
      const begins = at - last > gap;
      last = at;
      const there = `${this.x(at).toFixed(1)} ${this.y(values[number]).toFixed(1)}`;
      return begins ? `M${there} l0.01 0` : `L${there}`;
    }).join("");
  }

  axes() {
    const lines = [0, 0.5, 1].flatMap((part) => {
      const y = this.y(part * this.top);
      return [
        svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.format(part * this.top)),
      ];
    });
    const times = [0, 1 / 3, 2 / 3, 1].map((part) => {
      const at = this.from + part * (this.to - this.from);
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      return svg("text", { x: this.x(at), y: HEIGHT - 5, "text-anchor": anchor }, clock(at));
    });
    return [...lines, ...times];
  }

  nearest(event) {
    const box = this.picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    let best = null;
    this.points.forEach((point, number) => {
      if (best === null || Math.abs(this.x(point.at) - x) < Math.abs(this.x(this.points[best].at) - x)) best = number;
    });
    return best;
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    this.point(Math.min(last, Math.max(0, (this.at ?? last) + steps[event.key])));
  }

  // Says the values at a point, or the newest ones.
  point(number) {
    this.at = number;
    const point = this.points[number ?? this.points.length - 1];
    if (this.cursor) {
      this.cursor.setAttribute("visibility", number === null ? "hidden" : "visible");
      if (number !== null) for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(point.at));
    }
    const said = this.series.map(({ name }, which) =>
      el("span", { class: CLASSES[which] }, `${name} ${point ? this.format(point.values[which]) : "–"}`));
    fill(this.caption, el("b", {}, this.title), ...said, el("span", {}, point ? clock(point.at, number !== null) : "no samples yet"));
    this.picture.setAttribute("aria-label", [...this.caption.children].map((part) => part.textContent).join(", "));
  }
}

const clock = (at, seconds = false) =>
  new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(seconds && { second: "2-digit" }) });

// Averages samples, where more than one falls into a bucket of the picture.
function averages(rows, from, width, series) {
  const points = [];
  let bucket = null;
  for (const row of rows) {
    const number = Math.floor((row.at - from) / width);
    if (bucket?.number !== number) points.push((bucket = { number, rows: [] }));
    bucket.rows.push(row);
  }
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  return points.map(({ rows: some }) => ({
    at: some[some.length - 1].at,
    values: series.map(({ of }) => mean(some.map(of))),
  }));
}

// The next number at which an axis may end.
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value);
}
