// Axes: from data to pixels, and the round numbers along them.

function linear(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((to - from) * (value - low)) / span;
}

function logarithmic(low, high, from, to) {
  const inner = linear(Math.log(low), Math.log(high), from, to);
  return (value) => inner(Math.log(value));
}

// At most `most` round numbers between low and high: 1, 2 or 5 times a power of ten (of two and its powers, for bytes).
function ticks(low, high, most = 6, binary = false) {
  const rough = (high - low) / Math.max(1, most);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const unit = binary ? 1024 ** Math.max(0, Math.floor(Math.log(rough) / Math.log(1024) + 1e-9)) : 1;
  const power = 10 ** Math.floor(Math.log10(rough / unit));
  const round = power * [1, 2, 5, 10].find((one) => one * power * unit >= rough * 0.999);
  const step = unit * (binary && round === 1000 ? 1024 : round);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++)
    out.push(Number((i * step).toPrecision(12)));
  return out;
}

// Powers of ten with 2 and 5 between, for axes over more than a decade.
function logTicks(low, high, binary = false) {
  const out = [];
  if (binary) {
    const first = Math.ceil(Math.log2(low)),
      last = Math.floor(Math.log2(high)),
      step = [1, 2, 5, 10].find((one) => (last - first) / one <= 8) || 10;
    for (let power = Math.ceil(first / step) * step; power <= last; power += step) out.push(2 ** power);
    return out;
  }
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const one of [1, 2, 5]) if (one * 10 ** power >= low && one * 10 ** power <= high) out.push(one * 10 ** power);
  return out.length > 9 ? out.filter((one) => /^1(e|0*$|$)/.test(one.toExponential().replace(".0", ""))) : out;
}

// The last index whose value is at most `value`; 0 where none is. values: ascending.
function lastAtMost(values, value) {
  let low = 0,
    high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

if (typeof module !== "undefined") module.exports = { linear, logarithmic, ticks, logTicks, lastAtMost };
