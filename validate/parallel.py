"""A plan's torch objects: mesh, sharded or replicated modules, checkpoints, optimizer.

What each option of Plan becomes stands here and nowhere else; what torch cannot do is refused by `simulator.parallel.legality`
before any of this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from simulator.parallel.pipeline import num_positions, position, stage_layers
from simulator.parallel.pipeline.layers import dealt
from simulator.spec.model import Model
from simulator.spec.model.experts import cuts_rows
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import uses_autocast
from simulator.work.ops.op_context import OpContext
from validate.models import Block, Decoder, Part, Style, loss_fn
from validate.scaled import scale_products
from validate.torch_private import CheckpointImpl, checkpoint_wrapper, group_of, kept_by_selective_checkpoints

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
POWERSGD_BEGINS = 2  # reductions before it: DDP rebuilds its buckets after the first
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class Built:
    """What a step needs. `chunks`: this rank's part of the model, several where a pipeline stage holds several.

    networks: what is called of each chunk: itself, or DDP around it. offloaded: parameters, and with them gradients and the
    optimizer, live in the host's memory. optimizer: made last.
    """

    chunks: tuple[Decoder, ...]
    networks: list[nn.Module]
    mesh: DeviceMesh | None
    loss: Loss
    autocast: torch.dtype | None
    offloaded: bool = False
    optimizer: torch.optim.Optimizer | None = field(default=None)

    @property
    def module(self) -> nn.Module:
        """All that is here, without DDP around it."""
        return self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)

    @property
    def network(self) -> nn.Module:
        """What is called where there is one chunk."""
        return self.networks[0]

    @property
    def units(self) -> list[nn.Module]:
        """What FSDP2 gathers and frees: each chunk, and its layers."""
        return [unit for chunk in self.chunks for unit in (chunk, *chunk.layers)]


def style_of(model: Model, plan: Plan, stack: Stack, *, direct_flash: bool = False) -> Style:
    """How the modules of a plan are written."""
    setting = OpContext(model=model, stack=stack, plan=plan, autocast=uses_autocast(stack, plan))
    dtype, expand = DTYPES[plan.precision.master], setting.expand_kv
    return Style(
        stack=stack, dtype=dtype, seq_len=plan.seq_len, expand_kv=expand, direct_flash=direct_flash, ep=plan.ep
    )


def build(
    model: Model, plan: Plan, stack: Stack, device: torch.device, *, direct_flash: bool = False, pinned: bool = False
) -> Built:
    """Modules of this rank, still without storage: `materialise` gives it to them. DDP comes last, by `replicate`.

    Sharded modules get storage for this rank's part only, so the whole model need not fit anywhere. pinned: offloaded
    states lie in page-locked memory, which only a process with a GPU has.
    """
    mesh = _mesh(plan, device.type)
    stage = mesh["pp"].get_local_rank() if mesh is not None and plan.pp > 1 else 0
    style = style_of(model, plan, stack, direct_flash=direct_flash)
    chunks = []
    for part in _parts(model, plan, stage):
        with torch.device("meta"):
            module = Decoder(model, style, part)
        if plan.narrow:
            scale_products(module, plan)
        _spread(module, plan, mesh, device.type)
        _checkpoint_blocks(module, plan)
        if stack.traits.compiles_blocks:
            for block in module.layers:
                block.compile()
        if plan.traits.shards_rows and mesh is not None:
            _shard(module, plan, mesh, pinned=pinned)
        chunks.append(module)
    return Built(
        chunks=tuple(chunks),
        networks=list(chunks),
        mesh=mesh,
        loss=torch.compile(loss_fn) if stack.kernels.loss == "fp32_compiled" else loss_fn,
        autocast=DTYPES[plan.compute_dtype] if uses_autocast(stack, plan) else None,
        offloaded=plan.offload.parameters != "none",
    )


def _parts(model: Model, plan: Plan, stage: int) -> list[Part | None]:
    """The chunks of a pipeline stage; None: the model is not cut."""
    if plan.pp == 1:
        return [None]
    schedule, count = plan.pipeline_schedule, plan.pipeline.virtual_stages
    layers_of_chunks = stage_layers(model.num_layers, plan.pp, count, split=dealt(model, plan), schedule=schedule)[
        stage
    ]
    last = num_positions(schedule, plan.pp, count) - 1
    places = [position(schedule, plan.pp, stage, chunk) for chunk in range(count)]
    return [
        Part(layers=tuple(layers), embedding=place == 0, head=place == last)
        for layers, place in zip(layers_of_chunks, places, strict=True)
    ]


def _spread(module: Decoder, plan: Plan, mesh: DeviceMesh | None, device_type: str) -> None:
    """Cut the modules where other ranks of tp, cp and ep have the rest."""
    if plan.cp > 1:
        from validate.context_parallel import spread

        spread(module, plan, _beside(plan, device_type, "cp"))
    if plan.tp > 1 and mesh is not None:
        from validate.tensor_parallel import split

        split(module, plan, mesh["tp"])
    if plan.ep > 1:
        group = _beside(plan, device_type, "ep")
        for block in module.layers:
            if block.mixture:
                block.experts.group = group


def _beside(plan: Plan, device_type: str, axis: str) -> Any:  # noqa: ANN401  torch's process group
    """The group of an axis that shares its ranks with FSDP's shards: cp outside of tp, ep innermost of them all."""
    inner = plan.tp if axis == "cp" else 1
    size = plan.cp if axis == "cp" else plan.ep
    return init_device_mesh(device_type, (plan.num_devices // size // inner, size, inner), mesh_dim_names=_AROUND)[
        "axis"
    ].get_group()


_AROUND = ("outside", "axis", "inside")


def materialise(built: Built, device: torch.device) -> None:
    """Storage on `device`, and first values. Offloaded parameters stay on the host, the tables they need do not."""
    for module in built.chunks:
        module.to_empty(device="cpu" if built.offloaded else device)
        if built.offloaded:
            for name, table in list(module.named_buffers()):
                module.register_buffer(name, table.to(device), persistent=False)
        if module.is_tied and module.lm_head.weight is not module.embedding.weight:
            module.lm_head.weight = module.embedding.weight  # plain modules get a storage for each name
        module.initialise()


def _mesh(plan: Plan, device_type: str) -> DeviceMesh | None:
    """(pp, dp_replicate, dp_shard, tp) without axes of one rank (FSDP2 keeps dp_shard); None where the world is the group.

    Ranks of cp hold other parameters' shards, or replicas where nothing is sharded.
    """
    sharded = plan.traits.shards_rows
    sizes = {"pp": plan.pp, "dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "tp": plan.tp}
    sizes["dp_shard" if plan.zero > 0 else "dp_replicate"] *= plan.cp
    axes = {name: size for name, size in sizes.items() if size > 1 or (sharded and name == "dp_shard")}
    if not sharded and len(axes) < 2 and plan.tp * plan.pp == 1:
        return None
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


# --- checkpoints


def _checkpoint_blocks(module: Decoder, plan: Plan) -> None:
    if plan.recompute.mode == "none":
        return
    every = plan.recompute.every if plan.recompute.mode == "every_k" else 1
    contexts = {"context_fn": _selective_contexts} if plan.recompute.mode == "selective" else {}
    for index, block in enumerate(module.layers):
        if index % every == 0:
            module.layers[index] = checkpoint_wrapper(
                block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False, **contexts
            )


def _selective_contexts() -> Any:  # noqa: ANN401  torch's own pair of contexts
    """Outputs of products, of attention and of reduce-scatters are kept; everything else runs again."""
    saved_ops = kept_by_selective_checkpoints()

    def policy(_context: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved_ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# --- data parallelism


def _shard(module: Decoder, plan: Plan, mesh: DeviceMesh, *, pinned: bool) -> None:
    """fully_shard around each block and the rest; one axis shards, two also replicate (HSDP)."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    axes = tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[plan.compute_dtype], reduce_dtype=DTYPES[plan.gradient_dtype])
    reshard = False if plan.zero == 2 else plan.fsdp.reshard_after_forward
    offload = OffloadPolicy() if plan.offload.parameters == "none" else CPUOffloadPolicy(pin_memory=pinned)
    sharded = mesh[axes] if len(axes) < len(mesh.mesh_dim_names) else mesh
    wrap = partial(fully_shard, mesh=sharded, mp_policy=policy, offload_policy=offload)
    for block in module.layers:
        if plan.ep > 1 and block.mixture:
            _shard_experts(block, plan, partial(wrap, reshard_after_forward=reshard), mesh.device_type)
        wrap(block, reshard_after_forward=reshard)
    wrap(module, reshard_after_forward=reshard if isinstance(reshard, bool) else None)
    _set_prefetch(module, plan)


def _shard_experts(block: Block, plan: Plan, wrap: Callable[..., Any], device_type: str) -> None:
    """A rank's experts over the ranks that have the same ones; whole experts, or rows of each, as torchtitan cuts them."""
    from torch.distributed.tensor import Shard

    shards = plan.num_expert_ranks // plan.ep
    sizes = (plan.pp, plan.dp_replicate, shards, plan.ep)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "ep"))
    num_experts, cut_by = block.experts.up.weight.shape[0], block.style.stack.kernels.expert_shards
    rows = cuts_rows(cut_by, shards=shards, experts=num_experts, ep=plan.ep)
    mesh = mesh["dp_replicate", "dp_shard"] if plan.dp_replicate > 1 else mesh["dp_shard"]
    wrap(block.experts, mesh=mesh, shard_placement_fn=(lambda _: Shard(1)) if rows else None)
    block.experts.set_gradient_divide_factor(float(plan.num_data_parallel * plan.cp))


def _set_prefetch(module: Decoder, plan: Plan) -> None:
    """Depths other than FSDP2's own (0 forward, 1 backward) are told to each unit by name.

    A unit that is told to prefetch itself, which is there already, prefetches nothing: that is how 0 is said.
    """
    units = [module, *module.layers]
    for index, unit in enumerate(units):
        if plan.fsdp.forward_prefetch:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + plan.fsdp.forward_prefetch])
        if plan.fsdp.backward_prefetch != 1:
            end = len(units) if index == 0 else index
            begin = max(end - plan.fsdp.backward_prefetch, 1)
            unit.set_modules_to_backward_prefetch(units[begin:end][::-1] or [unit])


