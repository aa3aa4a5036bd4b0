"""Rank 0 of plans, one after another, each in a process of its own: `python -m tests.plain_torch.rank fake|plain cpu|cuda OUT NAME ...`.

fake: as `validate run --mode fake` plays it. plain: real tensors on a CPU, counted by the events of torch's own allocator;
nothing but the profiler follows the step, no mode of dispatch and no tracker. The other ranks are torch's fake process group
both times: what is compared is what torch itself makes of a plan. A GPU's bytes are counted on the CPU with what a GPU has
otherwise: blocks of 512 bytes, the results of its attention kernels and (where torch has no CUDA) SiLU's composed backward.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tests.plain_torch.plans import task
from validate.players import guard
from validate.task import Task

if sys.argv[1:3] == ["fake", "cuda"] and guard.needs_guard():  # before torch is loaded
    with tempfile.TemporaryDirectory() as scratch:
        guard.stand_in(Path(scratch))

import torch
from torch import Tensor
from torch import distributed as dist

from validate import context_parallel
from validate.gpus import built_with_cuda
from validate.parallel import build, make_optimizer, materialise, replicate
from validate.playable import unplayable
from validate.players import fake
from validate.players.allocated import Change, changes, moments, profiled
from validate.players.hooks import reduced_in_place
from validate.players.memory import MICRO_BATCHES
from validate.steps import TrainingStep
from validate.torch_private import FakeStore, attention_kernels

GPU_BLOCK_BYTES: Final = 512
NUMBER_BYTES: Final = 8  # of a number of Python's beside a tensor, which stays on the CPU wherever the tensor is
LSE_ROWS: Final = 32  # the memory-efficient kernel's log-sum-exps are filled up to a multiple


def main(way: str, device: str, out: str, *names: str) -> None:
    """A line of JSON for each plan, at the file's end: its name, and the bytes of its third step, or what was wrong."""
    for name in names:
        if not os.fork():
            status = 1
            try:
                # Not before the fork: the pool of threads that this makes would have to be made anew in the child, and the
                # first to see that are autograd's threads, all at once, of which some then find none and end the process.
                torch.set_num_threads(1)
                torch.manual_seed(0)
                found = {"name": name, "memory": _played(way, task(name, device))}
                status = 0
            except Exception as exc:  # noqa: BLE001  the table has a row for it
                found = {"name": name, "error": f"{type(exc).__name__}: {exc}"}
            with Path(out).open("a", encoding="utf-8") as lines:
                print(json.dumps(found), file=lines)
            os._exit(status)
        os.wait()


def _played(way: str, asked: Task) -> dict[str, Any]:
    if faults := unplayable(asked.model, asked.plan, asked.stack, "fake"):
        raise ValueError("; ".join(map(str, faults)))
    if way == "fake":
        return fake.play(asked.model, asked.plan, asked.stack, asked.device).as_json()
    with tempfile.TemporaryDirectory() as folder:
        return plain(asked, Path(folder))


def plain(asked: Task, folder: Path) -> dict[str, Any]:
    """Bytes of the third step, in the words of a record's memory. Uses the process's default group."""
    plan, cpu, on_gpu = asked.plan, torch.device("cpu"), asked.device == "cuda"
    kept = _gpu_kernels() if on_gpu else None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.num_devices)
    built = build(asked.model, plan, asked.stack, cpu, direct_flash=on_gpu)
    number = min(plan.num_micro_batches, MICRO_BATCHES)

    def run(announce: Callable[[str], None]) -> None:
        materialise(built, cpu)
        step = TrainingStep(built, asked.model, plan, asked.stack, cpu)
        built.optimizer = make_optimizer(built, plan)
        replicate(built, plan, reduced_in_place(plan))
        for _ in range(2):
            step.run(num_micro_batches=number)
        announce("start")
        step.run(announce, number)

    events = profiled(run, folder)
    del kept
    return moments(_alive(changes(events), on_gpu=on_gpu), events)


def _alive(found: Sequence[Change], *, on_gpu: bool) -> list[tuple[float, int]]:
    """(time, bytes alive from then on) of storages that a device would hold."""
    sizes: dict[int, int] = {}
    rows: list[tuple[float, int]] = []
    block, live = GPU_BLOCK_BYTES if on_gpu else 1, 0
    for one in found:
        if one.num_bytes < 0:
            live -= sizes.pop(one.address, 0)
        elif not one.scratch and (one.in_kernel or one.num_bytes > NUMBER_BYTES):
            sizes[one.address] = -(-one.num_bytes // block) * block
            live += sizes[one.address]
        rows.append((one.at, live))
    return rows


# --- a GPU's kernels on a CPU


def _gpu_kernels() -> torch.library.Library:
    """What CUDA's kernels leave behind, as kernels of the CPU while the library lives. Nothing is computed."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _flash_back, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", _efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _efficient_back, "CPU")
    if not built_with_cuda():
        library.impl("silu_backward", _silu_back, "CPU", allow_override=True)
    context_parallel.attention_kernels = lambda q: attention_kernels(
        SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=q.dtype)
    )
    return library


def _flash(q: Tensor, k: Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    """Results where q has its own, a log-sum-exp a row in fp32, seed and offset, and a scalar that nobody uses."""
    b, heads, s, _c = q.shape
    lse = q.new_empty((b, heads, s), dtype=torch.float32)
    random, unused = q.new_empty((2,), dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
    return torch.empty_like(q), lse, None, None, s, k.shape[2], random, unused, q.new_empty(0)


def _flash_back(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (q, k, v)))


def _efficient(q: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
    """Results in [b, s, H, C], log-sum-exps of whole blocks of rows, seed and offset."""
    b, heads, s, _c = q.shape
    lse = q.new_empty((b, heads, -(-s // LSE_ROWS) * LSE_ROWS), dtype=torch.float32)
    return _by_rows(q), lse, q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)


def _efficient_back(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    """Gradients of q, k and v, and none of a mask that is not there."""
    return _by_rows(q), _by_rows(k), _by_rows(v), None


def _by_rows(x: Tensor) -> Tensor:
    """[b, H, s, C] as a view of [b, s, H, C]."""
    b, heads, s, c = x.shape
    return x.new_empty((b, s, heads, c)).transpose(1, 2)


def _silu_back(gradient: Tensor, x: Tensor) -> Tensor:
    """As aten writes it where a device has no kernel; what a C++ expression makes lives to its end."""
    sigmoid = torch.sigmoid(x)
    parts = [1 - sigmoid]
    parts.append(x * parts[-1])
    parts.append(1 + parts[-1])
    parts.append(sigmoid * parts[-1])
    return gradient * parts[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
