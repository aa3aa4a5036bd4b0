"""Megatron-LM's arguments on data parallelism: the implementation, what it shards, and what overlaps with compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simulator.formats.readers.plans.draft import Degree
from simulator.formats.readers.plans.reading import Reading

_ANY_STAGE: Final = (("--zero", "1"),)  # what a ready command shows


def read_data_parallel(r: Reading, fields: dict[str, Any], stack: dict[str, tuple[object, str]]) -> Degree:
    """The data-parallel implementation, and the degree that takes the remaining ranks."""
    if r.flag("--deepspeed"):
        return _megatron_deepspeed(r, fields, stack)
    distributed = bool(r.flag("--use-distributed-optimizer"))
    torch_fsdp, own_fsdp = bool(r.flag("--use-torch-fsdp2")), bool(r.flag("--use-megatron-fsdp"))
    strategy = r.choice("--data-parallel-sharding-strategy", ("no_shard", "optim", "optim_grads", "optim_grads_params"))
    if torch_fsdp:
        _torch_fsdp_faults(r, fields, distributed=distributed, own_fsdp=own_fsdp)
        fields |= {"data_parallel": "fsdp2", "zero": 3}
        if r.flag("--torch-fsdp2-no-reshard-after-forward"):
            fields["reshard_after_forward"] = False
        return "dp_shard"
    if own_fsdp:
        stage = {None: 0, "no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}[strategy]
        fields |= {"zero": stage, "data_parallel": "fsdp2" if stage == 2 else "megatron"}
        if stage < 3:
            taken = "FSDP2's stage 2" if stage == 2 else "the distributed optimizer"
            r.unmodelled("--data-parallel-sharding-strategy", f"{strategy} of Megatron-FSDP is taken as {taken}")
    else:
        fields["zero"] = 1 if distributed else 0
        if strategy not in (None, "no_shard"):
            r.fault("--data-parallel-sharding-strategy", f"{strategy} needs Megatron-FSDP", "--use-megatron-fsdp")
    _overlap(r, fields, stack, sharded=distributed or own_fsdp)
    instances = r.integer("--num-distributed-optimizer-instances")
    if fields["zero"] == 0:
        if instances is not None and instances > 1:
            r.fault("--num-distributed-optimizer-instances", "shards nothing", "--use-distributed-optimizer")
        return "dp_replicate"
    if instances is not None:
        fields["dp_replicate"] = instances
    return "dp_shard"


def _megatron_deepspeed(r: Reading, fields: dict[str, Any], stack: dict[str, tuple[object, str]]) -> Degree:
    """Megatron-DeepSpeed's own arguments (BigScience, Microsoft): ZeRO's stage, and checkpoints as they were called."""
    stage = r.integer("--zero-stage", least=0, plan_field="zero")
    if stage is None and "zero" not in r.given:
        remedy = "--zero-stage N in the file, or --zero N"
        r.fault("--deepspeed", "the stage is in DeepSpeed's own file", remedy, _ANY_STAGE)
    elif stage is not None and stage > 3:
        r.fault("--zero-stage", f"there is no stage {stage}", "0, 1, 2 or 3")
    zero = stage if stage is not None and stage <= 3 else 0
    if zero == 0 and fields.get("precision") == "bf16":
        zero = 1
        r.note("--zero-stage", "with bf16 DeepSpeed's own optimizer shards its states: zero = 1")
    fields |= {"data_parallel": "deepspeed", "zero": zero}
    if r.flag("--use-distributed-optimizer"):
        r.fault("--use-distributed-optimizer", "contradicts --deepspeed", "keep one")
    if r.flag("--checkpoint-activations"):
        fields["recompute"] = "full"
    for name in ("tp_overlap", "tp_whole", "overlap", "late_parameters", "loss", "weight_gradients"):
        stack.pop(name, None)  # its kernels are those of Megatron-LM 2021
    return "dp_shard" if zero else "dp_replicate"


def _torch_fsdp_faults(r: Reading, fields: Mapping[str, Any], *, distributed: bool, own_fsdp: bool) -> None:
    """Options that validate_args refuses with --use-torch-fsdp2."""
    against = {
        "--use-distributed-optimizer": distributed,
        "--use-megatron-fsdp": own_fsdp,
        "--pipeline-model-parallel-size": fields.get("pp", 1) > 1,
        "--expert-model-parallel-size": fields.get("ep", 1) > 1,
        "--fp16": "--fp16" in r,
    }
    for name, wrong in against.items():
        if wrong:
            r.fault(name, "contradicts --use-torch-fsdp2", f"drop {name} or --use-torch-fsdp2")
    for name in ("--untie-embeddings-and-output-weights", "--no-gradient-accumulation-fusion"):
        if name not in r:
            r.fault("--use-torch-fsdp2", f"needs {name}", f"add {name}")


def _overlap(r: Reading, fields: Mapping[str, Any], stack: dict[str, tuple[object, str]], *, sharded: bool) -> None:
    """Whether gradients and parameters travel beside compute, or behind the backward and before the forward."""
    reduces, gathers = bool(r.flag("--overlap-grad-reduce")), bool(r.flag("--overlap-param-gather"))
    if gathers and not sharded:
        r.fault("--overlap-param-gather", "gathers nothing", "--use-distributed-optimizer")
    if gathers and not reduces:
        r.fault("--overlap-param-gather", "needs --overlap-grad-reduce", "add --overlap-grad-reduce")
    if fields["zero"] == 3 and not reduces:
        if fields.get("tp", 1) * fields.get("pp", 1) > 1:
            r.default_unmodelled("--overlap-grad-reduce", "false", "gradients are reduced beside the backward here")
        else:
            stack["overlap"] = (False, f"{r.file}: no --overlap-grad-reduce")
        return
    if not reduces:
        stack["late_gradients"] = (True, f"{r.file}: no --overlap-grad-reduce")
    if sharded and not gathers:
        stack["late_parameters"] = (True, f"{r.file}: no --overlap-param-gather")
