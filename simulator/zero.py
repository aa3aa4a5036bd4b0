"""ZeRO: what each implementation shards, what stays resident on a GPU, what travels and which passes over memory it adds.

Letters: Ψ parameters, N shard ranks. Sources: arXiv 1910.02054 (the stages), torch 2.13 `_fully_shard` (FSDP2),
`fsdp/_flat_param.py` (FSDP1), `nn/parallel/distributed.py` (DDP), DeepSpeed `runtime/zero`, Megatron-Core
`distributed/param_and_grad_buffer.py`; told in docs/background/memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from simulator.kernels import DTYPE_BYTES, Stream
from simulator.model import Model
from simulator.plan import Plan

Shape = tuple[int, ...]
FIRST_BUCKET_BYTES = 2**20  # DDP's first bucket is small so that communication starts early
DEFAULT_BUCKET_BYTES = 25 * 2**20
MIN_8BIT_NUMEL = 4096  # bitsandbytes keeps 32-bit state for smaller tensors
QUANT_BLOCK_NUMEL = 256  # bitsandbytes: one fp32 scale a block


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitComm:
    """What one piece of the model (embedding, layer0.., head) sends, in bytes of the full tensor; 0 = nothing.

    all_gather_forward_bytes, all_gather_backward_bytes: parameters, in every micro-batch. FSDP's root unit is gathered
    before the embedding and reduced after it.
    reduce_scatter_bytes, all_reduce_bytes: gradients, in every micro-batch or the last one (Plan.syncs_every_micro_batch);
    all_reduce_bytes under HSDP is the shard that travels between replicas. num_buckets: collectives they are split into.
    parameter_gather_bytes: updated parameters, once a step.
    backward_gather_ranks: ranks of the backward's all-gather (smaller than dp_shard if reshard_after_forward is a number).
    *_kernels: full-size passes over memory around the collectives, on the compute stream.
    """

    unit: str
    all_gather_forward_bytes: int = 0
    all_gather_backward_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0
    num_buckets: int = 1
    parameter_gather_bytes: int = 0
    backward_gather_ranks: int = 1
    gather_forward_kernels: tuple[Stream, ...] = ()
    gather_backward_kernels: tuple[Stream, ...] = ()
    gradient_kernels: tuple[Stream, ...] = ()


# --- units


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
            Unit(name=name, shapes=shapes, shards=1, local_numels=tuple(map(prod, shapes)), padded_numel=_numel(shapes))
            for name, shapes, _ in _buckets(model, plan)
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
    shard = -(-_numel(shapes) // ranks)
    return Unit(name=name, shapes=shapes, shards=ranks, local_numels=(shard,), padded_numel=shard * ranks)


def _numel(shapes: tuple[Shape, ...]) -> int:
    return sum(map(prod, shapes))


def _buckets(model: Model, plan: Plan) -> tuple[tuple[str, tuple[Shape, ...], str], ...]:
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


# --- what is resident


def resident_tensors(model: Model, plan: Plan) -> dict[str, list[int]]:
    """Bytes of every tensor that lives on the fullest GPU between steps, by category.

    parameters: as the implementation stores them. gradients: only where their buffer outlives the step.
    optimizer_state: momenta, and the fp32 master copy if it is one more. buckets: communication buffers that stay.
    buffers: the model's own (position tables).
    """
    plain = plan.implementation in ("ddp", "zero_redundancy", "fsdp1", "fsdp2")
    tensors = _torch_tensors(model, plan) if plain else _flat_tensors(model, plan)
    return {**tensors, "buffers": buffer_tensors(model, plan)}


def buffer_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of the model's own buffers: fp32 tables of the rotary cosines and sines."""
    if model.positions != "rope":
        return []
    return [plan.seq_len * int(model.head_dim * model.rotary_fraction) * 4] * 2


