"""Which plans torch itself can play, and in which mode: every reason why not, at once. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.base.errors import Fault
from simulator.spec.model import Model
from simulator.spec.plan import AXES, NOTHING_OFFLOADED, Plan
from simulator.spec.software.stack import Stack
from validate.task import Mode

MAX_CPU_RANKS = 4


def unplayable(model: Model, plan: Plan, stack: Stack, mode: Mode) -> list[Fault]:
    """Why this plan cannot be played this way; empty if it can."""
    return [
        *_model_faults(model, plan),
        *_plan_faults(plan),
        *_offload_faults(plan),
        *_stack_faults(stack, mode),
        *_split_faults(model, plan),
        *_mode_faults(plan, mode),
        *_hook_faults(plan, mode),
    ]


def played_otherwise(model: Model, plan: Plan, stack: Stack, mode: Mode, device: str) -> list[str]:
    """What of the plan and its stack this way of playing it cannot have, and has otherwise."""
    notes = []
    if (device == "cpu" or mode == "fake") and model.norm == "rms" and stack.norm == "fused":
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
    if plan.memory_fraction < 1 and (device == "cpu" or mode == "fake"):
        notes.append("memory_fraction: there is no caching allocator here to limit")
    return notes


def _model_faults(model: Model, plan: Plan) -> Iterator[Fault]:
    """What the modules of `validate.models` do not have."""
    place = f"model {model.name}"
    parts = {
        "experts": (model.experts is not None, "a mixture of experts"),
        "latent": (model.latent is not None, "multi-head latent attention"),
        "mamba": (model.mamba is not None, "a Mamba-2 mixer"),
        "pattern": (model.pattern is not None and model.mamba is None, "layers of one branch"),
        "mtp_layers": (model.mtp_layers > 0, "multi-token prediction"),
        "attention_sinks": (model.attention_sinks, "attention with sinks"),
        "global_every": (
            model.global_every > 0 and model.sliding_window is not None and model.sliding_window < plan.seq_len,
            "windowed and global layers in one model",
        ),
    }
    for name, (there, what) in parts.items():
        if there:
            yield Fault(place=f"{place}: {name}", problem=f"{what} is not played", remedy="`predict` takes it")


def _plan_faults(plan: Plan) -> Iterator[Fault]:
    if plan.implementation not in ("ddp", "zero_redundancy", "fsdp2"):
        yield Fault(
            place="plan: data_parallel",
            problem=f"{plan.implementation} is not played",
            remedy="ddp, zero_redundancy or fsdp2",
        )
    for name in ("cp", "pp", "ep"):
        if getattr(plan, name) > 1:
            yield Fault(place=f"plan: {name}", problem=f"{name} = {getattr(plan, name)} is not played", remedy="1")
    degrees = {axis: getattr(plan, axis) for axis in plan.axis_order}
    if [axis for axis, size in degrees.items() if size > 1] != [axis for axis in AXES if degrees[axis] > 1]:
        problem = f"{plan.rank_order} is not the order of torch's device mesh"
        yield Fault(place="plan: rank_order", problem=problem, remedy="tp-cp-ep-dp-pp; `predict` takes any")
    if plan.narrow:
        yield Fault(place="plan: precision", problem=f"{plan.precision} products need more than torch", remedy="bf16")
    if plan.optimizer == "adam8bit":
        yield Fault(place="plan: optimizer", problem="adam8bit needs bitsandbytes", remedy="adamw")
    if plan.optimizer.startswith("sgd") and plan.optimizer_impl == "fused" and plan.implementation == "fsdp2":
        yield Fault(
            place="plan: optimizer_impl",
            problem="torch has no fused SGD for sharded parameters",
            remedy="foreach",
        )
    if plan.optimizer_dtype != plan.master_dtype and plan.optimizer not in ("sgd", "adam8bit"):
        yield Fault(
            place="plan: optimizer_dtype",
            problem=f"torch keeps its state in the parameters' dtype, {plan.master_dtype}, not {plan.optimizer_dtype}",
            remedy=f"optimizer_dtype = {plan.master_dtype}" if plan.master_dtype != "fp16" else "master_dtype = fp32",
        )
    if plan.implementation != "fsdp2" and plan.master_dtype not in ("fp32", plan.gradient_dtype):
        yield Fault(
            place="plan: reduce_dtype",
            problem=f"DDP's hooks only narrow fp32 gradients, and these are {plan.master_dtype}",
            remedy=f"reduce_dtype = {plan.master_dtype}",
        )


def _stack_faults(stack: Stack, mode: Mode) -> Iterator[Fault]:
    place = f"stack {stack.name}"
    if stack.blocks == "fused":
        yield Fault(place=place, problem="hand-fused blocks are not torch's own", remedy="an eager or compiled stack")
    if stack.blocks == "eager" and stack.rope == "fused":
        yield Fault(place=place, problem="a fused rotary kernel is not torch's own", remedy='rope = "half"')
    if stack.dropout:
        yield Fault(place=place, problem="dropout is not played", remedy="dropout = false")
    if stack.loss_metrics:
        yield Fault(place=place, problem="training metrics are not played", remedy="loss_metrics = 0")
    if stack.loss == "in_place":
        yield Fault(place=place, problem="Transformer Engine's loss is not torch's own", remedy='loss = "fp32_eager"')
    if stack.loss == "fused":
        yield Fault(place=place, problem="a fused loss is not torch's own", remedy='loss = "fp32_eager"')
    if stack.attention.kernel == "flash1_triton":
        yield Fault(place=place, problem="the Triton kernel of 2022 is not in torch", remedy='kernel = "flash2"')
    if mode == "fake" and stack.blocks == "compiled":
        yield Fault(place=place, problem="compiled blocks do not run on fake tensors", remedy="solo on a GPU")


def _offload_faults(plan: Plan) -> Iterator[Fault]:
    """CPUOffloadPolicy is all that torch has: states of FSDP2 to the host, each unit's copied ahead of its gather."""
    offload, place = plan.offload, "plan: offload"
    if offload.activations != "none":
        yield Fault(
            place=f"{place}.activations",
            problem="torch's save_on_cpu takes gathered weights along, and waits for every copy",
            remedy='activations = "none"; `predict` takes it',
        )
    if offload.parameters == "none":
        return
    if offload.migration != "copy":
        problem = f"torch's allocator has no unified memory to migrate by {offload.migration}"
        yield Fault(place=f"{place}.migration", problem=problem, remedy='migration = "copy"')
    if offload.prefetch != NOTHING_OFFLOADED.prefetch:
        yield Fault(
            place=f"{place}.prefetch",
            problem="FSDP2 copies a unit as it gathers it: how far ahead is forward_prefetch's and backward_prefetch's",
            remedy=f"prefetch = {NOTHING_OFFLOADED.prefetch}",
        )


