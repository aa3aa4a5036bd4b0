// Memory over the step: categories piled up, what is reserved, where the device ends; the cause under the pointer.

const NAMED = 7; // categories under the pointer

class MemoryPlot {
  constructor(place, memory) {
    this.memory = memory;
    this.layers = this.piled();
    this.last = Math.max(1, memory.num_moments - 1);
    this.peak = memory.allocated.indexOf(Math.max(...memory.allocated));
    this.at = this.peak;
    this.said = el("p", { class: "said", "aria-live": "polite" });
    drawnAgain(place, (width) => this.draw(width));
    place.append(this.key(), this.said);
  }

  // Layers from below: {name, values, below, top}, bytes at each moment.
  piled() {
    const { memory } = this;
    const named = Object.entries(memory.categories);
    const layers = [["outside", memory.at.map(() => memory.outside)]];
    layers.push(...(named.length ? named : [["live", memory.allocated]]));
    let below = memory.at.map(() => 0);
    return layers.map(([name, values]) => {
      const layer = { name, values, below, top: values.map((value, i) => value + below[i]) };
      below = layer.top;
      return layer;
    });
  }

  key() {
    const names = this.layers.map((one) => one.name).reverse();
    const list = legend(names, (name) => (name === "outside" ? "outside torch" : words(name)));
    const peak = `● peak: ${this.cause(this.peak)}`;
    list.append(el("li", {}, "– reserved and outside torch"), el("li", {}, peak));
    return list;
  }

  cause(i) {
    return this.memory.labels[this.memory.label[i]];
  }

  draw(width) {
    const { memory } = this;
    this.width = width;
    this.height = width < 560 ? 250 : 330;
    this.pad = { left: 58, right: 8, top: 22, bottom: 34 };
    this.floor = this.height - this.pad.bottom;
    const most = 1.08 * Math.max(memory.capacity, ...memory.reserved.map((one) => one + memory.outside));
    this.x = linear(0, this.last, this.pad.left, width - this.pad.right);
    this.y = linear(0, most, this.floor, this.pad.top);
    const root = svg("svg", {
      width,
      height: this.height,
      viewBox: `0 0 ${width} ${this.height}`,
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-label": "Memory of the fullest rank over the step; arrow keys move along it, p goes to the peak",
    });
    const bytes = {
      ticks: ticks(0, most, 6, true),
      scale: this.y,
      form: (one) => shown("bytes", one).replace(".00", ""),
    };
    root.append(...axes(width, this.height, this.pad, { ticks: [], scale: this.x }, bytes));
    root.append(...this.areas(), ...this.limits(), ...this.phases(), ...this.marks());
    this.listen(root);
    return root;
  }

  line(values) {
    return values.map((value, i) => `${this.x(this.memory.at[i]).toFixed(1)} ${this.y(value).toFixed(1)}`);
  }

  areas() {
    return this.layers.map(({ name, top, below }) => {
      const d = `M${this.line(top).join("L")}L${this.line(below).reverse().join("L")}z`;
      return svg("path", { d, fill: colour(name) });
    });
  }

  limits() {
    const { memory } = this;
    const y = this.y(memory.capacity);
    const right = this.width - this.pad.right;
    const reserved = this.line(memory.reserved.map((one) => one + memory.outside));
    const words_ = { x: right - 4, y: y - 5, "text-anchor": "end", class: "strong" };
    return [
      svg("path", { class: "reserved", d: `M${reserved.join("L")}` }),
      svg("line", { class: "capacity", x1: this.pad.left, x2: right, y1: y, y2: y }),
      svg("text", words_, `capacity ${shown("bytes", memory.capacity)}`),
    ];
  }

  // Where each forward, backward and the optimizer begin; named where there is room.
  phases() {
    const { phases } = this.memory;
    let free = -1;
    return phases.flatMap(([moment, phase, batch]) => {
      const x = this.x(moment);
      const text = phases.length > 4 && phase !== "optimizer" ? `${phase} ${batch}` : phase;
      const needed = 6.2 * text.length + 6;
      const left = Math.min(x + 3, this.width - this.pad.right - needed);
      const mark = svg("line", { class: "gridline", x1: x, x2: x, y1: this.pad.top, y2: this.floor });
      if (left <= free) return [mark];
      free = left + needed;
      return [mark, svg("text", { x: left, y: this.floor + 16 }, text)];
    });
  }

  marks() {
    const { memory, peak } = this;
    this.cursor = svg("line", { class: "cursor", y1: this.pad.top, y2: this.floor, visibility: "hidden" });
    const at = { cx: this.x(memory.at[peak]), cy: this.y(memory.allocated[peak] + memory.outside) };
    return [svg("circle", { r: 4, fill: "currentColor", ...at }), this.cursor];
  }

  // What is held at a moment, the largest categories first.
  rows(i) {
    const { memory } = this;
    const live = this.layers.slice(1).filter((one) => one.values[i] > 0 && one.name !== "live");
    const largest = live.sort((a, b) => b.values[i] - a.values[i]).slice(0, NAMED);
    return [
      ["live", shown("bytes", memory.allocated[i])],
      ["reserved", shown("bytes", memory.reserved[i])],
      ["reserved and outside torch", shown("bytes", memory.reserved[i] + memory.outside)],
      ...largest.map((one) => [words(one.name), shown("bytes", one.values[i])]),
    ];
  }

  show(i, event = null) {
    this.at = Math.min(Math.max(0, i), this.memory.at.length - 1);
    const x = this.x(this.memory.at[this.at]);
    for (const [name, value] of [
      ["x1", x],
      ["x2", x],
      ["visibility", "visible"],
    ])
      this.cursor.setAttribute(name, value);
    const rows = this.rows(this.at);
    if (event) tell(this.cause(this.at), rows, event.clientX, event.clientY);
    else this.said.textContent = `${this.cause(this.at)}: ${rows.map((row) => row.join(" ")).join(", ")}`;
  }

  listen(root) {
    const inner = this.width - this.pad.left - this.pad.right;
    root.addEventListener("pointermove", (event) => {
      const share = (boundsOf(root, event)[0] - this.pad.left) / inner;
      this.show(lastAtMost(this.memory.at, this.last * share), event);
    });
    root.addEventListener("pointerleave", () => {
      hush();
      this.cursor.setAttribute("visibility", "hidden");
    });
    root.addEventListener("focus", () => this.show(this.at));
    root.addEventListener("keydown", (event) => {
      const { at, peak } = this;
      const to = {
        ArrowLeft: at - 1,
        ArrowRight: at + 1,
        PageUp: at - 20,
        PageDown: at + 20,
        Home: 0,
        End: Infinity,
        p: peak,
      };
      if (to[event.key] === undefined) return;
      event.preventDefault();
      this.show(to[event.key]);
    });
  }
}

function drawMemory(place) {
  new MemoryPlot(place, DRAWING.memory);
}
