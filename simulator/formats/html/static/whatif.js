// The what-if page: controls over the axes, the picture, the chosen plan with its command, pinned plans side by side.

const LISTED = [
  "verdict",
  "step_s",
  "low_s",
  "high_s",
  "used_bytes",
  "num_devices",
  "tokens_per_s",
  "mfu",
  "billion_tokens",
];

class WhatIf {
  constructor(place, answer) {
    this.explored = new Explored(answer);
    this.columns = this.explored.columns;
    this.syncs = []; // what brings the controls to the state
    this.figure = el("figure", { class: "chart" });
    this.chosen = el("div", { class: "panel controls", "aria-live": "polite", id: "chosen" });
    this.pinned = el("div", { id: "pinned" });
    this.best = el("div", { id: "best" });
    this.said = el("p", { class: "said", "aria-live": "polite" });
    this.state = this.explored.recalled(location.hash);
    this.left = this.explored.left(this.state);
    const tools = el("div", { class: "tools" }, [pressable("Clear filters", () => this.clear()), this.said]);
    place.append(this.controls(), tools, this.figure, this.chosen, this.pinned, this.best);
    const plot = new WhatIfPlot(this);
    this.redraw = drawnAgain(this.figure, (width) => plot.draw(width));
    this.figure.append(this.key(), el("p", { class: "note" }, WhatIf.NOTE));
    this.refresh();
    addEventListener("hashchange", () => {
      this.state = this.explored.recalled(location.hash);
      this.refresh();
    });
  }

  static NOTE =
    "The line joins plans that no other beats in both. Bars are 90 % intervals. Click a plan to choose it, Enter pins it.";

  refresh() {
    this.left = this.explored.left(this.state);
    const order = this.explored.best(this.left, this.state);
    if (this.state.plan === null || !this.left.includes(this.state.plan))
      this.state.plan = order[0] ?? this.left[0] ?? null;
    this.said.textContent = `${grouped(this.left.length)} of ${grouped(this.explored.count)} left, ${grouped(order.length)} of them run`;
    this.syncs.forEach((sync) => sync());
    this.redraw.now();
    this.tellChosen();
    this.tellRows(this.pinned, "Pinned, side by side", this.state.pins);
    this.tellRows(this.best, "The best of what is left", order.slice(0, 12));
    for (const one of [this.chosen, this.pinned, this.best]) NUMBERS.open(one);
    history.replaceState(null, "", `#${this.explored.fragment(this.state)}`);
  }

  choose(i) {
    this.state.plan = i;
    this.refresh();
  }

  pin(i) {
    const { pins } = this.state;
    this.state.pins = pins.includes(i) ? pins.filter((one) => one !== i) : [...pins, i].slice(-MOST_PINS);
    this.refresh();
  }

  clear() {
    for (const all of [this.state.filters, this.state.most]) for (const key of Object.keys(all)) all[key] = null;
    this.refresh();
  }

  // --- controls

  controls() {
    const axes_ = this.explored.answer.axes.map((axis, number) => this.axisControl(axis, number));
    const limits = Object.entries(this.explored.limits).map(([key, values]) => this.limitControl(key, values));
    const measures = [this.measureControl("y", "vertical axis"), this.measureControl("x", "horizontal axis")];
    return el("div", { class: "panel controls" }, [...axes_, ...limits, ...measures]);
  }

  filter(key, value) {
    this.state.filters[key] = value;
    this.refresh();
  }

  // A select of every value, and above it a slider where there are three numbers or more; its left end is any.
  axisControl(axis, number) {
    const order = this.explored.steps[axis.key];
    const id = `axis-${number}`;
    const options = [
      el("option", { value: "" }, "any"),
      ...order.map((i) => el("option", { value: i }, axis.values[i])),
    ];
    const select = el("select", { id }, options);
    select.addEventListener("change", () => this.filter(axis.key, select.value === "" ? null : Number(select.value)));
    this.syncs.push(() => {
      select.value = String(this.state.filters[axis.key] ?? "");
    });
    const numbers = order.length > 2 && axis.values.every((one) => Number.isFinite(Number(one)));
    const label = el("label", { for: id }, axis.key.replace(/^plan\./, ""));
    return el("div", {}, [label, numbers ? this.axisSlider(axis, order) : null, select]);
  }

  axisSlider(axis, order) {
    const told = `${axis.key}: any, or a value`;
    const slider = el("input", { type: "range", min: 0, max: order.length, step: 1, "aria-label": told });
    slider.addEventListener("input", () => this.filter(axis.key, order[Number(slider.value) - 1] ?? null));
    this.syncs.push(() => {
      const value = this.state.filters[axis.key];
      slider.value = value === null ? 0 : order.indexOf(value) + 1;
      slider.setAttribute("aria-valuetext", value === null ? "any" : axis.values[value]);
    });
    return slider;
  }

