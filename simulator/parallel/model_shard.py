"""Model shard: the part of a model that one rank holds under tensor and pipeline parallelism: a narrower, shorter model.

Tensor parallelism is Megatron's split (arXiv 1909.08053, section 3): the products into attention and MLP by columns, so
each rank has whole heads and a slice of d_ff; the products out of them by rows; the embedding and the LM head by
vocabulary. Norms, the biases after row-wise products and learned positions are on every rank.

A pipeline stage holds the layers of its chunks; the first virtual stage holds the embedding, the last the head. A tied
matrix is held by both (arXiv 2104.04473 follows Megatron-LM, which sums its two gradients in every step).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from typing_extensions import override

from simulator.base.errors import PlanError
from simulator.base.units import format_bytes
from simulator.parallel.pipeline import num_positions, position, stage_layers
from simulator.parallel.pipeline.layers import dealt
from simulator.spec.cluster.gpu_kinds import GpuKind, GpuKinds
from simulator.spec.model import FORWARD_SUFFIX, LOWEST_SUFFIX, BodyKind, LayerKind, Model, ModelPart, Parameter, marked
from simulator.spec.model.experts import Experts, StoredExperts
from simulator.spec.model.hybrid import Mamba
from simulator.spec.model.layer_kinds import BF16_SUFFIX, plain
from simulator.spec.model.tower import TOWER_WEIGHT, VISION
from simulator.spec.plan import PeftPlan, Plan

VOCAB_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by: each rank's part of the table is a multiple of it


class LocalExperts(StoredExperts):
    """The experts of a layer that one rank holds: d_ff and shared_d_ff are the rank's own, the router is the whole one."""

    held: int

    @property
    @override
    def num_local(self) -> int:
        return self.held


class ModelShard(Model):
    """What one rank holds of a model. Its sizes are the rank's own; d_model and head_dim are the whole model's.

    ranks_per_kv_head: ranks of tp that attend to one key-value head and hold a part each of the weights that make it.
    marks: what makes layers unlike others of their kind (`layer_marks`), by number. chunks: layer numbers of its pipeline chunks. embedding_chunk, head_chunk: which of them holds the ends; None: none.
    """

    chunks: tuple[tuple[int, ...], ...]
    ranks_per_kv_head: int
    embedding_chunk: int | None
    head_chunk: int | None
    marks: dict[int, str] = {}

    @property
    def holds_embedding(self) -> bool:
        return self.embedding_chunk is not None

    @property
    def holds_head(self) -> bool:
        return self.head_chunk is not None

    @property
    @override
    def kv_columns(self) -> int:
        return self.kv_width // self.ranks_per_kv_head

    @property
    @override
    def layer_numbers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @property
    def body_chunks(self) -> tuple[tuple[BodyKind, ...], ...]:
        """Kinds of what each chunk holds between the model's ends."""
        kinds = iter(zip(self.layer_numbers, self.layer_kinds, strict=True))
        layers: list[list[BodyKind]] = [[self._marked(*next(kinds)) for _ in chunk] for chunk in self.chunks]
        if self.embedding_chunk is not None:
            layers[self.embedding_chunk][:0] = _tower_body(self, self.marks)
        if self.head_chunk is None:
            return tuple(map(tuple, layers))
        modules: list[list[BodyKind]] = [
            ["mtp"] * self.mtp_layers if i == self.head_chunk else [] for i in range(len(layers))
        ]
        return tuple((*mine, *more) for mine, more in zip(layers, modules, strict=True))

    def _marked(self, number: int, kind: LayerKind) -> BodyKind:
        return marked(kind, self.marks.get(number, ""))

    @property
    @override
    def body(self) -> tuple[BodyKind, ...]:
        return tuple(kind for chunk in self.body_chunks for kind in chunk)

    @override
    def _embedding(self) -> tuple[Parameter, ...]:
        return super()._embedding() if self.holds_embedding else ()

    @override
    def _head(self) -> tuple[Parameter, ...]:
        return super()._head() if self.holds_head else ()


