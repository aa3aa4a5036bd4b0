// The what-if page: filters over axes, a picture of what is left, the chosen plan, pinned ones, the command line.

const VERDICTS = ["fits", "tight", "does not fit"];
const MEASURES = [
  ["step_s", "step time"],
  ["million_tokens_s", "time for a million tokens"],
  ["device_s_per_token", "device time a token"],
  ["billion_tokens", "cost of a billion tokens"],
  ["used_bytes", "memory of the fullest rank"],
  ["num_devices", "GPUs"],
];

// A word as a shell takes it.
function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}

// The words that predict a point: those of the study, and the point's values behind them.
function commandOf(answer, i) {
  const words = [...answer.command];
  for (const axis of answer.axes) {
    const value = axis.values[answer.at[axis.key][i]];
    if (value === "as usual") continue;
    if (axis.key.includes(".")) words.push("--set", `${axis.key}=${value}`);
    else words.push(`--${axis.key}`, value);
  }
  return words.map(quoted).join(" ");
}

// Indices of values in an order that a slider can follow: numbers by size, words as given.
function ordered(values) {
  const order = values.map((_, i) => i);
  return values.every((one) => one !== "" && Number.isFinite(Number(one)))
    ? order.sort((a, b) => Number(values[a]) - Number(values[b]))
    : order;
}

