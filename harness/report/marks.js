// What a mark of a picture or a cell of a map says, shown at once by pointer or keyboard; its title shows late, or never.
const tip = make("div", { id: "tip", hidden: true });
document.body.append(tip);

function show(text, x, y) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4))}px`;
  const above = y - tip.offsetHeight - 10;
  tip.style.top = `${above >= 4 ? above : y + 18}px`;
}

// One stop of the Tab key for all of them; arrows go on from there. `width` is how many stand side by side.
function rove(items, width) {
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width, Home: -items.length, End: items.length };
  items.forEach((item, index) => {
    item.setAttribute("tabindex", index ? -1 : 0);
    item.addEventListener("keydown", (event) => {
      if (!(event.key in moves)) return;
      event.preventDefault();
      const next = items[Math.max(0, Math.min(items.length - 1, index + moves[event.key]))];
      item.setAttribute("tabindex", -1);
      next.setAttribute("tabindex", 0);
      next.focus();
    });
  });
}

for (const plot of document.querySelectorAll(".plot")) {
  const marks = [...plot.querySelectorAll(".mark")];
  for (const mark of marks) {
    const title = mark.querySelector("title");
    mark.dataset.tip = title.textContent;
    mark.setAttribute("aria-label", title.textContent);
    mark.setAttribute("role", "img");
    title.remove();
  }
  if (marks.length) plot.setAttribute("role", "group"); // an image has no parts that can be read
  rove(marks, 1);
}
for (const map of document.querySelectorAll("table[data-rove]")) {
  const cells = [...map.tBodies[0].querySelectorAll("td:not(.n)")];
  const heads = map.classList.contains("heat") ? [...map.tHead.rows[0].cells].map((head) => `${head.textContent}: `) : [];
  for (const cell of cells.filter((one) => one.title)) {
    cell.dataset.tip = (heads[cell.cellIndex] || "") + cell.title;
    cell.setAttribute("aria-label", `${cell.textContent}: ${cell.title}`);
    cell.removeAttribute("title");
  }
  rove(cells, map.tBodies[0].rows.length ? cells.length / map.tBodies[0].rows.length : 1);
}

const tipOf = (target) => (target.closest ? target.closest("[data-tip]") : null);
document.addEventListener("pointerover", (event) => {
  const mark = tipOf(event.target);
  show(mark && mark.dataset.tip, event.clientX, event.clientY);
});
document.addEventListener("focusin", (event) => {
  const mark = tipOf(event.target), box = event.target.getBoundingClientRect();
  show(mark && mark.dataset.tip, box.right, box.top);
});
document.addEventListener("focusout", () => show(""));
document.addEventListener("keydown", (event) => event.key === "Escape" && show(""));
