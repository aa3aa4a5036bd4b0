// The live page: an editor with completion and faults in place, the prediction while you type, runs that were kept.

// Where the cursor of a TOML text stands: {table, key, prefix, from, inValue, quoted}; null in a comment or behind a value.
function placeAt(text, cursor) {
  const start = text.lastIndexOf("\n", cursor - 1) + 1,
    line = text.slice(start, cursor);
  const before = text.slice(0, start).match(/^[ \t]*\[([^\[\]\n]+)\][ \t]*(#.*)?$/gm),
    table = before ? before[before.length - 1].match(/\[([^\]]+)\]/)[1].trim() : "";
  const value = line.match(/^\s*([\w.-]+)\s*=\s*("?)([\w./-]*)$/);
  if (value)
    return { table, key: value[1], prefix: value[3], from: cursor - value[3].length - value[2].length, inValue: true };
  const header = line.match(/^\s*\[([\w.-]*)$/);
  if (header) return { table: null, key: "", prefix: header[1], from: cursor - header[1].length, inValue: false };
  const key = line.match(/^\s*([\w.-]*)$/);
  return key ? { table, key: "", prefix: key[1], from: cursor - key[1].length, inValue: false } : null;
}

// What can stand there: [{label, insert, about}]. words: tables of keys, names of presets.
function offersAt(words_, at) {
  if (!at) return [];
  const fits = (one) => one.label.toLowerCase().includes(at.prefix.toLowerCase()),
    first = (one) => (one.label.toLowerCase().startsWith(at.prefix.toLowerCase()) ? 0 : 1);
  let found = [];
  if (at.inValue) {
    const path = [at.table, at.key].filter(Boolean).join("."),
      parts = path.split("."),
      field = (words_.tables[parts.slice(0, -1).join(".")] || {})[parts[parts.length - 1]];
    const values = [...(words_.names[path] || []), ...(field ? field.values : [])];
    found = values.map((one) => ({
      label: String(one),
      insert: typeof one === "string" ? `"${one}"` : String(one),
      about: field ? field.about : "",
    }));
  } else if (at.table === null)
    found = Object.keys(words_.tables)
      .filter(Boolean)
      .sort()
      .map((one) => ({ label: one, insert: `${one}]`, about: "table" }));
  else
    found = Object.entries(words_.tables[at.table] || {})
      .filter(([, one]) => !one.table || one.values.length || at.table)
      .map(([key, one]) => ({ label: key, insert: `${key} = `, about: one.about }));
  return found
    .filter(fits)
    .sort((a, b) => first(a) - first(b))
    .slice(0, 12);
}

// The line, from 1, of the key that a fault's place names; of its table, or 0, where the key is not written.
function lineOf(text, place, problem) {
  const told = /line (\d+)/.exec(problem || "");
  if (told) return Number(told[1]);
  if (/end of document/.test(problem || "")) return text.split("\n").length;
  const parts = place.split(/[:. ]+/).filter(Boolean),
    key = parts[parts.length - 1];
  let table = "",
    fallback = 0;
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const header = lines[i].match(/^\s*\[([^\]]+)\]/);
    if (header) {
      table = header[1].trim();
      if (parts[0] && table === parts.slice(0, -1).join(".")) fallback = i + 1;
      else if (!fallback && parts[0] && table.split(".")[0] === parts[0]) fallback = i + 1;
      continue;
    }
    const here = lines[i].match(/^\s*([\w.-]+)\s*=/);
    if (
      here &&
      [table, here[1]].filter(Boolean).join(".").split(".").pop() === key &&
      (!parts[1] || table.split(".")[0] === parts[0] || here[1].startsWith(parts[0]))
    )
      return i + 1;
  }
  return fallback;
}

function drawLive(place) {
  const words_ = DRAWING.words,
    area = place.querySelector("#text"),
    gutter = place.querySelector(".lines"),
    offers = place.querySelector("#offers"),
    about = place.querySelector(".about"),
    list = place.querySelector(".faults"),
    now = place.querySelector(".now"),
    frame = place.querySelector("#report"),
    keep = place.querySelector("#keep"),
    told = place.querySelector("#editor output"),
    runs = place.querySelector(".runs");
  let number = null,
    asking = null,
    timer = 0,
    at = null,
    found = [],
    pick = 0,
    faulty = new Map(),
    reported = 0;

  const ask = (path, body) =>
    fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: asking ? asking.signal : undefined,
    }).then((one) => one.json());
  const gutters = () => {
    gutter.replaceChildren(
      ...area.value
        .split("\n")
        .map((_, i) =>
          el("span", { class: faulty.has(i + 1) ? "wrong" : null, title: faulty.get(i + 1) }, `${i + 1}\n`),
        ),
    );
    gutter.scrollTop = area.scrollTop;
    area.setAttribute("aria-invalid", faulty.size > 0);
  };

  async function predictNow() {
    if (asking) asking.abort();
    const mine = new AbortController();
    asking = mine;
    const text = area.value,
      since = performance.now();
    let data;
    try {
      data = await ask("/predict", { text });
    } catch {
      if (!mine.signal.aborted) told.textContent = "shardwise ui does not answer: was it ended?";
      return;
    }
    if (mine.signal.aborted) return;
    faulty = new Map();
    list.replaceChildren(
      ...(data.faults || []).map((one) => {
        const line = lineOf(text, one.place, one.problem),
          words__ = `${one.place}: ${one.problem}${one.remedy ? ` (${one.remedy})` : ""}`;
        if (line) faulty.set(line, words__);
        const go = line ? el("button", { type: "button", class: "quiet" }, `line ${line}`) : null;
        if (go)
          go.addEventListener("click", () => {
            const from =
              text
                .split("\n")
                .slice(0, line - 1)
                .join("\n").length + (line > 1 ? 1 : 0);
            area.focus();
            area.setSelectionRange(from, from + text.split("\n")[line - 1].length);
          });
        return el("li", {}, [go, " ", words__]);
      }),
    );
    gutters();
    number = data.answer ? data.number : null;
    keep.disabled = number === null;
    if (!data.answer) {
      now.classList.add("stale");
      return;
    }
    now.classList.remove("stale");
    showNow(data.answer, performance.now() - since);
    clearTimeout(reported);
    reported = setTimeout(() => showReport(data.number), 500);
  }

  function showNow(answer, ms) {
    const fact = (title, name, value, sub) =>
      el("div", {}, [
        el("span", { class: "label" }, title),
        el("span", { class: "big" }, el("data", { value, "data-figure": name }, shown(name, value))),
        el("span", { class: "sub" }, sub),
      ]);
    now.replaceChildren(
      el("div", {}, [
        el("p", { class: `badge ${answer.verdict.replaceAll(" ", "-")}` }, answer.verdict),
        el("span", { class: "sub" }, answer.cause),
      ]),
      fact(
        "Step time",
        "step_s",
        answer.step_s,
        `90 % interval ${shown("s", answer.low_s)} to ${shown("s", answer.high_s)}`,
      ),
      fact("Memory", "used_bytes", answer.memory.used_bytes, `of ${shown("bytes", answer.memory.capacity_bytes)}`),
      fact("Tokens a second", "tokens_per_s", answer.tokens_per_s, `${grouped(answer.num_devices)} GPUs`),
      fact("MFU", "mfu", answer.mfu, `predicted in ${Math.round(ms)} ms`),
    );
  }

  function showReport(which) {
    const top = frame.contentWindow ? frame.contentWindow.scrollY : 0;
    frame.hidden = false;
    frame.addEventListener("load", () => frame.contentWindow.scrollTo(0, top), { once: true });
    frame.src = `/report/${which}`;
  }

  function offer(open) {
    at = open ? placeAt(area.value, area.selectionStart) : null;
    found = area.selectionStart === area.selectionEnd ? offersAt(words_, at) : [];
    pick = 0;
    if (
      found.length === 1 &&
      (found[0].label === at.prefix || found[0].insert === area.value.slice(at.from, area.selectionStart))
    )
      found = [];
    offers.hidden = !found.length;
    offers.replaceChildren(
      ...found.map((one, i) => {
        const item = el("li", { role: "option", id: `offer-${i}`, "aria-selected": i === pick }, one.label);
        item.addEventListener("pointerdown", (event) => {
          event.preventDefault();
          pick = i;
          take();
        });
        return item;
      }),
    );
    mark();
  }

  function mark() {
    [...offers.children].forEach((one, i) => one.setAttribute("aria-selected", i === pick));
    if (found.length) area.setAttribute("aria-activedescendant", `offer-${pick}`);
    else area.removeAttribute("aria-activedescendant");
    offers.children[pick]?.scrollIntoView({ block: "nearest" });
    about.textContent = found.length ? `${found[pick].label}: ${found[pick].about || "a name"}` : "";
  }

  function take() {
    const one = found[pick],
      from = at.from;
    area.setRangeText(one.insert, from, area.selectionStart, "end");
    offer(false);
    changed();
    if (one.insert.endsWith(" = ")) offer(true);
  }

  function changed() {
    gutters();
    clearTimeout(timer);
    timer = setTimeout(predictNow, 120);
  }

  area.addEventListener("input", () => {
    changed();
    offer(true);
  });
  area.addEventListener("scroll", () => {
    gutter.scrollTop = area.scrollTop;
  });
  area.addEventListener("blur", () => offer(false));
  let escaped = false;
  area.addEventListener("keydown", (event) => {
    if (event.key === " " && event.ctrlKey) {
      event.preventDefault();
      offer(true);
      return;
    }
    const leaves = escaped;
    escaped = event.key === "Escape" && !found.length;
    if (event.key === "Tab" && !found.length && !leaves && !event.shiftKey) {
      event.preventDefault();
      area.setRangeText("  ", area.selectionStart, area.selectionEnd, "end");
      changed();
      return;
    }
    if (!found.length) return;
    const act = {
      ArrowDown: () => {
        pick = (pick + 1) % found.length;
        mark();
      },
      ArrowUp: () => {
        pick = (pick + found.length - 1) % found.length;
        mark();
      },
      Enter: take,
      Tab: take,
      Escape: () => offer(false),
    }[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });

  async function showRuns() {
    const all = await fetch("/runs")
      .then((one) => one.json())
      .catch(() => []);
    if (!all.length) {
      runs.replaceChildren(el("p", { class: "note" }, "None kept yet."));
      return;
    }
    const rows = all.map((one) => {
      const name = el("button", { type: "button", class: "quiet" }, one.name);
      name.addEventListener("click", () => {
        area.value = one.text;
        changed();
      });
      return el("tr", {}, [
        el("th", { scope: "row" }, name),
        el("td", { class: "short" }, one.verdict),
        ...["step_s", "used_bytes", "num_devices", "mfu"].map((key) =>
          el("td", { class: "num" }, el("data", { value: one[key] }, shown(key, one[key]))),
        ),
      ]);
    });
    const head = el(
      "tr",
      {},
      ["run", "verdict", "step", "memory", "GPUs", "MFU"].map((one, i) =>
        el("th", { scope: "col", class: i > 1 ? "num" : null }, one),
      ),
    );
    runs.replaceChildren(
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Runs kept" },
        el("table", {}, [
          el("caption", {}, "Kept; a name loads its study"),
          el("thead", {}, head),
          el("tbody", {}, rows),
        ]),
      ),
    );
  }

  keep.addEventListener("click", async () => {
    const done = await ask("/keep", { number, text: area.value }).catch(() => null);
    told.textContent = done && done.kept ? `kept as ${done.kept}` : "could not be kept";
    showRuns();
  });
  place.querySelector("#save").addEventListener("click", () => {
    area.select();
    navigator.clipboard?.writeText(area.value).then(
      () => {
        told.textContent = "copied";
      },
      () => {},
    );
  });
  new MutationObserver(() => {
    if (frame.contentDocument)
      frame.contentDocument.documentElement.dataset.theme = document.documentElement.dataset.theme;
  }).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  gutters();
  predictNow();
  showRuns();
}

if (typeof module !== "undefined") module.exports = { placeAt, offersAt, lineOf };
