// Pictures of an answer's rows: a bar of parts, scatter with its front, lines, bars. The page says which: data-chart.

function drawTime(place) {
  const parts = Object.entries(ANSWER.breakdown_s).filter(([, seconds]) => seconds > 0),
    rank = ([name]) =>
      name.startsWith("exposed") ? 0 : name.startsWith("wait") || ["bubble", "interference"].includes(name) ? 1 : 2;
  parts.sort((a, b) => rank(a) - rank(b) || b[1] - a[1]);
  const total = parts.reduce((sum, one) => sum + one[1], 0);
  stackedBar(
    place,
    parts.map(([name, value]) => ({ name, value, share: value / total })),
    "s",
  );
}

function stackedBar(place, parts, unit) {
  const total = parts.reduce((sum, one) => sum + one.value, 0) || 1;
  drawnAgain(place, (width) => {
    const height = 54,
      root = svg("svg", {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "aria-label": parts.map((one) => `${one.name} ${percent(one.value / total)}`).join(", "),
      });
    let x = 0;
    for (const one of parts) {
      const w = (width * one.value) / total,
        box = svg("rect", {
          x,
          y: 6,
          width: Math.max(w - 1, 0.5),
          height: 30,
          rx: w > 6 ? 2 : 0,
          fill: colour(one.name),
          "fill-opacity": /^wait:/.test(one.name) ? 0.55 : 1,
        });
      box.addEventListener("pointermove", (event) =>
        tell(one.name, [[shown(unit, one.value), percent(one.value / total)]], event.clientX, event.clientY),
      );
      box.addEventListener("pointerleave", hush);
      root.append(box);
      if (w > 8 * String(one.name).length)
        root.append(svg("text", { x: x + w / 2 - 0.5, y: 25, "text-anchor": "middle", class: "on" }, one.name));
      if (w > 40)
        root.append(svg("text", { x: x + w / 2 - 0.5, y: 50, "text-anchor": "middle" }, percent(one.value / total)));
      x += w;
    }
    return root;
  });
}

// spec: rows (path), x, y (keys), group (key), label (keys), log, front, band ([low, high] keys), zero, title.
function drawChart(place) {
  const spec = JSON.parse(place.dataset.chart),
    rows = spec.data || found(ANSWER, spec.rows) || [];
  if (spec.chart === "stack")
    return stackedBar(
      place,
      (Array.isArray(rows) ? rows.map((row) => [found(row, spec.label), found(row, spec.y)]) : Object.entries(rows))
        .filter(([, value]) => value > 0)
        .map(([name, value]) => ({ name, value })),
      spec.unit || "s",
    );
  if (spec.chart === "bars") return drawBars(place, rows, spec);
  const points = rows
    .map((row, i) => ({
      x: found(row, spec.x),
      y: found(row, spec.y),
      group: spec.group ? String(found(row, spec.group)) : "",
      row,
      i,
    }))
    .filter((one) => Number.isFinite(one.x) && Number.isFinite(one.y) && (!spec.log || (one.x > 0 && one.y > 0)));
  if (points.length < 1) {
    place.hidden = true;
    return;
  }
  drawPoints(place, points, spec, (one) =>
    (spec.label || []).map((key) => [words(key.split("/").pop()), shown(key, found(one.row, key))]),
  );
}

