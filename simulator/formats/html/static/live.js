// The live page: the prediction while you type, faults at their lines, the report, and runs that were kept.

const WAIT_MS = 120; // behind the last key
const REPORT_MS = 500; // behind the last prediction

class Live {
  constructor(place) {
    const part = (selector) => place.querySelector(selector);
    this.area = part("#text");
    this.gutter = part(".lines");
    this.faults = part(".faults");
    this.now = part(".now");
    this.frame = part("#report");
    this.keep = part("#keep");
    this.said = part("#editor output");
    this.runs = part(".runs");
    this.faulty = new Map(); // line -> what is wrong there
    new Completion(this.area, part("#offers"), part(".about"), DRAWING.words, () => this.changed());
    this.area.addEventListener("input", () => this.changed());
    this.area.addEventListener("scroll", () => (this.gutter.scrollTop = this.area.scrollTop));
    this.keep.addEventListener("click", () => this.keepRun());
    part("#save").addEventListener("click", () => this.copy());
    this.vary = part("#vary");
    this.back = part("#back");
    part("#explore").addEventListener("click", () => this.explore());
    this.vary.addEventListener("keydown", (event) => event.key === "Enter" && this.explore());
    this.back.addEventListener("click", () => this.report(this.number));
    new MutationObserver(() => this.themed()).observe(root_, { attributeFilter: ["data-theme"] });
    this.lines();
    this.predict();
    this.listRuns();
  }

  async ask(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    return answer.json();
  }

