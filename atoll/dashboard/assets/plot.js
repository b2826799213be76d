// One curve as SVG: linear axes, round ticks, breaks where values are not finite.
import { el, isNarrow, svg } from "./dom.js";

const HEIGHT = 230, LEFT = 56, RIGHT = 22, TOP = 10, BOTTOM = 26;

export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

const short = (value) => (Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(5))));

export function plot({ name, steps, values }) {
  const finite = values.filter((value) => value !== null);
  const last = finite.at(-1);
  const figure = el("figure", {}, el("figcaption", {}, name,
    el("span", { class: "quiet" }, finite.length ? `${short(last)} at step ${steps.at(-1)}` : "no finite value")));
  if (finite.length < 2) return figure;
  let low = Math.min(...finite), high = Math.max(...finite);
  if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  const width = isNarrow() ? 340 : 520;
  const first = steps[0], end = Math.max(steps.at(-1), first + 1);
  const x = (step) => LEFT + ((step - first) / (end - first)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img",
    "aria-label": `${name} over steps ${first} to ${end}: from ${short(finite[0])} to ${short(last)}, least ${short(Math.min(...finite))}, most ${short(Math.max(...finite))}` });
  for (const value of ticks(low, high, 4)) {
    drawn.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(first, end, 5)) {
    drawn.append(svg("text", { x: x(step), y: HEIGHT - 8, "text-anchor": "middle" }, short(step)));
  }
  let path = "", pen = false;
  values.forEach((value, at) => {
    if (value !== null) path += `${pen ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = value !== null;
  });
  const marker = svg("circle", { class: "marker", r: 3, cx: -9, cy: -9 });
  const told = svg("text", { x: LEFT + 8, y: TOP + 12 }, "");
  drawn.append(svg("path", { class: "curve", d: path }), marker, told);
  drawn.addEventListener("pointermove", (event) => {
    const box = drawn.getBoundingClientRect();
    const wanted = first + (((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT) * (end - first);
    let at = 0;
    steps.forEach((step, one) => { if (values[one] !== null && Math.abs(step - wanted) < Math.abs(steps[at] - wanted)) at = one; });
    if (values[at] === null) return;
    marker.setAttribute("cx", x(steps[at]));
    marker.setAttribute("cy", y(values[at]));
    told.textContent = `step ${steps[at]}: ${short(values[at])}`;
  });
  figure.append(drawn);
  return figure;
}
