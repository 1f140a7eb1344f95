"use strict";
// Sorts tables, opens and closes tensors, and switches the theme. The page is readable without it.
(function () {
  const root = document.documentElement;

  const theme = document.getElementById("theme");
  const isDark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  name();
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);

  // Unknown values come last in both directions.
  const key = (row, column) => {
    const cell = row.cells[column];
    if (!("value" in cell.dataset)) return cell.textContent.trim();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const compare = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        const keyed = Array.from(table.tBodies[0].rows, (row) => [key(row, column), row]);
        keyed.sort(([a], [b]) => a === null ? (b === null ? 0 : 1) : b === null ? -1 : sign * compare(a, b));
        table.tBodies[0].append(...keyed.map(([, row]) => row));
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      });
    });
  }

  const tensors = Array.from(document.querySelectorAll("details.tensor"));
  const buttons = document.getElementById("all");
  if (buttons) {
    buttons.hidden = false;
    const [open, close] = buttons.children;
    open.addEventListener("click", () => tensors.forEach((tensor) => { tensor.open = true; }));
    close.addEventListener("click", () => tensors.forEach((tensor) => { tensor.open = false; }));
  }
  const follow = () => {
    const tensor = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (tensor && tensor.tagName === "DETAILS") { tensor.open = true; tensor.scrollIntoView(); }
  };
  addEventListener("hashchange", follow);
  follow();
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    closed.forEach((tensor) => { tensor.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((tensor) => { tensor.open = false; }));
})();
