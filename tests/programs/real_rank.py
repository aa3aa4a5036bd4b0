"""One rank of a real run on gloo and CPU: `real_rank.py OUT.json PROGRAM.py ARGS`, watched by torch's profiler alone.

Written down: collectives of the step behind two others [kind, bytes of the full tensor] in their order, and the storages
that are alive at that step's peak [bytes, operator that made it], by the allocator's own events since the program began.
Buffers of gloo's own are left out: nothing else calls them by their size, and NCCL has none. The profiler refers to each
tensor whose shape it notes, and torch swaps no such tensors (`to_empty` of a DTensor): WATCHED is "memory" (without shapes)
or "collectives" (from the first step's end on) where a program does that.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from validate.capture import triton_absent
from validate.every_thread import wait_for_threads

KINDS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter", "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast", "alltoall_base_": "all_to_all", "alltoall_": "all_to_all",
    "reduce_": "reduce", "gather_": "gather", "scatter_": "scatter", "send": "send", "recv_": "receive",
}  # fmt: skip
FULL_IS_SECOND = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_scatter_", "scatter_")
ITEM_BYTES = {
    "float": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "double": 8,
    "int": 4,
    "long int": 8,
    "bool": 1,
    "unsigned char": 1,
}
STEPS = 3
NUMBER_BYTES = 8
RANDOM_BYTES = torch.get_rng_state().numel()  # the CPU's own generator, which checkpoints keep beside the GPU's


def main(out: str, program: str, *arguments: str) -> None:
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401  every place that knows a mesh's makers by name is there to be marked

    for owner, name in ((DeviceMesh, "__init__"), (DistributedDataParallel, "__init__")):
        setattr(owner, name, host(getattr(owner, name)))
    original, marked = device_mesh.init_device_mesh, host(device_mesh.init_device_mesh)
    for module in list(sys.modules.values()):
        if vars(module).get("init_device_mesh") is original:
            vars(module)["init_device_mesh"] = marked
    triton_absent.install()
    sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent)
    watched = os.environ.get("WATCHED", "both")
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=watched != "memory")
    if watched == "collectives":
        first = register_optimizer_step_post_hook(lambda *_: (first.remove(), profiler.start()))
    else:
        profiler.start()
    runpy.run_path(program, run_name="__main__")
    wait_for_threads()
    profiler.stop()
    results = profiler.profiler.kineto_results
    events = sorted(results.events(), key=lambda one: one.start_ns())
    steps = [one.end_ns() for one in events if one.name().startswith("Optimizer.step#") and outermost(one, events)]
    seen = STEPS - (watched == "collectives")
    begin, end = steps[seen - 2 : seen]
    found: dict[str, list[Any]] = {}
    if watched != "memory":
        found["collectives"] = [one for at, *one in collectives(events) if begin <= at < end]
    if watched != "collectives":
        found["peak"] = peak(list(walk(results.experimental_event_tree(), ())), begin, end)
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def host(original: Callable[..., Any]) -> Callable[..., Any]:
    """What keeps tensors on the CPU wherever the model lies, marked: ranks of a mesh, which parameters DDP saw."""

    @wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("host"):
            return original(*args, **kwargs)

    return marked


def outermost(one: Any, events: list[Any]) -> bool:
    """A step of an optimizer that is not part of another's."""
    return not any(
        other is not one
        and other.name().startswith("Optimizer.step#")
        and other.start_ns() <= one.start_ns()
        and one.end_ns() <= other.end_ns()
        for other in events
    )


def collectives(events: list[Any]) -> Iterator[list[Any]]:
    """[time, kind, bytes] of each call of a process group. gloo's own event says the dtype: the next of as many elements, or the next."""
    own = [one for one in events if one.name().startswith("gloo:")]
    for event in events:
        name = event.name().removeprefix("c10d::")
        if name == event.name() or name not in KINDS:
            continue
        place = 1 if name in FULL_IS_SECOND or name == "allgather_" else 0
        shapes, dtype = [event.structured_input_shapes()[place]], event.dtypes()[place]
        if dtype not in ITEM_BYTES:  # a list of tensors
            shapes = list(flat(shapes))
            count = sum(map(prod, shapes))
            later = [one for one in own if one.start_ns() >= event.start_ns() and any(one.dtypes())]
            alike = (one for one in later if sum(map(prod, flat(one.structured_input_shapes()))) == count)
            dtype = next(alike, later[0]).dtypes()[0]
        ranks = int(os.environ["WORLD_SIZE"]) if name == "allgather_" else 1  # its lists of results are not recorded
        yield [event.start_ns(), KINDS[name], ranks * sum(prod(one) for one in shapes) * ITEM_BYTES[dtype]]


