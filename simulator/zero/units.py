"""Units: the parameters that an implementation gathers, reduces and frees together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from simulator.kernels import DTYPE_BYTES
from simulator.model import Model
from simulator.plan import Plan

Shape = tuple[int, ...]
FIRST_BUCKET_BYTES = 2**20  # DDP's first bucket is small so that communication starts early
DEFAULT_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered, reduced and freed together.

    shapes: of its parameters in registration order. shards: ranks it is cut into (1: replicated).
    local_numels: elements of each stored tensor on the fullest rank; padded_numel: elements of its collectives.
    """

    name: str
    shapes: tuple[Shape, ...]
    shards: int
    local_numels: tuple[int, ...]
    padded_numel: int

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part of a collective."""
        return self.padded_numel // self.shards


def shard_ranks(plan: Plan) -> int:
    """N: ranks over which the plan's stage cuts states. Context parallelism shares its ranks with FSDP's shards."""
    return plan.dp_shard * plan.cp if plan.zero > 0 else 1


def pieces(model: Model) -> tuple[tuple[str, tuple[Shape, ...]], ...]:
    """Embedding, layers and head with their parameters' shapes, in registration order."""
    embedding, layer, head = (
        tuple(shape for _, shape in model.parameter_shapes(part)) for part in ("embedding", "layer", "head")
    )
    return ("embedding", embedding), *((f"layer{i}", layer) for i in range(model.num_layers)), ("head", head)


def units(model: Model, plan: Plan) -> tuple[Unit, ...]:
    """The plan's units in the order in which the forward pass needs them.

    FSDP: one a transformer block, and the root (embedding, final norm, head), which comes first.
    DDP and torch's ZeRO-1: one a bucket, in the order in which the backward fills them. DeepSpeed stage 3: one a piece.
    DeepSpeed 1 and 2, Megatron: one flat group.
    """
    implementation = plan.implementation
    if implementation in ("fsdp1", "fsdp2"):
        return _fsdp_units(model, plan)
    if implementation in ("ddp", "zero_redundancy"):
        return tuple(
            Unit(
                name=name, shapes=shapes, shards=1, local_numels=tuple(map(prod, shapes)), padded_numel=numel_of(shapes)
            )
            for name, shapes, _ in buckets(model, plan)
        )
    if plan.zero == 3:
        return tuple(_flat(name, shapes, shard_ranks(plan)) for name, shapes in pieces(model))
    everything = tuple(shape for _, shapes in pieces(model) for shape in shapes)
    return (_flat("parameters", everything, shard_ranks(plan)),)


def _fsdp_units(model: Model, plan: Plan) -> tuple[Unit, ...]:
    ranks = shard_ranks(plan)
    make = _rows if plan.implementation == "fsdp2" else _flat
    (_, embedding), *layers, (_, head) = pieces(model)
    root = make("root", (*embedding, *head), ranks)
    if not layers:
        return (root,)
    layer = make("layer0", layers[0][1], ranks)
    return root, *(replace(layer, name=name) for name, _ in layers)


def _rows(name: str, shapes: tuple[Shape, ...], ranks: int) -> Unit:
    """FSDP2: each parameter is cut on dim 0, padded to a multiple of the ranks."""
    local = tuple(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)
    return Unit(name=name, shapes=shapes, shards=ranks, local_numels=local, padded_numel=sum(local) * ranks)


def _flat(name: str, shapes: tuple[Shape, ...], ranks: int) -> Unit:
    """FSDP1, DeepSpeed, Megatron: the parameters of a unit are one vector, padded to a multiple of the ranks."""
    shard = -(-numel_of(shapes) // ranks)
    return Unit(name=name, shapes=shapes, shards=ranks, local_numels=(shard,), padded_numel=shard * ranks)


def numel_of(shapes: tuple[Shape, ...]) -> int:
    """Elements of all `shapes`."""
    return sum(map(prod, shapes))


def buckets(model: Model, plan: Plan) -> tuple[tuple[str, tuple[Shape, ...], str], ...]:
    """DDP's buckets as (name, shapes, piece that fills it), in the order of the backward.

    A bucket closes as soon as it holds its cap, so one parameter may exceed it. The first cap is 1 MiB, if the cap was
    left at its default.
    """
    size = DTYPE_BYTES[plan.master_dtype]
    cap = FIRST_BUCKET_BYTES if plan.bucket_bytes == DEFAULT_BUCKET_BYTES else plan.bucket_bytes
    buckets: list[tuple[str, tuple[Shape, ...], str]] = []
    current: list[Shape] = []
    held = 0
    name = ""
    for name, shapes in reversed(pieces(model)):
        for shape in reversed(shapes):
            current.append(shape)
            held += prod(shape) * size
            if held >= cap:
                buckets.append((f"bucket{len(buckets)}", tuple(current), name))
                current, held, cap = [], 0, plan.bucket_bytes
    if current:
        buckets.append((f"bucket{len(buckets)}", tuple(current), name))
    return tuple(buckets)


def keeps_layers(plan: Plan) -> bool:
    """Blocks stay gathered between forward and backward."""
    reshard = plan.reshard_after_forward
    return plan.zero < 3 or reshard is False or (reshard is not True and reshard == 1)


def keeps_root(plan: Plan) -> bool:
    """The root stays gathered between forward and backward: the default, since the backward begins with it."""
    return plan.reshard_after_forward is not True or plan.implementation == "fsdp1" or plan.zero < 3
