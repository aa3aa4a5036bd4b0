// Values as people read them, by the unit in their name: simulator/formats/html/figures.py in the browser.

const BYTES = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
  [1, "B"],
];
const SECONDS = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "us"],
  [1e-9, "ns"],
];
const DURATIONS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];
const RATES = [
  [1e12, "TB/s"],
  [1e9, "GB/s"],
  [1e6, "MB/s"],
  [1e3, "kB/s"],
  [1, "B/s"],
];
const FLOPS = [
  [1e18, "EFLOP/s"],
  [1e15, "PFLOP/s"],
  [1e12, "TFLOP/s"],
  [1e9, "GFLOP/s"],
  [1e6, "MFLOP/s"],
  [1, "FLOP/s"],
];
const SHARE_ENDS = [
  "_mfu",
  "_hfu",
  "_share",
  "_fraction",
  "utilization",
  "utilisation",
  "_goodput",
  "_gain",
  "_lost",
  "_abs_error",
  "_bias",
  "_coverage_90",
  "relative_error",
];
const LEAST = 0.0005;
const SAID = {
  num_devices: "GPUs",
  used_bytes: "memory used",
  low_s: "lower end, 90 %",
  high_s: "upper end, 90 %",
  lower_s: "all overlapped",
  upper_s: "nothing overlapped",
};
const SPELT = Object.fromEntries(
  ["GPU", "GPUs", "CPU", "HBM", "KV", "MFU", "HFU", "NIC", "NICs", "NVLink", "NVMe", "PCIe", "RDMA"].map((word) => [
    word.toLowerCase(),
    word,
  ]),
);
const UNITS = /(_s|_per_s_user|_per_s_gpu|_s_per_token|_seconds|_days|_bytes|_flop|flop_per_step)$/;

function threeDigits(value) {
  return Math.abs(value) < 1000 ? Number(value.toPrecision(3)) : value;
}

// With commas; ties go to the even digit, as in Python.
function grouped(value, digits = 0) {
  const size = Math.abs(value),
    tie = digits === 0 && size % 1 === 0.5 && size < 2 ** 52;
  const [whole, part] = (tie ? 2 * Math.round(size / 2) : size).toFixed(digits).split(".");
  const text = whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? "." + part : "");
  return (value < 0 && /[1-9]/.test(text) ? "-" : "") + text;
}

// Three significant digits in the largest unit that keeps the number at 1 or more.
function scaled(value, scales) {
  const [scale, unit] = scales.find(([one]) => Math.abs(threeDigits(value / one)) >= 1) || scales[scales.length - 1];
  const number = threeDigits(value / scale);
  if (Math.abs(number) < (unit === "B" ? 0.5 : LEAST)) return "0 " + scales.find(([one]) => one === 1)[1];
  const decimals = unit === "B" ? 0 : Math.min(3, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number)) + 1e-12)));
  return `${grouped(number, decimals)} ${unit}`;
}

function formatNumber(value) {
  if (Math.abs(value) >= 100) return grouped(value);
  if (value === 0) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(3)))));
  if (exponent < -4) {
    const [digits, power] = value.toExponential(2).split("e");
    const sign = power.startsWith("-") ? "-" : "+";
    return `${Number(digits)}e${sign}${power.replace(/^[+-]/, "").padStart(2, "0")}`;
  }
  return String(Number(value.toPrecision(3)));
}

function percent(value) {
  return grouped(100 * value, 1) + "%";
}

function shown(name, value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number")
    return Array.isArray(value) ? value.map((one) => shown(name, one)).join(", ") || "–" : String(value);
  name = "_" + name;
  if (name.endsWith("flop_per_s")) return scaled(value, FLOPS);
  if (name.endsWith("bytes_per_s")) return scaled(value, RATES);
  if (/_per_s(_user|_gpu)?$/.test(name)) return (value >= 100 ? grouped(value) : formatNumber(value)) + "/s";
  if (/_(s|s_per_token|seconds)$/.test(name)) return scaled(value, value < 60 ? SECONDS : DURATIONS);
  if (name.endsWith("_days")) return shown("s", 86400 * value);
  if (name.endsWith("_bytes")) return scaled(value, BYTES);
  if (SHARE_ENDS.some((end) => name.endsWith(end))) return percent(value);
  if (name.endsWith("_flop") || name.endsWith("flop_per_step")) return scaled(value, FLOPS).replace("/s", "");
  return Number.isInteger(value) ? grouped(value) : formatNumber(value);
}

// The name that tells the unit of the value at a path: its own, or that of the record: breakdown_s/gemm is in seconds.
function unitOf(path) {
  const [last = "", above = ""] = path
    .split("/")
    .filter((part) => !/^\d+$/.test(part))
    .reverse();
  const own = UNITS.test(`_${last}`) || SHARE_ENDS.some((end) => `_${last}`.endsWith(end));
  return !own && /(_s|_bytes)$/.test(above) ? above : last;
}

// A key as a heading: "peak_allocated_bytes" is "peak allocated", "num_steps" is "steps".
function words(name) {
  if (Object.hasOwn(SAID, name)) return SAID[name];
  const plain = unitless(name).replace(/_per_s$/, " a second");
  const spelt = (word) => (Object.hasOwn(SPELT, word) ? SPELT[word] : word);
  return plain.replace(/^num_/, "").replaceAll("_", " ").split(" ").map(spelt).join(" ");
}

function unitless(name) {
  for (const unit of ["_bytes_per_s", "_flop_per_s", "_bytes", "_s", "_flop"])
    if (name.endsWith(unit) && !(unit === "_s" && name.endsWith("_per_s")))
      return name.slice(0, -unit.length);
  return name;
}

function found(data, path) {
  for (const part of path.split("/")) {
    if (data === null || data === undefined) return undefined;
    data = Object.hasOwn(Object(data), part) ? data[part] : undefined;
  }
  return data;
}

if (typeof module !== "undefined")
  module.exports = { shown, words, unitOf, found, scaled, formatNumber, grouped, percent, BYTES, SECONDS };