  limitControl(key, values) {
    const id = `most-${key}`;
    const last = values.length - 1;
    const output = el("output", { for: id });
    const slider = el("input", { type: "range", id, min: 0, max: last, step: 1 });
    slider.addEventListener("input", () => {
      this.state.most[key] = Number(slider.value) === last ? null : values[Number(slider.value)];
      this.refresh();
    });
    this.syncs.push(() => {
      const most = this.state.most[key] ?? null;
      slider.value = most === null ? last : lastAtMost(values, most);
      output.textContent = most === null ? "any" : `≤ ${shown(key, most)}`;
      slider.setAttribute("aria-valuetext", output.textContent);
    });
    const title = key === "num_devices" ? "GPUs at most" : "memory at most";
    return el("div", {}, [el("label", { for: id }, [title, output]), slider]);
  }

  measureControl(name, title) {
    const id = `measure-${name}`;
    const options = this.explored.measures.map(([key, text]) => el("option", { value: key }, text));
    const select = el("select", { id }, options);
    select.addEventListener("change", () => {
      this.state[name] = select.value;
      this.refresh();
    });
    this.syncs.push(() => {
      select.value = this.state[name];
    });
    return el("div", {}, [el("label", { for: id }, title), select]);
  }

  // --- what is told beside the picture

  key() {
    const items = Object.entries(SHADES).reverse();
    return legend(
      items.map(([name]) => name),
      String,
      (name) => SHADES[name],
    );
  }

  shown(key, i) {
    return shown(key, this.columns[key][i]);
  }

  fact(title, key, i, sub = "") {
    if (!this.columns[key]) return null;
    const value = el("data", { value: this.columns[key][i], "data-figure": key, "data-path": `columns/${key}/${i}` }, this.shown(key, i));
    return el("div", {}, [
      el("span", { class: "label" }, title),
      el("span", { class: "big" }, value),
      sub && el("span", { class: "sub" }, sub),
    ]);
  }

  facts(i) {
    const share = (key) => percent(this.columns[key][i] / this.columns.step_s[i]);
    const parts = this.columns.communication_s
      ? `communication ${share("communication_s")}, waiting ${share("waiting_s")} of the step`
      : "";
    return [
      this.fact("Step time", "step_s", i, `90 % interval ${this.shown("low_s", i)} to ${this.shown("high_s", i)}`),
      this.fact("Memory", "used_bytes", i, `of ${this.shown("capacity_bytes", i)}`),
      this.fact("Tokens a second", "tokens_per_s", i, `${this.shown("num_devices", i)} GPUs`),
      this.fact("MFU", "mfu", i, parts),
      this.fact("Cost of a billion tokens", "billion_tokens", i),
    ].filter(Boolean);
  }

  tellChosen() {
    const i = this.state.plan;
    if (i === null) {
      this.chosen.replaceChildren(el("p", {}, "Nothing is left: loosen a filter."));
      return;
    }
    const verdict = this.columns.verdict[i];
    const badge = el("p", { class: `badge ${verdict.replaceAll(" ", "-")}` }, verdict);
    const reason = () => el("p", {}, this.explored.answer.reasons[this.columns.why[i]]);
    this.chosen.replaceChildren(
      el("div", {}, [badge, el("h2", {}, this.explored.named(i))]),
      ...(verdict === "illegal" ? [reason()] : this.facts(i)),
      this.command(i),
    );
  }

  command(i) {
    const line = commandOf(this.explored.answer, i);
    const copy = pressable("Copy command", () => {
      navigator.clipboard?.writeText(line).then(
        () => (copy.textContent = "Copied"),
        () => {},
      );
    });
    const words_ = el("pre", { tabindex: 0, "aria-label": "Command of this plan" }, line);
    return el("div", { class: "whole" }, [words_, el("div", { class: "tools" }, [this.pinButton(i), copy])]);
  }

  pinButton(i, attributes = {}) {
    const pinned = this.state.pins.includes(i);
    return pressable(pinned ? "Unpin" : "Pin", () => this.pin(i), { "aria-pressed": pinned, ...attributes });
  }

  tellRows(place, caption, points) {
    const keys = LISTED.filter((key) => this.columns[key]);
    const heading = (key) => el("th", { scope: "col", class: key === "verdict" ? null : "num" }, words(key));
    const action = el("th", { scope: "col" }, el("span", { class: "hide" }, "pin"));
    const head = el("tr", {}, [el("th", { scope: "col" }, "plan"), ...keys.map(heading), action]);
    const rows = points.map((i) => this.row(i, keys));
    const table = el("table", {}, [el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, rows)]);
    const region = el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption }, table);
    place.replaceChildren(...(points.length ? [region] : []));
  }

  row(i, keys) {
    const name = pressable(this.explored.named(i), () => this.choose(i), { class: "quiet" });
    const cell = (key) => {
      const number = { value: this.columns[key][i] ?? "", "data-path": `columns/${key}/${i}` };
      const value = el("data", number, this.shown(key, i));
      return el("td", { class: key === "verdict" ? "short" : "num" }, value);
    };
    const label = `${this.state.pins.includes(i) ? "Unpin" : "Pin"} ${this.explored.named(i)}`;
    const pin = el("td", {}, this.pinButton(i, { "aria-label": label }));
    const cells = [el("th", { scope: "row" }, name), ...keys.map(cell), pin];
    return el("tr", { class: i === this.state.plan ? "chosen" : null }, cells);
  }
}

function drawWhatIf(place) {
  new WhatIf(place, ANSWER);
}
