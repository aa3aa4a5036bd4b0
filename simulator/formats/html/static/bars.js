// The timeline's bars: decoding what simulator/formats/html/timeline.py packs, and what of it a view shows.

function decoded(flat, labels) {
  const bars = [];
  let end = 0;
  for (let i = 0; i < flat.length;) {
    const start = end + flat[i],
      count = flat[i + 6],
      numbers = flat.slice(i + 7, i + 7 + count);
    end = start + flat[i + 1];
    let next = 0;
    const label = labels[flat[i + 2]].replace(/#/g, () => numbers[next++]);
    bars.push({ start, end, label, category: flat[i + 3], critical: flat[i + 4] === 1, ops: flat[i + 5] });
    i += 7 + count;
  }
  return bars;
}

// The bars of a row that lie in [from, to], neighbours narrower than a pixel joined: [x, width, category] in pixels.
function visible(bars, from, to, width) {
  const scale = width / (to - from || 1),
    out = [];
  let low = 0,
    high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle].end < from) low = middle + 1;
    else high = middle;
  }
  for (let i = low; i < bars.length && bars[i].start <= to; i++) {
    const left = Math.max(0, (bars[i].start - from) * scale),
      right = Math.min(width, (bars[i].end - from) * scale);
    const last = out[out.length - 1];
    if (last && right - last.x < 1.2 && bars[i].category !== last.category) {
      if (right - left > last.longest) {
        last.category = bars[i].category;
        last.longest = right - left;
      }
      last.width = Math.max(last.width, right - last.x);
    } else if (last && last.category === bars[i].category && left - (last.x + last.width) < 0.4 && last.width < 1.2) {
      last.width = right - last.x;
    } else out.push({ x: left, width: right - left, longest: right - left, category: bars[i].category });
  }
  return out;
}

// An SVG path of boxes, one for each of the bars of a category: a row stays a dozen elements however many bars it has.
function boxes(shownBars, y, height) {
  const paths = new Map();
  for (const one of shownBars) {
    const width = Math.max(one.width - (one.width > 3 ? 0.6 : 0), 0.6);
    paths.set(
      one.category,
      (paths.get(one.category) || "") +
        `M${one.x.toFixed(1)} ${y}h${width.toFixed(1)}v${height}h${(-width).toFixed(1)}z`,
    );
  }
  return paths;
}

function barAt(bars, time) {
  let low = 0,
    high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle].start <= time) low = middle + 1;
    else high = middle;
  }
  const one = bars[low - 1];
  return one && time <= one.end ? one : null;
}

// Every bar of the rows whose label or category has the text; case does not count.
function searched(rows, text, categories) {
  const wanted = text.trim().toLowerCase(),
    out = [];
  if (!wanted) return out;
  rows.forEach((row, index) =>
    row.bars.forEach((bar) => {
      if (bar.label.toLowerCase().includes(wanted) || categories[bar.category].toLowerCase().includes(wanted))
        out.push({ row: index, bar });
    }),
  );
  return out.sort((a, b) => a.bar.start - b.bar.start || a.row - b.row);
}

// [from, to] zoomed by a factor around a place in it, kept inside [0, end] and no narrower than `least`.
function zoomed([from, to], factor, at, end, least) {
  const width = Math.min(end, Math.max(least, (to - from) * factor)),
    share = (at - from) / (to - from || 1);
  const start = Math.min(Math.max(0, at - share * width), end - width);
  return [start, start + width];
}

function moved([from, to], by, end) {
  const width = to - from,
    start = Math.min(Math.max(0, from + by), end - width);
  return [start, start + width];
}

if (typeof module !== "undefined") module.exports = { decoded, visible, boxes, barAt, searched, zoomed, moved };
