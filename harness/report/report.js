// Comfort only: without this the page is complete, unsorted and unfiltered. Nothing is fetched or stored.
"use strict";
const FACTORS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, "µJ": 1e-6, mJ: 1e-3, J: 1, "µs": 1e-6, ms: 1e-3, s: 1 };

function make(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

// A cell's sorting value: a number in its own unit where it starts with one, else its text; null for "-" and nothing.
function valueOf(row, column) {
  const cell = row.cells[column];
  const text = cell && cell.colSpan === 1 ? (cell.querySelector("summary, .value") || cell).textContent.trim() : "";
  const found = text.match(/^(-?\d[\d.]*(?:e[+-]?\d+)?)(?: (\S+))?/);
  if (!text || text === "-" || text.endsWith("FLOP/s")) return null; // a speed among shares
  return found ? Number(found[1]) * (FACTORS[found[2]] || 1) : text;
}

function compare(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
  return typeof a === "number" ? -1 : 1;
}

function sort(table, column, header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, value: valueOf(row, column) }));
  const known = rows.filter((item) => item.value !== null);
  known.sort((a, b) => (descending ? compare(b.value, a.value) : compare(a.value, b.value)));
  const missing = rows.filter((item) => item.value === null);
  table.tBodies[0].append(...[...known, ...missing].map((item) => item.row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = make("button", { type: "button", textContent: header.textContent, title: "sort" });
    button.addEventListener("click", () => sort(table, column, header));
    header.replaceChildren(button);
  });
}

// Every word must occur in the case's name or in the row.
function filter(words, status) {
  let shown = 0, total = 0;
  for (const section of document.querySelectorAll("section.case")) {
    const name = section.querySelector("h3").textContent.toLowerCase();
    let some = false;
    for (const row of section.querySelectorAll("tbody tr")) {
      const text = name + " " + row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      some ||= !row.hidden;
      shown += !row.hidden;
      total += 1;
    }
    section.hidden = !some;
  }
  status.textContent = words.length ? `${shown} of ${total} rows` : "";
}

const controls = make("div", { className: "controls" });
const label = make("label", { textContent: "Filter " });
const input = make("input", { type: "search", id: "filter", placeholder: "words, such as: split_kv NHD facts.a wrong" });
const status = make("span", { role: "status" });
label.append(input);
controls.append(label, status);
document.querySelector("#cases h2").after(controls);
input.addEventListener("input", () => filter(input.value.toLowerCase().split(/\s+/).filter(Boolean), status));

const theme = make("button", { type: "button", id: "theme", textContent: "dark / light" });
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
document.querySelector("nav").append(theme);

// A <title> shows late and never on touch: show it at once.
const tip = make("div", { id: "tip", hidden: true });
document.body.append(tip);
for (const title of document.querySelectorAll(".plot .mark > title")) {
  const mark = title.parentNode;
  mark.dataset.tip = title.textContent;
  mark.setAttribute("aria-label", title.textContent);
  title.remove();
}
document.addEventListener("pointerover", (event) => {
  const text = event.target.dataset ? event.target.dataset.tip : undefined;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(4, event.clientY - tip.offsetHeight - 10)}px`;
});
for (const event of ["beforeprint", "afterprint"]) {
  addEventListener(event, () => document.querySelectorAll("details.reason").forEach((details) => {
    if (event === "beforeprint") details.dataset.was = details.open ? "1" : "";
    details.open = event === "beforeprint" || details.dataset.was === "1";
  }));
}
