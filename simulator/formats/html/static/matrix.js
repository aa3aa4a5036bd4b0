// Who sends how much to whom in a step: GPUs of the first node, or nodes; the two of a cell are marked in the node's picture.

const MATRICES = [
  ["gpus", "GPUs of the first node", "GPU"],
  ["nodes", "Nodes", "node"],
];
const SHADES_OF_CELLS = 12;

class MatrixPlot {
  constructor(place, traffic, choices) {
    this.traffic = traffic;
    [this.key, , this.noun] = choices[0];
    this.at = [0, 0];
    this.note = el("p", { class: "note" });
    this.said = el("p", { class: "said", "aria-live": "polite" });
    const figure = el("figure", { class: "chart" }, choices.length > 1 ? this.switch(choices) : null);
    place.append(figure);
    this.redraw = drawnAgain(figure, (width) => this.draw(width));
    figure.append(this.note, this.said);
  }

  switch(choices) {
    const group = el("div", { class: "tools", role: "group", "aria-label": "What the matrix shows" });
    for (const [key, title, noun] of choices) {
      const one = pressable(title, () => {
        Object.assign(this, { key, noun, at: [0, 0] });
        group.querySelectorAll("button").forEach((each) => each.setAttribute("aria-pressed", each === one));
        this.redraw.now();
      });
      one.setAttribute("aria-pressed", key === this.key);
      group.append(one);
    }
    return group;
  }

  draw(width) {
    this.rows = this.traffic[this.key];
    this.most = Math.max(1, ...this.rows.flat());
    this.size = Math.min(width - 40, 330);
    this.cell = this.size / this.rows.length;
    const told = `Bytes between ${this.rows.length} ${this.noun}s, at most ${shown("bytes", this.most)}; arrow keys move`;
    const height = this.size + 34;
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "plot", tabindex: 0 });
    root.setAttribute("role", "application");
    root.setAttribute("aria-label", told);
    const side = Math.max(2, this.cell);
    this.ring = svg("rect", { class: "hit", width: side, height: side, visibility: "hidden" });
    root.append(...this.cells(), ...this.numbers(), this.ring);
    this.listen(root);
    const all = this.traffic.num_nodes || 0;
    const part = this.key === "nodes" && all > this.rows.length ? `; the first of ${grouped(all)} nodes` : "";
    this.note.textContent = `From the ${this.noun} of a row to that of a column, at most ${shown("bytes", this.most)}${part}.`;
    return root;
  }

  // A path a shade: thousands of cells stay a dozen elements.
  cells() {
    const side = Math.max(this.cell - (this.cell > 8 ? 1 : 0), 0.5).toFixed(2);
    const paths = Array.from({ length: SHADES_OF_CELLS + 1 }, () => []);
    this.rows.forEach((row, i) =>
      row.forEach((value, j) => {
        const [x, y] = this.corner(i, j);
        const d = `M${x.toFixed(2)} ${y.toFixed(2)}h${side}v${side}h-${side}z`;
        paths[Math.ceil((SHADES_OF_CELLS * value) / this.most)].push(d);
      }),
    );
    return paths.map((d, shade) => {
      const fill = shade ? COLOURS.gradients : "var(--faint)";
      const opacity = shade ? 0.16 + (0.84 * shade) / SHADES_OF_CELLS : 1;
      return svg("path", { d: d.join(""), fill, opacity });
    });
  }

  corner(i, j) {
    return [34 + j * this.cell, 18 + i * this.cell];
  }

  numbers() {
    const every = Math.ceil(this.rows.length / 12);
    const some = this.rows.map((_, i) => i).filter((i) => i % every === 0);
    return some.flatMap((i) => [
      svg("text", { x: 28, y: 18 + (i + 0.5) * this.cell + 4, "text-anchor": "end" }, String(i)),
      svg("text", { x: 34 + (i + 0.5) * this.cell, y: 12, "text-anchor": "middle" }, String(i)),
    ]);
  }

  show(i, j, event = null) {
    const inside = this.rows[i] && this.rows[i][j] !== undefined;
    this.ring.setAttribute("visibility", inside ? "visible" : "hidden");
    markGpus(inside && this.key === "gpus" ? [`gpu${i}`, `gpu${j}`] : []);
    if (!inside) {
      hush();
      return;
    }
    this.at = [i, j];
    const [x, y] = this.corner(i, j);
    this.ring.setAttribute("x", x);
    this.ring.setAttribute("y", y);
    const [title, sent] = [`${this.noun} ${i} to ${this.noun} ${j}`, shown("bytes", this.rows[i][j])];
    if (event) tell(title, [["sent in a step", sent]], event.clientX, event.clientY);
    else this.said.textContent = `${title}: ${sent} in a step`;
  }

  listen(root) {
    root.addEventListener("pointermove", (event) => {
      const [px, py] = boundsOf(root, event);
      this.show(Math.floor((py - 18) / this.cell), Math.floor((px - 34) / this.cell), event);
    });
    root.addEventListener("pointerleave", () => this.show(-1, -1));
    root.addEventListener("keydown", (event) => {
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!by) return;
      event.preventDefault();
      const most = this.rows.length - 1;
      const [i, j] = this.at.map((one, which) => Math.min(most, Math.max(0, one + by[which])));
      this.show(i, j);
    });
  }
}

function markGpus(names) {
  for (const one of document.querySelectorAll("[data-part]"))
    one.classList.toggle("hit", names.includes(one.dataset.part));
}

function drawMatrix(place) {
  const { traffic } = DRAWING;
  const choices = MATRICES.filter(([key]) => traffic[key] && traffic[key].length > 1);
  if (choices.length) new MatrixPlot(place, traffic, choices);
}
