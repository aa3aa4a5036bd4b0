// Memory over the step: categories piled up, what is reserved, where the device ends; and the step with its interval.

function piled(memory) {
  const names = Object.keys(memory.categories),
    layers = [["outside", memory.at.map(() => memory.outside)]];
  if (names.length) for (const name of names) layers.push([name, memory.categories[name]]);
  else layers.push(["live", memory.allocated]);
  let below = memory.at.map(() => 0);
  return layers.map(([name, values]) => {
    const top = values.map((value, i) => value + below[i]),
      layer = { name, values, below, top };
    below = top;
    return layer;
  });
}

function drawMemory(place) {
  const memory = DRAWING.memory,
    layers = piled(memory),
    last = Math.max(1, memory.num_moments - 1);
  const said = el("p", { class: "said", "aria-live": "polite" });
  const peak = memory.allocated.indexOf(Math.max(...memory.allocated));
  let at = peak;
  const rowsAt = (i) => [
    ["live", shown("bytes", memory.allocated[i])],
    ["reserved", shown("bytes", memory.reserved[i])],
    ["reserved and outside torch", shown("bytes", memory.reserved[i] + memory.outside)],
    ...layers
      .slice(1)
      .filter((one) => one.values[i] > 0 && one.name !== "live")
      .sort((a, b) => b.values[i] - a.values[i])
      .slice(0, 7)
      .map((one) => [words(one.name), shown("bytes", one.values[i])]),
  ];
  const draw = (width) => {
    const height = width < 560 ? 250 : 330,
      pad = { left: 58, right: 8, top: 22, bottom: 34 };
    const most = 1.08 * Math.max(memory.capacity, ...memory.reserved.map((one) => one + memory.outside));
    const x = linear(0, last, pad.left, width - pad.right),
      y = linear(0, most, height - pad.bottom, pad.top);
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-label": "Memory of the fullest rank over the step; arrow keys move along it",
    });
    root.append(
      ...axes(
        width,
        height,
        pad,
        { ticks: [], scale: x, form: String },
        { ticks: ticks(0, most, 6, true), scale: y, form: (one) => shown("bytes", one).replace(".00", "") },
      ),
    );
    layers.forEach((layer) => {
      const up = layer.top.map((value, i) => `${x(memory.at[i]).toFixed(1)} ${y(value).toFixed(1)}`),
        down = layer.below.map((value, i) => `${x(memory.at[i]).toFixed(1)} ${y(value).toFixed(1)}`).reverse();
      root.append(svg("path", { d: `M${up.join("L")}L${down.join("L")}z`, fill: colour(layer.name) }));
    });
    root.append(
      svg("path", {
        class: "reserved",
        d:
          "M" +
          memory.reserved
            .map((value, i) => `${x(memory.at[i]).toFixed(1)} ${y(value + memory.outside).toFixed(1)}`)
            .join("L"),
      }),
    );
    root.append(
      svg("line", {
        class: "capacity",
        x1: pad.left,
        x2: width - pad.right,
        y1: y(memory.capacity),
        y2: y(memory.capacity),
      }),
      svg(
        "text",
        { x: width - pad.right - 4, y: y(memory.capacity) - 5, "text-anchor": "end", class: "strong" },
        `capacity ${shown("bytes", memory.capacity)}`,
      ),
    );
    let free = -1;
    for (const [moment, phase, batch] of memory.phases) {
      root.append(
        svg("line", { class: "gridline", x1: x(moment), x2: x(moment), y1: pad.top, y2: height - pad.bottom }),
      );
      const text = memory.phases.length > 4 && phase !== "optimizer" ? `${phase} ${batch}` : phase,
        needed = 6.2 * text.length + 6;
      const left = Math.min(x(moment) + 3, width - pad.right - needed);
      if (left > free) {
        root.append(svg("text", { x: left, y: height - pad.bottom + 16 }, text));
        free = left + needed;
      }
    }
    const cursor = svg("line", { class: "cursor", y1: pad.top, y2: height - pad.bottom, visibility: "hidden" }),
      dot = svg("circle", {
        r: 4,
        fill: "currentColor",
        cx: x(memory.at[peak]),
        cy: y(memory.allocated[peak] + memory.outside),
      });
    root.append(dot, cursor);
    const show = (i, event) => {
      at = Math.min(Math.max(0, i), memory.at.length - 1);
      cursor.setAttribute("x1", x(memory.at[at]));
      cursor.setAttribute("x2", x(memory.at[at]));
      cursor.setAttribute("visibility", "visible");
      const cause = memory.labels[memory.label[at]];
      if (event) tell(cause, rowsAt(at), event.clientX, event.clientY);
      else
        said.textContent = `${cause}: ${rowsAt(at)
          .map(([name, value]) => `${name} ${value}`)
          .join(", ")}`;
    };
    root.addEventListener("pointermove", (event) => {
      const [px] = boundsOf(root, event);
      show(lastAtMost(memory.at, (last * (px - pad.left)) / (width - pad.left - pad.right)), event);
    });
    root.addEventListener("pointerleave", () => {
      hush();
      cursor.setAttribute("visibility", "hidden");
    });
    root.addEventListener("focus", () => show(at));
    root.addEventListener("keydown", (event) => {
      const to = {
        ArrowLeft: at - 1,
        ArrowRight: at + 1,
        PageUp: at - 20,
        PageDown: at + 20,
        Home: 0,
        End: memory.at.length - 1,
        p: peak,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(to);
    });
    return root;
  };
  drawnAgain(place, draw);
  const line = el("li", {}, "– reserved and outside torch"),
    names = legend(layers.map((one) => one.name).reverse(), (name) =>
      name === "outside" ? "outside torch" : words(name),
    );
  names.append(line, el("li", {}, `● peak: ${memory.labels[memory.label[peak]]}`));
  place.append(names, said);
}

