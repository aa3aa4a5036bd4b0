"""A row of the table -> the inputs of a prediction, by the written rules; what they cannot express is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from typing import Any, Final

from runs_table import arguments, nemo
from runs_table.choices import choices
from runs_table.frameworks import FrameworkRule, framework_rule
from runs_table.published import is_hybrid
from runs_table.recipes import package_fields, package_stack, published_recipe
from runs_table.rules import (
    ends_as_layers,
    expert_plan,
    family_fields,
    filled,
    filled_node,
    intra_kind,
    machine,
    mixture_fields,
    network_bytes_per_s,
    overlaps_experts,
    rack_gpus,
    sequence_parallel,
)
from simulator.base.errors import ModelError, PlanError
from simulator.formats.readers.plans import Draft, plan_fields
from simulator.parallel.legality import check
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.blanks import described
from simulator.studies.backtest.notes import techniques
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.resolve import as_measured, beyond_models, with_attention
from simulator.studies.backtest.rows import RunRow
from simulator.studies.backtest.unstated import untrained

_GROUPS = re.compile(r"zero1_intragroup([0-9]+)")
_OFFLOAD = re.compile(
    r"(?<!no )(?<!no-)(?<!without )offload(?!\w*\s*[=:]\s*(?:0|false|none|no|off|n)\b)", re.IGNORECASE
)
_STATES_OFFLOAD = re.compile(
    r"(optimi[sz]er|cpu|zero|param(eter)?s?)[ _-]?offload|offload_(optimizer|param)", re.IGNORECASE
)
_PARAMETERS_OFFLOAD = re.compile(r"param(eter)?s?[ _-]?offload|offload_param|zero3_offload|infinity", re.IGNORECASE)
_SWAPPED_HEADS = re.compile(r"cp_comm_type=a2a\b(?!\+)|\bulysses\b", re.IGNORECASE)
_EVERY_SECOND_BLOCK = re.compile(r"AC=selective layer")
_REDUCE_DTYPES = {"mixed_precision=PURE": "bf16", "fp32 grad accumulation": "fp32"}
_STATE_SPACE = re.compile(r"--hybrid-layer-pattern|--mamba-|\bmamba", re.IGNORECASE)
_MUON = re.compile(r"\bmuon\b(?!-)", re.IGNORECASE)
_ASYNC_TP = re.compile(r"\basync ?TP\b", re.IGNORECASE)
# How fp8 is scaled, in the words of notes: current scaling, sub-channels or blocks (DeepSeek's 128 × 128), delayed scaling
_SCALED = tuple(
    (re.compile(pattern, re.IGNORECASE), recipe)
    for pattern, recipe in (
        (r"\bfp8-rowwise\b", "rowwise"),
        (r"\bfp8[-_]cs\b|\bcurrent scaling\b", "tensorwise"),
        (r"\bfp8[-_](sc|bs)\b|\bblock-?wise\b|\bsub-?channel\b", "blockwise"),
        (r"\bfp8[-_]ds\b|\bdelayed scaling\b", "delayed"),
    )
)
_SIZES = ("n_layers", "d_model", "n_heads", "d_ff", "mlp_kind", "vocab", "seq_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row made concrete. micro_batches: of one rank and step, a fraction where the last one is smaller.

    unmodelled: options that the row states and no prediction holds.
    """

    row: RunRow
    rule: FrameworkRule
    model: Model
    plan: Plan
    cluster: Cluster
    stack: Stack
    micro_batches: float
    unmodelled: tuple[str, ...] = ()

    @property
    def time_factor(self) -> float:
        """Step time over that of the plan, whose micro-batches are all full."""
        return self.micro_batches / self.plan.num_micro_batches