def resident_bytes(model: Model, plan: Plan, *, granularity_bytes: int = 1) -> dict[str, int]:
    """Category -> bytes between steps on the fullest GPU; each tensor rounded up to `granularity_bytes` (CUDA: 512)."""
    return {
        category: sum(-(-size // granularity_bytes) * granularity_bytes for size in sizes)
        for category, sizes in resident_tensors(model, plan).items()
    }


def gradient_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of every tensor that the backward leaves for the optimizer and that did not exist before the step."""
    master = DTYPE_BYTES[plan.master_dtype]
    match plan.implementation:
        case "fsdp1" | "fsdp2":
            # FSDP2's sharded gradients are views of one flat output a unit, FSDP1's are that output
            return [unit.shard_numel * master for unit in units(model, plan)]
        case "ddp" | "zero_redundancy":
            return [] if plan.gradient_as_bucket_view else _replicated(model, master)
        case "deepspeed" if plan.zero < 3:
            shard = 1 if plan.zero < 2 else shard_ranks(plan)
            return [-(-model.num_parameters // shard) * DTYPE_BYTES[plan.compute_dtype]]
        case _:
            return []


def model_state_bytes(model: Model, plan: Plan) -> int:
    """Parameters, gradients and optimizer state on one GPU: the figure of ZeRO's table."""
    held = resident_tensors(model, plan)
    kinds = ("parameters", "gradients", "optimizer_state")
    return sum(sum(held[kind]) for kind in kinds) + sum(gradient_tensors(model, plan))


def _replicated(model: Model, element_bytes: int) -> list[int]:
    return [prod(shape) * element_bytes for _, shapes in pieces(model) for shape in shapes]


def _torch_tensors(model: Model, plan: Plan) -> dict[str, list[int]]:
    master = DTYPE_BYTES[plan.master_dtype]
    if plan.implementation in ("fsdp1", "fsdp2"):
        stored = [numel for unit in units(model, plan) for numel in unit.local_numels]
        stepped, buckets = stored, []
    else:
        stored = [prod(shape) for _, shapes in pieces(model) for shape in shapes]
        stepped = _largest_part(stored, shard_ranks(plan)) if plan.zero == 1 else stored
        alone = plan.dp_replicate * shard_ranks(plan) == 1
        buckets = [] if alone else [unit.numel * master for unit in units(model, plan)]
    return {
        "parameters": [numel * master for numel in stored],
        "gradients": [],
        "optimizer_state": [size for numel in stepped for size in optimizer_tensors(numel, plan)],
        "buckets": buckets,
    }


def _flat_tensors(model: Model, plan: Plan) -> dict[str, list[int]]:
    """DeepSpeed and Megatron: compute-dtype parameters, an fp32 master copy and momenta of this rank's flat part."""
    compute, ranks = DTYPE_BYTES[plan.compute_dtype], shard_ranks(plan)
    whole = -(-model.num_parameters // ranks) * ranks
    shard = whole // ranks
    megatron = plan.implementation == "megatron"
    reduced = DTYPE_BYTES[plan.gradient_dtype]
    gradients = [whole * reduced] if megatron else [shard * compute] if plan.zero == 3 else []
    # Megatron's fp32 copy of 16-bit gradients lives only where they are not fp32 already
    copies = [shard * 4] if megatron and reduced < 4 else []
    return {
        "parameters": [(shard if plan.zero == 3 else whole) * compute],
        "gradients": gradients + copies,
        "optimizer_state": [shard * 4, *optimizer_tensors(shard, plan)],
        "buckets": [plan.reduce_bucket_numel * compute] if plan.zero == 3 else [],
    }


def optimizer_tensors(numel: int, plan: Plan) -> list[int]:
    """Bytes of the state tensors of one parameter of `numel` elements. The fused optimizer keeps its step on the GPU."""
    step = [4] if plan.optimizer_impl == "fused" and plan.optimizer in ("adam", "adamw") else []
    match plan.optimizer:
        case "sgd":
            return []
        case "sgd_momentum":
            return [numel * DTYPE_BYTES[plan.optimizer_dtype]]
        case "adam8bit" if numel >= MIN_8BIT_NUMEL:
            return [numel, numel, *[-(-numel // QUANT_BLOCK_NUMEL) * 4] * 2]
        case "adam8bit":
            return [numel * 4] * 2
        case _:
            return [numel * DTYPE_BYTES[plan.optimizer_dtype]] * 2 + step


def _largest_part(numels: list[int], ranks: int) -> list[int]:
    """ZeRO-1 of torch gives whole parameters away, largest first, to the rank that has least; the fullest rank's part."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for numel in sorted(numels, reverse=True):
        rank = held.index(min(held))
        parts[rank].append(numel)
        held[rank] += numel
    return parts[held.index(max(held))]


# --- what travels


def communication(model: Model, plan: Plan) -> tuple[UnitComm, ...]:
    """What each piece of the model sends, in forward order: embedding, layer0.., head."""
    match plan.implementation:
        case "fsdp1" | "fsdp2":
            return _fsdp_communication(model, plan)
        case "ddp" | "zero_redundancy":
            return _ddp_communication(model, plan)
        case _:
            return tuple(_flat_communication(name, shapes, plan) for name, shapes in pieces(model))


def _fsdp_communication(model: Model, plan: Plan) -> tuple[UnitComm, ...]:
    root, *layers = units(model, plan)
    comm = _fsdp_comm(root, plan, kept=keeps_root(plan))
    embedding = replace(comm, unit="embedding", all_gather_backward_bytes=0, gather_backward_kernels=())
    head = UnitComm(
        unit="head",
        all_gather_backward_bytes=comm.all_gather_backward_bytes,
        backward_gather_ranks=comm.backward_gather_ranks,
        gather_backward_kernels=comm.gather_backward_kernels,
    )
    if not layers:
        return embedding, head
    layer = _fsdp_comm(layers[0], plan, kept=keeps_layers(plan))
    return embedding, *(replace(layer, unit=unit.name) for unit in layers), head


def keeps_layers(plan: Plan) -> bool:
    """Blocks stay gathered between forward and backward."""
    return plan.zero < 3 or plan.reshard_after_forward is False


def keeps_root(plan: Plan) -> bool:
    """The root stays gathered between forward and backward: the default, since the backward begins with it."""
    return plan.reshard_after_forward is not True or plan.implementation == "fsdp1" or plan.zero < 3


def _fsdp_comm(unit: Unit, plan: Plan, *, kept: bool) -> UnitComm:
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    sharded = unit.shards > 1
    gathered = unit.padded_numel * compute if plan.zero > 0 else 0
    again = 0 if kept else gathered
    reshard = plan.reshard_after_forward
    ranks = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else unit.shards
    replicas = plan.dp_replicate
    passes = _gather_passes(unit, plan) if gathered else ()
    return UnitComm(
        unit=unit.name,
        all_gather_forward_bytes=gathered if sharded else 0,
        all_gather_backward_bytes=again if sharded else 0,
        backward_gather_ranks=ranks,
        reduce_scatter_bytes=unit.padded_numel * reduced if sharded else 0,
        all_reduce_bytes=unit.shard_numel * reduced if replicas > 1 else 0,
        gather_forward_kernels=passes,
        gather_backward_kernels=passes if again else (),
        gradient_kernels=_gradient_passes(unit, plan),
    )


def _gather_passes(unit: Unit, plan: Plan) -> tuple[Stream, ...]:
    """Cast of the shard to the compute dtype; FSDP2 also copies the gathered buffer out into parameters."""
    compute, master = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.master_dtype]
    shard, full = unit.shard_numel, unit.padded_numel * compute
    cast = Stream(op="cast", read_bytes=shard * master, write_bytes=shard * compute)
    if plan.implementation == "fsdp1":
        return (cast,) if compute != master else ()
    return cast, Stream(op="copy", read_bytes=full, write_bytes=full)


def _gradient_passes(unit: Unit, plan: Plan) -> tuple[Stream, ...]:
    """Full-size passes before the reduction: 6 B a parameter in FSDP2 (bf16 to fp32), 18 in FSDP1."""
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    numel = unit.padded_numel
    if plan.implementation == "fsdp2":
        return (Stream(op="copy", read_bytes=numel * compute, write_bytes=numel * reduced),)
    flatten = Stream(op="copy", read_bytes=numel * compute, write_bytes=numel * compute)
    divide = Stream(op="elementwise", read_bytes=numel * reduced, write_bytes=numel * reduced)
    if compute == reduced:
        return flatten, divide
    return flatten, Stream(op="cast", read_bytes=numel * compute, write_bytes=numel * reduced), divide


def _ddp_communication(model: Model, plan: Plan) -> tuple[UnitComm, ...]:
    """All-reduce a bucket, booked on the piece whose backward fills it; ZeRO-1's owners broadcast new parameters."""
    master = DTYPE_BYTES[plan.master_dtype]
    numels: dict[str, list[int]] = {}
    for _, shapes, piece in _buckets(model, plan):
        numels.setdefault(piece, []).append(_numel(shapes))
    return tuple(
        UnitComm(
            unit=name,
            all_reduce_bytes=sum(numels.get(name, [])) * DTYPE_BYTES[plan.gradient_dtype],
            num_buckets=len(numels.get(name, [])) or 1,
            parameter_gather_bytes=_numel(shapes) * master if plan.zero == 1 else 0,
            gradient_kernels=_bucket_passes(sum(numels.get(name, [])) * master, plan),
        )
        for name, shapes in pieces(model)
    )


def _bucket_passes(num_bytes: int, plan: Plan) -> tuple[Stream, ...]:
    """Gradients are copied (and divided) into their bucket, and back after it has travelled, unless they are its views."""
    if num_bytes == 0:
        return ()
    once = Stream(op="copy", read_bytes=num_bytes, write_bytes=num_bytes)
    return (once,) if plan.gradient_as_bucket_view else (once, once)


def _flat_communication(name: str, shapes: tuple[Shape, ...], plan: Plan) -> UnitComm:
    """DeepSpeed and Megatron. Stage 0 all-reduces; 1 and 2 reduce-scatter and gather new parameters; 3 gathers twice."""
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    ranks = shard_ranks(plan)
    numel = -(-_numel(shapes) // ranks) * ranks
    gathered = numel * compute if plan.zero == 3 else 0
    passes: tuple[Stream, ...] = ()
    buckets = 1
    if plan.implementation == "deepspeed":
        copy = Stream(op="copy", read_bytes=numel * compute, write_bytes=numel * compute)
        divide = Stream(op="elementwise", read_bytes=numel * reduced, write_bytes=numel * reduced)
        passes = copy, divide
        buckets = -(-numel // plan.reduce_bucket_numel)
    return UnitComm(
        unit=name,
        all_gather_forward_bytes=gathered,
        all_gather_backward_bytes=gathered,
        backward_gather_ranks=ranks,
        reduce_scatter_bytes=numel * reduced if plan.zero > 0 else 0,
        all_reduce_bytes=numel // ranks * reduced if plan.zero == 0 or plan.dp_replicate > 1 else 0,
        num_buckets=buckets,
        parameter_gather_bytes=numel * compute if plan.zero in (1, 2) else 0,
        gradient_kernels=passes,
    )