// Horizontal bars. spec: label (key), y (key), band, most.
function drawBars(place, rows, spec) {
  const all = (
    Array.isArray(rows)
      ? rows.map((row) => ({ name: String(found(row, spec.label)), value: found(row, spec.y), row }))
      : Object.entries(rows).map(([name, value]) => ({
          name,
          value: typeof value === "object" ? found(value, spec.y) : value,
          row: value,
        }))
  ).filter((one) => Number.isFinite(one.value));
  if (!all.length) {
    place.hidden = true;
    return;
  }
  if (spec.sort) all.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const bars = all.slice(0, spec.most || 24),
    unit = (spec.y || "").split("/").pop();
  drawnAgain(place, (width) => {
    const left = Math.min(width * 0.42, 6.4 * Math.max(...bars.map((one) => one.name.length)) + 8),
      step = 24,
      height = bars.length * step + 6;
    const low = Math.min(0, ...bars.map((one) => one.value)),
      high = Math.max(
        0,
        ...bars.map((one) => one.value),
        ...(spec.band ? bars.map((one) => found(one.row, spec.band[1]) || 0) : []),
      );
    const x = linear(low, high || 1, left + (low < 0 ? 60 : 0), width - 74),
      root = svg("svg", {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "aria-label": bars.map((one) => `${one.name} ${shown(unit, one.value)}`).join(", "),
      });
    bars.forEach((one, i) => {
      const y = i * step + 3,
        a = x(Math.min(0, one.value)),
        b = x(Math.max(0, one.value)),
        most = Math.floor((left - 8) / 6.4);
      root.append(
        svg(
          "text",
          { x: left - 6, y: y + 14, "text-anchor": "end", class: "strong" },
          one.name.length > most ? one.name.slice(0, most - 1) + "…" : one.name,
        ),
        svg("rect", {
          x: a,
          y,
          width: Math.max(1, b - a),
          height: 17,
          rx: 2,
          fill: colour(spec.colour || (COLOURS[one.name] ? one.name : "live")),
        }),
      );
      if (spec.band)
        root.append(
          svg("path", {
            class: "axisline",
            d: `M${x(found(one.row, spec.band[0]))} ${y + 8.5}H${x(found(one.row, spec.band[1]))}`,
          }),
        );
      root.append(
        svg(
          "text",
          {
            x: one.value < 0 ? a - 6 : Math.max(b, spec.band ? x(found(one.row, spec.band[1])) : b) + 6,
            y: y + 13,
            "text-anchor": one.value < 0 ? "end" : "start",
          },
          spec.percent ? percent(one.value) : shown(unit, one.value),
        ),
      );
    });
    return root;
  });
}

// Median errors of runs like this, ours beside one constant MFU.
function drawRecord(place) {
  const rows = DRAWING.record.rows.filter((row) => row.mfu_median !== undefined).slice(0, 10);
  if (!rows.length) {
    place.hidden = true;
    return;
  }
  drawnAgain(place, (width) => {
    const left = Math.min(240, width * 0.36),
      height = rows.length * 40 + 24,
      most = Math.max(...rows.map((row) => Math.max(row.median, row.mfu_median))),
      x = linear(0, most * 1.12, left, width - 8);
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": rows
        .map((row) => `${row.runs_of}: median error ${row.median} %, one MFU ${row.mfu_median} %`)
        .join("; "),
    });
    rows.forEach((row, i) => {
      const y = i * 40 + 4,
        letters = Math.floor(left / 6.3) - 1,
        name = row.runs_of.length > letters ? row.runs_of.slice(0, letters - 1) + "…" : row.runs_of;
      root.append(
        svg("text", { x: 0, y: y + 14, class: "strong" }, name),
        svg("text", { x: 0, y: y + 29 }, `${row.n} runs`),
      );
      root.append(
        svg("rect", {
          x: left,
          y: y + 2,
          width: Math.max(1, x(row.median) - left),
          height: 13,
          rx: 2,
          fill: COLOURS.gemm,
        }),
        svg("text", { x: x(row.median) + 5, y: y + 13 }, `${row.median} %`),
        svg("rect", {
          x: left,
          y: y + 18,
          width: Math.max(1, x(row.mfu_median) - left),
          height: 13,
          rx: 2,
          fill: COLOURS.idle,
        }),
        svg("text", { x: x(row.mfu_median) + 5, y: y + 29 }, `${row.mfu_median} %`),
      );
    });
    root.append(
      svg("rect", { x: left, y: height - 15, width: 10, height: 10, fill: COLOURS.gemm }),
      svg("text", { x: left + 15, y: height - 6 }, "shardwise"),
      svg("rect", { x: left + 90, y: height - 15, width: 10, height: 10, fill: COLOURS.idle }),
      svg("text", { x: left + 105, y: height - 6 }, "one MFU"),
    );
    return root;
  });
}