def resolve(row: RunRow) -> Run:
    """Model, plan, cluster and stack of a row, by the rules of docs/reference/runs-table.md.

    Raises RefusedError with every reason found, or PlanError, ModelError, ClusterError where the inputs refuse.
    """
    row = variants_of(row)[0]
    rule = framework_rule(row)
    options = arguments.stated_options(row)
    draft = None if options is None else arguments.draft_of(row, options, rule)
    if draft is not None and isinstance(draft.model, Model):
        row = replace(row, vocab=draft.model.vocab_size)
    if reasons := [*_inexpressible(row, stated=draft is not None)]:
        raise RefusedError(*reasons)
    if draft is not None and draft.faults:
        raise PlanError(draft.faults)
    if reasons := [*_blanks(row)]:
        raise RefusedError(*reasons)
    cluster = _cluster_of(row)
    if draft is not None:
        return _as_stated(row, rule, draft, cluster)
    micro_batches, plan = _plan(row, rule, cluster)
    return Run(
        row=row,
        rule=rule,
        model=_model(row),
        plan=plan,
        cluster=cluster,
        stack=_stack_of(row, plan, cluster.device),
        micro_batches=micro_batches,
    )


def variants_of(row: RunRow) -> tuple[RunRow, ...]:
    """The row with its blanks filled, once for each way that its framework's documents leave open."""
    row = filled(row)
    return choices(row, framework_rule(row))


def _as_stated(row: RunRow, rule: FrameworkRule, draft: Draft, cluster: Cluster) -> Run:
    """The run that a row's own options describe, on the stack of its framework."""
    fields = {**plan_fields(draft, row.n_gpus or 1, {}), "stack": rule.stack(row)}
    plan = Plan.parse(fields, draft.file, PlanError)
    check(plan, draft.file)
    if not isinstance(draft.model, Model):
        raise RefusedError(("model not stated", "the options name none"))
    return Run(
        row=row,
        rule=rule,
        model=draft.model.model_copy(update={"name": row.model_name or row.id}),
        plan=plan,
        cluster=cluster,
        stack=arguments.changed(_stack(plan.stack), draft),
        micro_batches=plan.num_micro_batches,
        unmodelled=arguments.unmodelled(draft),
    )


def _cluster_of(row: RunRow) -> Cluster:
    """The machine that the row names, or the usual one of its GPU."""
    num_devices, preset = row.n_gpus or 0, machine(row)
    if preset is None:
        cluster = _cluster(row.gpu, num_devices, filled_node(row), intra_kind(row), network_bytes_per_s(row))
    else:
        cluster = _preset(preset, num_devices)
    rack = rack_gpus(row)
    cluster = cluster if rack is None else cluster.model_copy(update={"nvlink_domain_size": rack})
    defaults = described(row)[1].defaults.items()  # of the software that measured the job's fabric
    habits = tuple((key, value) for key, value in defaults if key.startswith("fabric."))
    return as_measured(cluster, replace(row, settings=(*habits, *row.settings)))


_stack = cache(Stack.load)


_ONE_TENSOR: Final = re.compile(r"\bpacked experts")  # their weights are one tensor a projection


def _stack_of(row: RunRow, plan: Plan, device: Device) -> Stack:
    """The plan's stack with the attention that the row states; in pieces, where its tensor parallelism is asynchronous."""
    given = _stack(plan.stack)
    if given.kernels.expert_rows == "stacked" and _ONE_TENSOR.search(row.notes):
        given = given.copy_with(expert_rows="padded")
    if changes := nemo.stack_changes(row) | package_stack(row):
        given = given.copy_with(**changes)
    stack = with_attention(given, flash=row.flash_attn, device=device)
    if plan.tp == 1 or stack.kernels.blocks != "compiled" or not _ASYNC_TP.search(row.notes):
        return stack
    return stack.copy_with(tp_overlap="symmetric_memory")


@cache
def _cluster(
    gpu: str, num_devices: int, gpus_per_node: int | None, intra: str | None, bytes_per_s: float | None
) -> Cluster:
    return Cluster.synthesise(gpu, num_devices, gpus_per_node, intra, bytes_per_s)


@cache
def _preset(name: str, num_devices: int) -> Cluster:
    cluster = Cluster.load(name)
    return cluster.with_nodes(ceil(num_devices / cluster.gpus_per_node))


