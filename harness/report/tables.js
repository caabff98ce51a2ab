// Sorting and filtering of tables. Comfort only: without it the page is complete, unsorted and unfiltered.
const FACTORS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, "µJ": 1e-6, mJ: 1e-3, J: 1, "µs": 1e-6, ms: 1e-3, s: 1 };

function make(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

// A cell's sorting value: a number in its own unit where it starts with one, else its text; null for "-" and nothing.
function valueOf(row, column) {
  const cell = row.cells[column];
  const text = cell && cell.colSpan === 1 ? (cell.querySelector("summary, .value, .badge") || cell).textContent.trim() : "";
  const found = text.match(/^([+-]?\d[\d.]*(?:e[+-]?\d+)?)(?: (\S+))?/);
  if (!text || text === "-" || text.endsWith("FLOP/s")) return null; // a speed among shares
  if (found && found[2] === "times") return 100 * (Number(found[1]) - 1); // a change, among others in percent
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
  [...table.tHead.rows[table.tHead.rows.length - 1].cells].forEach((header, column) => {
    const button = make("button", { type: "button", textContent: header.textContent, title: "sort" });
    button.addEventListener("click", () => sort(table, column, header));
    header.replaceChildren(button);
  });
}

// Every word must occur in the row, or in the name of its case.
function filter(section, words, status) {
  let shown = 0, total = 0;
  for (const table of section.querySelectorAll("table")) {
    const home = table.closest("section");
    const name = home === section ? "" : home.querySelector("h3").textContent.toLowerCase();
    let some = false;
    for (const row of table.tBodies[0].rows) {
      const text = name + " " + row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      some ||= !row.hidden;
      shown += !row.hidden;
      total += 1;
    }
    if (home !== section) home.hidden = !some;
    const fold = table.closest("details.fold");
    if (fold && some && words.length) fold.open = true;
  }
  status.textContent = words.length ? `${shown} of ${total} rows` : "";
}

for (const section of document.querySelectorAll("section[data-filter]")) {
  const controls = make("div", { className: "controls" });
  const label = make("label", { textContent: `Filter ${section.dataset.filter} ` });
  const input = make("input", { type: "search", placeholder: "words, such as: split_kv NHD facts.a" });
  const status = make("span");
  status.setAttribute("role", "status");
  label.append(input);
  controls.append(label, status);
  section.querySelector("h2").after(controls);
  input.addEventListener("input", () => {
    filter(section, input.value.toLowerCase().split(/\s+/).filter(Boolean), status);
  });
}
