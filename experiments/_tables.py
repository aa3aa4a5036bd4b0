"""Published kernel measurements: the subset the fits use, the rows they must not use, and the split for testing.

`experiments/measured/kernels/*.csv.gz` keeps the columns of the collected tables; every row names its source.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SUBSET = HERE / "measured" / "kernels"
H200_RUNS = HERE / "measured" / "h200-2026-11-20"
H200_STEPS = HERE / "measured" / "h200-solo-2026-11-20"
# Profiled steps that fits may see; the other plans there are held out
SEEN = (
    "llama3-8b-s8192-b2-none-dp_shard64",
    "llama3.2-1b-s2048-b8-none-dp_replicate8-zero0",
    "llama3.2-3b-s4096-b2-selective-dp_shard8",
)
Row = dict[str, str]

GEMM_DEVICES = (
    "A100-SXM4-80GB",
    "A100-PCIe-80GB",
    "H100-SXM5-80GB",
    "H200-SXM-141GB",
    "B200-SXM",
    "GB200",
    "GB300",
)
FP8_DEVICES = ("B200-SXM", "GB200", "GB300")
DROPPED_COLUMNS = {"tflops"}  # derived from the time; kept nowhere twice


def rows(table: str) -> list[Row]:
    """All rows of a committed table: gemm, attention or membound."""
    with gzip.open(SUBSET / f"{table}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def own_samples() -> list[dict[str, Any]]:
    """The project's own H200 samples, failures left out. Later files of the same folder add to the first."""
    samples: list[dict[str, Any]] = []
    for path in sorted(H200_RUNS.glob("kernels*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            samples += [row for row in map(json.loads, file) if "error" not in row]
    return samples


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def table_hashes() -> dict[str, str]:
    """Every file that the fits read, with its hash; paths relative to experiments/."""
    files = [*sorted(SUBSET.glob("*.csv.gz")), *sorted(H200_RUNS.glob("kernels*.jsonl.gz"))]
    files += [H200_RUNS / "clocks-kernels.csv", *sorted(H200_STEPS / f"{name}-spans.json.gz" for name in SEEN)]
    return {str(path.relative_to(HERE)): sha256(path) for path in files}


def held_out(n: int, k: int) -> bool:
    """One family of weight shapes in five is kept from the fit; n × k and k × n are one family."""
    low, high = sorted((n, k))
    return int(hashlib.md5(f"{low},{high}".encode(), usedforsecurity=False).hexdigest(), 16) % 5 == 0


_WATTS = re.compile(r"power-mode run .* sustained, (\d+)W")


def is_random_input(row: Row) -> bool:
    """Inputs decide power and power decides speed: unfilled weights run 8-13 % faster than random ones."""
    return "randn" in row["notes"]


def watts(row: Row) -> float | None:
    """Logged power of a run of 0.3 to 1 s; None: a burst of six calls."""
    found = _WATTS.search(row["notes"])
    return float(found[1]) if found else None


def gemm_wanted(row: Row) -> bool:
    if row["gpu"] not in GEMM_DEVICES or float(row["m"]) == 0:
        return False
    if "SimuMax" in row["source"]:
        return row["layout"] != "grouped"
    if "aiconfigurator" not in row["source"] or not is_random_input(row):
        return False
    if watts(row) is not None:
        return row["software"].endswith("kernel=torch_flow")  # cuBLAS
    return row["dtype"] == "bf16" or (
        row["dtype"] == "fp8" and row["gpu"] in FP8_DEVICES and "torch_flow" in row["software"]
    )


def attention_wanted(row: Row) -> bool:
    gpu, software = row["gpu"], row["software"]
    if "aiconfigurator" in row["source"]:
        blackwell = dict.fromkeys(("B200-SXM", "GB200", "GB300"), "0.5.14 kernel=trtllm")
        main = {"A100-SXM4-80GB": "SGLang 0.5.10", "H100-SXM5-80GB": "kernel=fa3", **blackwell}
        return row["causal"] == "y" and row["direction"] == "fwd" and main.get(gpu, "never") in software
    if "SimuMax" in row["source"]:
        return row["head_dim"] in ("128", "192")
    return ("FA3 paper" in row["source"] and software in ("FA2", "FA3", "cuDNN")) or "ABI-stable" in software


_STREAMS = ("stream_", "scale_small", "kernel_launch_throughput", "fp8_cast_scale", "layer_norm", "cross_entropy")


def membound_wanted(row: Row) -> bool:
    if not any(name in row["gpu"] for name in ("A100", "H100", "H200", "B200", "GB300")):
        return False
    op, source = row["op"], row["source"]
    if row["gpu"].startswith("GB"):
        return op == "fp8_cast_scale"
    if "Liger" in source:
        eager = "huggingface" in row["software"] or row["software"].startswith("torch (")
        return eager and op in ("layer_norm", "cross_entropy", "embedding", "relu_squared")
    if "vidur" in source:
        return op == "add"
    return op.startswith(_STREAMS) or (op in ("gelu", "layernorm") and "LLMCompass" in source)


WANTED: dict[str, Callable[[Row], bool]] = {
    "gemm": gemm_wanted,
    "attention": attention_wanted,
    "membound": membound_wanted,
}


def collect(folder: Path) -> None:
    """Cut the committed subset out of the full tables in `folder`. Equal input gives equal bytes."""
    SUBSET.mkdir(parents=True, exist_ok=True)
    for table, wanted in WANTED.items():
        with gzip.open(folder / f"{table}.csv.gz", "rt", encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if wanted(row)]
        rows += list(_additions(table))
        (SUBSET / f"{table}.csv.gz").write_bytes(_packed(rows))


def _packed(rows: list[Row]) -> bytes:
    text = io.StringIO(newline="")
    columns = [name for name in rows[0] if name not in DROPPED_COLUMNS]
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return gzip.compress(text.getvalue().encode(), mtime=0)


def _additions(table: str) -> Iterator[Row]:
    """Published rows that the collected tables lack; `additions.json` beside the subset holds them."""
    path = SUBSET / "additions.json"
    if path.exists():
        data: dict[str, list[Row]] = json.loads(path.read_text(encoding="utf-8"))
        yield from data.get(table, [])


def select(table: Iterable[Row], **columns: str) -> list[Row]:
    """Rows whose columns contain the given texts; `gpu` must start with it, `direction` must equal it."""
    matches: dict[str, Callable[[str, str], bool]] = {"gpu": str.startswith, "direction": str.__eq__}
    tests = [(c, matches.get(c, str.__contains__), text) for c, text in columns.items()]
    return [row for row in table if all(test(row[c], text) for c, test, text in tests)]
