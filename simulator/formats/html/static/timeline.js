// The timeline: zoom by wheel, buttons and keys; search; the critical path; which classes of ranks are shown.

const FEW = 3; // classes of ranks that are shown at first

class TimelineView {
  constructor(place, data) {
    this.data = data;
    this.end = Math.ceil(data.step_s / data.tick_s);
    this.view = [0, this.end];
    this.hits = [];
    this.hit = -1;
    this.path = false;
    this.every = data.programs.flatMap((program, number) => this.decodedRows(program, number));
    this.rows = this.every.filter((row) => row.number < FEW);
    this.said = el("output", { "aria-live": "polite" });
    this.figure = el("figure", { class: "chart" });
    place.append(this.tools(), this.figure);
    this.redraw = drawnAgain(this.figure, (width) => new TimelinePlot(this, width).draw(), { late: true });
    this.figure.append(legend(data.categories), el("p", { class: "note" }, TimelineView.NOTE));
  }

  static NOTE =
    "Drag to move; Ctrl or Shift with the wheel zooms. Enter in the search box goes to the next operation found.";

  decodedRows(program, number) {
    return program.rows.map((row, i) => ({
      program: program.name,
      number,
      first: i === 0,
      stream: row.stream,
      bars: decoded(row.bars, this.data.labels),
    }));
  }

  tools() {
    const button = (text, label, act) => pressable(text, act, { "aria-label": label });
    const toggle = (text, label, act) => {
      const one = button(text, label, () => one.setAttribute("aria-pressed", act()));
      one.setAttribute("aria-pressed", "false");
      return one;
    };
    this.box = el("input", { type: "search", placeholder: "Search operations", "aria-label": "Search operations" });
    this.box.addEventListener("input", () => this.search());
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.next(event.shiftKey ? -1 : 1);
    });
    const count = this.data.programs.length;
    return el("div", { class: "tools" }, [
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("−", "Zoom out", () => this.zoom(2)),
      button("Whole step", "Show the whole step", () => this.show([0, this.end])),
      toggle("Critical path", "Show the critical path", () => this.togglePath()),
      count > FEW ? toggle(`All ${count} rank classes`, "Show every class of ranks", () => this.toggleAll()) : null,
      this.box,
      button("Next", "Next operation found", () => this.next(1)),
      this.said,
    ]);
  }

  show(view) {
    this.view = view;
    this.redraw.now();
  }

  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    this.show(zoomed(this.view, factor, at, this.end, Math.max(20, this.end / 1e5)));
  }

  move(share) {
    this.show(moved(this.view, share * (this.view[1] - this.view[0]), this.end));
  }

  togglePath() {
    this.path = !this.path;
    this.redraw.now();
    return this.path;
  }

  toggleAll() {
    const all = this.rows !== this.every;
    this.rows = all ? this.every : this.every.filter((row) => row.number < FEW);
    this.search();
    return all;
  }

  pressed(event) {
    const act = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.show([0, this.end]),
      ArrowLeft: () => this.move(-0.2),
      ArrowRight: () => this.move(0.2),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
    this.figure.querySelector("svg").focus();
  }

  seconds(ticks_) {
    return shown("s", ticks_ * this.data.tick_s);
  }

  search() {
    this.hits = searched(this.rows, this.box.value, this.data.categories);
    this.hit = -1;
    const total = this.hits.reduce((sum, one) => sum + one.bar.end - one.bar.start, 0);
    const told = `${grouped(this.hits.length)} found, ${this.seconds(total)} together`;
    this.said.textContent = this.box.value.trim() ? told : "";
    this.redraw.now();
  }

  // To the next operation found, or the one before; the view follows where it lies outside.
  next(by) {
    if (!this.hits.length) return;
    this.hit = (this.hit + by + this.hits.length) % this.hits.length;
    const { bar, row } = this.hits[this.hit];
    const { program, stream } = this.rows[row];
    const where = `${bar.label} on ${program} ${stream}, ${this.seconds(bar.end - bar.start)} at ${this.seconds(bar.start)}`;
    this.said.textContent = `${this.hit + 1} of ${this.hits.length}: ${where}`;
    if (bar.start < this.view[0] || bar.end > this.view[1]) {
      const width = Math.min(this.end, Math.max(14 * (bar.end - bar.start), this.view[1] - this.view[0]));
      this.view = moved([bar.start - width / 2, bar.start + width / 2], 0, this.end);
    }
    this.redraw.now();
  }
}

function drawTimeline(place) {
  new TimelineView(place, DRAWING.timeline);
}
