// What stands behind a number: a click on it, or Enter, opens its meaning, formula, inputs and source. The words are those of the
// reference of --json; the page holds them as #meanings, by key: plans/3/step_s is plans/step_s.

const NUMBER = "data[role=button]";

function keyOf(path) {
  return path
    .split("/")
    .filter((part) => !/^\d+$/.test(part))
    .join("/");
}

// The path of an input of the value at `path`: its last name replaced, indices behind it kept.
function beside(path, name) {
  if (name.startsWith("/")) return name.slice(1);
  const parts = path.split("/");
  const last = Math.max(...parts.map((part, i) => (/^\d+$/.test(part) ? 0 : i)));
  return [...parts.slice(0, last), name, ...parts.slice(last + 1)].join("/");
}

// What tells a number: an answer's path, or one of the drawing behind "drawing/".
function pathOf(number) {
  return number.dataset.drawn ? `drawing/${number.dataset.drawn}` : number.dataset.path;
}

class Numbers {
  constructor() {
    this.meanings = JSON.parse(document.getElementById("meanings").textContent);
    this.answer = ANSWER; // the live page shows newer ones
    this.box = el("dialog", { class: "behind", "aria-labelledby": "behind-h" });
    this.box.addEventListener("click", (event) => event.target === this.box && this.box.close());
    document.body.append(this.box);
    document.addEventListener("click", (event) => this.pressed(event.target));
    document.addEventListener("keydown", (event) => this.keyed(event));
  }

  // Numbers below a place that have a meaning become buttons; a table is one stop of the Tab key, and arrows walk in it.
  open(place) {
    for (const one of place.querySelectorAll("data[data-path], data[data-drawn]")) {
      if (!this.meanings[keyOf(pathOf(one))] || one.value === "" || one.closest("summary")) continue;
      one.setAttribute("role", "button");
      one.setAttribute("aria-haspopup", "dialog");
      one.tabIndex = one.closest("tbody") ? -1 : 0;
    }
    for (const body of place.querySelectorAll("tbody")) {
      const first = body.querySelector(NUMBER);
      if (first) first.tabIndex = 0;
    }
  }

  pressed(target) {
    const number = target.closest?.(NUMBER);
    if (number && !String(getSelection())) this.tell(number);
  }

  keyed(event) {
    const number = event.target.closest?.(NUMBER);
    if (!number) return;
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] || [];
    const next = down === undefined ? null : this.next(number, down, right);
    if (event.key === "Enter" || event.key === " ") this.tell(number);
    else if (next) this.walk(number, next);
    else return;
    event.preventDefault();
  }

  // The nearest number in that direction: along its row, or in its column.
  next(number, down, right) {
    const cell = number.closest("td");
    if (!cell) return null;
    const step = (one) =>
      right ? one[right > 0 ? "nextElementSibling" : "previousElementSibling"] : sameColumn(one, down);
    for (let one = step(cell); one; one = step(one)) {
      const found = one.querySelector(NUMBER);
      if (found) return found;
    }
    return null;
  }

  walk(from, to) {
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  tell(number) {
    const path = pathOf(number);
    const why = this.meanings[keyOf(path)];
    const close = pressable("Close", () => this.box.close(), { class: "quiet" });
    this.box.replaceChildren(
      el("h2", { id: "behind-h" }, titleOf(number)),
      el("p", { class: "big" }, number.textContent),
      el("p", {}, capital(why.means)),
      why.formula ? el("p", { class: "formula" }, `= ${why.formula}`) : null,
      this.inputs(path, why),
      ...this.sources(why),
      el("p", { class: "source" }, [number.dataset.drawn ? "" : el("code", {}, path.replaceAll("/", ".")), ` = ${number.value}`]),
      el("div", { class: "tools" }, close),
    );
    this.open(this.box);
    if (!this.box.open) this.box.showModal();
    close.focus();
  }

  inputs(path, why) {
    const rows = (why.inputs || []).map((name) => {
      const at = beside(path, name);
      const value = this.value(at);
      if (value === undefined || value === null || at === path) return null;
      const last = keyOf(at).split("/").pop();
      const place = at.startsWith("drawing/") ? { "data-drawn": at.slice(8) } : { "data-path": at };
      return el("div", {}, [el("dt", {}, words(last)), el("dd", {}, el("data", { value, ...place }, shown(unitOf(at), value)))]);
    });
    return el("dl", {}, rows.filter(Boolean));
  }

  value(path) {
    return path.startsWith("drawing/") ? found(DRAWING, path.slice(8)) : found(this.answer, path);
  }

  sources(why) {
    const rests = (this.answer.sources || []).filter((one) => (why.from || []).includes(one.what));
    const told = [why.source, ...rests.map((one) => `${one.what}, ${one.kind}: ${one.detail}`)];
    return told.filter(Boolean).map((text) => el("p", { class: "source" }, text));
  }
}

function sameColumn(cell, down) {
  const row = cell.parentElement[down > 0 ? "nextElementSibling" : "previousElementSibling"];
  return row && row.cells[cell.cellIndex];
}

// A number in words: its column and its row, or what stands before it.
function titleOf(number) {
  const cell = number.closest("td");
  const name = words(keyOf(pathOf(number)).split("/").pop());
  if (!cell) return number.closest("div")?.querySelector("dt, .label")?.textContent || name;
  const head = cell.closest("table").tHead?.rows[0].cells[cell.cellIndex];
  const row = cell.parentElement.cells[0];
  return [head && head.textContent.trim(), row !== cell && row.textContent.trim()].filter(Boolean).join(": ") || name;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

if (typeof module !== "undefined") module.exports = { keyOf, beside };
