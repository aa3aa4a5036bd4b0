"""This CPU as a machine: calibrate it, run small plans that the fit never sees, compare with their predictions.

    PYTHONPATH=. python experiments/cpu_loop.py FOLDER --minutes 0.3 --stop-after 280

Runs on gloo with two processes of one thread, and wants the machine for itself. It is calibrated in three sittings,
before, amid and after the plans, because the cores of a virtual machine do not keep their pace. FOLDER gets
samples-*.jsonl and runs.jsonl; the next call goes on where this one stopped. Nothing in the samples is a plan: products,
passes over memory, collectives, hooks. The table is printed. `--keep` packs a folder under experiments/measured and puts
the newest one's table into docs/accuracy/cpu.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import _cpu_accuracy

from simulator import Model, Plan, Stack
from simulator.spec.plan.records import PrecisionPlan
from validate.fit.machine import CPU_STACK
from validate.measure import Job, measure
from validate.records import read_records
from validate.run_plan import append, deadlines, play
from validate.task import Task

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy" / "cpu.md"
RANKS, SITTINGS = 2, 3
MODELS = {
    "3M": Model(name="3M", num_layers=4, d_model=192, num_heads=6, num_kv_heads=3, d_ff=512, vocab_size=4096),
    "10M": Model(name="10M", num_layers=6, d_model=256, num_heads=8, num_kv_heads=4, d_ff=1024, vocab_size=8192),
    "18M": Model(name="18M", num_layers=6, d_model=384, num_heads=6, num_kv_heads=2, d_ff=1024, vocab_size=8192),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": RANKS, "zero": 0},
    "zero1": {"dp_shard": RANKS, "zero": 1},
    "fsdp2": {"dp_shard": RANKS, "zero": 3},
}
SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("3M", {"seq_len": 128, "micro_batch_size": 2}),
    ("10M", {"seq_len": 512, "micro_batch_size": 1}),
    ("18M", {"seq_len": 256, "micro_batch_size": 1}),
    ("10M", {"seq_len": 128, "micro_batch_size": 2, "recompute": "full"}),
    ("3M", {"seq_len": 256, "micro_batch_size": 4}),
    ("10M", {"seq_len": 128, "micro_batch_size": 2}),
    ("3M", {"seq_len": 128, "micro_batch_size": 2, "num_micro_batches": 2}),
)


def main() -> int:
    """Do what the folder has not: sittings of the calibration, plans; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=0.3, help="for each sitting of the calibration")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds; begins no plan after them")
    parser.add_argument(
        "--keep", action="store_true", help="pack the folder, and write its table into docs/accuracy/cpu.md"
    )
    options = parser.parse_args()
    if options.keep:
        pack(options.folder)
        _cpu_accuracy.write_page(PAGE)
        return 0
    end_s = time.monotonic() + options.stop_after
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = options.folder / "runs.jsonl"
    calibrate(options.folder, 0, options.minutes)
    done = [(r["model"]["name"], r["plan"]) for r in read_records(runs)[0]] if runs.exists() else []
    for index, task in enumerate(tasks(options.steps)):
        if _identity(task) in done:
            continue
        if time.monotonic() > end_s:
            break
        calibrate(options.folder, (SITTINGS - 1) * index // (len(SHAPES) * len(STRATEGIES)), options.minutes)
        record = play(task, deadlines(3))
        print(_what(task), record["verdict"], record["trouble"] or "", flush=True)
        append(runs, record)
    calibrate(options.folder, SITTINGS - 1, options.minutes)
    print("\n".join(_cpu_accuracy.table(options.folder)))
    return 0


def calibrate(folder: Path, sitting: int, minutes: float) -> None:
    """Measure the machine once more, unless that sitting is there."""
    out = folder / f"samples-{sitting + 1}.jsonl"
    if not out.exists():
        print(measure(Job(out=out, minutes=minutes, device="cpu", num_ranks=RANKS, threads=1)), flush=True)


def tasks(steps: int) -> list[Task]:
    """Every shape under every strategy."""
    stack = Stack.load(CPU_STACK)
    return [
        Task(
            mode="cpu",
            model=MODELS[name],
            plan=Plan(**degrees, **shape, precision=PrecisionPlan(compute="fp32"), stack=CPU_STACK),
            stack=stack,
            num_steps=steps,
            num_warm_up=2,
            profile=False,
        )
        for name, shape in SHAPES
        for degrees in STRATEGIES.values()
    ]


def pack(folder: Path) -> None:
    """What can be committed: samples compressed, no host named."""
    for path in sorted(folder.glob("samples-*.jsonl")):
        with gzip.GzipFile(f"{path}.gz", "wb", mtime=0) as file:
            file.write(_anonymous(path).encode())
        path.unlink()
    runs = folder / "runs.jsonl"
    runs.write_text(_anonymous(runs), encoding="utf-8")


def _anonymous(path: Path) -> str:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        for facts in (row, row.get("machine")):
            if isinstance(facts, dict) and "hostname" in facts:
                facts["hostname"] = ""
    return "".join(json.dumps(row) + "\n" for row in rows)


def _identity(task: Task) -> tuple[str, dict[str, Any]]:
    return task.model.name, task.plan.model_dump(mode="json")


def _what(task: Task) -> str:
    plan = task.plan
    return (
        f"{task.model.name} {plan.implementation} {plan.micro_batch_size} x {plan.seq_len} x {plan.num_micro_batches}"
    )


if __name__ == "__main__":
    sys.exit(main())
