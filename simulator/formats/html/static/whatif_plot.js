// The picture of the what-if page: every point that is left, the front, intervals, the chosen and the pinned plans.

const TIMES = ["step_s", "million_tokens_s", "device_s_per_token", "billion_tokens"];
const SHADES = { "does not fit": "var(--axis)", tight: COLOURS.interference, fits: COLOURS.live };

class WhatIfPlot {
  // page: has explored, state, left, choose(i) and pin(i).
  constructor(page) {
    this.page = page;
    this.explored = page.explored;
  }

  draw(width) {
    const { state, left } = this.page;
    this.points = this.explored.drawable(left, state);
    if (!this.points.length) return el("p", { class: "note" }, "Nothing to draw: loosen a filter.");
    this.width = width;
    this.height = Math.min(440, Math.max(260, width * 0.48));
    this.pad = { left: 66, right: 16, top: 22, bottom: 42 };
    this.x = this.scale(state.x, 40, this.pad.left, width - this.pad.right);
    this.y = this.scale(state.y, 12, this.height - this.pad.bottom, this.pad.top);
    this.pixels = new Array(this.explored.count).fill(null);
    for (const i of this.points)
      this.pixels[i] = [this.x.at(this.value(state.x, i)), this.y.at(this.value(state.y, i))];
    const root = this.frame();
    root.append(...this.axes(), ...this.dots(), ...this.front(), this.whiskers(), ...this.marks());
    this.listen(root);
    return root;
  }

  value(key, i) {
    return this.explored.columns[key][i];
  }

  // An axis over the points: logarithmic where the largest is so many times the smallest.
  scale(key, wide, from, to) {
    const values = this.points.map((i) => this.value(key, i));
    const low = Math.min(...values);
    const high = Math.max(...values);
    const log = high / low > wide;
    const [first, last] = log ? [low * 0.87, high * 1.15] : extent(values, false);
    const most = Math.abs(to - from) < 480 ? 4 : 7;
    const bytes = /bytes$/.test(key);
    return {
      at: (log ? logarithmic : linear)(first, last, from, to),
      ticks: log ? logTicks(first, last, bytes) : ticks(first, last, most, bytes),
      log,
    };
  }

  frame() {
    const { state } = this.page;
    const told = `${this.explored.title(state.y)} over ${this.explored.title(state.x)}, ${this.points.length} plans`;
    return svg("svg", {
      width: this.width,
      height: this.height,
      viewBox: `0 0 ${this.width} ${this.height}`,
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-label": `${told}; arrow keys go along the front, Enter pins`,
    });
  }

  axes() {
    const told = (key, scale) => ({
      scale: scale.at,
      ticks: scale.ticks,
      form: (one) => shown(key, one),
      title: this.explored.title(key) + (scale.log ? ", logarithmic" : ""),
    });
    const { state } = this.page;
    return axes(this.width, this.height, this.pad, told(state.x, this.x), told(state.y, this.y));
  }

  // A path for each verdict: thousands of points stay three elements.
  dots() {
    const r = this.points.length > 900 ? 2.4 : 3.6;
    const circle = ([x, y]) =>
      `M${(x - r).toFixed(1)} ${y.toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
    return Object.entries(SHADES).map(([verdict, fill]) => {
      const mine = this.points.filter((i) => this.value("verdict", i) === verdict);
      const d = mine.map((i) => circle(this.pixels[i])).join("");
      return svg("path", { d, fill, "fill-opacity": verdict === "does not fit" ? 0.35 : 0.75 });
    });
  }

  front() {
    const { state } = this.page;
    const runs = this.points.filter((i) => this.explored.runs(i));
    const both = runs.map((i) => [this.value(state.x, i), this.value(state.y, i)]);
    this.along = front(both).map((j) => runs[j]);
    const d = this.along.map((i) => this.pixels[i].map((one) => one.toFixed(1)).join(" ")).join("L");
    return d ? [svg("path", { class: "frontline", d: `M${d}` })] : [];
  }

  // The 90 % intervals of the front, the chosen and the pinned plans; of all, they would hide the points.
  whiskers() {
    const { state } = this.page;
    const wanted = TIMES.includes(state.y) ? [...new Set([...this.along, ...state.pins, state.plan])] : [];
    const end = (key, i) => this.y.at((this.value(key, i) * this.value(state.y, i)) / this.value("step_s", i));
    const lines = wanted
      .filter((i) => i !== null && this.pixels[i])
      .map((i) => {
        const low = Math.min(this.height - this.pad.bottom, end("low_s", i));
        return `M${this.pixels[i][0].toFixed(1)} ${low.toFixed(1)}V${Math.max(this.pad.top, end("high_s", i)).toFixed(1)}`;
      });
    return svg("path", { class: "axisline", d: lines.join("") });
  }

  marks() {
    const { state } = this.page;
    const box = ([x, y]) => svg("rect", { class: "hit", x: x - 6, y: y - 6, width: 12, height: 12 });
    const ring = ([x, y]) => svg("circle", { class: "hit", cx: x, cy: y, r: 8 });
    const pinned = state.pins.filter((i) => this.pixels[i]).map((i) => box(this.pixels[i]));
    return state.plan !== null && this.pixels[state.plan] ? [...pinned, ring(this.pixels[state.plan])] : pinned;
  }

  told(i) {
    const figure = (key) => shown(key, this.value(key, i));
    return [
      ["verdict", this.value("verdict", i)],
      ["step", `${figure("step_s")} (${figure("low_s")} to ${figure("high_s")})`],
      ["memory", figure("used_bytes")],
      ["GPUs", figure("num_devices")],
      ["tokens", figure("tokens_per_s")],
    ];
  }

  listen(root) {
    const under = (event) => nearest(this.pixels, ...boundsOf(root, event));
    root.addEventListener("pointermove", (event) => {
      const i = under(event);
      if (i < 0) hush();
      else tell(this.explored.named(i), this.told(i), event.clientX, event.clientY);
    });
    root.addEventListener("pointerleave", hush);
    root.addEventListener("click", (event) => {
      const i = under(event);
      if (i >= 0) this.page.choose(i);
    });
    root.addEventListener("keydown", (event) => this.pressed(event));
  }

  pressed(event) {
    const { plan } = this.page.state;
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const count = this.along.length;
    if (event.key === "Enter" && plan !== null) this.page.pin(plan);
    else if (by && count) this.page.choose(this.along[(this.along.indexOf(plan) + by + count) % count]);
    else return;
    event.preventDefault();
    this.page.figure.querySelector("svg")?.focus();
  }
}
