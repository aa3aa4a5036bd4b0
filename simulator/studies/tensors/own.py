"""A prediction's own tensors: of each GPU of a node what its units keep, and when the simulated step uses it.

A unit's parameters are used by its forwards and backwards, what it saves of a micro-batch by both of those, all its states by the
optimizer. What else a step holds (gradients in flight, temporaries, libraries) is taken off the GPU's room as a whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from simulator.memory import device_history, outside_torch_bytes
from simulator.memory.history import History
from simulator.memory.tape import TAG
from simulator.parallel.model_shard import shard_of
from simulator.play.engine import run
from simulator.play.lower import Lowering
from simulator.play.lower.pool_tiers import saved_by_unit, weight_of
from simulator.work.offload.tiered import Tensor
from simulator.work.script import resident_tensors
from simulator.work.trace import Span

_VISIT: Final = re.compile(r"(forward|backward) (embedding|head|layer\d+)(?: mb(\d+))?")
_FOLDED: Final = re.compile(r"[FBW](\d+)\.(\d+)")  # a pipeline's micro-batch and chunk, all its units in one
MOST_MICRO_BATCHES: Final = 8  # that are played


def own_tensors(lowering: Lowering) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """(tensors of all GPUs of the first node, bytes of each GPU for them); GPUs that no rank uses have all their room."""
    plan, cluster = lowering.plan, lowering.cluster
    timeline = run(lowering.programs(min(plan.num_micro_batches, max(MOST_MICRO_BATCHES, 2 * plan.pp))))
    device = cluster.device
    visible = device.usable_bytes - device.hypervisor_bytes
    room, tensors = [visible] * cluster.gpus_per_node, list[Tensor]()
    history = device_history(lowering.model, plan, lowering.stack, device)
    saved = _saved(history)
    for rank in range(min(plan.num_devices, cluster.gpus_per_node)):
        stage, gpu = lowering.mesh.coordinates(rank)["pp"], cluster.gpu_of(rank) % cluster.gpus_per_node
        spans = timeline.of(timeline.programs[stage if plan.pp > 1 else 0])
        mine = list(_tensors(lowering, spans, saved, gpu, stage))
        tensors += mine
        room[gpu] = max(0, visible - outside_torch_bytes(device, plan, stack=lowering.stack) - _beside(history))
    return tuple(tensors), tuple(room)


def _saved(history: History) -> Counter[str]:
    """Bytes that each unit saves of a micro-batch from its forward to its backward; `layer`: of any layer, for those of other stages."""
    found = saved_by_unit(history)["activations"]
    found["layer"] = max((size for unit, size in found.items() if unit.startswith("layer")), default=0)
    return found


def _beside(history: History) -> int:
    """Peak bytes of a step that are neither model states nor saved activations."""
    tags = {TAG[name] for name in ("parameters", "gradients", "optimizer_state", "activations")}
    live, most, sizes = 0, 0, dict[int, int]()
    for slot, num_bytes, _, tag in history.events:
        if num_bytes >= 0 and tag not in tags:
            sizes[slot] = num_bytes
            live += num_bytes
            most = max(most, live)
        elif num_bytes < 0:
            live -= sizes.pop(slot, 0)
    return most


def _tensors(
    lowering: Lowering, spans: tuple[Span, ...], saved: Counter[str], gpu: int, stage: int
) -> Iterator[Tensor]:
    uses: dict[tuple[str, str], list[float]] = {}  # (unit, micro-batch or empty) -> moments
    optimizer_s = max((float(span.start_s) for span in spans if span.category == "optimizer"), default=0.0)
    for unit, micro_batch, start_s in _visits(spans, lowering.plan.pipeline.virtual_stages):
        uses.setdefault((unit, ""), []).append(start_s)
        if _size(saved, unit):
            uses.setdefault((unit, micro_batch), []).append(start_s)
    shard = shard_of(lowering.stack.stored(lowering.model), lowering.plan, stage)
    totals = {name: sum(sizes) for name, sizes in resident_tensors(shard, lowering.plan).items()}
    units = [unit for unit, micro_batch in uses if not micro_batch]
    weights = {unit: weight_of(lowering.model, unit) for unit in units}
    for (unit, micro_batch), moments in uses.items():
        if micro_batch:
            yield Tensor(
                name=f"gpu{gpu} {unit} mb{micro_batch}: saved",
                gpu=gpu,
                num_bytes=_size(saved, unit),
                uses_s=tuple(sorted(moments)),
            )
            continue
        for name in ("parameters", "gradients", "optimizer_state"):
            size = totals[name] * weights[unit] // sum(weights.values())
            of_step = () if name == "optimizer_state" else sorted(moments)
            if size:  # states stay from one step to the next
                yield Tensor(
                    name=f"gpu{gpu} {unit}: {name}",
                    gpu=gpu,
                    num_bytes=size,
                    uses_s=(0.0, *of_step, max([optimizer_s, *of_step])),
                )


def _visits(spans: tuple[Span, ...], num_chunks: int) -> Iterator[tuple[str, str, float]]:
    """(unit, micro-batch, when) of each pass of a unit. Of folded passes the units begin together."""
    found = [(visit, span) for span in spans if (visit := _VISIT.match(span.label))]
    units = list(dict.fromkeys(visit[2] for visit, _ in found))
    width = -(-len(units) // num_chunks)
    for visit, span in found:
        yield visit[2], visit[3] or "0", float(span.start_s)
    for span in spans:
        if folded := _FOLDED.fullmatch(span.label):
            for unit in units[int(folded[2]) * width :][:width]:
                yield unit, folded[1], float(span.start_s)


def _size(saved: Counter[str], unit: str) -> int:
    return saved[unit] or (saved["layer"] if unit.startswith("layer") else 0)