def flat(shapes: list[Any]) -> Iterator[list[int]]:
    """The shapes in nested lists of them."""
    if shapes and isinstance(shapes[0], list):
        for one in shapes:
            yield from flat(one)
    else:
        yield shapes


def walk(events: list[Any], above: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Allocator events with the operators around them."""
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event, above
        yield from walk(event.children, (*above, event))


def peak(allocations: list[tuple[Any, tuple[Any, ...]]], begin: int, end: int) -> list[tuple[int, str]]:
    """What is alive at the peak between two times."""
    alive: dict[int, tuple[int, str]] = {}
    best, total, most = [], 0, -1
    for event, size, name in lives(sorted(allocations, key=lambda one: one[0].start_time_ns)):
        if event.start_time_ns >= end:
            break
        pointer = event.extra_fields.ptr
        if size > 0:
            alive[pointer] = (size, name)
            total += size
        else:
            total -= alive.pop(pointer)[0]
        if event.start_time_ns >= begin and total > most:
            best, most = list(alive.values()), total
    return best


def lives(allocations: list[tuple[Any, tuple[Any, ...]]]) -> Iterator[tuple[Any, int, str]]:
    """(event, bytes, operators around it) of the program's own storages: negative bytes for a free.

    A CPU kernel's scratch, freed before its operator returns, and what gloo takes are not the program's.
    """
    found: list[tuple[Any, int, str] | None] = []
    open_: dict[
        int, tuple[int, int, bool]
    ] = {}  # pointer -> place in found, end of the kernel, whether gloo may free it
    for event, above in allocations:
        fields = event.extra_fields
        names = [one.name for one in above]
        if fields.alloc_size < 0:
            at, until, _ = open_.pop(fields.ptr, (-1, 0, False))
            if at >= 0:
                found[at] = None if event.start_time_ns < until else found[at]
                found.append((event, fields.alloc_size, "") if found[at] else None)
        elif not any(one.startswith(("c10d::", "gloo:", "enumerate(DataLoader)")) for one in names):
            by_itself = not names or not names[-1].startswith(("aten::", "FSDP::"))
            if by_itself and (fields.alloc_size <= NUMBER_BYTES or fields.alloc_size == RANDOM_BYTES):
                continue  # a number of Python's beside a tensor, which autograd keeps on the CPU
            until = next((one.end_time_ns for one in above if is_kernel(one.name)), 0)
            if fields.ptr in open_:  # freed by a thread of gloo's, which nobody watches
                found[open_[fields.ptr][0]] = None
            open_[fields.ptr] = (len(found), until, "host" in names or is_sent(names))
            found.append((event, fields.alloc_size, " < ".join(reversed(names[-6:]))))
    for at, _, sent in open_.values():  # nobody saw gloo's threads free what they sent
        found[at] = None if sent else found[at]
    yield from (one for one in found if one is not None)


def is_sent(names: list[str]) -> bool:
    """Tensors that were joined to be sent, inside a step; a model's own parameters are joined before."""
    inside = any(one == "DistributedDataParallel.forward" or one.startswith("autograd::engine") for one in names)
    return inside and "aten::flatten_dense_tensors" in names


@cache
def is_kernel(name: str) -> bool:
    """An operator that a device runs, not one that is made of others."""
    if not name.startswith("aten::"):
        return False
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    names = [name if one == "default" else f"{name}.{one}" for one in (packet.overloads() if packet else ())]
    implicit = torch._C._dispatch_has_kernel_for_dispatch_key
    known = [one for one in names if torch._C._dispatch_has_kernel(one)]
    return not any(implicit(one, "CompositeImplicitAutograd") for one in known)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(*sys.argv[1:])