  changed() {
    this.lines();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.predict(), WAIT_MS);
  }

  lines() {
    const line = (_, i) =>
      el("span", { class: this.faulty.has(i + 1) ? "wrong" : null, title: this.faulty.get(i + 1) }, `${i + 1}\n`);
    this.gutter.replaceChildren(...this.area.value.split("\n").map(line));
    this.gutter.scrollTop = this.area.scrollTop;
    this.area.setAttribute("aria-invalid", this.faulty.size > 0);
  }

  // The text as it is; an answer to an older one is dropped.
  async predict() {
    this.asking?.abort();
    const mine = (this.asking = new AbortController());
    const text = this.area.value;
    const since = performance.now();
    let data;
    try {
      data = await this.ask("/predict", { text }, mine.signal);
    } catch {
      if (!mine.signal.aborted) this.said.textContent = "shardwise ui does not answer: was it ended?";
      return;
    }
    if (mine.signal.aborted) return;
    this.tellFaults(text, data.faults || []);
    this.number = data.answer ? data.number : null;
    this.keep.disabled = this.number === null;
    this.now.classList.toggle("stale", !data.answer);
    if (data.answer) this.tellNow(data.answer, performance.now() - since);
  }

  tellFaults(text, faults) {
    this.faulty = new Map();
    this.faults.replaceChildren(
      ...faults.map((one) => {
        const told = `${one.place}: ${one.problem}${one.remedy ? ` (${one.remedy})` : ""}`;
        const line = lineOf(text, one.place, one.problem);
        if (line) this.faulty.set(line, told);
        const go = line ? pressable(`line ${line}`, () => this.goTo(line), { class: "quiet" }) : null;
        return el("li", {}, [go, " ", told]);
      }),
    );
    this.lines();
  }

  goTo(line) {
    const lines = this.area.value.split("\n");
    const from = lines.slice(0, line - 1).reduce((sum, one) => sum + one.length + 1, 0);
    this.area.focus();
    this.area.setSelectionRange(from, from + (lines[line - 1] || "").length);
  }

  tellNow(answer, ms) {
    const fact = (title, name, value, sub) =>
      el("div", {}, [
        el("span", { class: "label" }, title),
        el("span", { class: "big" }, el("data", { value, "data-path": name }, shown(name.split("/").pop(), value))),
        el("span", { class: "sub" }, sub),
      ]);
    const badge = el("p", { class: `badge ${answer.verdict.replaceAll(" ", "-")}` }, answer.verdict);
    const interval = `90 % interval ${shown("s", answer.low_s)} to ${shown("s", answer.high_s)}`;
    const capacity = `of ${shown("bytes", answer.memory.capacity_bytes)}`;
    this.now.replaceChildren(
      el("div", {}, [badge, el("span", { class: "sub" }, answer.cause)]),
      fact("Step time", "step_s", answer.step_s, interval),
      fact("Memory", "memory/used_bytes", answer.memory.used_bytes, capacity),
      fact("Tokens a second", "tokens_per_s", answer.tokens_per_s, `${grouped(answer.num_devices)} GPUs`),
      fact("MFU", "mfu", answer.mfu, `predicted in ${Math.round(ms)} ms`),
    );
    NUMBERS.answer = answer;
    NUMBERS.open(this.now);
    clearTimeout(this.reported);
    this.reported = setTimeout(() => this.report(this.number), REPORT_MS);
  }

  // The what-if page of the study as it stands, in the place of the report.
  async explore() {
    this.said.textContent = "predicting all combinations …";
    const data = await this.ask("/explore", { text: this.area.value, vary: this.vary.value }).catch(() => null);
    this.said.textContent = data?.number ? `${grouped(data.count)} combinations predicted` : "not predicted";
    this.tellFaults(this.area.value, data?.faults || []);
    if (!data?.number) return;
    clearTimeout(this.reported);
    this.back.hidden = false;
    this.frame.hidden = false;
    this.frame.src = `/report/${data.number}`;
  }

  // The report below, scrolled to where it was.
  report(number) {
    if (number === null) return;
    this.back.hidden = true;
    const top = this.frame.contentWindow ? this.frame.contentWindow.scrollY : 0;
    this.frame.hidden = false;
    this.frame.addEventListener("load", () => this.frame.contentWindow.scrollTo(0, top), { once: true });
    this.frame.src = `/report/${number}`;
  }

  themed() {
    const inner = this.frame.contentDocument;
    if (inner) inner.documentElement.dataset.theme = root_.dataset.theme;
  }

  async keepRun() {
    const done = await this.ask("/keep", { number: this.number, text: this.area.value }).catch(() => null);
    this.said.textContent = done && done.kept ? `kept as ${done.kept}` : "could not be kept";
    this.listRuns();
  }

  copy() {
    this.area.select();
    navigator.clipboard?.writeText(this.area.value).then(
      () => (this.said.textContent = "copied"),
      () => {},
    );
  }

  async listRuns() {
    const all = await fetch("/runs")
      .then((one) => one.json())
      .catch(() => []);
    this.runs.replaceChildren(all.length ? this.runsTable(all) : el("p", { class: "note" }, "None kept yet."));
  }

  runsTable(all) {
    const heading = (one, i) => el("th", { scope: "col", class: i > 1 ? "num" : null }, one);
    const head = el("tr", {}, ["run", "verdict", "step", "memory", "GPUs", "MFU"].map(heading));
    const rows = all.map((one) => this.runRow(one));
    const caption = el("caption", {}, "Kept; a name loads its study");
    const table = el("table", {}, [caption, el("thead", {}, head), el("tbody", {}, rows)]);
    return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Runs kept" }, table);
  }

  runRow(one) {
    const load = () => {
      this.area.value = one.text;
      this.changed();
    };
    const name = pressable(one.name, load, { class: "quiet" });
    const cell = (key) => el("td", { class: "num" }, el("data", { value: one[key] }, shown(key, one[key])));
    const cells = ["step_s", "used_bytes", "num_devices", "mfu"].map(cell);
    return el("tr", {}, [el("th", { scope: "row" }, name), el("td", { class: "short" }, one.verdict), ...cells]);
  }
}

const root_ = document.documentElement;

function drawLive(place) {
  new Live(place);
}
