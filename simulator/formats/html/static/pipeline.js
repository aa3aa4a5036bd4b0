// A pipeline's passes: forward, backward and gradients of weights by micro-batch; the gaps are the bubble.

const PASSES = ["forward", "backward", "weights"];

function drawPipeline(place) {
  const stages = DRAWING.pipeline;
  const used = new Set(stages.flatMap((one) => one.passes.map((pass) => pass[2])));
  const figure = el("figure", { class: "chart" });
  place.append(figure);
  drawnAgain(figure, (width) => pipelinePlot(stages, width), { late: true });
  figure.append(legend(PASSES.filter((_, i) => used.has(i))));
}

function pipelinePlot(stages, width) {
  const end = Math.max(...stages.flatMap((one) => one.passes.map((pass) => pass[1])));
  const left = 66;
  const band = stages.length > 24 ? 9 : 22;
  const height = stages.length * (band + 3) + 26;
  const x = linear(0, end, left, width - 6);
  const told = `Pipeline of ${stages.length} stages over ${shown("s", end)}`;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told });
  stages.forEach((stage, i) => {
    const y = i * (band + 3);
    root.append(svg("text", { x: 0, y: y + band / 2 + 4 }, stage.name), ...passPaths(stage.passes, x, y, band));
    if (band > 12) root.append(...passNumbers(stage.passes, x, y + band / 2 + 4));
  });
  for (const one of ticks(0, end, width < 560 ? 3 : 7)) {
    const at = { x: Math.min(x(one), width - 22), y: height - 6, "text-anchor": "middle" };
    root.append(svg("text", at, one && shown("s", one)));
  }
  return root;
}

function passPaths(passes, x, y, band) {
  const paths = {};
  for (const [start, stop, phase] of passes) {
    const width = Math.max(0.6, x(stop) - x(start) - 0.7).toFixed(1);
    paths[phase] = `${paths[phase] || ""}M${x(start).toFixed(1)} ${y}h${width}v${band}h-${width}z`;
  }
  return Object.entries(paths).map(([phase, d]) => svg("path", { d, fill: colour(PASSES[phase]) }));
}

function passNumbers(passes, x, y) {
  const shade = (phase) => `on${inkOn(colour(PASSES[phase]))}`;
  const fits = ([start, stop, , batch]) => x(stop) - x(start) > 7 * String(batch).length + 4;
  return passes
    .filter(fits)
    .map(([start, stop, phase, batch]) =>
      svg("text", { x: (x(start) + x(stop)) / 2, y, "text-anchor": "middle", class: shade(phase) }, String(batch)),
    );
}
