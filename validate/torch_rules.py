"""What torch itself can play of a plan, and in which mode: fake tensors, one rank alone, CPUs, or all GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from simulator.parallel.legality.degrees import nearest_divisor
from simulator.parallel.legality.rule import Played, PlayRule
from simulator.parallel.schedule_traits import splits_backward
from simulator.spec.plan import AXES, NOTHING_OFFLOADED, Plan
from simulator.spec.plan.memory import USUAL_MEMORY
from simulator.spec.plan.optimizers import OPTIMIZERS
from validate.torch_rules_spread import SPREAD

MAX_CPU_RANKS: Final = 4


def _model_rule(where: str, feature: str, there: Callable[[Played], bool]) -> PlayRule:
    """What the modules that are played do not have."""
    return PlayRule(
        where=where,
        at=lambda played: f"model {played.model.name}",
        holds=lambda played: not there(played),
        equation=f"{feature} is not played",
        remedy="not needed for an answer: `shardwise predict` takes this model",
    )


def _of_torch(plan: Plan) -> bool:
    """The optimizer steps all parameters by torch's own kernels."""
    found = OPTIMIZERS[plan.optimizer.kind]
    return bool(found.foreach) and not found.matrices and not found.loops


def _windows(played: Played) -> bool:
    """Some layers see a window that is shorter than the sequence, others see all of it."""
    model = played.model
    return model.global_every > 0 and model.sliding_window is not None and model.sliding_window < played.plan.seq_len


_MODEL: Final = (
    _model_rule(
        "experts",
        "a mixture with biases, a gate of its shared experts or tokens that travel in fewer channels",
        lambda played: (of := played.model.experts) is not None and bool(of.bias or of.shared_gate or of.latent_dim),
    ),
    _model_rule("latent", "multi-head latent attention", lambda played: played.model.latent is not None),
    _model_rule("mamba", "a mixer with a state", lambda played: played.model.mamba is not None),
    _model_rule(
        "pattern",
        "layers of one branch",
        lambda played: played.model.pattern is not None and played.model.mamba is None,
    ),
    _model_rule("mtp_layers", "multi-token prediction", lambda played: played.model.mtp_layers > 0),
    _model_rule("qk_norm_wide", "a norm over all heads of Q and K", lambda played: played.model.qk_norm_wide),
    _model_rule("norm_weight", "a norm without weights", lambda played: not played.model.norm_weight),
    _model_rule("attention_gate", "a gate of attention's result", lambda played: played.model.attention_gate),
    _model_rule("attention_sinks", "attention with sinks", lambda played: played.model.attention_sinks),
    _model_rule(
        "bidirectional",
        "attention without a mask, or a head that reads one token",
        lambda played: played.model.bidirectional or played.model.num_classes > 0,
    ),
    _model_rule("global_every", "windowed and global layers in one model", _windows),
)


def _in_mesh_order(plan: Plan) -> bool:
    """The axes above 1 are in the order of torch's device mesh."""
    given = [axis for axis in plan.axis_order if getattr(plan, axis) > 1]
    return given == [axis for axis in AXES if getattr(plan, axis) > 1]


_PLAYED_BY: Final = ("whole_modules", "shards_rows", "zero_engine", "core_layers")  # torch, and `validate.engines`
_PLAN: Final = (
    PlayRule(
        where="data_parallel",
        holds=lambda played: any(getattr(played.plan.traits, name) for name in _PLAYED_BY),
        equation=lambda played: f"{played.plan.implementation} is not played",
        remedy='data_parallel = "ddp", "zero_redundancy", "fsdp2", "deepspeed" or "megatron"',
    ),
    PlayRule(
        where="rank_order",
        holds=lambda played: _in_mesh_order(played.plan),
        equation=lambda played: f"{played.plan.rank_order} is not the order of torch's device mesh",
        remedy='rank_order = "tp-cp-ep-dp-pp"; `shardwise predict` takes any',
    ),
    PlayRule(
        where="optimizer",
        holds=lambda played: _of_torch(played.plan),
        equation=lambda played: f"torch has no {played.plan.optimizer.kind} for all parameters",
        remedy='optimizer = "adamw"',
    ),
    PlayRule(
        where="optimizer_impl",
        applies=lambda played: played.plan.traits.shards_rows and played.plan.optimizer.kind.startswith("sgd"),
        holds=lambda played: played.plan.optimizer.impl != "fused",
        equation="torch has no fused SGD for sharded parameters",
        remedy='optimizer_impl = "foreach"',
    ),
    PlayRule(
        where="optimizer_dtype",
        applies=lambda played: played.plan.optimizer.kind in ("adam", "adamw", "sgd_momentum"),
        holds=lambda played: played.plan.optimizer.dtype == played.plan.precision.master,
        equation=lambda played: (
            f"torch keeps its state in the parameters' dtype, {played.plan.precision.master}, "
            f"not {played.plan.optimizer.dtype}"
        ),
        remedy=lambda played: (
            f'optimizer_dtype = "{played.plan.precision.master}"'
            if played.plan.precision.master != "fp16"
            else 'master_dtype = "fp32"'
        ),
    ),
    PlayRule(
        where="reduce_dtype",
        applies=lambda played: not played.plan.traits.shards_rows,
        holds=lambda played: played.plan.precision.master in ("fp32", played.plan.gradient_dtype),
        equation=lambda played: f"DDP's hooks only narrow fp32 gradients, and these are {played.plan.precision.master}",
        remedy=lambda played: f'reduce_dtype = "{played.plan.precision.master}"',
    ),
)


