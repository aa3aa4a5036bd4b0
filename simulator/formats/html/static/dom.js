// What every picture needs: elements, colours, the box under the pointer.

const SPACE = document.getElementById("mark").querySelector("rect").namespaceURI;
const ANSWER = JSON.parse(document.getElementById("answer").textContent);
const DRAWING = JSON.parse(document.getElementById("drawing").textContent);

const COLOURS = {
  gemm: "#3566b8",
  attention: "#6c8fd9",
  elementwise: "#5fa8c9",
  norm: "#8cc7cf",
  embedding: "#8c9bd6",
  loss: "#b07cc6",
  optimizer: "#7d68b3",
  copies: "#b3a57a",
  recompute: "#9a7d5a",
  activation: "#77b6a2",
  cross_entropy: "#b07cc6",
  stragglers: "#a08a80",
  interference: "#d9a441",
  host: "#7b8794",
  idle: "#b6bfc9",
  bubble: "#98a4b3",
  all_gather: "#d1603d",
  reduce_scatter: "#e08e45",
  all_reduce: "#c5415a",
  all_to_all: "#b8408f",
  send_recv: "#d38aa8",
  h2d: "#6a9a4f",
  d2h: "#93b86a",
  cuda_malloc: "#b3261e",
  parameters: "#244c7d",
  gradients: "#3f7cc0",
  optimizer_state: "#6fa3dc",
  buckets: "#a1c3e8",
  buffers: "#bdd3ea",
  inputs: "#d3e1ef",
  workspaces: "#b9bec5",
  activations: "#e2853f",
  unsharded_parameters: "#4c8a48",
  temporaries: "#efb88a",
  outside: "#8b939c",
  live: "#5b93cf",
  forward: "#3f7cc0",
  backward: "#e2853f",
  weights: "#4c8a48",
  training: "#3f7cc0",
  checkpoints: "#b3a57a",
  "lost work": "#c5415a",
  down: "#7b8794",
  collectives: "#d1603d",
  "": "#5b93cf",
};
const FURTHER = ["#3566b8", "#d1603d", "#4c8a48", "#7d68b3", "#c5415a", "#2f8f95", "#b3842f", "#8b5a83"];

function colour(name) {
  const plain = String(name).replace(/^(exposed|wait):/, "");
  if (COLOURS[plain]) return COLOURS[plain];
  let sum = 0;
  for (const letter of plain) sum = (sum * 31 + letter.codePointAt(0)) % 997;
  return FURTHER[sum % FURTHER.length];
}

// Of names that stand for nothing known: one after another, so that a picture has no two alike.
function colourOf(name, names) {
  return COLOURS[name] || FURTHER[Math.max(0, names.indexOf(name)) % FURTHER.length];
}

// What to add to the class of words on a colour, so that they can be read (WCAG's relative luminance).
function inkOn(shade) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = parseInt(shade.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.183 ? " dark" : "";
}

function el(tag, attributes = {}, children = []) {
  const one = document.createElement(tag);
  return dressed(one, attributes, children);
}

function svg(tag, attributes = {}, children = []) {
  return dressed(document.createElementNS(SPACE, tag), attributes, children);
}

function dressed(one, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("aria-") ? value !== undefined : value !== null && value !== undefined && value !== false)
      one.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  for (const child of [].concat(children)) if (child !== null && child !== undefined) one.append(child);
  return one;
}

function pressable(text, act, attributes = {}) {
  const button = el("button", { type: "button", ...attributes }, text);
  button.addEventListener("click", act);
  return button;
}

const TIP = document.getElementById("tip");

// The box beside the pointer. rows: [name, value] each, in words.
function tell(title, rows, x, y) {
  TIP.replaceChildren(
    el("b", {}, title),
    ...rows.map(([name, value]) => el("div", {}, [el("span", {}, name), el("span", {}, value)])),
  );
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect();
  TIP.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  TIP.style.top = `${y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18}px`;
}

function hush() {
  TIP.hidden = true;
}

// A drawing that is made again when its width changes. draw(width) gives an element. Many are made when they come into sight.
function drawnAgain(place, draw, { late = false } = {}) {
  let width = 0,
    holder = el("div");
  place.append(holder);
  const again = () => {
    const now = Math.floor(holder.clientWidth);
    if (now && now !== width) {
      width = now;
      holder.replaceChildren(...[].concat(draw(now)));
    }
  };
  again.now = () => {
    width = 0;
    again();
  };
  const watch = () => {
    again();
    new ResizeObserver(again).observe(holder);
  };
  if (!late) watch();
  else {
    holder.style.minHeight = "12rem";
    const seen = new IntersectionObserver(
      (entries) => {
        if (entries.some((one) => one.isIntersecting)) {
          seen.disconnect();
          holder.style.minHeight = "";
          watch();
        }
      },
      { rootMargin: "600px" },
    );
    seen.observe(holder);
    addEventListener("beforeprint", () => {
      holder.style.minHeight = "";
      again();
    });
  }
  return again;
}

function legend(names, label = words, shade = colour) {
  return el(
    "ul",
    { class: "legend" },
    names.map((name) => {
      const box = el("span", { class: "swatch" });
      box.style.background = shade(name);
      return el("li", {}, [box, label(name)]);
    }),
  );
}

function boundsOf(target, event) {
  const box = target.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

// Axes with their numbers. x, y: {scale, ticks, form, title}.
function axes(width, height, pad, x, y) {
  const parts = [];
  for (const one of y.ticks)
    parts.push(
      svg("line", { class: "gridline", x1: pad.left, x2: width - pad.right, y1: y.scale(one), y2: y.scale(one) }),
      svg("text", { x: pad.left - 6, y: y.scale(one) + 4, "text-anchor": "end" }, y.form(one)),
    );
  let free = -Infinity; // to the right of the last number that is written
  for (const one of x.ticks) {
    const text = x.form(one);
    const half = 3.2 * text.length;
    const middle = Math.min(x.scale(one), width - half);
    if (middle - half < free) continue;
    free = middle + half + 6;
    parts.push(svg("text", { x: middle, y: height - pad.bottom + 16, "text-anchor": "middle" }, text));
  }
  parts.push(
    svg("line", {
      class: "axisline",
      x1: pad.left,
      x2: width - pad.right,
      y1: height - pad.bottom,
      y2: height - pad.bottom,
    }),
  );
  if (x.title) parts.push(svg("text", { x: width - pad.right, y: height - 4, "text-anchor": "end" }, x.title));
  if (y.title) parts.push(svg("text", { x: 2, y: 11 }, y.title));
  return parts;
}
