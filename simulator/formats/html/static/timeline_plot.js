// The picture of the timeline: a row a stream, a path a category, what a search found, the critical path.

const FAINT = 0.3; // of what is not marked, where something is

class TimelinePlot {
  // page: has data, rows, view, hits, hit, path and moves its view.
  constructor(page, width) {
    const many = page.rows.length > 12;
    const several = page.data.programs.length > 1;
    this.page = page;
    this.width = width;
    this.left = width < 560 ? 66 : 132;
    this.inner = width - this.left - 6;
    this.top = 24;
    this.band = many ? 13 : 20;
    this.tops = [];
    let y = this.top;
    for (const row of page.rows) {
      if (row.first && several) y += many ? 12 : 18;
      this.tops.push(y);
      y += this.band + (many ? 3 : 6);
    }
    this.height = y + 6;
    this.x = linear(...page.view, this.left, this.left + this.inner);
  }

  draw() {
    const { rows, view, data } = this.page;
    const [from, to] = view.map((one) => shown("s", one * data.tick_s));
    const root = svg("svg", {
      width: this.width,
      height: this.height,
      viewBox: `0 0 ${this.width} ${this.height}`,
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-label": `Timeline of ${rows.length} streams, ${from} to ${to}; plus and minus zoom, arrows move, 0 shows all`,
    });
    root.append(...this.clock(), ...rows.flatMap((row, i) => this.row(row, i)));
    this.listen(root);
    return root;
  }

  clock() {
    const { data, view } = this.page;
    const seconds = ticks(view[0] * data.tick_s, view[1] * data.tick_s, this.width < 560 ? 3 : 7);
    return seconds.flatMap((one) => {
      const x = this.x(one / data.tick_s);
      const text = svg(
        "text",
        { x: Math.min(x, this.width - 20), y: 13, "text-anchor": "middle" },
        one && shown("s", one),
      );
      return [svg("line", { class: "gridline", x1: x, x2: x, y1: this.top - 4, y2: this.height }), text];
    });
  }

  row(row, i) {
    const { data, hits, path } = this.page;
    const most = Math.floor((this.left - 8) / 6.3);
    const stream = row.stream.length > most ? `${row.stream.slice(0, most)}…` : row.stream;
    const parts = [svg("text", { x: 4, y: this.tops[i] + this.band / 2 + 4 }, stream)];
    if (row.first && data.programs.length > 1) {
      parts.push(svg("text", { x: 0, y: this.tops[i] - 3, class: "strong" }, row.program));
    }
    const strip = svg("g", { transform: `translate(${this.left} 0)` });
    strip.append(...this.bars(row.bars, i, hits.length || path ? FAINT : 1));
    if (path)
      strip.append(
        ...this.bars(
          row.bars.filter((one) => one.critical),
          i,
          1,
        ),
      );
    const found_ = hits.filter((one) => one.row === i).map((one) => one.bar);
    strip.append(...this.bars(found_, i, 1), ...this.frame(i));
    return [...parts, strip];
  }

  bars(some, i, opacity) {
    const { data, view } = this.page;
    const paths = boxes(visible(some, ...view, this.inner), this.tops[i], this.band);
    return [...paths].map(([category, d]) => svg("path", { d, fill: colour(data.categories[category]), opacity }));
  }

  // Around the operation that the search stands at.
  frame(i) {
    const one = this.page.hits[this.page.hit];
    if (!one || one.row !== i) return [];
    const from = Math.max(0, this.x(one.bar.start) - this.left);
    const width = Math.max(3, Math.min(this.inner - from, this.x(one.bar.end) - this.left - from));
    return [svg("rect", { class: "hit", x: from, y: this.tops[i] - 1, height: this.band + 2, width })];
  }

  time(px) {
    const [from, to] = this.page.view;
    return from + ((to - from) * (px - this.left)) / this.inner;
  }

  under(px, py) {
    const i = this.tops.findIndex((one) => py >= one && py <= one + this.band);
    if (i < 0 || px < this.left) return null;
    const { bars } = this.page.rows[i];
    const bar = barAt(bars, this.time(px)) || barAt(bars, this.time(px + 1));
    return bar && { bar, row: this.page.rows[i] };
  }

  listen(root) {
    root.addEventListener("pointerdown", (event) => {
      this.drag = { from: this.page.view, x: event.clientX, shift: 0 };
      root.setPointerCapture(event.pointerId);
    });
    root.addEventListener("pointerup", () => {
      const { drag } = this;
      this.drag = null;
      if (drag && drag.shift) this.page.show(moved(drag.from, drag.shift, this.page.end));
    });
    root.addEventListener("pointermove", (event) =>
      this.drag ? this.dragged(root, event) : this.pointed(root, event),
    );
    root.addEventListener("pointerleave", hush);
    root.addEventListener("keydown", (event) => this.page.pressed(event));
    const wheel = (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      this.page.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(boundsOf(root, event)[0]));
    };
    root.addEventListener("wheel", wheel, { passive: false });
  }

  // While the hand moves only the strips follow; what comes into sight is drawn when it lets go.
  dragged(root, event) {
    const pixels = event.clientX - this.drag.x;
    this.drag.shift = (-pixels / this.inner) * (this.drag.from[1] - this.drag.from[0]);
    root.querySelectorAll("g").forEach((one) => one.setAttribute("transform", `translate(${this.left + pixels} 0)`));
    hush();
  }

  pointed(root, event) {
    const one = this.under(...boundsOf(root, event));
    if (!one) {
      hush();
      return;
    }
    const { bar, row } = one;
    const { data } = this.page;
    const rows = [
      ["category", words(data.categories[bar.category])],
      ["takes", shown("s", (bar.end - bar.start) * data.tick_s)],
      ["starts at", shown("s", bar.start * data.tick_s)],
      ["stream", `${row.program}, ${row.stream}`],
    ];
    if (bar.critical) rows.push(["on the critical path", "yes"]);
    const title = bar.ops > 1 ? `${bar.label} and ${bar.ops - 1} more` : bar.label;
    tell(title, rows, event.clientX, event.clientY);
  }
}
