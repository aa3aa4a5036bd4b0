"""Fits the few coefficients of software stacks, each on at most six runs that are named in its file and never scored.

    python experiments/fit_stacks.py [--write]

What a kernel table cannot know of a stack: how far products inside a step stay behind the same product alone
(`gemm_factor`), how far its elementwise kernels stay behind a stream over memory (`elementwise_factor`), and how fast its
version of the attention kernel is (`attention.speed_factor`). Kernels and links are not touched here.

The runs are chosen by a rule, not by their errors: among a stack's rows on the fewest devices (links are not to be fitted
here) whose memory surely fits, for each kind of device the row in the middle, then always the row farthest (in logarithms of parameters, sequence
length and micro-batch, by precision and recomputation) from those chosen. At most six, at most a third of the stack's rows.
The fit is a maximum a posteriori with a soft-L1 loss: coefficients start from a prior, so what the runs do not show stays
where it was.

Host times of Megatron-Core with Transformer Engine (`host_launch_s`, `host_module_s`, `host_collective_s`), and how much
slower other hosts run it than DGX H100's Xeon (`host_factor` of devices), come from its own tests: models so small that the
host decides. The runs are chosen by a rule too: of the layouts that ran on as many H100s, GB200s and A100s with nothing that
changes what the host does left unmodelled, the one with the fewest and the one with the most collectives a layer; of equal
runs the first.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runs_table.arguments import stated_options  # noqa: E402

from simulator.base.errors import InputError  # noqa: E402
from simulator.base.fit import Fit  # noqa: E402
from simulator.formats.readers.runs_table import RunRow, read_runs  # noqa: E402
from simulator.memory import simulate_memory  # noqa: E402
from simulator.play.lower import lower  # noqa: E402
from simulator.play.lower.rank_classes import SPEED_SPREAD  # noqa: E402
from simulator.predict.play import play  # noqa: E402
from simulator.spec.calibration import Calibration  # noqa: E402
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves  # noqa: E402
from simulator.spec.cluster import Cluster  # noqa: E402
from simulator.spec.model import Model  # noqa: E402
from simulator.spec.plan import Plan  # noqa: E402
from simulator.spec.plan.records import FsdpPlan, OptimizerPlan, RecomputePlan  # noqa: E402
from simulator.spec.software.stack import IN_STEP, Stack  # noqa: E402
from simulator.studies.backtest.outcome import RefusedError  # noqa: E402
from simulator.studies.backtest.resolve import Run, resolve  # noqa: E402
from simulator.studies.backtest.work import measured_step_s  # noqa: E402
from simulator.work.ops import build_blocks  # noqa: E402

RUNS = ROOT / "experiments" / "measured" / "runs-plain.csv.gz"
SOLO = ROOT / "experiments" / "measured" / "h200-2026-11-20" / "plans.jsonl"
STACKS = ROOT / "topologies" / "stacks"
NOISE = 0.015  # of a run: repeats of published runs differ by 1-2 %
MOST_RUNS = 6


@dataclass(frozen=True)
class Coefficient:
    """name: field of Stack, with .<architecture> for a table. prior, width: median and one sigma of its logarithm."""

    name: str
    prior: float
    width: float


# The priors say what each number can physically be. A product inside a step: IN_STEP, from our own single-GPU steps below.
# Elementwise kernels: a stream, if well written; up to three times that (docs/background/kernels.md).
HOPPER = Coefficient("gemm_factor.hopper", IN_STEP, 0.02)
AMPERE = Coefficient("gemm_factor.ampere", IN_STEP, 0.03)
ELEMENTWISE = Coefficient("elementwise_factor", 1.0, 0.3)
# Host seconds of an operator: some microseconds of C++ for a kernel, tens under an interpreter that runs Python around it
LAUNCH = Coefficient("host_launch_s", 20e-6, 0.7)
FITS: dict[str, tuple[Coefficient, ...]] = {
    "llm-foundry-2023": (
        AMPERE,
        HOPPER,
        # A100's streams were measured, most of H100's are the H200's: one factor for both would move what one device lacks to the other
        Coefficient("elementwise_factor.ampere", 1.0, 0.3),
        Coefficient("elementwise_factor.hopper", 1.0, 0.3),
        Coefficient("speed_factor.ampere", 1.0, 0.15),
        Coefficient("speed_factor.hopper", 1.0, 0.15),
    ),
    "nemo-24": (HOPPER, ELEMENTWISE),
    "internevo-2023": (AMPERE, ELEMENTWISE),
    "megatron-style-2023-by-layer": (
        AMPERE,
        ELEMENTWISE,
        LAUNCH,
        Coefficient("host_collective_s", 50e-6, 0.7),
        Coefficient("collective_wait_s", 50e-6, 0.7),
    ),
    "megatron-deepspeed-2022-blocking": (AMPERE, ELEMENTWISE, LAUNCH),
    "maxtext-2024": (Coefficient("gemm_factor.hopper", IN_STEP, 0.06), ELEMENTWISE),
}


def main() -> None:
    """Fit every stack of FITS, print what was found, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the coefficients into topologies/stacks")
    parser.add_argument("--only", choices=sorted((*FITS, HOST_STACK)), help="one stack; default: all")
    arguments = parser.parse_args()
    write = arguments.write
    sigma = 0.0 if arguments.only == HOST_STACK else solo_stack(write=write and arguments.only is None)
    by_stack: dict[str, list[Run]] = {}
    for row in read_runs(RUNS):
        run = _expressible(row) if isinstance(row, RunRow) else None
        if run is not None:
            by_stack.setdefault(run.stack.name, []).append(run)
    if arguments.only in (None, HOST_STACK):
        hosts(by_stack[HOST_STACK], write=write)
    for name, coefficients in FITS.items():
        if arguments.only not in (None, name):
            continue
        chosen = choose(by_stack[name])
        report(
            name,
            coefficients,
            [_Measured(run) for run in chosen],
            write=write,
            ids=[r.row.id for r in chosen],
            sigma=sigma,
        )