def _split_faults(model: Model, plan: Plan) -> Iterator[Fault]:
    if plan.tp == 1:
        return
    if plan.implementation != "fsdp2" and plan.num_data_parallel > 1:
        yield Fault(
            place="plan: tp",
            problem="torch's DDP of split parameters is an experiment: it makes them anew in every forward",
            remedy="tp = 1, or zero = 3",
        )
    if model.fused_qkv:
        yield Fault(place="plan: tp", problem="a joined QKV projection is not split by torch's styles", remedy="tp = 1")
    for name in ("num_heads", "num_kv_heads", "d_ff"):
        if getattr(model, name) % plan.tp:
            problem = f"{plan.tp} does not divide {name} = {getattr(model, name)}"
            yield Fault(place="plan: tp", problem=problem, remedy=f"a divisor of {getattr(model, name)}")


def _hook_faults(plan: Plan, mode: Mode) -> Iterator[Fault]:
    if plan.sync_every_steps > 1:
        problem = "steps without the replicas are not played"
        yield Fault(place="plan: sync_every_steps", problem=problem, remedy="1; `predict` takes any")
    if plan.comm_hook.kind == "powersgd" and mode in ("fake", "solo"):
        problem = "PowerSGD reduces with real ranks only"
        yield Fault(place="plan: comm_hook", problem=problem, remedy="--mode cpu or full")
    if plan.comm_hook.kind == "powersgd" and plan.tp > 1:
        yield Fault(place="plan: comm_hook", problem="PowerSGD is played among all ranks", remedy="tp = 1")
    if plan.comm_hook.kind == "powersgd" and plan.comm_hook.error_feedback and mode == "cpu":
        problem = "gloo ends the hook on threads of its own, where no tracker sees the error's memory"
        yield Fault(place="plan: comm_hook.error_feedback", problem=problem, remedy="false, or GPUs")
    if plan.comm_hook.kind == "bf16_compress" and mode == "cpu":
        problem = "torch's bf16 hook needs NCCL"
        yield Fault(place="plan: comm_hook", problem=problem, remedy="fp16_compress, or GPUs")


def _mode_faults(plan: Plan, mode: Mode) -> Iterator[Fault]:
    replicated = plan.implementation in ("ddp", "zero_redundancy") and plan.num_data_parallel > 1
    if mode == "fake" and replicated and plan.num_micro_batches > 1 and plan.syncs_every_micro_batch:
        yield Fault(
            place="plan: sync_every_micro_batch",
            problem="DDP lays its buckets out anew after its first reduction, which fake tensors have no data for",
            remedy="--mode cpu or solo, or sync_every_micro_batch = false",
        )
    if mode == "cpu" and plan.num_devices > MAX_CPU_RANKS:
        yield Fault(
            place="plan",
            problem=f"{plan.num_devices} ranks are too many processes for one CPU machine",
            remedy=f"at most {MAX_CPU_RANKS}, or --mode fake",
        )
