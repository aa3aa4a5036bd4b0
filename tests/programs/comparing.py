"""Programs that others wrote, captured and run for real: `python -m tests.programs.comparing [NAME ...]` prints a table.

Each program runs its three steps twice: captured as rank 0 of 2 on tensors without values, and as two real ranks on gloo
and CPU under torch's profiler (`real_rank.py`). Of the third step: collectives, and what is alive at its peak.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simulator.cli import main as shardwise
from simulator.formats.readers.capture import read_capture
from simulator.work.captured.capture import Capture, Kind

HERE = Path(__file__).resolve().parent
RANKS = 2
DEADLINE_S = 300
SMALL_BYTES = 512


@dataclass(frozen=True, slots=True)
class Program:
    """A program of this folder, its arguments, and the packages that it needs beside torch.

    memory: it is equal to a real run's on a CPU, and must stay so. real: a CPU runs the same program at all. ranks: of the job.
    swaps: it swaps tensors, and is run twice (`real_rank.py` says why).
    """

    name: str
    file: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    memory: bool = True
    real: bool = True
    ranks: int = RANKS
    swaps: bool = False

    def missing(self) -> list[str]:
        return [one for one in self.needs if find_spec(one) is None]


_FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "mamba2", "llava")
_TP, _PP = "--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree"
_CP, _COMPILED = "--parallelism.context_parallel_degree", "--compile.enable"
_EP, _BALANCED = "--parallelism.expert_parallel_degree", "--debug.moe_force_load_balance"
_TITAN: dict[str, tuple[str, ...]] = {
    "fsdp": ("llama3", "debugmodel"),
    "fsdp-full-ac": ("llama3", "debugmodel", "--activation_checkpoint.mode", "full"),
    "fsdp-tp": ("llama3", "debugmodel", _TP, "2"),
    "fsdp-pp": ("llama3", "debugmodel", _PP, "2"),
    "fsdp-tp-pp": ("llama3", "debugmodel", _PP, "2", _TP, "2"),
    "moe-ep": ("qwen3", "debugmodel_moe", _EP, "2", _BALANCED),
    "deepseek-ep": ("deepseek_v3", "debugmodel", _EP, "2", _BALANCED),
    "fsdp-cp": ("llama3", "debugmodel", _CP, "2"),
    "fsdp-tp-compiled": ("llama3", "debugmodel", _TP, "2", _COMPILED),
}


def _titan(name: str, *options: str) -> Program:
    """torchtitan's trainer, a rank a GPU of what it splits by and two shards."""
    needs, split = ("torchtitan", "tyro", "torchdata", "datasets"), 2 ** sum(one in (_TP, _PP, _CP) for one in options)
    both = _CP not in options and _COMPILED not in options  # a CPU has no ring attention, and compiles for itself
    return Program(
        f"torchtitan-{name}", "torchtitan_trainer.py", options, needs, ranks=2 * split, swaps=True, real=both
    )


PROGRAMS = {
    one.name: one
    for one in (
        Program("nanogpt-ddp", "nano_gpt.py", ("gpt",)),
        Program("own-operator-ddp", "nano_gpt.py", ("own",)),
        *(
            Program(f"{family}-{recipe}", "hugging_face.py", (family, recipe), ("transformers",))
            for family in _FAMILIES
            for recipe in ("fsdp2", "ddp")
        ),
        Program("accelerate-fsdp2", "launched.py", ("accelerate",), ("transformers", "accelerate"), real=False),
        Program("trainer-ddp", "launched.py", ("trainer",), ("transformers", "accelerate")),
        Program("lora-ddp", "launched.py", ("lora",), ("transformers", "accelerate", "peft")),
        Program("vit-ddp", "vision.py", ("vit",), ("timm",)),
        Program("dit-ddp", "vision.py", ("dit",), ("diffusers",), memory=False),
        *(
            Program(f"deepspeed-zero{stage}", "deepspeed_engine.py", (str(stage),), ("deepspeed",), memory=False)
            for stage in (1, 2, 3)
        ),
        Program("unet-ddp", "vision.py", ("unet",), ("diffusers",), memory=False),
        Program("megatron-tp-pp", "megatron_core.py", ("2", "2", "sequence"), ("megatron",), memory=False, ranks=4),
        Program("megatron-distributed", "megatron_core.py", ("1", "1", "distributed"), ("megatron",)),
        *(_titan(name, *options) for name, options in _TITAN.items()),
    )
}