def shard_of(model: Model, plan: Plan, stage: int = 0) -> Model:
    """The part of `model` on one rank of a stage; the model itself where nothing splits it, and for a `ModelShard`."""
    if isinstance(model, ModelShard) or (plan.tp * plan.pp * plan.ep == 1 and not layer_marks(model, plan)):
        return model
    schedule, pp, chunks = plan.pipeline_schedule, plan.pp, plan.pipeline.virtual_stages
    layer_counts = stage_layers(model.num_layers, pp, chunks, split=dealt(model, plan), schedule=schedule)[stage]
    places = [position(schedule, pp, stage, chunk) for chunk in range(chunks)]
    last = num_positions(schedule, pp, chunks) - 1
    fields = {
        "num_layers": sum(map(len, layer_counts)),
        "num_heads": model.num_heads // plan.tp,
        "num_kv_heads": max(1, model.num_kv_heads // plan.tp),
        "ranks_per_kv_head": max(1, plan.tp // model.num_kv_heads),
        "d_ff": model.d_ff // plan.tp,
        "vocab_size": _vocabulary(model.vocab_size, plan),
        "experts": None if model.experts is None else _experts(model.experts, plan),
        "mamba": None if model.mamba is None else _mamba(model.mamba, plan),
        "mtp_layers": model.mtp_layers if last in places else 0,
        "tied_embeddings": model.tied_embeddings and pp == 1,
        "chunks": tuple(map(tuple, layer_counts)),
        "embedding_chunk": places.index(0) if 0 in places else None,
        "marks": layer_marks(model, plan),
        "head_chunk": places.index(last) if last in places else None,
    }
    return ModelShard.model_construct(**(dict(model) | fields))


def bf16_layers(model: Model, plan: Plan) -> frozenset[int]:
    """Numbers of the layers whose products stay in bf16 (Megatron-LM, core/fp8_utils.py: is_first_last_bf16_layer)."""
    if not plan.narrow:
        return frozenset()
    numbers, count = range(model.num_layers), model.num_layers
    return frozenset(
        (*numbers[: plan.precision.first_layers_bf16], *numbers[max(0, count - plan.precision.last_layers_bf16) :])
    )


def layer_marks(model: Model, plan: Plan) -> dict[int, str]:
    """What makes layers unlike others of their kind, by number: what is trained of them, products in bf16."""
    marks = {**_tuned(model, plan), **_tuned_tower(model, plan)} if plan.peft.any else {}
    return marks | {number: marks.get(number, "") + BF16_SUFFIX for number in bf16_layers(model, plan)}


_TOWER, _JOINT = -1, -2  # in place of a layer's number


def _tuned_tower(model: Model, plan: Plan) -> dict[int, str]:
    """Marks of a frozen tower, and of what joins it, which may have something to train.

    A frozen tower keeps nothing: images have no gradients.
    """
    if model.sees is None or plan.peft.trains(TOWER_WEIGHT):
        return {}
    own = [name for name, _ in model.parameter_shapes("embedding") if not name.startswith(VISION)]
    joint = LOWEST_SUFFIX if plan.peft.at(None).tunes(own) else FORWARD_SUFFIX
    return {_TOWER: f"@0{FORWARD_SUFFIX}", _JOINT: f"@0{joint}"}


def _tower_body(model: Model, marks: dict[int, str]) -> list[BodyKind]:
    """The units of its tower under marks."""
    return [marked(kind, marks.get(_JOINT if kind == "joint" else _TOWER, "")) for kind in model.tower_kinds]


def _tuned(model: Model, plan: Plan) -> dict[int, str]:
    """Marks of layers: the first that is trained as this one is, and whether it lies below all that is trained.

    peft makes the embedding's output need gradients where activations are recomputed (peft_model.py:
    `_prepare_model_for_gradient_checkpointing`), so backwards go through all layers then.
    """
    parts: tuple[ModelPart, ...] = ("embedding", "head", *dict.fromkeys(model.layer_kinds))
    names = {part: [name for name, _ in model.parameter_shapes(part)] for part in parts}
    peft, checkpointed = plan.peft, plan.recomputes_adapted
    first = [*names["embedding"], *(names["head"] if plan.mixes_units else ())]  # with FSDP1's root, all have gradients
    below = not (peft.adds and checkpointed) and not peft.at(None).tunes(first)
    if not peft.by_layer and not below:
        return {}
    alike: dict[PeftPlan, int] = {}
    marks = {}
    for number, kind in enumerate(model.layer_kinds):
        own = peft.at(number)
        tuned = own.tunes(names[kind])
        suffix = (LOWEST_SUFFIX if tuned else FORWARD_SUFFIX) if below else ""
        below = below and not tuned
        marks[number] = f"@{alike.setdefault(own, number)}{suffix}"
    return marks


def whole_body(model: Model, plan: Plan) -> tuple[BodyKind, ...]:
    """What stands between the ends of the whole model, under the plan's precisions and what it trains."""
    if isinstance(model, ModelShard) or not (marks := layer_marks(model, plan)):
        return model.body
    numbered = zip(model.layer_numbers, model.layer_kinds, strict=True)
    kinds = (marked(kind, marks.get(number, "")) for number, kind in numbered)
    return (*_tower_body(model, marks), *kinds, *["mtp" for _ in range(model.mtp_layers)])  # type: ignore[arg-type]


def body_names(shard: Model) -> tuple[str, ...]:
    """Names of a rank's layers in the order of its chunks, numbered as in the model."""
    numbers, modules, towers = iter(shard.layer_numbers), iter(range(shard.mtp_layers)), count()

    def name(kind: BodyKind) -> str:
        own = plain(kind)
        number = {"mtp": modules, "tower": towers, "tower_window": towers}.get(own, numbers)
        return own if own == "joint" else f"{'layer' if number is numbers else own[:5]}{next(number)}"

    return tuple(map(name, shard.body))


def _experts(experts: Experts, plan: Plan) -> LocalExperts:
    fields = {
        "held": experts.num_experts // plan.ep,
        "d_ff": experts.d_ff // plan.experts.etp,
        "shared_d_ff": experts.shared_d_ff // plan.tp,
    }
    return LocalExperts.model_construct(**(dict(experts) | fields))


def _mamba(mamba: Mamba, plan: Plan) -> Mamba:
    """Heads and groups of a rank (Megatron-LM, core/ssm/mamba_mixer.py)."""
    return mamba.model_copy(update={"num_heads": mamba.num_heads // plan.tp, "num_groups": mamba.num_groups // plan.tp})


def _vocabulary(vocab_size: int, plan: Plan) -> int:
    """Rows of the embedding on one rank: Megatron pads them, DTensor's first ranks hold one more."""
    if not plan.vocab_parallel:
        return vocab_size
    rows = -(-vocab_size // plan.tp)
    if plan.tp > 1 and plan.traits.own_model_code:
        return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return rows


def shard_shares(plan: Plan, kinds: GpuKinds | None) -> Mapping[str, float]:
    """By the holders of `kinds` (device, and what is free of it): parts in proportion to free memory, 1 on average.

    Empty where parts are equal. Raises PlanError where the reserve leaves a GPU nothing.
    """
    if plan.fsdp.shard_sizes == "equal" or kinds is None or not kinds.of_rank:
        return {}
    free = {kind.holder: _free(kinds, kind) - plan.fsdp.shard_reserve_bytes for kind in kinds.kinds}
    if short := [holder for holder, size in free.items() if size <= 0]:
        reserve = format_bytes(plan.fsdp.shard_reserve_bytes)
        problem = f"a reserve of {reserve} leaves {', '.join(short)} nothing to hold"
        raise PlanError.at("plan: shard_reserve_bytes", problem, "less than the smallest GPU")
    ranks = plan.num_devices
    counts = [ranks - len(kinds.of_rank), *(0 for _ in kinds.kinds[1:])]
    for number in kinds.of_rank.values():
        counts[number] += 1
    total = sum(count * free[kind.holder] for count, kind in zip(counts, kinds.kinds, strict=True))
    return {holder: size * ranks / total for holder, size in free.items()}


def largest_share(shares: Mapping[str, float], kinds: GpuKinds | None, device: str) -> float:
    """Of the GPUs of one device, the part that takes longest to step."""
    found = [shares[kind.holder] for kind in kinds.kinds if kind.device == device] if shares and kinds else []
    return max(found, default=1.0)


def _free(kinds: GpuKinds, kind: GpuKind) -> int:
    device = kinds.memory_of(kind)
    return device.usable_bytes - device.hypervisor_bytes
