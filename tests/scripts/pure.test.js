// The pure functions of pages: run by `node --test`, from tests/unit/test_page_scripts.py.
const test = require("node:test");
const assert = require("node:assert");
const at = (name) => require(`../../simulator/formats/html/static/${name}.js`);
const { linear, ticks, lastAtMost } = at("scale");
const { decoded, visible, boxes, barAt, searched, zoomed, moved } = at("bars");
const { front, nearest, encoded, restored, kept } = at("points");
const { found } = at("format");
const { placeAt, offersAt, lineOf } = at("toml");
const { quoted, commandOf, ordered } = at("explored");

test("a linear scale maps its ends and its middle", () => {
  const x = linear(10, 30, 100, 0);
  assert.deepStrictEqual([x(10), x(20), x(30)], [100, 50, 0]);
});

test("ticks are round, inside, and not too many", () => {
  assert.deepStrictEqual(ticks(0, 1, 5), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepStrictEqual(
    ticks(0, 80 * 2 ** 30, 5, true),
    [0, 20, 40, 60, 80].map((one) => one * 2 ** 30),
  );
  assert.deepStrictEqual(ticks(3, 3), [3]);
  assert.deepStrictEqual(
    ticks(5 * 2 ** 30, 8 * 2 ** 30, 4, true), // 1 GiB, not 1,000 MiB
    [5, 6, 7, 8].map((one) => one * 2 ** 30),
  );
});

test("the last at most a value", () => {
  assert.deepStrictEqual(
    [0, 1, 5, 9, 10, 99].map((one) => lastAtMost([1, 5, 9], one)),
    [0, 0, 1, 2, 2, 2],
  );
});

// gap, length, label, category, critical, ops, numbers of the label
const FLAT = [5, 10, 0, 0, 1, 1, 1, 7, 0, 20, 0, 1, 0, 3, 1, 8];
const BARS = decoded(FLAT, ["forward layer#"]);

test("bars are decoded with the numbers of their labels", () => {
  assert.deepStrictEqual(BARS, [
    { start: 5, end: 15, label: "forward layer7", category: 0, critical: true, ops: 1 },
    { start: 15, end: 35, label: "forward layer8", category: 1, critical: false, ops: 3 },
  ]);
});

test("a view shows the bars inside it, in pixels", () => {
  assert.deepStrictEqual(
    visible(BARS, 0, 40, 400).map((one) => [one.x, one.width, one.category]),
    [
      [50, 100, 0],
      [150, 200, 1],
    ],
  );
  assert.deepStrictEqual(
    visible(BARS, 20, 30, 100).map((one) => [one.x, one.width]),
    [[0, 100]],
  );
  assert.deepStrictEqual(visible(BARS, 36, 40, 100), []);
});

test("a million bars on a hundred pixels are at most some hundred boxes", () => {
  const many = Array.from({ length: 1e5 }, (_, i) => ({ start: i, end: i + 0.5, category: i % 3 }));
  assert.ok(visible(many, 0, 1e5, 100).length <= 101);
  assert.strictEqual(boxes(visible(many, 0, 1e5, 100), 0, 10).size <= 3, true);
});

test("the bar at a time, and none in a gap", () => {
  assert.strictEqual(barAt(BARS, 20).label, "forward layer8");
  assert.strictEqual(barAt(BARS, 3), null);
  assert.strictEqual(barAt(BARS, 36), null);
});

test("a search finds labels and categories whatever their case", () => {
  const rows = [{ bars: BARS }];
  assert.deepStrictEqual(
    searched(rows, "LAYER8", ["gemm", "norm"]).map((one) => one.bar.start),
    [15],
  );
  assert.strictEqual(searched(rows, "gemm", ["gemm", "norm"]).length, 1);
  assert.strictEqual(searched(rows, " ", ["gemm", "norm"]).length, 0);
});

test("zooming keeps the place under the pointer and stays inside", () => {
  assert.deepStrictEqual(zoomed([0, 100], 0.5, 20, 100, 1), [10, 60]);
  assert.deepStrictEqual(zoomed([0, 100], 2, 20, 100, 1), [0, 100]);
  assert.deepStrictEqual(zoomed([0, 100], 1e-9, 50, 100, 2), [49, 51]);
  assert.deepStrictEqual(moved([10, 30], 1000, 100), [80, 100]);
  assert.deepStrictEqual(moved([10, 30], -1000, 100), [0, 20]);
});

test("the front has what nothing else beats in both", () => {
  assert.deepStrictEqual(front([[1, 5], [2, 3], [3, 4], null, [4, 1], [2, 3]]), [0, 1, 4]);
});

test("the nearest point, within reach", () => {
  assert.strictEqual(nearest([[0, 0], null, [10, 0]], 8, 1), 2);
  assert.strictEqual(nearest([[0, 0]], 100, 100), -1);
});

test("an address gives back the state that it was made of", () => {
  const state = { tp: ["1", "a,b&c=d"], größe: ["</script>"], empty: "" };
  assert.deepStrictEqual(restored("#" + encoded(state)), { tp: ["1", "a,b&c=d"], größe: ["</script>"] });
  assert.deepStrictEqual(restored("#a=%E0%A4%A"), {});
});

test("filters keep what agrees with all", () => {
  const columns = { tp: [1, 2, 2, 4], step_s: [4, 3, 2, 1] };
  assert.deepStrictEqual(kept(columns, { tp: 2, step_s: { most: 2.5 } }, 4), [2]);
  assert.deepStrictEqual(kept(columns, { tp: null }, 4), [0, 1, 2, 3]);
});

test("a path finds what stands there, and nothing that only objects inherit", () => {
  assert.strictEqual(found({ a: [{ b: 3 }] }, "a/0/b"), 3);
  assert.strictEqual(found({ a: 1 }, "constructor"), undefined);
});

test("a command is words for a shell, whatever stands in them", () => {
  assert.strictEqual(quoted("plan.tp=4"), "plan.tp=4");
  assert.strictEqual(quoted("a b'; rm -rf ~ #"), `'a b'"'"'; rm -rf ~ #'`);
  const answer = {
    command: ["shardwise", "predict", "my study.toml"],
    axes: [
      { key: "nodes", values: ["1", "2"] },
      { key: "plan.tp", values: ["2", "as usual"] },
    ],
    at: { nodes: [1, 0], "plan.tp": [0, 1] },
  };
  assert.strictEqual(commandOf(answer, 0), "shardwise predict 'my study.toml' --nodes 2 --set plan.tp=2");
  assert.strictEqual(commandOf(answer, 1), "shardwise predict 'my study.toml' --nodes 1");
});

test("sliders follow numbers by size and words as given", () => {
  assert.deepStrictEqual(ordered(["8", "1", "16"]), [1, 0, 2]);
  assert.deepStrictEqual(ordered(["full", "none"]), [0, 1]);
});

const STUDY = 'model = "llama"\n# [none]\n[plan]\ntp = 3\n[plan.precision]\ncompute = "fp9"\n';
const WORDS = {
  names: { model: ["llama3-8b", "gpt"] },
  tables: {
    "": { model: { about: "a preset", values: [] }, plan: { about: "", values: [], table: true } },
    plan: { tp: { about: "tensor", values: [] }, precision: { about: "", values: [], table: true } },
    "plan.precision": { compute: { about: "dtype", values: ["bf16", "fp8"] } },
  },
};

test("the cursor's place: table, key, what is written already", () => {
  assert.deepStrictEqual(placeAt(STUDY, STUDY.indexOf("tp") + 1), {
    table: "plan",
    key: "",
    prefix: "t",
    from: STUDY.indexOf("tp"),
    inValue: false,
  });
  const value = placeAt(STUDY, STUDY.indexOf("fp9") + 2);
  assert.deepStrictEqual(
    [value.table, value.key, value.prefix, value.inValue, STUDY[value.from]],
    ["plan.precision", "compute", "fp", true, '"'],
  );
  assert.strictEqual(placeAt("[pl", 3).table, null);
  assert.strictEqual(placeAt("# a", 3), null);
});

test("offers fit the place: keys, values, names, tables", () => {
  const offered = (text) => offersAt(WORDS, placeAt(text, text.length)).map((one) => one.insert);
  assert.deepStrictEqual(offered("mo"), ["model = "]);
  assert.deepStrictEqual(offered("model = ll"), ['"llama3-8b"']);
  assert.deepStrictEqual(offered("[plan]\nt"), ["tp = "]);
  assert.deepStrictEqual(offered('[plan.precision]\ncompute = "'), ['"bf16"', '"fp8"']);
  assert.deepStrictEqual(offered("[pre"), ["plan.precision]"]);
  assert.deepStrictEqual(offered("x = 1 # "), []);
});

test("a fault's line is its key's, its table's, or the one it names", () => {
  assert.strictEqual(lineOf(STUDY, "plan.precision.compute", ""), 6);
  assert.strictEqual(lineOf(STUDY, "plan: tp", ""), 4);
  assert.strictEqual(lineOf(STUDY, "model", ""), 1);
  assert.strictEqual(lineOf(STUDY, "plan: degrees", ""), 3);
  assert.strictEqual(lineOf(STUDY, "study", "not TOML (at line 2, column 1)"), 2);
  assert.strictEqual(lineOf(STUDY, "elsewhere", ""), 0);
});

const { Explored } = at("explored");
const POINTS = {
  command: ["shardwise", "predict"],
  axes: [{ key: "plan.tp", values: ["2", "1"] }],
  at: { "plan.tp": [0, 1, 1, 0] },
  columns: {
    verdict: ["fits", "tight", "does not fit", "illegal"],
    step_s: [2, 1, 0.5, null],
    tokens_per_s: [10, 40, 80, null],
    used_bytes: [30, 60, 90, null],
    num_devices: [8, 8, 8, null],
  },
};

test("time for as many tokens where batches differ, and what runs stands first", () => {
  const explored = new Explored(POINTS);
  const state = explored.recalled("");
  assert.strictEqual(state.y, "million_tokens_s");
  assert.deepStrictEqual(explored.best(explored.left(state), state), [1, 0]);
  assert.deepStrictEqual(explored.drawable(explored.left(state), state), [0, 1, 2]);
  assert.deepStrictEqual(Object.keys(explored.limits), ["used_bytes"]);
});

test("a state comes back from its address, whatever else stands in one", () => {
  const explored = new Explored(POINTS);
  const state = {
    ...explored.start(),
    x: "num_devices",
    plan: 1,
    pins: [0, 1],
    filters: { "plan.tp": 1 },
    most: { used_bytes: 60 },
  };
  assert.deepStrictEqual(explored.recalled(`#${explored.fragment(state)}`), state);
  assert.deepStrictEqual(explored.left(state), [1]);
  const wrong = explored.recalled("#plan=99&pins=a,1,-2&x=constructor&%3D%20plan.tp=7&%3C%20used_bytes=x");
  assert.deepStrictEqual(
    [wrong.plan, wrong.pins, wrong.x, wrong.filters["plan.tp"], wrong.most.used_bytes],
    [null, [1], "used_bytes", null, null],
  );
});

test("a number's key has no indices, and its inputs stand beside it", () => {
  const { keyOf, beside } = at("numbers");
  assert.strictEqual(keyOf("plans/3/step_s"), "plans/step_s");
  assert.strictEqual(beside("plans/3/step_s", "low_s"), "plans/3/low_s");
  assert.strictEqual(beside("columns/step_s/17", "low_s"), "columns/low_s/17");
  assert.strictEqual(beside("spread/0/1", "/num_points"), "num_points");
});