def _inexpressible(row: RunRow, *, stated: bool) -> Iterator[tuple[str, str]]:
    """What a plan of today has no word for. stated: the row's own options say what its layers are."""
    yield from beyond_models(row)
    if (row.ep or 1) > 1 and (row.n_experts or 1) == 1:
        yield "expert parallelism without experts", f"ep = {row.ep}"
    if not stated and not is_hybrid(row) and _STATE_SPACE.search(row.notes):
        yield "layers without attention", "a state-space model by its notes, of no published pattern"
    if _OFFLOAD.search(row.notes) and not _offload(row, framework_rule(row)):
        yield "offload", "stated in the notes"


def _blanks(row: RunRow) -> Iterator[tuple[str, str]]:
    """Columns that nothing else fills, and degrees that contradict each other."""
    needed = [*_SIZES, "n_gpus", "micro_batch", "global_batch", "precision"]
    needed += ["top_k"] if (row.n_experts or 1) > 1 else []
    blank = [c for c in needed if getattr(row, c) in (None, "")]
    if blank:
        yield f"{', '.join(blank)} blank", "no rule fills it"
    if not row.gpu:
        yield "gpu blank", "no rule fills it"
    degrees = {"tp": row.tp or 1, "pp": row.pp or 1, "cp": row.cp or 1}
    product = prod(degrees.values()) * (row.dp or 1)
    if row.n_gpus and (row.n_gpus % product or (row.dp and row.n_gpus != product)):
        stated = {**degrees, "dp": row.dp} if row.dp else degrees
        yield (
            "degrees do not multiply to n_gpus",
            f"{' × '.join(f'{k} {v}' for k, v in stated.items())}, not {row.n_gpus}",
        )


def _model(row: RunRow) -> Model:
    fields = {
        "name": row.model_name or row.id,
        "num_layers": row.n_layers,
        "d_model": row.d_model,
        "num_heads": row.n_heads,
        "d_ff": row.d_ff,
        "vocab_size": row.vocab,
        "max_positions": row.seq_len,
        **({"num_kv_heads": row.n_kv_heads} if row.n_kv_heads else {}),
        **(mixture_fields(row) if (row.n_experts or 1) > 1 else family_fields(row)),
        **{name.removeprefix("model."): value for name, value in techniques(row).items() if name.startswith("model.")},
    }
    return Model.parse(fields, f"line {row.line}", ModelError)


def _plan(row: RunRow, rule: FrameworkRule, cluster: Cluster) -> tuple[float, Plan]:
    """(micro-batches a step, plan). A rank's share below one micro-batch is one smaller micro-batch."""
    cp, tp, num_devices = row.cp or 1, row.tp or 1, row.n_gpus or 1
    pp = row.pp or 1
    ranks = num_devices // (cp * tp * pp)
    share = (row.global_batch or 1) / ranks
    micro_batch = min(row.micro_batch or 1, ceil(share))
    micro_batches = max(share, 1) / micro_batch  # ranks of experts may share a sequence, but none runs a part of one
    fields = {
        "cp": cp,
        "tp": tp,
        "pp": pp,
        "virtual_stages": (row.vpp or (2 if overlaps_experts(row) else 1)) if pp > 1 else 1,
        "sequence_parallel": sequence_parallel(row, rule),
        "cp_exchange": "all_to_all" if _SWAPPED_HEADS.search(row.notes) else "ring",
        "micro_batch_size": micro_batch,
        "num_micro_batches": ceil(micro_batches),
        "seq_len": row.seq_len,
        **_precision(row),
        **nemo.bf16_layers(row),
        **nemo.cuda_graphs(row),
        "optimizer_impl": rule.optimizer_impl,
        **({"optimizer": "sgd_momentum"} if _MUON.search(f"{row.framework} {row.notes}") else {}),
        **({"master_dtype": rule.master_dtype, "optimizer_dtype": rule.master_dtype} if rule.master_dtype else {}),
        "stack": rule.stack(row),
        **ends_as_layers(row, rule),
        **expert_plan(row, rule),
        **_sharding(row, rule, ranks, cluster.gpus_per_node),
        **_recompute(row, rule),
        **_offload(row, rule),
        **(recipe.plan_fields() if (recipe := published_recipe(row)) else package_fields(row)),
        **_reduce_dtype(row, rule),
        **dict(rule.keys),
        **({"expert_imbalance": untrained(row)} if rule.untrained and (row.n_experts or 1) > 1 else {}),
    }
    if nemo.keeps_fp8(row) and (fields["data_parallel"], fields["zero"]) == ("megatron", 1):
        fields["fp8_all_gather"] = fields.get("fp8_recipe") != "blockwise"
    plan = Plan.parse(fields, f"line {row.line}", PlanError)
    check(plan, f"line {row.line}")
    return micro_batches, plan


