"""What of a plan is played otherwise than it was asked for, and what torch or the packages of `validate.engines` do not play."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from simulator.base.errors import Fault
from simulator.parallel.legality.rule import Played, PlayRule
from simulator.spec.model import Model
from simulator.spec.plan import NOTHING_OFFLOADED, Plan
from simulator.spec.plan.compression import NO_ONE_BIT, NO_ZEROPP
from simulator.spec.software.stack import Stack
from validate.engines import engine_of, package_faults
from validate.gpus import built_with_cuda
from validate.task import Mode
from validate.torch_rules import PLAYED


def _rule(where: str, holds: Callable[[Played], bool], equation: str, remedy: str) -> PlayRule:
    """A field of the plan, or what it stands at, that an engine does not play."""
    return PlayRule(where=where, holds=holds, equation=equation, remedy=remedy)


def _alone(axis: str, engine: str) -> PlayRule:
    problem = f"{engine} is played without {axis}"
    return _rule(axis, lambda played: getattr(played.plan, axis) == 1, problem, f"{axis} = 1")


_ANY: Final = (
    _rule(
        "data_parallel",
        lambda played: played.mode in ("cpu", "full"),
        "an engine's collectives need the other ranks",
        "--mode cpu or full",
    ),
    _rule(
        "data_parallel",
        lambda played: played.model.experts is None,
        "mixtures of experts are played by torch's own data parallelism alone",
        "a dense model, or --program",
    ),
    _rule(
        "offload",
        lambda played: played.plan.offload == NOTHING_OFFLOADED,
        "engines play no offload",
        "no [plan.offload]",
    ),
    _rule(
        "stack",
        lambda played: played.stack.traits.runs_operators,
        "compiled blocks are not played inside an engine",
        'stack = "torch-2.13-cpu", or "torch-2.11-eager" on a GPU',
    ),
    _rule(
        "sync_every_micro_batch",
        lambda played: played.plan.sync_every_micro_batch is None,
        "engines decide themselves when they reduce",
        "leave sync_every_micro_batch out",
    ),
    _rule(
        "precision",
        lambda played: not played.plan.narrow,
        "fp8 products are played by torch's own data parallelism alone",
        'precision = "bf16"',
    ),
    _rule(
        "precision.master",
        lambda played: played.plan.precision.master == "fp32",
        "engines keep their own copy of the parameters in fp32",
        'master_dtype = "fp32"',
    ),
)
_OF: Final[dict[str, tuple[PlayRule, ...]]] = {
    "deepspeed": (
        *(_alone(axis, "DeepSpeed") for axis in ("tp", "cp", "ep", "pp")),
        _rule(
            "precision",
            lambda played: played.plan.compute_dtype == "bf16" or (played.plan.compute_dtype == "fp32" and played.plan.zero > 0),
            "DeepSpeed is played in bf16, and in fp32 from stage 1 on; fp16 skips steps until its loss scale fits",
            'precision = "bf16"',
        ),
        _rule(
            "reduce_dtype",
            lambda played: played.plan.gradient_dtype == played.plan.compute_dtype,
            "DeepSpeed is played with gradients that travel as they are",
            "leave reduce_dtype out",
        ),
        _rule(
            "dp_replicate",
            lambda played: played.plan.zero == 0 or played.plan.dp_replicate == 1,
            "MiCS is not played",
            "dp_replicate = 1",
        ),
        _rule(
            "deepspeed",
            lambda played: played.plan.deepspeed.zeropp == NO_ZEROPP and played.plan.deepspeed.one_bit == NO_ONE_BIT,
            "ZeRO++ and 1-bit optimizers are not played: their kernels are compiled for CUDA",
            "leave zeropp and one_bit out",
        ),
    ),
    "megatron": (
        *(_alone(axis, "Megatron-Core") for axis in ("cp", "ep", "pp")),
        _rule(
            "zero",
            lambda played: played.plan.zero < 2,
            "Megatron-FSDP is not played",
            "zero = 0, or 1 for the distributed optimizer",
        ),
        _rule(
            "precision",
            lambda played: played.plan.compute_dtype == "bf16",
            "Megatron-Core is played in bf16",
            'precision = "bf16"',
        ),
        _rule(
            "optimizer",
            lambda played: played.plan.optimizer.kind in ("adam", "adamw"),
            "Megatron-Core is played with Adam",
            'optimizer = "adamw"',
        ),
        _rule(
            "recompute",
            lambda played: played.plan.recompute.mode in ("none", "full"),
            "Megatron-Core is played with every layer recomputed or none",
            'recompute = "full" or "none"',
        ),
        _rule(
            "vocab_parallel",
            lambda played: played.plan.tp == 1 or played.plan.vocab_parallel,
            "Megatron-Core splits the tables wherever it splits layers",
            "vocab_parallel = true",
        ),
        _rule(
            "stack",
            lambda played: played.stack.traits.own_layers,
            "Megatron-Core brings its own layers, and this stack describes others",
            'stack = "megatron-core-0.16-local-cpu", or "megatron-core-0.16-local" on a GPU',
        ),
        _rule(
            "data_parallel",
            lambda played: _is_gpt(played.model),
            "of Megatron-Core's models, pre-norm layers with rotary positions and SwiGLU, GEGLU or GELU are played",
            "such a model, or --program",
        ),
    ),
}  # fmt: skip


def _is_gpt(model: Model) -> bool:
    """Megatron-Core's GPTModel of local layers has it as it is described here."""
    usual = model.positions == "rope" and model.mlp in ("swiglu", "geglu", "gelu") and model.mlp_bias == model.out_bias
    other = model.qk_norm, model.post_norms, model.parallel_residual, model.embedding_norm, model.embedding_scale
    return usual and not any((*other, model.logit_softcap, model.lm_head_bias, model.sliding_window))


