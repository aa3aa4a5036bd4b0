// Pictures of an answer's rows, as the page asks for them: data-chart. And the bar of a step's parts.

const WAITS = ["bubble", "interference"];

// What waits for communication first, then other waits, then work; the longest of each first.
function drawTime(place) {
  const rank = (name) => (name.startsWith("exposed") ? 0 : name.startsWith("wait") || WAITS.includes(name) ? 1 : 2);
  const parts = Object.entries(ANSWER.breakdown_s).map(([name, value]) => ({ name, value }));
  parts.sort((a, b) => rank(a.name) - rank(b.name) || b.value - a.value);
  drawStack(place, parts, "s");
}

// One bar of the parts of a whole. parts: {name, value}; those of nothing are left out.
function drawStack(place, all, unit) {
  const parts = all.filter((one) => one.value > 0);
  const total = parts.reduce((sum, one) => sum + one.value, 0) || 1;
  const told = parts.map((one) => `${one.name} ${percent(one.value / total)}`).join(", ");
  drawnAgain(place, (width) => {
    const root = svg("svg", { width, height: 54, viewBox: `0 0 ${width} 54`, role: "img", "aria-label": told });
    let x = 0;
    for (const one of parts) {
      const wide = (width * one.value) / total;
      root.append(...stackPart(one, x, wide, percent(one.value / total), shown(unit, one.value)));
      x += wide;
    }
    return root;
  });
}

function stackPart(one, x, wide, share, value) {
  const fill = { fill: colour(one.name), "fill-opacity": /^wait:/.test(one.name) ? 0.55 : 1 };
  const box = svg("rect", { x, y: 6, width: Math.max(wide - 1, 0.5), height: 30, rx: wide > 6 ? 2 : 0, ...fill });
  box.addEventListener("pointermove", (event) => tell(one.name, [[value, share]], event.clientX, event.clientY));
  box.addEventListener("pointerleave", hush);
  const middle = { x: x + wide / 2 - 0.5, "text-anchor": "middle" };
  return [
    box,
    wide > 8 * one.name.length ? svg("text", { ...middle, y: 25, class: `on${inkOn(fill.fill)}` }, one.name) : null,
    wide > 40 ? svg("text", { ...middle, y: 50 }, share) : null,
  ].filter(Boolean);
}

// spec: chart (scatter, lines, bars, stack), rows (path) or data, x, y, group, label (keys), log, front, band, zero.
function drawChart(place) {
  const spec = JSON.parse(place.dataset.chart);
  const rows = spec.data || found(ANSWER, spec.rows) || [];
  if (spec.chart === "bars") drawBars(place, rows, spec);
  else if (spec.chart === "stack") drawStack(place, BarsPlot.named(rows, spec), spec.unit || "s");
  else {
    const points = rows.map((row) => pointOf(row, spec)).filter((one) => drawn(one.x, spec) && drawn(one.y, spec));
    place.hidden = !points.length;
    const told = ({ row }) =>
      (spec.label || []).map((key) => [words(key.split("/").pop()), shown(key, found(row, key))]);
    if (points.length) drawPoints(place, points, spec, told);
  }
}

function pointOf(row, spec) {
  return { x: found(row, spec.x), y: found(row, spec.y), group: spec.group ? String(found(row, spec.group)) : "", row };
}

function drawn(value, spec) {
  return Number.isFinite(value) && (!spec.log || value > 0);
}
