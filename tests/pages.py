"""Pages as the commands write them, once for all tests of a module."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from simulator.cli import main

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--model", "llama3.2-1b", "--cluster", "hgx-h100-8", "--set", "plan.seq_len=512")
SEARCH = (
    "search",
    *SMALL[:4],
    "--global-batch",
    "8",
    "--seq-len",
    "512",
    "--stack",
    "torch-2.6-eager",
    "--jobs",
    "1",
    "--fix",
    "tp=1",
    "--fix",
    "cp=1",
)
EXAMPLES = ROOT / "docs" / "examples"
SAMPLES = ROOT / "experiments" / "measured" / "cpu-loop-2026-11-21"
# Kind of page -> the command that writes it
COMMANDS = {
    "predict": (
        "predict",
        *SMALL,
        "--pp",
        "2",
        "--num-micro-batches",
        "4",
        "--nodes",
        "2",
        "--stack",
        "megatron-core-2025",
    ),
    "search": (*SEARCH, "--fix", "pp=1", "--fix", "recompute=none"),
    "front": (*SEARCH, "--fix", "pp=1", "--fix", "zero=3", "--fix", "recompute=none", "--front", "--nodes", "1,2"),
    "compare": ("compare", *SMALL, "--what-if", "plan.zero=2", "--no-ablations"),
    "serve": ("serve", *SMALL[:4], "--requests", "50"),
    "serve-search": (
        "serve",
        *SMALL[:4],
        "--search",
        "--rate",
        "4",
        "--slo-tpot",
        "p95=50ms",
        "--fix",
        "pp=1",
        "--fix",
        "tp=1",
        "--disaggregated",
        "no",
        "--requests",
        "40",
        "--jobs",
        "1",
    ),
    "goodput": ("goodput", *SMALL, "--steps", "1000", "--replicas", "3"),
    "sensitivity": (
        "sensitivity",
        *SMALL,
        "--what-if",
        "plan.zero=2",
        "--vary",
        "link.intra.bytes_per_s=x0.9..x1",
        "--no-errors",
        "--samples",
        "8",
        "--jobs",
        "1",
    ),
    "explore": (
        "explore",
        *SMALL,
        "--vary",
        "tp=1,2,3",
        "--vary",
        "nodes=1,2",
        "--vary",
        "plan.micro_batch_size=4,1,2",
        "--jobs",
        "1",
    ),
    "failures": ("sensitivity", *SMALL, "--failures"),
    "place": ("place", *SMALL),
    "backtest": ("backtest", str(EXAMPLES / "runs.csv")),
    "replay": ("replay", str(EXAMPLES / "snapshot.json.gz")),
    "policies": ("replay", str(EXAMPLES / "snapshot.json.gz"), "--policy", "native", "--policy", "slab"),
    "topo": ("topo", "hgx-h100-8"),
    "collective": ("collective", "all_reduce"),
    "recorded": ("predict", "--program", str(EXAMPLES / "traces" / "ddp")),
    "validate-compare": ("validate", "compare", str(EXAMPLES / "runs.jsonl")),
    "calibrate-check": (
        "calibrate",
        "check",
        str(SAMPLES / "samples-1.jsonl.gz"),
        "--baseline",
        str(SAMPLES / "samples-2.jsonl.gz"),
    ),
}


@dataclass(frozen=True)
class Page:
    """A page, the JSON that its command printed, and the JSON inside."""

    kind: str
    file: Path
    text: str
    printed: Any

    @property
    def answer(self) -> Any:
        return inside(self.text, "answer")

    @property
    def drawing(self) -> Any:
        return inside(self.text, "drawing")


def inside(text: str, name: str) -> Any:
    """The JSON of an element of the page."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


_MADE: dict[str, Page] = {}


def made(kind: str, factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Page:
    """The page of a command, which runs once for all tests, with --json and --html."""
    if kind not in _MADE:
        _MADE[kind] = _run(kind, factory.mktemp(kind), capsys)
    return _MADE[kind]


def _run(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Page:
    file = folder / f"{kind}.html"
    capsys.readouterr()
    code = main([*COMMANDS[kind], "--json", "--html", str(file)])
    out, err = capsys.readouterr()
    assert file.is_file(), (code, err)
    return Page(kind=kind, file=file, text=file.read_text(encoding="utf-8"), printed=json.loads(out))


class Values(HTMLParser):
    """`found`: the path and the value of every number that a page shows of its answer."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        named = dict(attrs)
        if tag == "data" and named.get("data-path"):
            self.found.append((named["data-path"] or "", named.get("value") or ""))
