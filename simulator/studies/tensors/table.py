"""The node whose GPUs may hold tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.spec.cluster import Cluster
from simulator.work.offload.tiered import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """GPUs of one node. room: bytes of each. bytes_per_s: of the road from a GPU to another, one way."""

    room: tuple[int, ...]
    bytes_per_s: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, cluster: Cluster, room: Sequence[int]) -> Node:
        """The first node of a cluster, by the data sheet of its roads."""
        pairs = [(a, b) for a in range(len(room)) for b in range(len(room)) if a != b]
        rates = {(a, b): min(float(link.bytes_per_s) for link in cluster.route(a, b)) for a, b in pairs}
        return cls(room=tuple(room), bytes_per_s=rates)

    def seconds(self, tensor: Tensor, holder: int) -> float:
        """What the tensor's uses take on the road from where it is held; nothing at home."""
        if holder == tensor.gpu:
            return 0.0
        return len(tensor.uses_s) * tensor.num_bytes / self.bytes_per_s[holder, tensor.gpu]