function drawInterval(place) {
  const all = [
    ["floor", ANSWER.floor_s],
    ["no overlap", ANSWER.upper_s],
    ["all hidden", ANSWER.lower_s],
  ].filter(([, value]) => Number.isFinite(value) && value > 0);
  const near = all.filter(([, value]) => value > 0.35 * ANSWER.low_s && value < 2.2 * ANSWER.high_s),
    far = all.filter((one) => !near.includes(one));
  drawnAgain(place, (width) => {
    const marks = near,
      values = [ANSWER.low_s, ANSWER.high_s, ANSWER.step_s, ...marks.map(([, value]) => value)],
      height = 92,
      pad = 12;
    const low = Math.min(...values),
      high = Math.max(...values),
      room = 0.06 * (high - low) || 0.1 * high,
      x = linear(low - room, high + room, pad, width - pad),
      y = 44;
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `Step ${shown("s", ANSWER.step_s)}, 90 % interval ${shown("s", ANSWER.low_s)} to ${shown("s", ANSWER.high_s)}`,
    });
    root.append(
      svg("line", { class: "axisline", x1: pad, x2: width - pad, y1: y, y2: y }),
      svg("rect", {
        x: x(ANSWER.low_s),
        width: Math.max(2, x(ANSWER.high_s) - x(ANSWER.low_s)),
        y: y - 8,
        height: 16,
        rx: 3,
        fill: COLOURS.live,
        opacity: 0.35,
      }),
    );
    root.append(
      svg("line", {
        x1: x(ANSWER.step_s),
        x2: x(ANSWER.step_s),
        y1: y - 12,
        y2: y + 12,
        stroke: "currentColor",
        "stroke-width": 2.5,
      }),
    );
    const labels = [
      ["step " + shown("s", ANSWER.step_s), ANSWER.step_s, 0],
      [shown("s", ANSWER.low_s), ANSWER.low_s, 1],
      [shown("s", ANSWER.high_s), ANSWER.high_s, 1],
      ...marks.map(([name, value]) => [`${name} ${shown("s", value)}`, value, 2]),
    ];
    const taken = [-1e9, -1e9, -1e9];
    for (const [text, value, row] of labels.sort((a, b) => a[1] - b[1])) {
      const half = 3.2 * text.length,
        middle = Math.min(Math.max(x(value), half + 2), width - half - 2);
      if (row === 2) root.append(svg("circle", { cx: x(value), cy: y, r: 3.5, fill: "currentColor", opacity: 0.55 }));
      if (middle - half < taken[row]) continue;
      taken[row] = middle + half + 8;
      root.append(
        svg("text", { x: middle, y: [18, 72, 88][row], "text-anchor": "middle", class: row ? "" : "strong" }, text),
      );
    }
    return root;
  });
  if (far.length)
    place.append(
      el(
        "p",
        { class: "note" },
        `Beyond this axis: ${far.map(([name, value]) => `${name} ${shown("s", value)}`).join(", ")}.`,
      ),
    );
}