def _widths(played: Played) -> dict[str, int]:
    """Sides of fp8 products: tokens of a rank, and what layers read and write."""
    model, plan = played.model, played.plan
    tokens = plan.micro_batch_size * plan.seq_len // plan.cp
    own = {name: getattr(model, name) for name in ("d_model", "d_ff", "q_width", "kv_width")}
    return {"micro_batch_size × seq_len / cp": tokens, **own}


def _odd(played: Played) -> dict[str, int]:
    return {name: width for name, width in _widths(played).items() if width % _MULTIPLE}


_MULTIPLE: Final = 16  # elements that cuBLAS's fp8 products come in
_narrow_rule = partial(PlayRule, where="precision", applies=lambda played: played.plan.narrow)
_NARROW: Final = (
    _narrow_rule(
        holds=lambda played: played.plan.precision.compute != "nvfp4",
        equation="nvfp4 products need more than torch",
        remedy='precision = "fp8" or "bf16"',
    ),
    _narrow_rule(
        where="fp8_recipe",
        holds=lambda played: played.plan.precision.fp8_recipe in (None, "tensorwise", "rowwise"),
        equation=lambda played: f"torch scales by tensor or by row, not {played.plan.precision.fp8_recipe}",
        remedy='fp8_recipe = "tensorwise" or "rowwise"',
    ),
    _narrow_rule(
        where="fp8_all_gather",
        holds=lambda played: not played.plan.precision.fp8_all_gather,
        equation="weights are gathered in 16 bits and cast behind it",
        remedy="fp8_all_gather = false",
    ),
    _narrow_rule(
        holds=lambda played: played.plan.tp == 1 and played.model.experts is None,
        equation="fp8 products that tp splits, and experts' own, are not played",
        remedy='tp = 1 and a dense model, or precision = "bf16"',
    ),
    _narrow_rule(
        holds=lambda played: not _odd(played),
        equation=lambda played: (
            " and ".join(f"{name} = {width}" for name, width in _odd(played).items())
            + f": torch's fp8 products have sides that {_MULTIPLE} divides"
        ),
        remedy=f'multiples of {_MULTIPLE}, or precision = "bf16"',
    ),
    _narrow_rule(
        where="recompute",
        holds=lambda played: played.plan.recompute.mode != "selective",
        equation="selective checkpointing does not keep the results of fp8 products",
        remedy='recompute = "full" or "none"',
    ),
    _narrow_rule(
        where="schedule",
        holds=lambda played: played.plan.pp == 1 or not splits_backward(played.plan.pipeline_schedule),
        equation="an fp8 product's backward makes both gradients at once",
        remedy='schedule = "1f1b"',
    ),
)


def _states_leave(played: Played) -> bool:
    return played.plan.offload.parameters != "none"


_OFFLOAD: Final = (  # CPUOffloadPolicy is all there is: states of FSDP2 to the host, each unit's copied ahead of its gather
    PlayRule(
        where="offload.activations",
        holds=lambda played: played.plan.offload.activations == "none",
        equation="torch's save_on_cpu takes gathered weights along, and waits for every copy",
        remedy='offload.activations = "none"; `shardwise predict` takes any',
    ),
    PlayRule(
        where="offload.migration",
        applies=_states_leave,
        holds=lambda played: played.plan.offload.migration == "copy",
        equation=lambda played: (
            f"torch's allocator has no unified memory to migrate by {played.plan.offload.migration}"
        ),
        remedy='offload.migration = "copy"',
    ),
    PlayRule(
        where="offload.prefetch",
        applies=_states_leave,
        holds=lambda played: played.plan.offload.prefetch == NOTHING_OFFLOADED.prefetch,
        equation="FSDP2 copies a unit back when it gathers it: forward_prefetch and backward_prefetch say how far ahead",
        remedy=f"offload.prefetch = {NOTHING_OFFLOADED.prefetch}",
    ),
)


def _stack_rule(equation: str, remedy: str, broken: Callable[[Played], bool]) -> PlayRule:
    """What of a software stack is not torch's own."""
    return PlayRule(
        where="",
        at=lambda played: f"stack {played.stack.name}",
        holds=lambda played: not broken(played),
        equation=equation,
        remedy=remedy,
    )