@dataclass(frozen=True, slots=True)
class Step:
    """Collectives of a step in order, [kind, bytes of the full tensor]; bytes alive at its peak, largest first."""

    collectives: list[list[object]]
    at_peak: list[int]


def captured(program: Program, folder: Path) -> Step:
    """The third step, captured."""
    out = folder / "step.capture.gz"
    told = shardwise(
        ["capture", str(HERE / program.file), "-o", str(out), "--ranks", str(program.ranks), "--", *program.arguments]
    )
    if told:
        raise RuntimeError(f"{program.name} was not captured: exit code {told}")
    return step_of(read_capture(out))


def step_of(capture: Capture) -> Step:
    """What a capture says of its recorded step."""
    alive: dict[int, int] = {}
    total, most, at_peak = 0, -1, list[int]()
    for index, (kind, *values) in enumerate(capture.events):
        if kind == Kind.ALLOCATE:
            alive[values[0]] = values[1]
            total += values[1]
        elif kind == Kind.FREE:
            total -= alive.pop(values[0])
        if index >= capture.steady and total > most:
            most, at_peak = total, list(alive.values())
    found: list[list[object]] = []
    for event in capture.events[capture.steady :]:
        if event[0] == Kind.COLLECTIVE:
            found.append([capture.names[event[2]], event[4]])
        elif event[0] == Kind.MESSAGE:
            found.append(["receive" if event[2] else "send", event[5]])
    return Step(found, sorted(at_peak, reverse=True))


def real(program: Program, folder: Path, popen: Callable[..., Any] = subprocess.Popen) -> Step:
    """The third step of rank 0 of a real run, or of two that are watched in turn. popen: starts its processes."""
    found: dict[str, list[list[object]]] = {}
    for watched in ("memory", "collectives") if program.swaps else ("both",):
        found |= _played(popen, program, folder, watched)
    return Step(found["collectives"], sorted((size for size, _ in found["peak"]), reverse=True))


def _played(popen: Callable[..., Any], program: Program, folder: Path, watched: str) -> dict[str, list[list[object]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(program.ranks),
        "LOCAL_WORLD_SIZE": str(program.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WATCHED": watched,
    }
    every = range(program.ranks)
    ranks = [_rank(popen, program, folder, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in every]
    try:
        told = [one.communicate(timeout=DEADLINE_S)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    if any(one.returncode for one in ranks):
        raise RuntimeError(f"{program.name} failed on gloo: {told[0].decode(errors='replace')[-2000:]}")
    found: dict[str, list[list[object]]] = json.loads((folder / "rank0.json").read_text(encoding="utf-8"))
    return found


def _rank(popen: Callable[..., Any], program: Program, folder: Path, variables: dict[str, str]) -> Any:
    out = folder / f"rank{variables['RANK']}.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.programs.real_rank", str(out)]
    own = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    own["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for a device by itself
    return popen(
        [*command, str(HERE / program.file), *program.arguments],
        env=own, cwd=HERE.parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def beyond_scalars(sizes: list[int]) -> list[int]:
    """Without what fits a block of CUDA's allocator.

    Whether gloo's thread has freed one of its own by the peak is a race: single numbers, DDP's table of buckets (an int for
    each parameter and one more).
    """
    return [size for size in sizes if size > SMALL_BYTES]


def main(names: list[str]) -> int:
    """A row for each program; exit status 1 where one differs."""
    differs = False
    heads = ("program", "collectives", "equal", "bytes at peak, captured", "real", "equal")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for name in names or PROGRAMS:
        program = PROGRAMS[name]
        if missing := program.missing():
            print(f"| {name} | needs {', '.join(missing)} | | | | |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            one = captured(program, Path(folder))
            if not program.real:
                print(f"| {name} | {len(one.collectives)} | captured only | {sum(one.at_peak):,} | | |", flush=True)
                continue
            other = real(program, Path(folder))
        same = one.collectives == other.collectives, beyond_scalars(one.at_peak) == beyond_scalars(other.at_peak)
        differs |= not all(same)
        said = ["yes" if each else "no" for each in same]
        count, sizes = len(one.collectives), (sum(one.at_peak), sum(other.at_peak))
        print(f"| {name} | {count} | {said[0]} | {sizes[0]:,} | {sizes[1]:,} | {said[1]} |", flush=True)
    return int(differs)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