def replicate(built: Built, plan: Plan, hook: Callable[..., Any] | None = None) -> None:
    """DistributedDataParallel around the modules, where the plan has replicas to keep equal.

    hook: reduces a bucket instead of an all-reduce (a fake process group has none that can be waited for).
    """
    if plan.traits.whole_modules and plan.num_data_parallel * plan.cp > 1:
        group = _replicas(built.mesh)
        built.networks = [_replicated(module, plan, group, hook) for module in built.chunks]


def _replicated(module: Decoder, plan: Plan, group: Any, hook: Callable[..., Any] | None) -> nn.Module:  # noqa: ANN401
    ddp = nn.parallel.DistributedDataParallel(
        module,
        process_group=group,
        init_sync=False,  # every rank begins with the same seed
        gradient_as_bucket_view=plan.ddp.gradient_as_bucket_view,
        broadcast_buffers=False,
        bucket_cap_mb=plan.ddp.bucket_bytes / 2**20,
    )
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    elif plan.ddp.comm_hook.kind == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        ddp.register_comm_hook(_powersgd(plan, powerSGD_hook.PowerSGDState), powerSGD_hook.powerSGD_hook)
    elif plan.gradient_dtype != plan.precision.master:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        compress = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        ddp.register_comm_hook(None, compress[plan.gradient_dtype])
    return ddp


