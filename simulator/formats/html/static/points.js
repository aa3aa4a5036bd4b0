// Points of plans: which are on the front, which are left by the filters, what the address of a page says.

// Indices of points that no other beats in both x and y (smaller is better), by x. points: [x, y] or null.
function front(points) {
  const order = points
    .map((_, i) => i)
    .filter((i) => points[i])
    .sort((a, b) => points[a][0] - points[b][0] || points[a][1] - points[b][1] || a - b);
  const out = [];
  let best = Infinity;
  for (const i of order)
    if (points[i][1] < best) {
      best = points[i][1];
      out.push(i);
    }
  return out;
}

// The nearest of pixels [x, y] to a place, within `most`; -1 where none is.
function nearest(pixels, x, y, most = 24) {
  let at = -1,
    best = most * most;
  pixels.forEach((one, i) => {
    if (!one) return;
    const distance = (one[0] - x) ** 2 + (one[1] - y) ** 2;
    if (distance < best) {
      best = distance;
      at = i;
    }
  });
  return at;
}

// State as the part of an address behind #, and back; keys and values are texts, lists are joined by commas.
function encoded(state) {
  return Object.keys(state)
    .sort()
    .filter((key) => state[key] !== "" && state[key] !== null && state[key] !== undefined)
    .map((key) => `${encodeURIComponent(key)}=${[].concat(state[key]).map(encodeURIComponent).join(",")}`)
    .join("&");
}

function restored(fragment) {
  const out = {};
  for (const part of fragment.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    if (at <= 0) continue;
    try {
      out[decodeURIComponent(part.slice(0, at))] = part
        .slice(at + 1)
        .split(",")
        .map(decodeURIComponent);
    } catch {
      /* half an escape */
    }
  }
  return out;
}

// Rows that agree with every filter: {column: value} exactly, {column: {most: number}} at most.
function kept(columns, filters, count) {
  const out = [];
  for (let i = 0; i < count; i++) {
    let fine = true;
    for (const [name, wanted] of Object.entries(filters)) {
      const value = columns[name][i];
      if (
        wanted !== null && typeof wanted === "object" ? !(value <= wanted.most) : wanted !== null && value !== wanted
      ) {
        fine = false;
        break;
      }
    }
    if (fine) out.push(i);
  }
  return out;
}

if (typeof module !== "undefined") module.exports = { front, nearest, encoded, restored, kept };
