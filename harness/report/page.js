// The page as a whole: dark or light, commands to copy, print. Nothing is fetched or stored.
const theme = make("button", { type: "button", id: "theme", textContent: "dark / light" });
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
document.querySelector("nav div").append(theme);

// A command's button comes with its opening: thousands would be in the way of the Tab key, and of loading.
async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(code); // where a page may not write there: one key less to press
    button.textContent = "selected";
  }
}
document.addEventListener("toggle", (event) => {
  const code = event.target.querySelector(":scope > code");
  if (!code || event.target.querySelector(":scope > button")) return;
  const button = make("button", { type: "button", className: "copy", textContent: "copy" });
  button.addEventListener("click", () => copy(code, button));
  event.target.append(button);
}, true);

for (const event of ["beforeprint", "afterprint"]) {
  addEventListener(event, () => document.querySelectorAll("details.reason").forEach((details) => {
    if (event === "beforeprint") details.dataset.was = details.open ? "1" : "";
    details.open = event === "beforeprint" || details.dataset.was === "1";
  }));
}