_STACK: Final = (
    _stack_rule(
        "hand-fused blocks are not torch's own",
        'stack = "torch-2.11-eager" or "torch-2.11-compiled"',
        lambda played: played.stack.traits.own_layers and not played.plan.traits.core_layers,
    ),
    _stack_rule(
        "a fused rotary kernel is not torch's own",
        "--set stack.rope=half",
        lambda played: played.stack.traits.runs_operators and played.stack.kernels.rope == "fused",
    ),
    _stack_rule("dropout is not played", "--set stack.dropout=false", lambda played: played.stack.kernels.dropout),
    _stack_rule(
        "training metrics are not played",
        "--set stack.loss_metrics=0",
        lambda played: played.stack.kernels.loss_metrics > 0,
    ),
    _stack_rule(
        "a fused loss is not torch's own",
        "--set stack.loss=fp32_eager",
        lambda played: played.stack.kernels.loss in ("in_place", "fused"),
    ),
    _stack_rule(
        "the Triton kernel of 2022 is not in torch",
        "--set stack.attention.kernel=flash2",
        lambda played: played.stack.attention.kernel == "flash1_triton",
    ),
    _stack_rule(
        "compiled blocks do not run on fake tensors",
        "--mode solo, on a GPU",
        lambda played: played.mode == "fake" and played.stack.traits.compiles_blocks,
    ),
)


def _split(played: Played) -> bool:
    return played.plan.tp > 1


def _divides(name: str) -> PlayRule:
    """Tp divides what the model has of one thing."""
    return PlayRule(
        where="tp",
        applies=_split,
        holds=lambda played: getattr(played.model, name) % played.plan.tp == 0,
        equation=lambda played: f"{played.plan.tp} does not divide {name} = {getattr(played.model, name)}",
        remedy=lambda played: f"tp = {nearest_divisor(getattr(played.model, name), played.plan.tp)}",
    )


_tp_rule = partial(PlayRule, where="tp", applies=_split)
_SPLIT: Final = (
    _tp_rule(
        holds=lambda played: not played.plan.traits.whole_modules or played.plan.num_data_parallel <= 1,
        equation="torch's DDP of split parameters is experimental: it rebuilds them in every forward",
        remedy="tp = 1, or zero = 3",
    ),
    _tp_rule(
        holds=lambda played: not played.model.fused_qkv,
        equation="a joined QKV projection is not split by torch's styles",
        remedy="tp = 1",
    ),
    _divides("num_heads"),
    _divides("num_kv_heads"),
    _divides("d_ff"),
)


def _fake_replicas(played: Played) -> bool:
    plan = played.plan
    replicated = plan.traits.whole_modules and plan.num_data_parallel > 1
    return played.mode == "fake" and replicated and plan.num_micro_batches > 1 and plan.pp == 1


_MODE: Final = (
    PlayRule(
        where="sync_every_micro_batch",
        applies=_fake_replicas,
        holds=lambda played: not played.plan.syncs_every_micro_batch,
        equation="DDP rebuilds its buckets after the first reduction, which fake tensors cannot do",
        remedy="--mode cpu or solo, or sync_every_micro_batch = false",
    ),
    PlayRule(
        where="",
        at=lambda _: "plan",
        applies=lambda played: played.mode == "cpu",
        holds=lambda played: played.plan.num_devices <= MAX_CPU_RANKS,
        equation=lambda played: f"{played.plan.num_devices} ranks are too many processes for one CPU machine",
        remedy=f"a plan of at most {MAX_CPU_RANKS} ranks, or --mode fake",
    ),
)


def _powersgd(played: Played) -> bool:
    return played.plan.ddp.comm_hook.kind == "powersgd"


_HOOKS: Final = (
    PlayRule(
        where="memory_policy",
        holds=lambda played: played.plan.memory == USUAL_MEMORY,
        equation="torch plays on the pool that its process has, by PYTORCH_CUDA_ALLOC_CONF in its environment",
        remedy="no [plan.memory]; `shardwise predict` takes any",
    ),
    PlayRule(
        where="sync_every_steps",
        holds=lambda played: played.plan.sync_every_steps <= 1,
        equation="`validate run` does not take steps without the replicas",
        remedy="sync_every_steps = 1; `shardwise predict` takes any",
    ),
    PlayRule(
        where="comm_hook",
        applies=_powersgd,
        holds=lambda played: played.mode not in ("fake", "solo"),
        equation="PowerSGD reduces with real ranks only",
        remedy="--mode cpu or full",
    ),
    PlayRule(
        where="comm_hook",
        applies=_powersgd,
        holds=lambda played: played.plan.tp <= 1,
        equation="PowerSGD is played among all ranks",
        remedy="tp = 1",
    ),
    PlayRule(
        where="comm_hook.error_feedback",
        applies=_powersgd,
        holds=lambda played: not played.plan.ddp.comm_hook.error_feedback or played.mode != "cpu",
        equation="gloo ends the hook on threads of its own, where no tracker sees the error's memory",
        remedy="comm_hook.error_feedback = false, or play it on GPUs",
    ),
    PlayRule(
        where="comm_hook",
        applies=lambda played: played.plan.ddp.comm_hook.kind == "bf16_compress",
        holds=lambda played: played.mode != "cpu",
        equation="torch's bf16 hook needs NCCL",
        remedy='comm_hook.kind = "fp16_compress", or play it on GPUs',
    ),
)

PLAYED: Final = (*_MODEL, *_PLAN, *_NARROW, *_OFFLOAD, *_STACK, *_SPLIT, *SPREAD, *_MODE, *_HOOKS)
