"""A captured program whose optimizer runs in the host's memory: state there, gradients down, Adam on the CPU, parameters up.

The capture is written anew as under an optimizer like torchao's CPUOffloadOptimizer, without the overlap that a real one may
have: behind the last gradient all of them are sent, then all parameters are updated and sent back, and the step ends. Adam
alone, whose cost on a CPU is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.spec.cluster.tiers import ADAM_BYTES_PER_NUMEL, HostTier
from simulator.work.captured.capture import Capture, Kind, Phase
from simulator.work.captured.changed import rewritten
from simulator.work.captured.cost import KernelCost
from simulator.work.captured.tensors import parsed, tensors

# Of Adam and its kin: once a parameter, which comes first
_UPDATES = ("aten._fused_adam", "aten._foreach_addcdiv_", "aten.addcdiv_")


class Update(NamedTuple):
    """What a rank's optimizer updates: parameters, and bytes of its state, of gradients and of parameters."""

    numel: int
    state_bytes: int
    gradient_bytes: int
    parameter_bytes: int


def update_of(capture: Capture) -> Update | None:
    """The recorded step's update of one rank; None without Adam, or where it has no state on the GPU."""
    at = _window(capture)
    kernels = [capture.signatures[event[1]] for event in (capture.events[i] for i in at) if event[0] == Kind.OPERATOR]
    updated = (parsed(args)[0][:1] for name, args, _ in kernels if name.startswith(_UPDATES))
    sizes = Counter[str]()
    for storage, size in capture.resident(at.start).items():
        sizes[capture.categories.get(storage, "")] += size
    of_kinds = (sizes[name] for name in ("optimizer_state", "gradients", "parameters"))
    found = Update(sum(one.numel for first in updated for one in tensors(first)), *of_kinds)
    return found if all(found) else None


def optimizer_in_host(capture: Capture, tier: HostTier, ranks: int) -> Capture | None:
    """One rank with its optimizer on the CPU, which `ranks` ranks of a node share; None where that frees nothing."""
    update = update_of(capture)
    if update is None:
        return None
    beside, count = tier.memory_bytes_per_s / ranks, len(capture.signatures)
    moves = {
        "send_gradients": update.gradient_bytes / min(tier.d2h_bytes_per_s, beside),
        "cpu_adam": update.numel * max(ranks / tier.adam_numel_per_s, ADAM_BYTES_PER_NUMEL / beside),
        "send_parameters": update.parameter_bytes / min(tier.h2d_bytes_per_s, beside),
    }
    costs = {count + n: KernelCost(seconds=each, category="offload") for n, each in enumerate(moves.values())}
    signatures = [*capture.signatures, *((f"host.{name}.default", ((), ()), ()) for name in moves)]
    events, steady = _moved(rewritten(capture, {}), costs)
    costs |= capture.costs
    return replace(capture, signatures=signatures, costs=costs, events=events, steady=steady)


def _moved(capture: Capture, moves: Iterable[int]) -> tuple[list[Sequence[int]], int]:
    """Events with `moves` in the place of the optimizer's kernels, their temporaries and its state; where the step begins."""
    window = _window(capture)
    state = {storage for storage, name in capture.categories.items() if name == "optimizer_state"}
    inside = [capture.events[index] for index in window]
    made = {event[1] for event in inside if event[0] == Kind.ALLOCATE}
    passing = {event[1] for event in inside if event[0] == Kind.FREE} & made
    found: list[Sequence[int]] = []
    steady = capture.steady
    for index, event in enumerate(capture.events):
        if index == capture.steady:
            steady = len(found)
        if index == window.start:
            found += [[Kind.OPERATOR, number, *event[2:4], Phase.OPTIMIZER] for number in moves]
        gone = state | passing if index in window else state
        of_storage = event[0] in (Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM)
        if not (event[1] in gone if of_storage else index in window and event[0] == Kind.OPERATOR):
            found.append(event)
    return found, steady


def _window(capture: Capture) -> range:
    """The events from the first of the optimizer's kernels to the last, and storages that come and go at once behind it."""
    own = [
        index
        for index in range(capture.steady, len(capture.events))
        if capture.events[index][0] == Kind.OPERATOR and capture.events[index][4] == Phase.OPTIMIZER
    ]
    if not own:
        return range(0)
    behind = range(own[-1] + 1, len(capture.events))
    storages = (Kind.ALLOCATE, Kind.FREE)
    return range(own[0], next((i for i in behind if capture.events[i][0] not in storages), len(capture.events)))