def _powersgd(plan: Plan, state: Callable[..., Any]) -> Any:  # noqa: ANN401  torch's own state
    """The hook's state; it begins as early as torch allows, since what is measured is what comes after."""
    hook = plan.ddp.comm_hook
    return state(
        process_group=None,
        matrix_approximation_rank=hook.rank,
        start_powerSGD_iter=POWERSGD_BEGINS,
        min_compression_rate=hook.min_compression_rate,
        use_error_feedback=hook.error_feedback,
        warm_start=hook.warm_start,
    )


def _replicas(mesh: DeviceMesh | None) -> Any:  # noqa: ANN401  torch's process group
    """The group over which gradients are averaged; None, the whole world, unless other ranks hold other parameters."""
    if mesh is None or not {"pp", "tp"}.intersection(mesh.mesh_dim_names):
        return None
    axes = tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))
    return mesh[axes].get_group() if len(axes) == 1 else group_of(mesh[axes])


# --- optimizer


def make_optimizer(built: Built, plan: Plan) -> torch.optim.Optimizer:
    """The plan's optimizer over this rank's parameters. Parameters of different meshes stand in groups of their own."""
    kind, options = optimizer_of(plan)
    parameters = built.module.parameters()
    if plan.traits.reduces_among_all and plan.dp_shard * plan.cp > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        group = built.mesh["dp_shard"].get_group() if built.mesh is not None else None
        return ZeroRedundancyOptimizer(parameters, kind, process_group=group, **options)
    return kind([{"params": group} for group in _by_mesh(parameters)], **options)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(str(getattr(parameter, "device_mesh", None)), []).append(parameter)
    return list(groups.values())


def optimizer_of(plan: Plan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Torch's class of the plan's optimizer, and its options."""
    how = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}[plan.optimizer.impl]
    match plan.optimizer.kind:
        case "adamw":
            return torch.optim.AdamW, {"lr": 1e-4, **how}
        case "adam":
            return torch.optim.Adam, {"lr": 1e-4, **how}
        case _:
            return torch.optim.SGD, {
                "lr": 1e-4,
                "momentum": 0.9 if plan.optimizer.kind == "sgd_momentum" else 0.0,
                **how,
            }
