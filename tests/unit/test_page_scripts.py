"""The scripts of pages under Node: their pure functions, and numbers in the same words as Python's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from simulator.formats.html.figures import shown, unit_of, words

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "simulator" / "formats" / "html" / "static"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node runs the scripts of pages, and it is not installed")

NAMES = (
    "step_s",
    "used_bytes",
    "bytes_per_s",
    "peak_flop_per_s",
    "tokens_per_s",
    "mfu",
    "exposed_share",
    "count",
    "hardware_flop",
    "num_devices",
    "low_s",
    "num_steps",
    "capacity_per_s",
    "tokens_per_s_user",
    "seconds",
    "run_days",
    "nearest_nic",
    "kv_mean",
)
PATHS = (
    "breakdown_s/gemm",
    "plans/3/median_s/ttft",
    "plans/3/step_s",
    "memory/used_bytes",
    "steps_s/p50",
    "days/p5",
    "now/0",
    "",
)
VALUES = (
    0,
    1,
    7,
    999,
    1000,
    1023,
    1024,
    65_536,
    123_456_789,
    0.5,
    2.5,
    0.9996,
    9.995,
    99.95,
    999.5,
    1e-9,
    4e-13,
    3e-5,
    0.0123456,
)
VALUES += (61, 3599.9, 200_000, 1.0057, 12.345, 1234.5, 84_934_656_000.0, 3.2e15, 989e12, -0.25, -3.5e-3, -1234567.8)


def _node(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    return subprocess.run([NODE, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_pure_functions() -> None:
    done = _node("--test", str(ROOT / "tests" / "scripts" / "pure.test.js"))
    assert done.returncode == 0, done.stdout[-4000:]


def test_numbers_are_told_as_in_python() -> None:
    asked = [(name, value) for name in NAMES for value in VALUES]
    asked += [("step_s", None), ("fits", True), ("fits", False), ("cause", "a"), ("kinds", ["a", "b"]), ("empty", "")]
    script = f"""const {{ shown, words, unitOf }} = require({json.dumps(str(STATIC / "format.js"))});
    const asked = {json.dumps(asked)};
    console.log(JSON.stringify([asked.map(([name, value]) => shown(name, value)), asked.map(([name]) => words(name)), {json.dumps(PATHS)}.map(unitOf)]));"""
    done = _node("-e", script)
    assert done.returncode == 0, done.stderr
    told, named, units = json.loads(done.stdout)
    wrong = [(n, v, shown(n, v), js) for (n, v), js in zip(asked, told, strict=True) if shown(n, v) != js]
    assert not wrong
    assert named == [words(name) for name, _ in asked]
    assert units == [unit_of(path) for path in PATHS]


def test_scripts_stand_alone() -> None:
    """Nothing that a page could load, run from text, or that would end its own element."""
    for file in sorted(STATIC.glob("*.js")):
        text = file.read_text(encoding="utf-8")
        for word in (
            "http",
            "</script",
            "eval(",
            "new Function",
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
        ):
            assert word not in text, f"{file.name}: {word}"
