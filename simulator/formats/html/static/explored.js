// What an exploration knows: its points, their names and figures, what filters leave, and the state as an address.

const MEASURES = [
  ["step_s", "step time"],
  ["million_tokens_s", "time for a million tokens"],
  ["device_s_per_token", "device time a token"],
  ["billion_tokens", "cost of a billion tokens"],
  ["used_bytes", "memory of the fullest rank"],
  ["num_devices", "GPUs"],
];
const LIMITS = ["used_bytes", "num_devices"];
const MOST_PINS = 6;

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
  const numbers = values.every((one) => one !== "" && Number.isFinite(Number(one)));
  return numbers ? order.sort((a, b) => Number(values[a]) - Number(values[b])) : order;
}

class Explored {
  constructor(answer) {
    const perToken = answer.columns.tokens_per_s.map((one) => (one ? 1e6 / one : null));
    this.answer = answer;
    this.columns = { ...answer.columns, million_tokens_s: perToken };
    this.count = answer.columns.verdict.length;
    this.measures = MEASURES.filter(([key]) => this.columns[key]);
    this.steps = Object.fromEntries(answer.axes.map((axis) => [axis.key, ordered(axis.values)]));
    this.limits = Object.fromEntries(
      LIMITS.map((key) => [key, this.distinct(key)]).filter(([, all]) => all.length > 1),
    );
  }

  distinct(key) {
    return [...new Set((this.columns[key] || []).filter(Number.isFinite))].sort((a, b) => a - b);
  }

  // Steps of different batches say nothing beside each other: then time is that of as many tokens.
  start() {
    const batches = this.columns.step_s.map((one, i) => one && one * this.columns.tokens_per_s[i]).filter(Boolean);
    const differ = Math.max(...batches) > 1.01 * Math.min(...batches);
    return { x: "used_bytes", y: differ ? "million_tokens_s" : "step_s", plan: null, pins: [], filters: {}, most: {} };
  }

  value(axis, i) {
    return axis.values[this.answer.at[axis.key][i]];
  }

  named(i) {
    return this.answer.axes.map((axis) => `${axis.key.replace(/^plan\./, "")} ${this.value(axis, i)}`).join(", ");
  }

  title(measure) {
    return MEASURES.find(([key]) => key === measure)[1];
  }

  runs(i) {
    return this.columns.verdict[i] === "fits" || this.columns.verdict[i] === "tight";
  }

  // The points that the filters leave.
  left(state) {
    const limits = Object.entries(state.most).filter(([, most]) => most !== null);
    const filters = { ...state.filters, ...Object.fromEntries(limits.map(([key, most]) => [key, { most }])) };
    return kept({ ...this.answer.at, ...this.columns }, filters, this.count);
  }

  // Those that have both figures of the picture.
  drawable(points, state) {
    return points.filter((i) => [state.x, state.y].every((key) => Number.isFinite(this.columns[key][i])));
  }

  // Those that run, the best in what the vertical axis shows first.
  best(points, state) {
    const values = this.columns[state.y];
    return this.drawable(points, state)
      .filter((i) => this.runs(i))
      .sort((a, b) => values[a] - values[b] || a - b);
  }

  // The state as the part of an address behind #. Values are named, so that an address outlives other axes.
  fragment(state) {
    const told = { x: state.x, y: state.y, pins: state.pins.map(String) };
    if (state.plan !== null) told.plan = String(state.plan);
    for (const axis of this.answer.axes) {
      const value = state.filters[axis.key] ?? null;
      if (value !== null) told[`= ${axis.key}`] = axis.values[value];
    }
    for (const [key, most] of Object.entries(state.most)) if (most !== null) told[`< ${key}`] = String(most);
    return encoded(told);
  }

  // The state that an address tells; what it does not tell, or tells wrongly, stays as at the start.
  recalled(fragment) {
    const told = restored(fragment);
    const state = this.start();
    const point = (text) => (/^\d+$/.test(text) && Number(text) < this.count ? Number(text) : null);
    for (const name of ["x", "y"]) {
      if (told[name] && this.measures.some(([key]) => key === told[name][0])) state[name] = told[name][0];
    }
    state.plan = told.plan ? point(told.plan[0]) : null;
    state.pins = (told.pins || []).map(point).filter((one) => one !== null);
    state.pins = state.pins.slice(0, MOST_PINS);
    for (const axis of this.answer.axes) {
      const at = axis.values.indexOf((told[`= ${axis.key}`] || []).join(","));
      state.filters[axis.key] = at >= 0 ? at : null;
    }
    for (const key of Object.keys(this.limits)) {
      const most = Number((told[`< ${key}`] || [NaN])[0]);
      state.most[key] = Number.isFinite(most) ? most : null;
    }
    return state;
  }
}

if (typeof module !== "undefined") {
  Object.assign(globalThis, require("./points.js"));
  module.exports = { quoted, commandOf, ordered, Explored };
}
