// The links of a node, with what a step puts on them where one is known; the same as a table below.

const LEVELS = { nic: 0, nvswitch: 1, gpu: 2, switch: 3, cpu: 4, memory: 5 };
const PLACED_AFTER = ["nic", "nvswitch", "switch", "cpu", "memory"]; // GPUs, each in the middle of what it is joined to
const MOST_GPUS = 32; // of a picture
const STEP = 62; // pixels between two levels

const kindOf = (name) => name.replace(/\d+$/, "");
const levelOf = (name) => LEVELS[kindOf(name)] ?? LEVELS.switch;

// Where the parts of a node stand: GPUs in a row, all else over or under the middle of what it is joined to.
function placed(node, width) {
  const gpus = Array.from({ length: node.num_gpus }, (_, i) => `gpu${i}`);
  const names = [...new Set([...gpus, ...node.links.flatMap((link) => [link.src, link.dst])])];
  const across = linear(-0.6, node.num_gpus - 0.4, 0, width);
  const x = Object.fromEntries(gpus.map((name, i) => [name, across(i)]));
  for (const kind of PLACED_AFTER) {
    for (const name of names.filter((one) => kindOf(one) === kind).sort()) {
      const joined = node.links.filter((link) => link.src === name || link.dst === name);
      const beside = joined.map((link) => x[link.src === name ? link.dst : link.src]).filter(Number.isFinite);
      x[name] = beside.length ? beside.reduce((sum, one) => sum + one, 0) / beside.length : width / 2;
    }
  }
  const levels = [...new Set(names.map(levelOf))].sort();
  const at = Object.fromEntries(
    names.map((name) => [name, [x[name] ?? width / 2, 26 + STEP * levels.indexOf(levelOf(name))]]),
  );
  return { at, height: 52 + STEP * (levels.length - 1) };
}

function nodeLine(link, at, loaded) {
  const [[x1, y1], [x2, y2]] = [at[link.src], at[link.dst]];
  const busy = Math.min(1, link.busy);
  const bend = y1 === y2 ? -24 - Math.abs(x2 - x1) / 10 : 0;
  const beside = link.src < link.dst ? 2.5 : -2.5; // the two directions of a cable side by side
  const middle = `${(x1 + x2) / 2 + beside} ${(y1 + y2) / 2 + bend}`;
  const line = svg("path", {
    d: `M${x1 + beside} ${y1}Q${middle} ${x2 + beside} ${y2}`,
    fill: "none",
    stroke: busy > 0.001 ? COLOURS.all_gather : "var(--axis)",
    "stroke-opacity": loaded ? 0.25 + 0.75 * Math.min(1, 1.5 * busy) : 0.8,
    "stroke-width": 1.4 + 5 * busy,
  });
  const rows = linkFigures(loaded).map(([title, name, form]) => [title, form(name, link[name])]);
  line.addEventListener("pointermove", (event) => {
    tell(`${link.name}: ${link.src} to ${link.dst}`, rows, event.clientX, event.clientY);
  });
  line.addEventListener("pointerleave", hush);
  return line;
}

function linkFigures(loaded) {
  const speed = ["speed, one way", "bytes_per_s", shown];
  const load = [
    ["in a step", "step_bytes", shown],
    ["busy", "busy", (_, value) => percent(value)],
  ];
  return loaded ? [speed, ...load] : [speed];
}

function nodeBox(name, [x, y], narrow) {
  const text = narrow && /\d$/.test(name) ? name.match(/\d+$/)[0] : name;
  const width = 7 * text.length + 12;
  const box = { x: x - width / 2, y: y - 11, width, height: 22, rx: 5, fill: "var(--panel)", stroke: "var(--axis)" };
  return [
    svg("rect", { ...box, "data-part": name }),
    svg("text", { x, y: y + 4, "text-anchor": "middle", class: "strong" }, text),
  ];
}

function nodePlot(node, width, loaded) {
  const { at, height } = placed(node, width);
  const told = `The links of a node of ${node.cluster}; the table below has each`;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told });
  root.append(...node.links.map((link) => nodeLine(link, at, loaded)));
  root.append(...Object.entries(at).flatMap(([name, where]) => nodeBox(name, where, width / node.num_gpus < 44)));
  return root;
}

function linkTable(node, loaded) {
  const figures = linkFigures(loaded);
  const head = ["link", "from", "to", ...figures.map(([title]) => title)].map((one) => el("th", { scope: "col" }, one));
  const cell = (link, at, [, name, form]) => {
    const number = { value: link[name], "data-drawn": `traffic/node/links/${at}/${name}` };
    return el("td", { class: "num" }, el("data", number, form(name, link[name])));
  };
  const row = (link, at) =>
    el("tr", {}, [
      ...[link.name, link.src, link.dst].map((one) => el("td", { class: "short" }, one)),
      ...figures.map((one) => cell(link, at, one)),
    ]);
  const body = el("tbody", {}, node.links.map(row));
  const table = el("table", { class: "sortable" }, [
    el("caption", {}, "Links of a node"),
    el("thead", {}, el("tr", {}, head)),
    body,
  ]);
  sortable(table);
  const region = el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Links of a node" }, table);
  return el("details", { class: "fold" }, [el("summary", {}, `All ${node.links.length} links`), region]);
}

function drawNode(place) {
  const node = DRAWING.traffic && DRAWING.traffic.node;
  if (!node) return;
  const loaded = node.links.some((link) => link.busy);
  const figure = el("figure", { class: "chart" }, el("figcaption", {}, `One node of ${node.cluster}`));
  place.append(figure);
  if (node.num_gpus <= MOST_GPUS) {
    drawnAgain(figure, (width) => nodePlot(node, width, loaded));
    const busy = "Width and colour: the share of the step in which a link would be busy at its data sheet's speed. ";
    figure.append(el("p", { class: "note" }, `${loaded ? busy : ""}Point at a link for its figures.`));
  } else {
    figure.append(el("p", { class: "note" }, `${grouped(node.num_gpus)} GPUs are too many to draw: the table has every link.`));
  }
  figure.append(linkTable(node, loaded));
}
