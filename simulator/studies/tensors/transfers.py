"""schedule_transfers: when what is held elsewhere crosses the roads of a node.

A use of a tensor that a peer holds is served ahead of time by a copy, where its own GPU has room for one until then; else the kernel
reads it in place. A GPU's port carries one transfer each way at a time, those that are needed first before the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from simulator.studies.tensors.assign import Assignment, GpuMemory, Node
from simulator.work.offload.tiered import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One use of one tensor. how: a copy ahead of it, or read in place. exposed_s: by how much it comes after its use."""

    tensor: str
    source: int
    target: int
    num_bytes: int
    how: Literal["copied ahead", "read in place"]
    start_s: float
    end_s: float
    used_s: float

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.end_s - self.used_s)


def schedule_transfers(tensors: Sequence[Tensor], node: Node, found: Assignment) -> tuple[Transfer, ...]:
    """Every transfer, in the order of the uses. The first use makes the tensor, so that it is written in place."""
    memory = GpuMemory(tensors, node)
    for one, gpu in zip(tensors, found.holders, strict=True):
        memory.add(one, gpu)
    out_s, in_s = [0.0] * len(node.room), [0.0] * len(node.room)
    uses = sorted(
        (used_s, number, index)
        for index, one in enumerate(tensors)
        if found.holders[index] != one.gpu
        for number, used_s in enumerate(one.uses_s)
    )
    transfers: list[Transfer] = []
    for used_s, number, index in uses:
        one, source = tensors[index], found.holders[index]
        seconds = one.num_bytes / node.bytes_per_s[source, one.gpu]
        port_s = max(out_s[source], in_s[one.gpu])
        before_s = one.uses_s[number - 1] if number else used_s
        start_s = max(port_s, before_s)
        copy = Tensor(
            name=one.name, gpu=one.gpu, num_bytes=one.num_bytes, uses_s=(memory.at_or_before(start_s), used_s)
        )
        ahead = number > 0 and start_s < used_s and memory.fits(copy, one.gpu)
        if ahead:
            memory.add(copy, one.gpu)
        else:
            start_s = max(port_s, used_s)
        out_s[source] = in_s[one.gpu] = start_s + seconds
        transfers.append(
            Transfer(
                tensor=one.name, source=source, target=one.gpu, num_bytes=one.num_bytes, start_s=start_s,
                how="copied ahead" if ahead else "read in place", end_s=start_s + seconds, used_s=used_s,
            )
        )  # fmt: skip
    return tuple(transfers)
