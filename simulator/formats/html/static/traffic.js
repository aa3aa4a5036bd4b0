// Who sends to whom: a matrix, and the links of a node with what the step puts on them.

function drawMatrix(place) {
  const traffic = DRAWING.traffic,
    choices = [
      ["gpus", "GPUs of the first node", "GPU"],
      ["nodes", "nodes", "node"],
    ].filter(([key]) => traffic[key] && traffic[key].length > 1);
  if (!choices.length) return;
  let [key, , noun] = choices[0],
    again = () => {};
  const figure = el("figure", { class: "chart" });
  if (choices.length > 1) {
    const group = el("div", { class: "tools", role: "group", "aria-label": "What the matrix shows" });
    choices.forEach(([name, title, word]) => {
      const one = el("button", { type: "button", "aria-pressed": name === key }, title);
      one.addEventListener("click", () => {
        key = name;
        noun = word;
        group.querySelectorAll("button").forEach((each) => each.setAttribute("aria-pressed", each === one));
        again.now();
      });
      group.append(one);
    });
    figure.append(group);
  }
  place.append(figure);
  const note = el("p", { class: "note" });
  again = drawnAgain(figure, (width) => {
    const rows = traffic[key],
      size = Math.min(width - 40, 330),
      cell = size / rows.length,
      most = Math.max(1, ...rows.flat());
    const root = svg("svg", {
      width,
      height: size + 34,
      viewBox: `0 0 ${width} ${size + 34}`,
      role: "img",
      "aria-label": `Bytes between ${rows.length} ${noun}s; the most is ${shown("bytes", most)}`,
    });
    rows.forEach((row, i) =>
      row.forEach((value, j) =>
        root.append(
          svg("rect", {
            x: 34 + j * cell,
            y: 18 + i * cell,
            width: Math.max(cell - (cell > 8 ? 1 : 0), 0.5),
            height: Math.max(cell - (cell > 8 ? 1 : 0), 0.5),
            fill: value ? COLOURS.gradients : "var(--faint)",
            opacity: value ? 0.16 + (0.84 * value) / most : 1,
          }),
        ),
      ),
    );
    for (let i = 0; i < rows.length; i += Math.ceil(rows.length / 12))
      root.append(
        svg("text", { x: 28, y: 18 + (i + 0.5) * cell + 4, "text-anchor": "end" }, i),
        svg("text", { x: 34 + (i + 0.5) * cell, y: 12, "text-anchor": "middle" }, i),
      );
    root.addEventListener("pointermove", (event) => {
      const [px, py] = boundsOf(root, event),
        i = Math.floor((py - 18) / cell),
        j = Math.floor((px - 34) / cell);
      if (rows[i] && rows[i][j] !== undefined)
        tell(
          `${noun} ${i} to ${noun} ${j}`,
          [["sent in a step", shown("bytes", rows[i][j])]],
          event.clientX,
          event.clientY,
        );
      else hush();
    });
    root.addEventListener("pointerleave", hush);
    note.textContent = `From the ${noun} of a row to that of a column, at most ${shown("bytes", most)}${key === "nodes" && traffic.num_nodes > rows.length ? `; the first ${rows.length} of ${grouped(traffic.num_nodes)} nodes` : ""}.`;
    return root;
  });
  figure.append(note);
}

const LEVELS = { nic: 0, nvswitch: 1, gpu: 2, switch: 3, cpu: 4, memory: 5 };

// Where the parts of a node stand: GPUs in a row, all else over or under the middle of what it is joined to.
function placed(node, width) {
  const kind = (name) => name.replace(/\d+$/, ""),
    at = {},
    ends = new Set();
  for (let gpu = 0; gpu < node.num_gpus; gpu++) ends.add(`gpu${gpu}`);
  node.links.forEach((link) => {
    ends.add(link.src);
    ends.add(link.dst);
  });
  const levels = [...new Set([...ends].map((name) => LEVELS[kind(name)] ?? 3))].sort(),
    across = linear(-0.6, node.num_gpus - 0.4, 0, width);
  for (let gpu = 0; gpu < node.num_gpus; gpu++) at[`gpu${gpu}`] = [across(gpu), 0];
  for (const name of ["nic", "nvswitch", "switch", "cpu", "memory"].flatMap((one) =>
    [...ends].filter((each) => kind(each) === one).sort(),
  )) {
    const beside = node.links
      .filter((link) => link.src === name || link.dst === name)
      .map((link) => at[link.src === name ? link.dst : link.src])
      .filter(Boolean);
    at[name] = [beside.length ? beside.reduce((sum, one) => sum + one[0], 0) / beside.length : width / 2, 0];
  }
  for (const name of ends) at[name] = at[name] || [width / 2, 0];
  const step = 62;
  for (const name of ends) at[name][1] = 26 + step * levels.indexOf(LEVELS[kind(name)] ?? 3);
  return { at, height: 52 + step * (levels.length - 1) };
}

function drawNode(place, node = DRAWING.traffic && DRAWING.traffic.node) {
  if (!node || node.num_gpus > 32) return;
  const figure = el("figure", { class: "chart" }, [el("figcaption", {}, `One node of ${node.cluster}`)]),
    loaded = node.links.some((link) => link.busy);
  place.append(figure);
  drawnAgain(figure, (width) => {
    const { at, height } = placed(node, width);
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `The links of a node of ${node.cluster}`,
    });
    for (const link of node.links) {
      const [x1, y1] = at[link.src],
        [x2, y2] = at[link.dst],
        busy = Math.min(1, link.busy),
        bend = y1 === y2 ? -24 - (6 * Math.abs(x2 - x1)) / 60 : 0,
        shift = link.src < link.dst ? 2.5 : -2.5;
      const line = svg("path", {
        d: `M${x1 + shift} ${y1}Q${(x1 + x2) / 2 + shift} ${(y1 + y2) / 2 + bend} ${x2 + shift} ${y2}`,
        fill: "none",
        stroke: busy > 0.001 ? COLOURS.all_gather : "var(--axis)",
        "stroke-opacity": loaded ? 0.25 + 0.75 * Math.min(1, 1.5 * busy) : 0.8,
        "stroke-width": 1.4 + 5 * busy,
      });
      const rows = [
        ["speed, one way", shown("bytes_per_s", link.bytes_per_s)],
        ...(loaded
          ? [
              ["in a step", shown("bytes", link.step_bytes)],
              ["busy", percent(link.busy)],
            ]
          : []),
      ];
      line.addEventListener("pointermove", (event) =>
        tell(`${link.name}: ${link.src} to ${link.dst}`, rows, event.clientX, event.clientY),
      );
      line.addEventListener("pointerleave", hush);
      root.append(line);
    }
    for (const [name, [x, y]] of Object.entries(at)) {
      const text = width / node.num_gpus < 44 && /\d$/.test(name) ? name.match(/\d+$/)[0] : name,
        w = 7 * text.length + 12;
      root.append(
        svg("rect", {
          x: x - w / 2,
          y: y - 11,
          width: w,
          height: 22,
          rx: 5,
          fill: "var(--panel)",
          stroke: "var(--axis)",
        }),
        svg("text", { x, y: y + 4, "text-anchor": "middle", class: "strong" }, text),
      );
    }
    return root;
  });
  figure.append(
    el(
      "p",
      { class: "note" },
      loaded
        ? "Width and colour: the share of the step in which a link would be busy at its data sheet's speed. Point at a link for its bytes."
        : "Point at a link for its speed.",
    ),
  );
}