function drawWhatIf(place, answer = ANSWER, load = null) {
  const count = answer.columns.verdict.length,
    columns = {
      ...answer.columns,
      million_tokens_s: answer.columns.tokens_per_s.map((one) => (one ? 1e6 / one : null)),
    };
  const batches = new Set(
      columns.step_s
        .map((one, i) => (one ? Math.round(one * columns.tokens_per_s[i]) : null))
        .filter((one) => one !== null),
    ),
    measures = MEASURES.filter(([key]) => columns[key]);
  const state = {
    x: measures.find(([key]) => key === "used_bytes") ? "used_bytes" : measures[0][0],
    y: Math.max(...batches) > 1.01 * Math.min(...batches) ? "million_tokens_s" : "step_s",
    plan: null,
    pins: [],
    filters: {},
    most: {},
  };
  const steps = Object.fromEntries(answer.axes.map((axis) => [axis.key, ordered(axis.values)]));
  const bounds = Object.fromEntries(
    ["used_bytes", "num_devices"]
      .filter((key) => columns[key])
      .map((key) => [key, [...new Set(columns[key].filter(Number.isFinite))].sort((a, b) => a - b)]),
  );
  const controls = el("div", { class: "panel controls" }),
    figure = el("figure", { class: "chart" }),
    chosen = el("div", { class: "panel controls", "aria-live": "polite", id: "chosen" }),
    pinned = el("div", { id: "pinned" }),
    best = el("div", { id: "best" });
  const said = el("p", { class: "said", "aria-live": "polite" }),
    syncs = [];
  let left = [],
    again = () => {};

  const named = (i) =>
    answer.axes.map((axis) => `${axis.key.replace(/^plan\./, "")} ${axis.values[answer.at[axis.key][i]]}`).join(", ");
  const usable = (i) =>
    columns.verdict[i] !== "illegal" && Number.isFinite(columns[state.x][i]) && Number.isFinite(columns[state.y][i]);
  const figureOf = (key, i) => shown(key, columns[key][i]);

  function remember() {
    const told = { x: state.x, y: state.y };
    if (state.plan !== null) told.plan = String(state.plan);
    if (state.pins.length) told.pins = state.pins.map(String);
    for (const [key, value] of Object.entries(state.filters))
      if (value !== null) told[`= ${key}`] = answer.axes.find((one) => one.key === key).values[value];
    for (const [key, value] of Object.entries(state.most)) if (value !== null) told[`< ${key}`] = String(value);
    history.replaceState(null, "", `#${encoded(told)}`);
  }

  function recall() {
    const told = restored(location.hash),
      index = (text) => (/^\d+$/.test(text) && Number(text) < count ? Number(text) : null);
    for (const name of ["x", "y"])
      if (told[name] && measures.some(([key]) => key === told[name][0])) state[name] = told[name][0];
    state.plan = told.plan ? index(told.plan[0]) : null;
    state.pins = (told.pins || [])
      .map(index)
      .filter((one) => one !== null)
      .slice(0, 6);
    for (const axis of answer.axes) {
      const at = told[`= ${axis.key}`] ? axis.values.indexOf(told[`= ${axis.key}`].join(",")) : -1;
      state.filters[axis.key] = at >= 0 ? at : null;
    }
    for (const key of Object.keys(bounds)) {
      const value = told[`< ${key}`] ? Number(told[`< ${key}`][0]) : NaN;
      state.most[key] = Number.isFinite(value) ? value : null;
    }
  }

  function refresh() {
    const filters = { ...state.filters };
    const narrowed = {};
    for (const [key, value] of Object.entries(filters)) narrowed[key] = value;
    left = kept(
      { ...answer.at, ...columns },
      {
        ...narrowed,
        ...Object.fromEntries(
          Object.entries(state.most)
            .filter(([, value]) => value !== null)
            .map(([key, value]) => [key, { most: value }]),
        ),
      },
      count,
    );
    const runs = left.filter((i) => usable(i) && columns.verdict[i] !== "does not fit");
    const order = [...runs].sort((a, b) => columns[state.y][a] - columns[state.y][b] || a - b);
    if (state.plan === null || !left.includes(state.plan))
      state.plan = order.length ? order[0] : left.length ? left[0] : null;
    said.textContent = `${grouped(left.length)} of ${grouped(count)} left, ${grouped(runs.length)} of them run`;
    syncs.forEach((sync) => sync());
    again.now && again.now();
    tellChosen();
    tellPinned();
    tellBest(order.slice(0, 12));
    remember();
  }

  const choose = (i) => {
    state.plan = i;
    refresh();
  };
  const pin = (i) => {
    state.pins = state.pins.includes(i) ? state.pins.filter((one) => one !== i) : [...state.pins, i].slice(-6);
    refresh();
  };

  // A select of every value, and for axes of three numbers and more a slider beside it; its left end is any.
  function axisControl(axis) {
    const order = steps[axis.key],
      id = `axis-${answer.axes.indexOf(axis)}`,
      label = el("label", { for: id }, [axis.key.replace(/^plan\./, "")]),
      holder = el("div", {}, label);
    const select = el("select", { id }, [
      el("option", { value: "" }, "any"),
      ...order.map((i) => el("option", { value: i }, axis.values[i])),
    ]);
    select.addEventListener("change", () => {
      state.filters[axis.key] = select.value === "" ? null : Number(select.value);
      refresh();
    });
    const numeric = order.length > 2 && axis.values.every((one) => Number.isFinite(Number(one)));
    if (numeric) {
      const slider = el("input", {
        type: "range",
        min: 0,
        max: order.length,
        step: 1,
        "aria-label": `${axis.key}: any, or a value`,
      });
      slider.addEventListener("input", () => {
        state.filters[axis.key] = Number(slider.value) ? order[Number(slider.value) - 1] : null;
        refresh();
      });
      holder.append(slider);
      syncs.push(() => {
        const value = state.filters[axis.key];
        slider.value = value === null ? 0 : order.indexOf(value) + 1;
        slider.setAttribute("aria-valuetext", value === null ? "any" : axis.values[value]);
      });
    }
    holder.append(select);
    syncs.push(() => {
      select.value = state.filters[axis.key] === null ? "" : String(state.filters[axis.key]);
    });
    return holder;
  }

  function mostControl(key) {
    const values = bounds[key],
      id = `most-${key}`,
      output = el("output", { for: id }),
      slider = el("input", { type: "range", id, min: 0, max: values.length - 1, step: 1 });
    slider.addEventListener("input", () => {
      const at = Number(slider.value);
      state.most[key] = at === values.length - 1 ? null : values[at];
      refresh();
    });
    syncs.push(() => {
      const value = state.most[key];
      slider.value = value === null ? values.length - 1 : lastAtMost(values, value);
      output.textContent = value === null ? "any" : `≤ ${shown(key, value)}`;
      slider.setAttribute("aria-valuetext", output.textContent);
    });
    return el("div", {}, [
      el("label", { for: id }, [key === "num_devices" ? "GPUs at most" : "memory at most", output]),
      slider,
    ]);
  }

  function measureControl(name, title) {
    const id = `measure-${name}`,
      select = el(
        "select",
        { id },
        measures.map(([key, words_]) => el("option", { value: key }, words_)),
      );
    select.addEventListener("change", () => {
      state[name] = select.value;
      refresh();
    });
    syncs.push(() => {
      select.value = state[name];
    });
    return el("div", {}, [el("label", { for: id }, title), select]);
  }

  function tellChosen() {
    const i = state.plan;
    if (i === null) {
      chosen.replaceChildren(el("p", {}, "Nothing is left: loosen a filter."));
      return;
    }
    const verdict = columns.verdict[i],
      parts = [
        el("div", {}, [el("p", { class: `badge ${verdict.replaceAll(" ", "-")}` }, verdict), el("h3", {}, named(i))]),
      ];
    if (verdict === "illegal") parts.push(el("p", {}, answer.reasons[columns.why[i]]));
    else {
      const fact = (title, key, sub) =>
        el("div", {}, [
          el("span", { class: "label" }, title),
          el("span", { class: "big" }, el("data", { value: columns[key][i], "data-figure": key }, figureOf(key, i))),
          sub ? el("span", { class: "sub" }, sub) : null,
        ]);
      parts.push(
        fact("Step time", "step_s", `90 % interval ${figureOf("low_s", i)} to ${figureOf("high_s", i)}`),
        fact("Memory", "used_bytes", `of ${figureOf("capacity_bytes", i)}`),
        fact("Tokens a second", "tokens_per_s", `${figureOf("num_devices", i)} GPUs`),
      );
      if (columns.mfu)
        parts.push(
          fact(
            "MFU",
            "mfu",
            columns.communication_s
              ? `communication ${percent(columns.communication_s[i] / columns.step_s[i])}, waiting ${percent(columns.waiting_s[i] / columns.step_s[i])} of the step`
              : "",
          ),
        );
      if (columns.billion_tokens) parts.push(fact("Cost of a billion tokens", "billion_tokens"));
    }
    const line = commandOf(answer, i),
      button = el(
        "button",
        { type: "button", "aria-pressed": state.pins.includes(i) },
        state.pins.includes(i) ? "Unpin" : "Pin",
      ),
      copy = el("button", { type: "button" }, "Copy command");
    button.addEventListener("click", () => pin(i));
    copy.addEventListener("click", () =>
      navigator.clipboard?.writeText(line).then(
        () => {
          copy.textContent = "Copied";
        },
        () => {},
      ),
    );
    const open = load ? el("button", { type: "button" }, "Open its report") : null;
    if (open) open.addEventListener("click", () => load(i));
    chosen.replaceChildren(...parts);
    const wide = el("div", { class: "whole" }, [
      el("pre", { tabindex: 0, "aria-label": "Command of this plan" }, line),
      el("div", { class: "tools" }, [button, copy, open]),
    ]);
    chosen.append(wide);
  }

  function rowsTable(caption, rows, extra) {
    const keys = [
      "verdict",
      "step_s",
      "low_s",
      "high_s",
      "used_bytes",
      "num_devices",
      "tokens_per_s",
      "mfu",
      "billion_tokens",
    ].filter((key) => columns[key]);
    const head = el(
      "tr",
      {},
      ["plan", ...keys.map(words), ""].map((one) =>
        el(
          "th",
          { scope: "col", class: one === "plan" || one === "verdict" ? null : "num" },
          one || el("span", { class: "hide" }, "action"),
        ),
      ),
    );
    const body = rows.map((i) => {
      const name = el("button", { type: "button", class: "quiet" }, named(i));
      name.addEventListener("click", () => choose(i));
      return el("tr", { class: i === state.plan ? "chosen" : null }, [
        el("th", { scope: "row" }, name),
        ...keys.map((key) =>
          el(
            "td",
            { class: key === "verdict" ? "short" : "num" },
            el("data", { value: columns[key][i] ?? "" }, figureOf(key, i)),
          ),
        ),
        el("td", {}, extra(i)),
      ]);
    });
    return el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      el("table", {}, [el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)]),
    );
  }

  const pinButton = (i) => {
    const one = el(
      "button",
      { type: "button", "aria-label": `${state.pins.includes(i) ? "Unpin" : "Pin"} ${named(i)}` },
      state.pins.includes(i) ? "Unpin" : "Pin",
    );
    one.addEventListener("click", () => pin(i));
    return one;
  };
  function tellPinned() {
    pinned.replaceChildren(...(state.pins.length ? [rowsTable("Pinned, side by side", state.pins, pinButton)] : []));
  }
  function tellBest(order) {
    best.replaceChildren(...(order.length ? [rowsTable("The best of what is left", order, pinButton)] : []));
  }

  const draw = (width) => {
    const shownPoints = left.filter(usable),
      height = Math.min(440, Math.max(260, width * 0.48)),
      pad = { left: 66, right: 16, top: 22, bottom: 42 };
    if (!shownPoints.length) return el("p", { class: "note" }, "Nothing to draw: loosen a filter.");
    const xs = shownPoints.map((i) => columns[state.x][i]),
      ys = shownPoints.map((i) => columns[state.y][i]),
      wide = Math.max(...ys) / Math.min(...ys) > 12,
      tall = Math.max(...xs) / Math.min(...xs) > 40;
    const [x0, x1] = tall ? [Math.min(...xs) * 0.9, Math.max(...xs) * 1.1] : extent(xs, false),
      [y0, y1] = wide ? [Math.min(...ys) * 0.85, Math.max(...ys) * 1.15] : extent(ys, false);
    const x = (tall ? logarithmic : linear)(x0, x1, pad.left, width - pad.right),
      y = (wide ? logarithmic : linear)(y0, y1, height - pad.bottom, pad.top);
    const title = (key) => measures.find(([one]) => one === key)[1],
      byBytes = (key) => /bytes$/.test(key);
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-label": `${title(state.y)} over ${title(state.x)}, ${shownPoints.length} plans; arrow keys go along the front, Enter pins`,
    });
    root.append(
      ...axes(
        width,
        height,
        pad,
        {
          scale: x,
          ticks: tall ? logTicks(x0, x1, byBytes(state.x)) : ticks(x0, x1, width < 560 ? 3 : 7, byBytes(state.x)),
          form: (one) => shown(state.x, one),
          title: title(state.x),
        },
        {
          scale: y,
          ticks: wide ? logTicks(y0, y1, byBytes(state.y)) : ticks(y0, y1, 6, byBytes(state.y)),
          form: (one) => shown(state.y, one),
          title: title(state.y) + (wide ? ", logarithmic" : ""),
        },
      ),
    );
    const pixels = new Array(count).fill(null);
    for (const i of shownPoints) pixels[i] = [x(columns[state.x][i]), y(columns[state.y][i])];
    const shades = { fits: COLOURS.live, tight: COLOURS.interference, "does not fit": "var(--axis)" },
      r = shownPoints.length > 900 ? 2.4 : 3.6;
    for (const verdict of [...VERDICTS].reverse()) {
      const d = shownPoints
        .filter((i) => columns.verdict[i] === verdict)
        .map(
          (i) =>
            `M${(pixels[i][0] - r).toFixed(1)} ${pixels[i][1].toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
        )
        .join("");
      if (d)
        root.append(
          svg("path", { d, fill: shades[verdict], "fill-opacity": verdict === "does not fit" ? 0.35 : 0.75 }),
        );
    }
    const runs = shownPoints.filter((i) => columns.verdict[i] !== "does not fit"),
      along = front(runs.map((i) => [columns[state.x][i], columns[state.y][i]])).map((j) => runs[j]);
    if (along.length)
      root.append(
        svg("path", {
          class: "frontline",
          d: "M" + along.map((i) => pixels[i].map((one) => one.toFixed(1)).join(" ")).join("L"),
        }),
      );
    const scale = (i) => columns[state.y][i] / columns.step_s[i],
      timed = ["step_s", "million_tokens_s", "device_s_per_token", "billion_tokens"].includes(state.y);
    const whiskers = [...new Set([...along, ...state.pins, state.plan])].filter(
      (i) => i !== null && pixels[i] && timed,
    );
    root.append(
      svg("path", {
        class: "axisline",
        d: whiskers
          .map(
            (i) =>
              `M${pixels[i][0].toFixed(1)} ${Math.min(height - pad.bottom, y(columns.low_s[i] * scale(i))).toFixed(1)}V${Math.max(pad.top, y(columns.high_s[i] * scale(i))).toFixed(1)}`,
          )
          .join(""),
      }),
    );
    for (const i of state.pins)
      if (pixels[i])
        root.append(svg("rect", { class: "hit", x: pixels[i][0] - 6, y: pixels[i][1] - 6, width: 12, height: 12 }));
    if (state.plan !== null && pixels[state.plan])
      root.append(svg("circle", { class: "hit", cx: pixels[state.plan][0], cy: pixels[state.plan][1], r: 8 }));
    const told = (i) => [
      ["verdict", columns.verdict[i]],
      ["step", `${figureOf("step_s", i)} (${figureOf("low_s", i)} to ${figureOf("high_s", i)})`],
      ["memory", figureOf("used_bytes", i)],
      ["GPUs", figureOf("num_devices", i)],
      ["tokens", figureOf("tokens_per_s", i)],
    ];
    root.addEventListener("pointermove", (event) => {
      const i = nearest(pixels, ...boundsOf(root, event));
      if (i < 0) hush();
      else tell(named(i), told(i), event.clientX, event.clientY);
    });
    root.addEventListener("pointerleave", hush);
    root.addEventListener("click", (event) => {
      const i = nearest(pixels, ...boundsOf(root, event));
      if (i >= 0) choose(i);
    });
    root.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Enter" && state.plan !== null) {
        event.preventDefault();
        pin(state.plan);
      } else if (by && along.length) {
        event.preventDefault();
        choose(along[(along.indexOf(state.plan) + by + along.length) % along.length]);
      } else return;
      figure.querySelector("svg")?.focus();
    });
    return root;
  };

  recall();
  controls.append(
    ...answer.axes.map(axisControl),
    ...Object.keys(bounds)
      .filter((key) => bounds[key].length > 1)
      .map(mostControl),
    measureControl("y", "vertical axis"),
    measureControl("x", "horizontal axis"),
  );
  const reset = el("button", { type: "button" }, "Clear filters");
  reset.addEventListener("click", () => {
    for (const key of Object.keys(state.filters)) state.filters[key] = null;
    for (const key of Object.keys(state.most)) state.most[key] = null;
    refresh();
  });
  place.append(controls, el("div", { class: "tools" }, [reset, said]), figure, chosen, pinned, best);
  again = drawnAgain(figure, draw);
  figure.append(
    el(
      "ul",
      { class: "legend" },
      [
        ["fits", COLOURS.live],
        ["tight", COLOURS.interference],
        ["does not fit", "var(--axis)"],
      ].map(([name, shade]) => {
        const box = el("span", { class: "swatch" });
        box.style.background = shade;
        return el("li", {}, [box, name]);
      }),
    ),
    el(
      "p",
      { class: "note" },
      "The line joins plans that no other beats in both. Bars are 90 % intervals. Click a plan to choose it, Enter pins it.",
    ),
  );
  refresh();
  addEventListener("hashchange", () => {
    recall();
    refresh();
  });
}

if (typeof module !== "undefined") module.exports = { quoted, commandOf, ordered };