def _offload(row: RunRow, rule: FrameworkRule) -> dict[str, Any]:
    """Optimizer states, and in stage 3 parameters, in host memory, where the notes say so of DeepSpeed."""
    deepspeed = "deepspeed" in (rule.partitioned, rule.sharded) and row.zero_or_fsdp in ("zero1", "zero2", "zero3")
    if not deepspeed or not (_OFFLOAD.search(row.notes) and _STATES_OFFLOAD.search(row.notes)):
        return {}
    parameters = row.zero_or_fsdp == "zero3" and _PARAMETERS_OFFLOAD.search(row.notes)
    return {"offload": {"optimizer": "host", **({"parameters": "host"} if parameters else {})}}


def _precision(row: RunRow) -> dict[str, Any]:
    if row.precision == "fp8_mx":
        return {"precision": "fp8", "fp8_recipe": "mxfp8"}
    if row.precision != "fp8":
        return {"precision": row.precision}
    stated = next((recipe for pattern, recipe in _SCALED if pattern.search(row.notes)), None)
    recipe = stated or nemo.fp8_recipe(row)
    return {"precision": "fp8", **({} if recipe is None else {"fp8_recipe": recipe})}


def _sharding(row: RunRow, rule: FrameworkRule, ranks: int, per_node: int) -> dict[str, Any]:
    """zero_or_fsdp in the plan's words: stage, whose implementation, ranks that share a shard, replicas."""
    word = row.zero_or_fsdp or rule.sharding or "ddp"
    groups = _GROUPS.fullmatch(word)
    shard = int(groups[1]) if groups else per_node // ((row.cp or 1) * (row.tp or 1)) if word == "hsdp" else ranks
    if word == "ddp" or row.n_gpus == 1:
        plain = "ddp" if rule.partitioned else rule.replicated or "ddp"  # who has both runs torch's own
        return {"zero": 0, "data_parallel": plain, "dp_replicate": ranks, "dp_shard": 1}
    if not shard or ranks % shard:
        raise RefusedError(("groups do not divide the ranks", f"{word}: groups of {shard} among {ranks} ranks"))
    stage = 1 if groups else {"zero1": 1, "zero2": 2, "fsdp_grad_op": 2}.get(word, 3)
    whose = rule.replicated if stage == 1 else rule.sharded
    if word in ("zero2", "zero3"):
        whose = rule.partitioned or whose
    return {"zero": stage, "data_parallel": whose, "dp_shard": shard, "dp_replicate": ranks // shard}


def _recompute(row: RunRow, rule: FrameworkRule) -> dict[str, Any]:
    """act_ckpt in the plan's words. Megatron's `selective` recomputes the attention core, which a fused kernel does."""
    word = rule.recomputes or row.act_ckpt or rule.recompute
    if word == "products":
        return {"recompute": "selective"}
    if word != "selective":
        return {"recompute": word}
    if _EVERY_SECOND_BLOCK.search(row.notes):
        return {"recompute": "every_k", "recompute_every": 2}
    if rule.replicated == "megatron" and row.flash_attn == "y":
        return {"recompute": "none"}
    return {"recompute": "selective"}


def _reduce_dtype(row: RunRow, rule: FrameworkRule) -> dict[str, Any]:
    found = (dtype for flag, dtype in _REDUCE_DTYPES.items() if flag in row.notes)
    dtype = next(found, rule.reduce_dtype)
    return {} if dtype is None else {"reduce_dtype": dtype}
