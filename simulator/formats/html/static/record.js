// Median errors on runs like this one, ours beside one constant MFU.

const MOST_ROWS = 10;

function drawRecord(place) {
  const rows = DRAWING.record.rows.filter((row) => row.mfu_median !== undefined).slice(0, MOST_ROWS);
  place.hidden = !rows.length;
  if (rows.length) drawnAgain(place, (width) => recordPlot(rows, width));
}

function recordPlot(rows, width) {
  const left = Math.min(240, width * 0.36);
  const height = rows.length * 40 + 24;
  const most = Math.max(...rows.flatMap((row) => [row.median, row.mfu_median]));
  const x = linear(0, most * 1.12, left, width - 8);
  const told = rows.map((row) => `${row.runs_of}: median error ${row.median} %, one MFU ${row.mfu_median} %`);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  root.setAttribute("aria-label", told.join("; "));
  root.append(...rows.flatMap((row, i) => recordRow(row, i * 40 + 4, left, x)));
  const key = [
    ["shardwise", COLOURS.gemm],
    ["one MFU", COLOURS.idle],
  ];
  key.forEach(([name, fill], i) => {
    const at = left + 90 * i;
    const box = svg("rect", { x: at, y: height - 15, width: 10, height: 10, fill });
    root.append(box, svg("text", { x: at + 15, y: height - 6 }, name));
  });
  return root;
}

function recordRow(row, y, left, x) {
  const bar = (value, top, fill) => [
    svg("rect", { x: left, y: top, width: Math.max(1, x(value) - left), height: 13, rx: 2, fill }),
    svg("text", { x: x(value) + 5, y: top + 11 }, `${value} %`),
  ];
  return [
    svg("text", { x: 0, y: y + 14, class: "strong" }, shortened(row.runs_of, Math.floor(left / 6.3) - 1)),
    svg("text", { x: 0, y: y + 29 }, `${row.n} runs`),
    ...bar(row.median, y + 2, COLOURS.gemm),
    ...bar(row.mfu_median, y + 18, COLOURS.idle),
  ];
}
