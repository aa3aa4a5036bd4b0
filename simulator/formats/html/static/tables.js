// Tables sort by their headings: numbers by the value that stands behind them, not by its words.

function valueOf(cell) {
  const data = cell.querySelector("data");
  const text = data ? data.getAttribute("value") : cell.textContent.trim();
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

function compared(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return a < b ? -1 : a > b ? 1 : 0;
}

// A table that goes on to the right says so at its edge.
function edged(place) {
  const look = () => place.classList.toggle("more", place.scrollLeft + place.clientWidth < place.scrollWidth - 2);
  place.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(place);
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells],
    body = table.tBodies[0];
  heads.forEach((head, column) => {
    if (body.rows.length && body.rows[0].cells[column].classList.contains("num")) head.classList.add("num");
    const button = el("button", { type: "button" }, [...head.childNodes]);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row, index) => ({ row, index, value: valueOf(row.cells[column]) }));
      rows.sort((a, b) => (down ? -1 : 1) * compared(a.value, b.value) || a.index - b.index);
      body.append(...rows.map((one) => one.row));
    });
  });
}
