// Horizontal bars with their names, values and intervals.

const BAR = 24; // pixels from one to the next
const LETTER = 6.4; // pixels

// spec: label, y (keys of a row), band ([low, high] keys), sort, most, colour, percent. rows: records, or values by name.
class BarsPlot {
  constructor(place, rows, spec) {
    this.spec = spec;
    this.unit = (spec.y || "").split("/").pop();
    const all = BarsPlot.named(rows, spec).filter((one) => Number.isFinite(one.value));
    if (spec.sort) all.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
    this.bars = all.slice(0, spec.most || 24);
    place.hidden = !this.bars.length;
    if (this.bars.length) drawnAgain(place, (width) => this.draw(width));
  }

  static named(rows, spec) {
    if (!Array.isArray(rows)) {
      const value = (one) => (typeof one === "object" ? found(one, spec.y) : one);
      return Object.entries(rows).map(([name, row]) => ({ name, value: value(row), row }));
    }
    return rows.map((row) => ({ name: String(found(row, spec.label)), value: found(row, spec.y), row }));
  }

  // The ends of a bar's interval; its own end, twice, where there is none.
  band(one) {
    const ends = (this.spec.band || []).map((key) => found(one.row, key));
    return ends.length === 2 && ends.every(Number.isFinite) ? ends : [one.value, one.value];
  }

  told(one) {
    return this.spec.percent ? percent(one.value) : shown(this.unit, one.value);
  }

  draw(width) {
    this.left = Math.min(width * 0.42, LETTER * Math.max(...this.bars.map((one) => one.name.length)) + 8);
    const low = Math.min(0, ...this.bars.map((one) => one.value));
    const high = Math.max(0, ...this.bars.flatMap((one) => [one.value, this.band(one)[1]]));
    this.x = linear(low, high || 1, this.left + (low < 0 ? 60 : 0), width - 74);
    const height = this.bars.length * BAR + 6;
    const told = this.bars.map((one) => `${one.name} ${this.told(one)}`).join(", ");
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told });
    root.append(...this.bars.flatMap((one, i) => this.bar(one, i * BAR + 3)));
    return root;
  }

  bar(one, y) {
    const from = this.x(Math.min(0, one.value));
    const to = this.x(Math.max(0, one.value));
    const [low, high] = this.band(one).map(this.x);
    const name = shortened(one.name, Math.floor((this.left - 8) / LETTER));
    const fill = colour(this.spec.colour || (COLOURS[one.name] ? one.name : "live"));
    const at = one.value < 0 ? { x: from - 6, "text-anchor": "end" } : { x: Math.max(to, high) + 6 };
    return [
      svg("text", { x: this.left - 6, y: y + 14, "text-anchor": "end", class: "strong" }, name),
      svg("rect", { x: from, y, width: Math.max(1, to - from), height: 17, rx: 2, fill }),
      svg("path", { class: "axisline", d: `M${low} ${y + 8.5}H${high}` }),
      svg("text", { y: y + 13, ...at }, this.told(one)),
    ];
  }
}

function shortened(name, most) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

function drawBars(place, rows, spec) {
  new BarsPlot(place, rows, spec);
}
