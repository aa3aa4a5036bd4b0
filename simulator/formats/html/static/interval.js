// The step with its interval, between the data sheet's floor and no overlap at all.

const LINES = [18, 72, 88]; // of the step, the interval's ends, the bounds

function drawInterval(place) {
  const bounds = [
    ["floor", ANSWER.floor_s],
    ["no overlap", ANSWER.upper_s],
    ["all hidden", ANSWER.lower_s],
  ].filter(([, value]) => Number.isFinite(value) && value > 0);
  const near = bounds.filter(([, value]) => value > 0.35 * ANSWER.low_s && value < 2.2 * ANSWER.high_s);
  const far = bounds.filter((one) => !near.includes(one)).map(([name, value]) => `${name} ${shown("s", value)}`);
  drawnAgain(place, (width) => intervalPlot(near, width));
  if (far.length) place.append(el("p", { class: "note" }, `Beyond this axis: ${far.join(", ")}.`));
}

function intervalPlot(near, width) {
  const { low_s: low, high_s: high, step_s: step } = ANSWER;
  const values = [low, high, step, ...near.map(([, value]) => value)];
  const [first, last] = [Math.min(...values), Math.max(...values)];
  const room = 0.06 * (last - first) || 0.1 * last;
  const x = linear(first - room, last + room, 12, width - 12);
  const y = 44;
  const told = `Step ${shown("s", step)}, 90 % interval ${shown("s", low)} to ${shown("s", high)}`;
  const root = svg("svg", { width, height: 92, viewBox: `0 0 ${width} 92`, role: "img", "aria-label": told });
  const box = { x: x(low), width: Math.max(2, x(high) - x(low)), y: y - 8, height: 16, rx: 3, opacity: 0.35 };
  const mark = { x1: x(step), x2: x(step), y1: y - 12, y2: y + 12, stroke: "currentColor", "stroke-width": 2.5 };
  root.append(
    svg("line", { class: "axisline", x1: 12, x2: width - 12, y1: y, y2: y }),
    svg("rect", { ...box, fill: COLOURS.live }),
    svg("line", mark),
    ...near.map(([, value]) => svg("circle", { cx: x(value), cy: y, r: 3.5, fill: "currentColor", opacity: 0.55 })),
    ...intervalWords(near, x, width),
  );
  return root;
}

// The labels of each line, those left out that would lie on the one before.
function intervalWords(near, x, width) {
  const labels = [
    [`step ${shown("s", ANSWER.step_s)}`, ANSWER.step_s, 0],
    [shown("s", ANSWER.low_s), ANSWER.low_s, 1],
    [shown("s", ANSWER.high_s), ANSWER.high_s, 1],
    ...near.map(([name, value]) => [`${name} ${shown("s", value)}`, value, 2]),
  ];
  const taken = LINES.map(() => -Infinity);
  const out = [];
  for (const [text, value, line] of labels.sort((a, b) => a[1] - b[1])) {
    const half = 3.2 * text.length;
    const middle = Math.min(Math.max(x(value), half + 2), width - half - 2);
    if (middle - half < taken[line]) continue;
    taken[line] = middle + half + 8;
    const at = { x: middle, y: LINES[line], "text-anchor": "middle", class: line ? null : "strong" };
    out.push(svg("text", at, text));
  }
  return out;
}