def unplayable(model: Model, plan: Plan, stack: Stack, mode: str) -> list[Fault]:
    """Why torch itself cannot play this plan in this mode; empty if it can."""
    subject = Played(plan, model, stack, mode)
    return [rule.fault(subject) for rule in PLAYED if rule.broken(subject)]


def engine_faults(model: Model, plan: Plan, stack: Stack, mode: Mode) -> Iterator[Fault]:
    """Why the package of the plan's data parallelism cannot play it: not there, or what this road does not play."""
    if engine_of(plan) is None:
        return
    subject = Played(plan, model, stack, mode)
    yield from (rule.fault(subject) for rule in (*_ANY, *_OF[plan.implementation]) if rule.broken(subject))
    yield from package_faults(plan)


def played_otherwise(model: Model, plan: Plan, stack: Stack, mode: Mode, device: str) -> list[str]:
    """What of the plan and its stack this way of playing it cannot have, and has otherwise."""
    notes = []
    decomposed = device == "cpu" or (mode == "fake" and not built_with_cuda())
    if decomposed and model.norm == "rms" and stack.kernels.norm == "fused":
        where = "on a CPU" if device == "cpu" else "where torch has no CUDA"
        notes.append(
            f"stack {stack.name}: rms_norm is one kernel there, and written out as operators that keep more {where}; "
            f'stack = "torch-2.13-fake-{device}" predicts what was played'
        )
    if plan.offload.parameters != "none":
        if device == "cpu":
            notes.append(
                "offload: on a CPU device and host are one memory, so offloaded states are counted with the rest"
            )
        if plan.offload.pinned and (device == "cpu" or mode == "fake"):
            notes.append("offload.pinned: no GPU here to pin memory for; pageable memory was used")
    if plan.cp > 1:
        notes.append("cp: each rank keeps its own rows of the position tables; the prediction counts whole ones")
    if model.experts is not None:
        notes.append("experts: tokens are dealt evenly, and a rank's experts are one batched product each way")
    if plan.narrow and stack.traits.runs_operators:
        notes.append("fp8: without a compiler a cast is several operators, whose time is not predicted")
    notes += _of_engines(plan, device)
    if plan.pp > 1 and device == "cpu" and mode != "fake":
        notes.append(
            "pp: bytes are the allocator's own; gloo's finished sends keep what they sent to the schedule's end"
        )
    if plan.memory_fraction < 1 and (device == "cpu" or mode == "fake"):
        notes.append("memory_fraction: there is no caching allocator here to limit")
    return notes


def _of_engines(plan: Plan, device: str) -> Iterator[str]:
    """What engines of packages hold that is not predicted."""
    if plan.traits.core_layers:
        yield (
            "Megatron-Core's local layers keep a copy of the MLP's upper half and rotary tables of Q and of K in each layer, "
            "and one buffer of scores for all: none is predicted"
        )
    if plan.traits.zero_engine and plan.zero == 1:
        yield "DeepSpeed's stage 1 is predicted as releases before 0.19 have it: without a bucket of gradients"
    if engine_of(plan) is not None and device == "cpu":
        yield ("bytes are the allocator's own: oneDNN's of 16-bit products and copies of gloo are not predicted")
