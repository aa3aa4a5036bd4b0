"""Parameters in units that an implementation gathers, reduces and frees together, and how they are cut into shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from simulator.base.remembered import remembered
from simulator.parallel.model_shard import body_names, whole_body
from simulator.spec.model import Model
from simulator.spec.model import ModelPart as Part
from simulator.spec.model.experts import cuts_rows
from simulator.spec.plan import Plan
from simulator.work.parameters import Stored, frozen, pair_size, trained

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUnit:
    """Parameters that are gathered, reduced and freed together.

    shapes: of its parameters in registration order. shards: ranks it is cut into (1: replicated).
    local_numels: elements of each stored tensor on the fullest rank; padded_numel: elements of its collectives.
    Its last num_expert_tensors are routed experts, cut into expert_shards instead. frozen: weights that are gathered with
    them as they are stored, and neither reduced nor stepped. even_numels: elements of each stored tensor in equal parts,
    where this rank's are not.
    """

    name: str
    shapes: tuple[Shape, ...]
    shards: int
    local_numels: tuple[int, ...]
    padded_numel: int
    expert_shards: int = 0
    num_expert_tensors: int = 0
    frozen: tuple[Stored, ...] = ()
    even_numels: tuple[int, ...] = ()

    def with_share(self, share: float) -> ParameterUnit:
        """The same unit on a rank whose part is not an equal one; what is gathered and reduced stays."""
        if share == 1:
            return self
        return replace(
            self, local_numels=tuple(ceil(share * n) for n in self.local_numels), even_numels=self.local_numels
        )

    @property
    def frozen_shard_bytes(self) -> int:
        """Of this rank's part of what is gathered and not trained."""
        return sum(-(-one.size // self.shards) for one in self.frozen)

    @property
    def frozen_bytes(self) -> int:
        """Of what is gathered and not trained."""
        return self.frozen_shard_bytes * self.shards

    @property
    def tensor_shards(self) -> tuple[int, ...]:
        """Ranks that each of its tensors is cut into."""
        rest = len(self.local_numels) - self.num_expert_tensors
        return (self.shards,) * rest + (self.expert_shards,) * self.num_expert_tensors

    def apart(self) -> tuple[ParameterUnit, ParameterUnit | None]:
        """What travels in the plan's own groups, and what in those of the experts."""
        count = self.num_expert_tensors
        if not count:
            return self, None
        return (
            cut(self.name, self.shapes[:-count], self.local_numels[:-count], self.shards),
            cut(self.name, self.shapes[-count:], self.local_numels[-count:], self.expert_shards),
        )

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part of a collective."""
        return sum(self.local_numels)


def shard_ranks(plan: Plan) -> int:
    """N: ranks over which the plan's stage cuts states. Context parallelism shares its ranks with FSDP's shards."""
    return plan.dp_shard * plan.cp if plan.zero > 0 else 1


def expert_shard_ranks(plan: Plan) -> int:
    """Ranks over which the states of an expert are cut, where experts are dealt to ranks."""
    return plan.num_expert_ranks // (plan.ep * plan.experts.etp) if plan.zero > 0 else 1


def pieces(model: Model, plan: Plan, *, cut_first: bool = False) -> tuple[tuple[str, tuple[Shape, ...]], ...]:
    """Embedding, layers (and modules of multi-token prediction) and head with the shapes that are trained, as registered.

    cut_first: the dimension that the plan's implementation cuts stands first.
    """
    return _pieces(model, plan, _by_rows(model, plan) if cut_first else False)


@remembered(16)  # a prediction asks twenty times
def _pieces(model: Model, plan: Plan, cut_by: bool) -> tuple[tuple[str, tuple[Shape, ...]], ...]:  # noqa: FBT001
    shapes = {kind: _shapes(model, kind, plan, by_rows=cut_by) for kind in dict.fromkeys(whole_body(model, plan))}
    body = ((name, shapes[kind]) for name, kind in zip(body_names(model), whole_body(model, plan), strict=True))
    return ("embedding", _shapes(model, "embedding", plan)), *body, ("head", _shapes(model, "head", plan))


def apart(model: Model, plan: Plan) -> tuple[tuple[str, tuple[Shape, ...], tuple[Shape, ...]], ...]:
    """Like `pieces`, but with the routed experts in a list of their own, where the plan shards and reduces them apart."""
    if model.experts is None or not plan.experts_apart:
        return tuple((name, shapes, ()) for name, shapes in pieces(model, plan, cut_first=True))
    rest = {kind: _shapes(model, kind, plan, routed=False) for kind in dict.fromkeys(whole_body(model, plan))}
    routed = {kind: _shapes(model, kind, plan, by_rows=_by_rows(model, plan), routed=True) for kind in rest}
    body = (
        (name, rest[kind], routed[kind]) for name, kind in zip(body_names(model), whole_body(model, plan), strict=True)
    )
    ends = [(name, _shapes(model, name, plan), ()) for name in _ENDS]
    return ends[0], *body, ends[1]


_ENDS: Final[tuple[Part, ...]] = ("embedding", "head")


def frozen_pieces(model: Model, plan: Plan) -> tuple[tuple[Stored, ...], ...]:
    """What is frozen of each of the `pieces`."""
    kinds: tuple[Part, ...] = ("embedding", *whole_body(model, plan), "head")
    found = {kind: frozen(model, kind, plan) for kind in dict.fromkeys(kinds)}
    return tuple(found[kind] for kind in kinds)


def _shapes(
    model: Model, part: Part, plan: Plan, *, by_rows: bool = False, routed: bool | None = None
) -> tuple[Shape, ...]:
    """Shapes of what is trained of a part: all, or those of routed experts, or the others. by_rows: of experts too."""
    return tuple(
        _counted(name, shape, plan, by_rows=by_rows)
        for name, shape in trained(model, part, plan)
        if routed is None or name.startswith("experts.") == routed
    )


def _counted(name: str, shape: Shape, plan: Plan, *, by_rows: bool) -> Shape:
    """Pairs that are stored wider have as many rows as they take elements of the others' dtype."""
    if by_rows and name.startswith("experts."):
        return (shape[1], shape[0], *shape[2:])
    return (pair_size(plan) * shape[0], *shape[1:]) if ".lora_" in name else shape


def _by_rows(model: Model, plan: Plan) -> bool:
    """The weights of each routed expert are cut, not the experts dealt."""
    ranks = expert_shard_ranks(plan) if plan.experts_apart else shard_ranks(plan)
    experts = model.experts if plan.traits.shards_rows else None
    return experts is not None and cuts_rows(experts.cut_by, shards=ranks, experts=experts.num_local, ep=plan.ep)


def flat_numels(model: Model, plan: Plan) -> tuple[tuple[int, int], ...]:
    """(elements, ranks that share them) of the rank's parameters: all, and the experts' where those are apart."""
    pairs = apart(model, plan)
    rest = sum(numel_of(shapes) for _, shapes, _ in pairs)
    routed = sum(numel_of(shapes) for _, _, shapes in pairs)
    return ((rest, shard_ranks(plan)), *(((routed, expert_shard_ranks(plan)),) if routed else ()))


def stepped_numel(model: Model, plan: Plan) -> int:
    """Elements that a rank's optimizer updates where parameters are cut flat."""
    even = sum(-(-numel // ranks) for numel, ranks in flat_numels(model, plan))
    return even if plan.fsdp.shard_share == 1 else ceil(plan.fsdp.shard_share * even)


def by_rows(name: str, shapes: tuple[Shape, ...], ranks: int) -> ParameterUnit:
    """FSDP2: each parameter is cut on dim 0, padded to a multiple of the ranks."""
    return cut(name, shapes, tuple(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes), ranks)


def cut(name: str, shapes: tuple[Shape, ...], local: tuple[int, ...], ranks: int) -> ParameterUnit:
    """A unit whose tensors are cut apart from each other. local: elements of each on the fullest rank."""
    return ParameterUnit(name=name, shapes=shapes, shards=ranks, local_numels=local, padded_numel=sum(local) * ranks)


def flat(name: str, shapes: tuple[Shape, ...], ranks: int) -> ParameterUnit:
    """FSDP1, DeepSpeed, Megatron: the parameters of a unit are one vector, padded to a multiple of the ranks."""
    shard = -(-numel_of(shapes) // ranks)
    return ParameterUnit(name=name, shapes=shapes, shards=ranks, local_numels=(shard,), padded_numel=shard * ranks)


def numel_of(shapes: tuple[Shape, ...]) -> int:
    """Elements of all `shapes`."""
    return sum(map(prod, shapes))


def gathered_sizes(unit: ParameterUnit, plan: Plan) -> tuple[int, ...]:
    """Bytes of each of a unit's tensors as it is gathered: fp8 for matrices of layers where the plan says so."""
    wide = DTYPE_BYTES[plan.compute_dtype]
    narrow = 1 if plan.precision.fp8_all_gather and unit.name != "root" else wide
    tensors = zip(unit.shapes, unit.even_numels or unit.local_numels, unit.tensor_shards, strict=True)
    return tuple(local * shards * (narrow if len(shape) > 1 else wide) for shape, local, shards in tensors)


def keeps_layers(plan: Plan) -> bool:
    """Blocks stay gathered between forward and backward."""
    reshard = plan.fsdp.reshard_after_forward
    return plan.zero < 3 or reshard is False or (reshard is not True and reshard == 1)


def keeps_root(plan: Plan) -> bool:
    """The root stays gathered between forward and backward: the default, since the backward begins with it.

    FSDP1 has no word for anything else.
    """
    return plan.fsdp.reshard_after_forward is not True or not plan.traits.shards_rows or plan.zero < 3


# DDP's buckets: gradients that travel together, in the order in which the backward fills them.
FIRST_BUCKET_BYTES: Final = 2**20  # DDP's first bucket is small so that communication starts early
DEFAULT_BUCKET_BYTES: Final = 25 * 2**20


def buckets(model: Model, plan: Plan) -> tuple[tuple[str, tuple[Shape, ...], str], ...]:
    """DDP's buckets as (name, shapes, piece that fills it), in the order of the backward.

    A bucket closes as soon as it holds its cap, so one parameter may exceed it. The first cap is 1 MiB, if the cap was
    left at its default.
    """
    size = DTYPE_BYTES[plan.precision.master]
    cap = FIRST_BUCKET_BYTES if plan.ddp.bucket_bytes == DEFAULT_BUCKET_BYTES else plan.ddp.bucket_bytes
    buckets: list[tuple[str, tuple[Shape, ...], str]] = []
    current: list[Shape] = []
    filled = 0
    name = ""
    for name, shapes in reversed(pieces(model, plan)):
        for shape in reversed(shapes):
            current.append(shape)
            filled += prod(shape) * size
            if filled >= cap:
                buckets.append((f"bucket{len(buckets)}", tuple(current), name))
                current, filled, cap = [], 0, plan.ddp.bucket_bytes
    if current:
        buckets.append((f"bucket{len(buckets)}", tuple(current), name))
    return tuple(buckets)
