// The timeline: rows of streams, zoom by wheel, buttons and keys, search, the critical path.

function drawTimeline(place) {
  const data = DRAWING.timeline,
    end = Math.ceil(data.step_s / data.tick_s),
    few = 3,
    everyRow = [];
  let rows = everyRow;
  data.programs.forEach((program, number) =>
    program.rows.forEach((row, i) =>
      everyRow.push({
        program: program.name,
        number,
        first: i === 0,
        stream: row.stream,
        bars: decoded(row.bars, data.labels),
      }),
    ),
  );
  let view = [0, end],
    hits = [],
    hit = -1,
    path = false,
    again = () => {};
  const said = el("output", { "aria-live": "polite" }),
    box = el("input", { type: "search", placeholder: "Search operations", "aria-label": "Search operations" });
  const button = (text, label, act) => {
    const one = el("button", { type: "button", "aria-label": label }, text);
    one.addEventListener("click", act);
    return one;
  };
  const zoom = (factor, at = (view[0] + view[1]) / 2) => {
    view = zoomed(view, factor, at, end, Math.max(20, end / 1e5));
    again.now();
  };
  const toHit = (by) => {
    if (!hits.length) return;
    hit = (hit + by + hits.length) % hits.length;
    const { bar, row } = hits[hit],
      width = Math.max((bar.end - bar.start) * 14, (view[1] - view[0]) * 0.999);
    if (bar.start < view[0] || bar.end > view[1])
      view = moved([bar.start - width / 2, bar.start - width / 2 + Math.min(width, end)], 0, end);
    said.textContent = `${hit + 1} of ${hits.length}: ${bar.label} on ${rows[row].program} ${rows[row].stream}, ${shown("s", (bar.end - bar.start) * data.tick_s)} at ${shown("s", bar.start * data.tick_s)}`;
    again.now();
  };
  const search = () => {
    hits = searched(rows, box.value, data.categories);
    hit = -1;
    const total = hits.reduce((sum, one) => sum + one.bar.end - one.bar.start, 0) * data.tick_s;
    said.textContent = box.value.trim() ? `${grouped(hits.length)} found, ${shown("s", total)} together` : "";
    again.now();
  };
  box.addEventListener("input", search);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      toHit(event.shiftKey ? -1 : 1);
    }
  });
  const critical = button("Critical path", "Show the critical path", () => {
    path = !path;
    critical.setAttribute("aria-pressed", path);
    again.now();
  });
  critical.setAttribute("aria-pressed", "false");
  rows = data.programs.length > few ? everyRow.filter((row) => row.number < few) : everyRow;
  const more = button(`All ${data.programs.length} rank classes`, "Show every class of ranks", () => {
    const whole = rows !== everyRow;
    rows = whole ? everyRow : everyRow.filter((row) => row.number < few);
    more.setAttribute("aria-pressed", whole);
    search();
  });
  more.setAttribute("aria-pressed", "false");
  more.hidden = data.programs.length <= few;
  const tools = el("div", { class: "tools" }, [
    button("+", "Zoom in", () => zoom(0.5)),
    button("−", "Zoom out", () => zoom(2)),
    button("Whole step", "Show the whole step", () => {
      view = [0, end];
      again.now();
    }),
    critical,
    more,
    box,
    button("Next", "Next operation found", () => toHit(1)),
    said,
  ]);
  const figure = el("figure", { class: "chart" });
  place.append(tools, figure);
  const draw = (width) => {
    const many = rows.length > 12,
      band = many ? 13 : 20,
      gap = many ? 3 : 6,
      left = width < 560 ? 66 : 132,
      top = 24,
      inner = width - left - 6;
    const tops = [];
    let y = top;
    for (const row of rows) {
      if (row.first && data.programs.length > 1) y += many ? 12 : 18;
      tops.push(y);
      y += band + gap;
    }
    const height = y + 6,
      time = (px) => view[0] + ((view[1] - view[0]) * (px - left)) / inner;
    const x = linear(view[0], view[1], left, left + inner);
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-label": `Timeline of ${rows.length} streams, ${shown("s", view[0] * data.tick_s)} to ${shown("s", view[1] * data.tick_s)}; plus and minus zoom, arrows move, 0 shows all`,
    });
    for (const one of ticks(view[0] * data.tick_s, view[1] * data.tick_s, width < 560 ? 3 : 7))
      root.append(
        svg("line", { class: "gridline", x1: x(one / data.tick_s), x2: x(one / data.tick_s), y1: top - 4, y2: height }),
        svg(
          "text",
          { x: Math.min(x(one / data.tick_s), width - 20), y: 13, "text-anchor": "middle" },
          one === 0 ? "0" : shown("s", one),
        ),
      );
    rows.forEach((row, i) => {
      if (row.first && data.programs.length > 1)
        root.append(svg("text", { x: 0, y: tops[i] - 3, class: "strong" }, row.program));
      root.append(
        svg(
          "text",
          { x: 4, y: tops[i] + band / 2 + 4 },
          row.stream.length * 6.3 > left - 8 ? row.stream.slice(0, Math.floor((left - 8) / 6.3)) + "…" : row.stream,
        ),
      );
      const strip = svg("g", { transform: `translate(${left} 0)` });
      for (const [category, d] of boxes(visible(row.bars, view[0], view[1], inner), tops[i], band))
        strip.append(
          svg("path", { d, fill: colour(data.categories[category]), opacity: hits.length || path ? 0.3 : 1 }),
        );
      if (path) {
        const chosen = row.bars.filter((one) => one.critical);
        for (const [category, d] of boxes(visible(chosen, view[0], view[1], inner), tops[i], band))
          strip.append(svg("path", { d, fill: colour(data.categories[category]) }));
      }
      const mine = hits.filter((one) => one.row === i).map((one) => one.bar);
      if (mine.length)
        for (const [category, d] of boxes(visible(mine, view[0], view[1], inner), tops[i], band))
          strip.append(svg("path", { d, fill: colour(data.categories[category]) }));
      if (hit >= 0 && hits[hit].row === i) {
        const a = Math.max(0, x(hits[hit].bar.start) - left);
        strip.append(
          svg("rect", {
            class: "hit",
            x: a,
            y: tops[i] - 1,
            height: band + 2,
            width: Math.max(3, Math.min(inner - a, x(hits[hit].bar.end) - left - a)),
          }),
        );
      }
      root.append(strip);
    });
    const rowAt = (py) => tops.findIndex((one) => py >= one && py <= one + band);
    let drag = null;
    root.addEventListener("pointerdown", (event) => {
      drag = { from: view, x: event.clientX };
      root.setPointerCapture(event.pointerId);
    });
    root.addEventListener("pointerup", () => {
      if (drag && drag.shift) {
        view = moved(drag.from, drag.shift, end);
        again.now();
      }
      drag = null;
    });
    root.addEventListener("pointermove", (event) => {
      if (drag) {
        drag.shift = ((drag.x - event.clientX) / inner) * (drag.from[1] - drag.from[0]);
        root
          .querySelectorAll("g")
          .forEach((one) => one.setAttribute("transform", `translate(${left + event.clientX - drag.x} 0)`));
        hush();
        return;
      }
      const [px, py] = boundsOf(root, event),
        i = rowAt(py),
        bar = i < 0 || px < left ? null : barAt(rows[i].bars, time(px)) || barAt(rows[i].bars, time(px + 1));
      if (!bar) {
        hush();
        return;
      }
      tell(
        bar.ops > 1 ? `${bar.label} and ${bar.ops - 1} more` : bar.label,
        [
          ["category", words(data.categories[bar.category])],
          ["takes", shown("s", (bar.end - bar.start) * data.tick_s)],
          ["starts at", shown("s", bar.start * data.tick_s)],
          ["stream", `${rows[i].program}, ${rows[i].stream}`],
          ...(bar.critical ? [["on the critical path", "yes"]] : []),
        ],
        event.clientX,
        event.clientY,
      );
    });
    root.addEventListener("pointerleave", hush);
    root.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
        event.preventDefault();
        zoom(event.deltaY > 0 ? 1.25 : 0.8, time(boundsOf(root, event)[0]));
      },
      { passive: false },
    );
    root.addEventListener("keydown", (event) => {
      const width = view[1] - view[0],
        act = {
          "+": () => zoom(0.5),
          "=": () => zoom(0.5),
          "-": () => zoom(2),
          0: () => {
            view = [0, end];
            again.now();
          },
          ArrowLeft: () => {
            view = moved(view, -width / 5, end);
            again.now();
          },
          ArrowRight: () => {
            view = moved(view, width / 5, end);
            again.now();
          },
        }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
      figure.querySelector("svg").focus();
    });
    return root;
  };
  again = drawnAgain(figure, draw, { late: true });
  figure.append(
    legend(data.categories),
    el(
      "p",
      { class: "note" },
      "Drag to move; Ctrl or Shift with the wheel zooms. Enter in the search box goes to the next one found.",
    ),
  );
}