def _expressible(row: RunRow) -> Run | None:
    try:
        run = resolve(row)
        return run if measured_step_s(run) else None
    except (RefusedError, InputError):
        return None


# --- which runs


def choose(runs: Sequence[Run]) -> list[Run]:
    """At most six runs, at most a third of all, on the fewest devices, shared among the kinds of device and spread."""
    count = max(1, min(MOST_RUNS, len(runs) // 3))
    fewest = min(run.plan.num_devices for run in runs)
    runs = [run for run in runs if run.plan.num_devices == fewest and _roomy(run)]
    devices = sorted({run.cluster.device.name for run in runs})
    taken: list[Run] = []
    for index, device in enumerate(devices):
        share = count // len(devices) + (index < count % len(devices))
        taken += _spread([run for run in runs if run.cluster.device.name == device], share)
    return taken


def _roomy(run: Run) -> bool:
    """The run's memory surely fits: an allocator at its limit costs time that no coefficient here stands for."""
    blocks = build_blocks(run.model, run.stack, run.plan)
    memory, _ = simulate_memory(run.model, run.plan, run.stack, blocks, run.cluster.device)
    return memory.fit is Fit.FITS


def _spread(runs: Sequence[Run], count: int) -> list[Run]:
    runs = sorted(runs, key=lambda run: run.row.id)
    points = np.array([_features(run) for run in runs])
    deviation = points.std(axis=0)
    points = points / np.where(deviation > 0, deviation, 1)
    taken = [int(np.argmin(((points - np.median(points, axis=0)) ** 2).sum(axis=1)))]
    while len(taken) < min(count, len(runs)):
        distance = np.min([((points - points[i]) ** 2).sum(axis=1) for i in taken], axis=0)
        if not distance.any():
            break  # the rest are repeats
        taken.append(int(np.argmax(distance)))
    return [runs[i] for i in sorted(taken)]


def _features(run: Run) -> list[float]:
    plan = run.plan
    numbers = (run.model.num_parameters, plan.seq_len, plan.num_devices, plan.micro_batch_size)
    kinds = (plan.precision.compute, plan.recompute.mode)
    return [*(math.log(n) for n in numbers), *(float(_code(kind)) for kind in kinds)]


def _code(word: str) -> int:
    order = ("bf16", "fp8", "fp16", "none", "selective", "full", "every_k")
    return order.index(word) if word in order else 0


# --- what a stack with other coefficients would take


class _Measured:
    """A run that can be predicted again under changed coefficients."""

    def __init__(self, run: Run) -> None:
        self.run = run
        measured = measured_step_s(run)
        if measured is None:
            raise ValueError(run.row.id)
        self.measured_s = measured
        self.calibration = Calibration.for_device(run.cluster.device)

    def predicted_s(self, stack: Stack) -> float:
        run = self.run
        lowering = lower(run.model, run.plan, run.cluster, stack, self.calibration, default_curves())
        return play(lowering).step_s * run.time_factor


def changed(stack: Stack, values: dict[str, float]) -> Stack:
    """The stack with coefficients replaced."""
    elementwise = stack.fitted.elementwise_factor
    tables: dict[str, dict[str, float]] = {
        "gemm_factor": dict(stack.fitted.gemm_factor),
        "elementwise_factor": dict(elementwise) if isinstance(elementwise, dict) else {},
        "speed_factor": dict(stack.attention.speed_factor),
    }
    plain: dict[str, Any] = {}
    for name, value in values.items():
        table, dot, architecture = name.partition(".")
        if dot:
            tables[table][architecture] = value
        else:
            plain[name] = value
    attention = stack.attention.model_copy(update={"speed_factor": tables["speed_factor"]})
    if tables["elementwise_factor"]:
        plain["elementwise_factor"] = tables["elementwise_factor"]
    return stack.copy_with(**plain, gemm_factor=tables["gemm_factor"], attention=attention)


Values = dict[str, float]


def fit(
    coefficients: Sequence[Coefficient],
    predict: Sequence[Callable[[Values], float]],
    measured: np.ndarray,
    noise: float = NOISE,
) -> tuple[Values, Values]:
    """(value, standard error of its logarithm) of each coefficient."""
    prior = np.log([c.prior for c in coefficients])
    width = np.array([c.width for c in coefficients])

    def residuals(x: np.ndarray) -> np.ndarray:
        trial = {c.name: float(np.exp(v)) for c, v in zip(coefficients, x, strict=True)}
        data = (np.log([one(trial) for one in predict]) - np.log(measured)) / noise
        soft = np.sign(data) * np.sqrt(2 * (np.sqrt(1 + data**2) - 1))  # soft-L1 on the runs, not on the prior
        return np.concatenate([soft, (x - prior) / width])

    # A host that keeps ahead of the device leaves no trace, so its time has no slope there: begin on the other side as well
    late = np.array([2.0 if c.name.endswith("_s") else 0.0 for c in coefficients])
    starts = [prior, prior + late * width] if late.any() else [prior]
    ends = (least_squares(residuals, start, diff_step=np.full(len(start), 1e-3)) for start in starts)
    found = min(ends, key=lambda end: float(end.cost))
    jacobian = np.asarray(found.jac)
    errors = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    names = [c.name for c in coefficients]
    values = (float(f"{value:.3g}") for value in np.exp(found.x))
    return dict(zip(names, values, strict=True)), dict(zip(names, map(float, errors), strict=True))


def _of(stack: Stack, predict: Callable[[Stack], float]) -> Callable[[Values], float]:
    return lambda values: predict(changed(stack, values))


def report(
    name: str, coefficients: Sequence[Coefficient], runs: Sequence[_Measured], *, write: bool, ids: Sequence[str],
    sigma: float,
) -> None:  # fmt: skip
    """Fit one stack, say what was found and how the runs come out, and write it."""
    stack = Stack.load(name)
    measured = np.array([run.measured_s for run in runs])
    values, errors = fit(coefficients, [_of(stack, run.predicted_s) for run in runs], measured)
    after = [run.predicted_s(changed(stack, values)) / run.measured_s - 1 for run in runs]
    _print(name, values, errors, ids, after)
    if write:
        _write(name, values, errors, ids, sigma)


def _print(
    name: str, values: dict[str, float], errors: dict[str, float], ids: Sequence[str], after: Sequence[float]
) -> None:
    print(name)
    for key, value in values.items():
        print(f"  {key} = {_written(key, value)} ± {100 * errors[key]:.1f} %")
    for run_id, error in zip(ids, after, strict=True):
        print(f"  {run_id}: {100 * error:+.1f} %")


# --- hosts


HOST_STACK = "megatron-core-2025"
HOST_NOISE = 0.1  # equal tests of one suite differ by as much
GRACE, ROME = "host_factor.blackwell", "host_factor.ampere"  # beside GB200; DGX A100's EPYC
SLOWER = {GRACE: ("gb200", "gb300"), ROME: ("a100-sxm4-40gb", "a100-sxm4-80gb", "a800-80gb")}
HOST_OPTIONS = {"--deterministic-mode", "--moe-router-load-balancing-type"}  # sinkhorn: rounds that the host waits for
# A launch: torch.nn.Linear's forward on a DGX H100's Xeon takes 13.5 us of it, on Grace 2.75 times that in a loop of
# nothing else (github.com/NVIDIA/TransformerEngine/issues/2053). The rest: the host's share of a call through many layers
# of Python
HOSTS = (
    Coefficient("host_launch_s", 13.5e-6, 0.5),
    Coefficient("host_module_s", 100e-6, 0.7),
    Coefficient("host_collective_s", 50e-6, 0.7),
    Coefficient(GRACE, 2.0, 0.5),
    Coefficient(ROME, 1.2, 0.3),
)


def host_runs(runs: Sequence[Run]) -> list[Run]:
    """Two layouts, each run once on each of three kinds of host."""
    found: dict[str, dict[str, Run]] = {}
    for run in sorted(runs, key=lambda run: run.row.id):
        if stated_options(run.row) is None or HOST_OPTIONS & set(run.unmodelled):
            continue
        layout = f"{run.plan.model_dump_json()} {run.model.num_layers} {run.model.d_model} {run.stack.kernels.loss}"
        found.setdefault(layout, {}).setdefault(run.cluster.device.architecture, run)
    everywhere = [tuple(kinds.values()) for kinds in found.values() if len(kinds) == len(SLOWER) + 1]
    everywhere.sort(key=lambda same: (_collectives(same[0]), same[0].row.id))
    # of equals the first: a rank order may be all they differ in
    most = max(everywhere, key=lambda same: _collectives(same[0]))
    return [*everywhere[0], *most]


def _collectives(run: Run) -> int:
    """Of a layer, both ways."""
    ops = build_blocks(run.model, run.stack, run.plan).body[0].ops
    return sum(len(op.forward_exchanges) + len(op.backward_exchanges) for op in ops)


class _Hosted(_Measured):
    """A run whose host may be slower than its device says."""

    def under(self, values: Values) -> float:
        """Seconds with these host times of the Xeon."""
        device = self.run.cluster.device
        factor = values.get(f"host_factor.{device.architecture}", 1.0)
        slower = factor / device.host_factor  # the device's own comes on top of a stack's times
        times = {name: slower * value for name, value in values.items() if name not in SLOWER}
        times["host_kernel_s"] = slower * self.run.stack.further_kernel_s()
        return self.predicted_s(self.run.stack.copy_with(**times))


def hosts(runs: Sequence[Run], *, write: bool) -> None:
    """Fit the host times of HOST_STACK and the factors of other hosts, and write both."""
    chosen = [_Hosted(run) for run in host_runs(runs)]
    measured = np.array([run.measured_s for run in chosen])
    values, errors = fit(HOSTS, [run.under for run in chosen], measured, HOST_NOISE)
    ids = [run.run.row.id for run in chosen]
    after = [run.under(values) / run.measured_s - 1 for run in chosen]
    _print(f"{HOST_STACK}: hosts", values, errors, ids, after)
    if not write:
        return
    host_values = {name: value for name, value in values.items() if name not in SLOWER}
    _write(HOST_STACK, host_values, errors, ids, None)
    for factor, devices in SLOWER.items():
        for device in devices:
            path = STACKS.parent / "devices" / f"{device}.toml"
            line = f"host_factor = {values[factor]:.2f}"
            path.write_text(
                re.sub(r"^host_factor = [\d.]+$", line, path.read_text(), flags=re.MULTILINE), encoding="utf-8"
            )


# --- our own single-GPU steps


SIZES = {
    "l1B": (16, 2048, 32, 8, 8192, 128256),
    "l3B": (28, 3072, 24, 8, 8192, 128256),
    "l8B": (32, 4096, 32, 8, 14336, 128256),
    "l8B_v1k": (32, 4096, 32, 8, 14336, 1024),
    "l13B_v32k": (40, 5120, 40, 40, 13824, 32000),
    "l70B_8L": (8, 8192, 64, 8, 28672, 128256),
}


class Solo:
    """One rank of a sharded job on one H200, its collectives returning at once."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.name, self.measured_s = str(line["name"]), float(line["step_s"])
        layers, width, heads, kv, d_ff, vocab = SIZES[str(line["model"])]
        self.model = Model(
            name=str(line["model"]),
            family="llama",
            num_layers=layers,
            d_model=width,
            num_heads=heads,
            num_kv_heads=kv,
            d_ff=d_ff,
            mlp="swiglu",
            norm="rms",
            positions="rope",
            vocab_size=vocab,
        )
        world = int(line["world"])
        shards = line["shards"] or (8 if line["strategy"] == "hsdp" else world)
        self.plan = Plan(
            dp_shard=shards,
            dp_replicate=world // shards,
            seq_len=line["seq"],
            micro_batch_size=line["mb"],
            num_micro_batches=line["accum"],
            recompute=RecomputePlan(mode=line["ac"]),
            optimizer=OptimizerPlan(impl=line["opt"]),
            fsdp=FsdpPlan(reshard_after_forward=None if line["reshard"] else False),
        )
        self.cluster = Cluster.load("hgx-h200-8", max(1, world // 8))
        self.calibration = Calibration.for_device(self.cluster.device)

    def predicted_s(self, stack: Stack) -> float:
        """Step time without communication and without waiting for slower GPUs."""
        played = play(lower(self.model, self.plan, self.cluster, stack, self.calibration, LinkCurves.ideal()))
        absent = ("exposed", "interference", "stragglers")
        return sum(seconds for name, seconds in played.breakdown.items() if not name.startswith(absent))


def solo_stack(*, write: bool) -> float:
    """gemm_factor of plain eager PyTorch on the H200: every third FSDP2 plan that the GPU, not the host, decides.

    Returns the `sigma` of fitted stacks: the root mean square of what the other plans miss by, of what repeats of a run
    differ by, and of the spread among GPUs of one kind.
    """
    lines = [json.loads(text) for text in SOLO.read_text().splitlines()]
    usable = [x for x in lines if "error" not in x and x["strategy"] in ("fsdp2", "hsdp") and not x["compile"]]
    plans = [Solo(x) for x in sorted(usable, key=lambda x: x["name"]) if x["seq"] * x["mb"] >= 4096]
    chosen = plans[::3][:MOST_RUNS]
    stack = Stack.load("torch-2.11-eager")
    measured = np.array([plan.measured_s for plan in chosen])
    wide = Coefficient("gemm_factor.hopper", 1.0, 0.1)
    values, errors = fit((wide,), [_of(stack, plan.predicted_s) for plan in chosen], measured)
    ids = [plan.name for plan in chosen]
    misses = {p.name: p.predicted_s(changed(stack, values)) / p.measured_s - 1 for p in plans}
    _print(stack.name, values, errors, list(misses), list(misses.values()))
    unseen = [miss for name, miss in misses.items() if name not in ids]
    left = math.sqrt(sum(miss**2 for miss in unseen) / len(unseen))
    sigma = round(math.hypot(left, NOISE, SPEED_SPREAD), 3)
    print(f"  sigma of fitted stacks {sigma:.3f}: plans not seen miss by {left:.3f}")
    if write:
        _write(stack.name, values, errors, ids, sigma)
    return sigma


# --- writing


def _write(name: str, values: Values, errors: Values, ids: Sequence[str], sigma: float | None) -> None:
    """Set the keys in the stack's file, leaving everything else as it stands."""
    path = STACKS / f"{name}.toml"
    text = path.read_text(encoding="utf-8")
    tables: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        table, dot, architecture = key.partition(".")
        if dot:
            tables.setdefault(table, {})[architecture] = value
        else:
            text = _set(text, Stack.flat_names[key], _written(key, value))
        field = "attention_efficiency" if table == "speed_factor" else table
        text = _set(text, f"sources.{field}", json.dumps(_source(table, errors, ids), ensure_ascii=False))
    for table, entries in tables.items():
        inline = "{ " + ", ".join(f"{k} = {v:.3f}" for k, v in entries.items()) + " }"
        text = _set(text, Stack.flat_names.get(table, f"attention.{table}"), inline)
    text = _set(text, "fitted.calibration_runs", json.dumps(list(ids)))
    if sigma is not None:
        text = _set(text, "fitted.sigma", f"{sigma:.3f}")
    path.write_text(text, encoding="utf-8")


def _written(key: str, value: float) -> str:
    return f'"{1e6 * value:.3g}us"' if key.endswith("_s") else f"{value:.3f}"


def _source(table: str, errors: dict[str, float], ids: Sequence[str]) -> str:
    spread = ", ".join(
        f"{key.partition('.')[2] or 'all'} ± {100 * error:.1f} %"
        for key, error in errors.items()
        if key.startswith(table)
    )
    return f"experiments/fit_stacks.py on the {len(ids)} runs of calibration_runs: {spread}"


def _set(text: str, place: str, value: str) -> str:
    """Set a key of a table, as host.launch_s. What was not there comes first in its table; a new table before [attention]."""
    table, _, key = place.partition(".")
    line = f"{key} = {value}\n"
    head, mark, tail = text.partition(f"[{table}]\n")
    if not mark:
        head, attention, tail = text.partition("[attention]\n")
        return f"{head}[{table}]\n{line}\n{attention}{tail}"
    inside, bracket, rest = tail.partition("\n[")
    pattern = re.compile(rf"^{re.escape(key)} = .*\n?", re.MULTILINE)
    inside = pattern.sub(lambda _: line, inside, count=1) if pattern.search(inside) else line + inside
    return head + mark + inside.rstrip("\n") + "\n" + bracket + rest


if __name__ == "__main__":
    main()
