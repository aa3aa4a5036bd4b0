// A scatter or lines of an answer's rows, with their front and intervals.

const CIRCLE = "a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0";

function extent(values, zero) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [zero && low >= 0 ? 0 : low - room, high + room];
}

class PointsPlot {
  // points: {x, y, group, row} each. spec: as of drawChart. told: of a point the further rows of the box beside it.
  constructor(place, points, spec, told) {
    Object.assign(this, { points, spec, told });
    this.groups = [...new Set(points.map((one) => one.group))];
    this.names = { x: spec.x.split("/").pop(), y: spec.y.split("/").pop() };
    drawnAgain(place, (width) => this.draw(width));
    const shade = (group) => colourOf(group, this.groups);
    if (this.groups.length > 1 && this.groups.length <= 12) place.append(legend(this.groups, String, shade));
  }

  draw(width) {
    this.width = width;
    this.height = Math.min(360, Math.max(220, width * 0.5));
    this.pad = { left: 62, right: 14, top: 22, bottom: 42 };
    const ends = this.points.flatMap((one) => [one.y, ...(this.band(one) || [])]);
    const along = this.points.map((one) => one.x);
    const both = this.spec.same ? [...along, ...ends] : null; // one range for both axes
    this.x = this.axis("x", both || along, this.pad.left, width - this.pad.right);
    this.y = this.axis("y", both || ends, this.height - this.pad.bottom, this.pad.top);
    const reach = this.spec.same ? [Math.min(...both), Math.max(...both)].map((x) => ({ x, y: x })) : [];
    const diagonal = svg("path", { class: "diagonal", d: reach.length ? `M${this.path(reach).join("L")}` : "" });
    this.pixels = this.points.map((one) => [this.x.scale(one.x), this.y.scale(one.y)]);
    this.ring = svg("circle", { class: "hit", r: 7, visibility: "hidden" });
    this.at = -1;
    const root = this.frame();
    root.append(...axes(width, this.height, this.pad, this.x, this.y), diagonal, ...this.lines(), ...this.front());
    root.append(...this.whiskers(), ...this.dots(), this.ring);
    this.listen(root);
    return root;
  }

  // The ends of a point's interval, where there are some.
  band(one) {
    const ends = (this.spec.band || []).map((key) => found(one.row, key));
    return ends.length === 2 && ends.every(Number.isFinite) ? ends : null;
  }

  axis(which, values, from, to) {
    const { log, zero } = this.spec;
    const name = this.names[which];
    const [low, high] = log ? [0.9 * Math.min(...values), 1.1 * Math.max(...values)] : extent(values, zero);
    const bytes = /bytes$/.test(name);
    const whole = (one) => !values.every(Number.isInteger) || Number.isInteger(one); // 8.5 GPUs are none
    const most = which === "y" ? 5 : this.width < 560 ? 3 : 7;
    return {
      scale: (log ? logarithmic : linear)(low, high, from, to),
      ticks: (log ? logTicks(low, high, bytes) : ticks(low, high, most, bytes)).filter(whole),
      form: (one) => shown(name, one),
      title: this.spec[`${which}Title`] || words(name),
    };
  }

  frame() {
    const told = `${words(this.names.y)} over ${words(this.names.x)}, ${this.points.length} points`;
    return svg("svg", {
      width: this.width,
      height: this.height,
      viewBox: `0 0 ${this.width} ${this.height}`,
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-label": `${told}; arrow keys go from one to the next`,
    });
  }

  path(some, y = (one) => one.y) {
    return some.map((one) => `${this.x.scale(one.x).toFixed(1)} ${this.y.scale(y(one)).toFixed(1)}`);
  }

  lines() {
    if (this.spec.chart !== "lines") return [];
    return this.groups.flatMap((group) => {
      const mine = this.points.filter((one) => one.group === group).sort((a, b) => a.x - b.x);
      const shade = colourOf(group, this.groups);
      const line = svg("path", { d: `M${this.path(mine).join("L")}`, fill: "none", stroke: shade, "stroke-width": 2 });
      const sure = mine.filter((one) => this.band(one));
      if (!sure.length) return [line];
      const [up, down] = [1, 0].map((end) => this.path(sure, (one) => this.band(one)[end]));
      return [svg("path", { class: "band", fill: shade, d: `M${up.join("L")}L${down.reverse().join("L")}z` }), line];
    });
  }

  front() {
    if (!this.spec.front) return [];
    const best = front(this.points.map((one) => [one.x, one.y])).map((i) => this.points[i]);
    return [svg("path", { class: "frontline", d: `M${this.path(best).join("L")}` })];
  }

  whiskers() {
    if (this.spec.chart === "lines") return [];
    const d = this.points.map((one, i) => {
      const ends = this.band(one);
      return ends
        ? `M${this.pixels[i][0].toFixed(1)} ${ends.map((end) => this.y.scale(end).toFixed(1)).join("V")}`
        : "";
    });
    return [svg("path", { class: "axisline", opacity: 0.6, d: d.join("") })];
  }

  dots() {
    return this.groups.map((group) => {
      const d = this.points.map((one, i) => {
        const [x, y] = this.pixels[i];
        return one.group === group ? `M${(x - 3.6).toFixed(1)} ${y.toFixed(1)}${CIRCLE}` : "";
      });
      return svg("path", { fill: colourOf(group, this.groups), "fill-opacity": 0.85, d: d.join("") });
    });
  }

  show(i, px, py) {
    this.at = i;
    this.ring.setAttribute("visibility", i < 0 ? "hidden" : "visible");
    if (i < 0) {
      hush();
      return;
    }
    const one = this.points[i];
    this.ring.setAttribute("cx", this.pixels[i][0]);
    this.ring.setAttribute("cy", this.pixels[i][1]);
    const rows = ["x", "y"].map((which) => [words(this.names[which]), shown(this.names[which], one[which])]);
    tell(one.group || rows[0].join(" "), [...rows, ...this.told(one)], px, py);
  }

  listen(root) {
    root.addEventListener("pointermove", (event) => {
      this.show(nearest(this.pixels, ...boundsOf(root, event)), event.clientX, event.clientY);
    });
    root.addEventListener("pointerleave", () => this.show(-1));
    root.addEventListener("blur", () => this.show(-1));
    root.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const box = root.getBoundingClientRect();
      const next = (this.at + by + this.points.length) % this.points.length;
      this.show(next, box.left + this.pixels[next][0], box.top + this.pixels[next][1]);
    });
  }
}

function drawPoints(place, points, spec, told) {
  new PointsPlot(place, points, spec, told);
}