// A pipeline's passes: forward, backward and gradients of weights by micro-batch.
function drawPipeline(place) {
  const stages = DRAWING.pipeline,
    names = ["forward", "backward", "weights"],
    end = Math.max(...stages.flatMap((one) => one.passes.map((pass) => pass[1])));
  const used = new Set(stages.flatMap((one) => one.passes.map((pass) => pass[2]))),
    figure = el("figure", { class: "chart" });
  place.append(figure);
  drawnAgain(
    figure,
    (width) => {
      const left = 66,
        band = stages.length > 24 ? 9 : 22,
        gap = 3,
        height = stages.length * (band + gap) + 26,
        x = linear(0, end, left, width - 6);
      const root = svg("svg", {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "aria-label": `Pipeline of ${stages.length} stages over ${shown("s", end)}`,
      });
      stages.forEach((stage, i) => {
        const y = i * (band + gap);
        root.append(svg("text", { x: 0, y: y + band / 2 + 4 }, stage.name));
        const paths = {};
        for (const [start, stop, phase, batch] of stage.passes) {
          const a = x(start),
            w = Math.max(0.6, x(stop) - a - 0.7);
          paths[phase] = (paths[phase] || "") + `M${a.toFixed(1)} ${y}h${w.toFixed(1)}v${band}h${(-w).toFixed(1)}z`;
        }
        for (const [phase, d] of Object.entries(paths)) root.append(svg("path", { d, fill: colour(names[phase]) }));
        if (band > 12)
          for (const [start, stop, , batch] of stage.passes)
            if (x(stop) - x(start) > 7 * String(batch).length + 4)
              root.append(
                svg(
                  "text",
                  { x: (x(start) + x(stop)) / 2, y: y + band / 2 + 4, "text-anchor": "middle", class: "on" },
                  String(batch),
                ),
              );
      });
      for (const one of ticks(0, end, width < 560 ? 3 : 7))
        root.append(
          svg(
            "text",
            { x: Math.min(x(one), width - 22), y: height - 6, "text-anchor": "middle" },
            one === 0 ? "0" : shown("s", one),
          ),
        );
      return root;
    },
    { late: true },
  );
  figure.append(legend(names.filter((_, i) => used.has(i))));
}
