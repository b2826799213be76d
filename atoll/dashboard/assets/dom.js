// Elements without HTML in strings: whatever a job, a node or a log is called stays text.

export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  set(made, properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function svg(name, properties = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(made, properties);
  made.append(...children);
  return made;
}

function set(element, properties) {
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
}

// Whether it is shown on a phone, as style.css has it. What is drawn is made narrower there: scaled down it could not be read.
export const isNarrow = () => matchMedia("(max-width: 40rem)").matches;

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const WIDE = new Set(["REASON", "DEVICES", "STRATEGY", "WHAT"]);
const WORDS = new Set(["PHASE", "STATE", "HEALTH"]);

// A table that is updated in place, row by row: what has the focus keeps it. link: column -> address of a cell's text.
// On a phone its rows are laid out otherwise (style.css), with each column's name: the roles say what they are still.
export class Table {
  constructor(caption, link = {}, extra = null) {
    this.head = el("tr", { role: "row" });
    this.body = el("tbody");
    this.caption = el("caption", {}, caption);
    this.element = el("div", { class: "table", tabindex: "0", role: "region", "aria-label": caption },
      el("table", { role: "table" }, this.caption, el("thead", {}, this.head), this.body));
    this.link = link;
    this.extra = extra;
  }

  update({ columns, numbers, rows }) {
    const names = this.extra ? [...columns, this.extra.name] : columns;
    if (this.head.childElementCount !== names.length) {
      this.head.replaceChildren(...names.map((name) =>
        el("th", { scope: "col", role: "columnheader", class: numbers.includes(name) ? "number" : null }, name)));
    }
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    rows.forEach((row, at) => {
      const line = this.body.rows[at] || this.newRow(columns, numbers);
      row.forEach((text, column) => this.fill(line.cells[column], columns[column], text));
      if (this.extra) this.extra.fill(line.cells[columns.length], at);
    });
  }

  newRow(columns, numbers) {
    const line = this.body.appendChild(el("tr", { role: "row" }));
    for (const name of this.extra ? [...columns, this.extra.name] : columns) {
      const cell = line.appendChild(el("td", { role: "cell", "data-name": name }));
      if (numbers.includes(name)) cell.className = "number";
      else if (WIDE.has(name)) cell.className = "wide";
      if (this.link[name]) cell.append(el("a"));
    }
    return line;
  }

  fill(cell, name, text) {
    const inner = this.link[name] ? cell.firstChild : cell;
    setText(inner, text);
    if (this.link[name]) inner.href = this.link[name](text);
    if (WORDS.has(name) && cell.className !== text) cell.className = text;
  }
}

export function bitRate(bps) {
  if (!bps) return "idle";
  const units = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"];
  const power = Math.min(Math.floor(Math.log10(bps) / 3), 3);
  return `${(bps / 1000 ** power).toPrecision(3)} ${units[power]}`;
}
