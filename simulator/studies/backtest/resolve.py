"""A row -> the inputs of a prediction, by its stated columns; inexpressible rows are refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import Any, Final

from simulator.base.errors import PlanError, StackError
from simulator.base.schema import merged, nearest
from simulator.parallel.legality import check
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.hosts import usual_host
from simulator.spec.cluster.measured import Bandwidth
from simulator.spec.model import Model
from simulator.spec.model.files import preset_names
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import traits_of
from simulator.spec.software.described import Described, named_in
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.studies.backtest.blanks import described, filled_rows
from simulator.studies.backtest.models import model_of, preset_of
from simulator.studies.backtest.notes import note_text, states
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import FP8_RECIPES, FlopConvention, RunRow

_GROUPS: Final = re.compile(r"zero1_intragroup([0-9]{1,18})")
_PCIE: Final = re.compile(r"\bpcie ?-?(?:gen)? ?([3-6])?", re.IGNORECASE)
_FASTER: Final = re.compile(r"nvl|nvswitch|xgmi", re.IGNORECASE)
_OLDER: Final = ("volta", "ampere", "ada", "cdna2")  # of PCIe 4
_NEEDED: Final = ("n_layers", "d_model", "n_heads", "d_ff", "mlp_kind", "vocab", "seq_len", "n_gpus", "micro_batch",
                  "global_batch", "precision")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row made concrete. micro_batches: of one rank and step, a fraction where the last one is smaller.

    unmodelled: options that the row states and no prediction holds.
    """

    row: RunRow
    model: Model
    plan: Plan
    cluster: Cluster
    stack: Stack
    micro_batches: float

    @property
    def time_factor(self) -> float:
        """Step time over that of the plan, whose micro-batches are all full."""
        return self.micro_batches / self.plan.num_micro_batches

    @property
    def flop_convention(self) -> FlopConvention:
        return self.row.flop_convention or "full_attention"

    @property
    def unmodelled(self) -> tuple[str, ...]:
        return tuple(self.row.unmodelled.split())


def resolve(row: RunRow) -> Run:
    """Model, plan, cluster and stack of a row's first variant, by docs/reference/runs-table.md.

    Raises RefusedError with every reason found, or PlanError, ModelError, ClusterError where the inputs refuse.
    """
    if row.excluded:
        kind, _, detail = row.excluded.partition(": ")
        raise RefusedError((kind, detail))
    stack, software = described(row)
    row = filled_rows(row)[0]
    if reasons := [*inexpressible(row), *_blanks(row)]:
        raise RefusedError(*reasons)
    cluster = _cluster_of(row)
    model = model_of(row)
    micro_batches, plan = _plan(row, stack, software, cluster.gpus_per_node)
    return Run(
        row=row,
        model=model,
        plan=plan,
        cluster=cluster,
        stack=_stack_of(row, stack, cluster.device).copy_with(known=_known(row, stack)),
        micro_batches=micro_batches,
    )


def _blanks(row: RunRow) -> Iterator[tuple[str, str]]:
    """Faults: blank columns that nothing fills, and contradictory degrees."""
    needed = [*_NEEDED, *(["top_k"] if (row.n_experts or 1) > 1 else [])]
    blank = [c for c in needed if getattr(row, c) in (None, "")]
    if blank:
        near = "; or ".join(filter(None, (nearest(row.model_name, preset_names()), "the sizes in their columns")))
        unknown = row.model_name and preset_of(row) is None
        yield (
            f"{', '.join(blank)} blank",
            f"no preset is called {row.model_name!r} ({near})" if unknown else "no rule fills it",
        )
    if not row.gpu:
        yield "gpu blank", "no rule fills it"
    degrees = {"tp": row.tp or 1, "pp": row.pp or 1, "cp": row.cp or 1}
    product = prod(degrees.values()) * (row.dp or 1)
    if row.n_gpus and (row.n_gpus % product or (row.dp and row.n_gpus != product)):
        stated = {**degrees, "dp": row.dp} if row.dp else degrees
        detail = f"{' × '.join(f'{k} {v}' for k, v in stated.items())}, not {row.n_gpus}"
        yield "degrees do not multiply to n_gpus", detail


def _cluster_of(row: RunRow) -> Cluster:
    """The machine that the row names, or the usual one of its GPU."""
    if row.machine:
        cluster = _preset(row.machine, row.n_gpus or 0)
    else:
        gbps = row.inter_link_gbps_per_node
        rate = None if gbps is None else gbps * 1e9 / 8
        cluster = _cluster(row.gpu, row.n_gpus or 0, _node(row), _intra_kind(row), rate)
    domain = row.nvlink_domain_size or _of_a_rack(cluster, row)
    return as_measured(cluster.model_copy(update={"nvlink_domain_size": domain}), row)


def _of_a_rack(cluster: Cluster, row: RunRow) -> int:
    """GPUs of an NVLink domain that a job takes: of several racks, whole nodes of each that share the job evenly.

    So degrees that are powers of two stay inside a rack of 18 nodes, of which the job takes 16.
    """
    node, domain, gpus = cluster.gpus_per_node, cluster.nvlink_domain_size, row.n_gpus or 1
    if domain <= node or gpus <= domain:
        return domain
    return max((size for size in range(node, domain + 1, node) if gpus % size == 0), default=domain)


def as_measured(cluster: Cluster, row: RunRow) -> Cluster:
    """The cluster with the bandwidths measured on the job's own nodes: of one node, and of all."""
    stated: dict[str, Any] = row.of("fabric")
    common = {"size_bytes": stated[size]} if (size := "size_bytes") in stated else {}
    groups = {"intra": (1, cluster.gpus_per_node), "inter": (cluster.num_nodes, cluster.num_nodes)}
    found = tuple(
        _without_copies(
            Bandwidth(collective=kind, nodes=groups[where][0], bus_bytes_per_s=rate * 1e9, **common),
            cluster,
            stated.get("gather_copies", 0),
        )
        for where in groups
        for kind, rate in stated.get(where, {}).items()
        if groups[where][1] > 1  # a job on one node has no group between nodes
    )
    if (rank_s := stated.get("call_rank_s")) is not None:
        cluster = cluster.model_copy(update={"fabric": cluster.fabric.model_copy(update={"call_rank_s": rank_s})})
    return cluster.with_measured(found, f"line {row.line}") if found else cluster


def _without_copies(one: Bandwidth, cluster: Cluster, copies: int) -> Bandwidth:
    """What NCCL gave, where a gather was timed with so many copies of the whole message beside it (lists of tensors)."""
    if not copies or one.collective not in ("all_gather", "reduce_scatter"):
        return one
    seconds = one.time_s(one.nodes * cluster.gpus_per_node)
    copied_s = copies * 2 * one.size_bytes / cluster.device.memory_bytes_per_s
    return one.model_copy(
        update={"bus_bytes_per_s": one.bus_bytes_per_s * seconds / max(seconds - copied_s, seconds / 2)}
    )


@cache
def _cluster(
    gpu: str, num_devices: int, gpus_per_node: int | None, intra: str | None, bytes_per_s: float | None
) -> Cluster:
    return Cluster.synthesise(gpu, num_devices, gpus_per_node, intra, bytes_per_s)


@cache
def _preset(name: str, num_devices: int) -> Cluster:
    cluster = Cluster.load(name)
    return cluster.with_nodes(ceil(num_devices / cluster.gpus_per_node))


def _node(row: RunRow) -> int | None:
    """GPUs of a node that a job takes: as stated, or, where the job's do not fill such nodes, the most that do."""
    stated, gpus = row.gpus_per_node, row.n_gpus or 1
    usual = stated or Cluster.load(usual_host(Device.resolve(row.gpu))).gpus_per_node
    if gpus <= usual or gpus % usual == 0:
        return stated
    return max(size for size in range(1, usual + 1) if gpus % size == 0)


def _intra_kind(row: RunRow) -> str | None:
    """The links between a node's GPUs where a row says that they are PCIe; None leaves them to the GPU's usual host."""
    found = _PCIE.search(row.intra_link)
    if found is None or _FASTER.search(row.intra_link):
        return None
    older = Device.load(row.gpu).architecture in _OLDER
    return "pcie4" if found[1] in ("3", "4") or (found[1] is None and older) else "pcie5"


def _plan(row: RunRow, stack: str, software: Described, per_node: int) -> tuple[float, Plan]:
    """(micro-batches a step, plan)."""
    cp, tp, pp = row.cp or 1, row.tp or 1, row.pp or 1
    ranks = (row.n_gpus or 1) // (cp * tp * pp)
    micro_batch, micro_batches = _batch(row, ranks)
    sequence_parallel, recipe = tp > 1 and row.seq_parallel == "y", FP8_RECIPES.get(row.precision)
    fields: dict[str, Any] = {
        "cp": cp,
        "tp": tp,
        "pp": pp,
        "virtual_stages": (row.vpp or 1) if pp > 1 else 1,
        "sequence_parallel": sequence_parallel,
        "micro_batch_size": micro_batch,
        "num_micro_batches": ceil(micro_batches),
        "seq_len": row.seq_len,
        "stack": stack,
        **({"precision": "fp8", "fp8_recipe": recipe} if recipe else {"precision": row.precision}),
        # ranks that all hold the same tokens would compute the same experts
        **({"ep": row.ep or 1, "etp": 1 if sequence_parallel else tp} if (row.n_experts or 1) > 1 else {}),
        **_sharding(row, software, ranks, per_node),
        **({"recompute": _recompute(row, software)} if row.act_ckpt else {}),
    }
    plan = Plan.parse(merged(fields, row.of("plan")), f"line {row.line}", PlanError)
    check(plan, f"line {row.line}")
    return micro_batches, plan


def _batch(row: RunRow, ranks: int) -> tuple[int, float]:
    """Sequences of a micro-batch, and micro-batches of a rank. A rank's share below one micro-batch is one smaller micro-batch.

    Ranks of experts may share a sequence, but none runs a part of one.
    """
    share = (row.global_batch or 1) / ranks
    if row.num_micro_batches:
        return ceil(share / row.num_micro_batches), row.num_micro_batches
    micro_batch = min(row.micro_batch or 1, ceil(share))
    return micro_batch, max(share, 1) / micro_batch


def _sharding(row: RunRow, software: Described, ranks: int, per_node: int) -> dict[str, Any]:
    """zero_or_fsdp in the plan's words: stage, whose implementation, ranks that share a shard, replicas."""
    word, whose = row.zero_or_fsdp, software.data_parallel
    if word == "ddp" or row.n_gpus == 1:  # who deals experts to ranks sums the other gradients as DeepSpeed does
        own = (row.ep or 1) == 1 or traits_of(whose.ddp).expert_groups
        return {"zero": 0, "data_parallel": whose.ddp if own else "deepspeed", "dp_replicate": ranks, "dp_shard": 1}
    groups = _GROUPS.fullmatch(word)
    shard = int(groups[1]) if groups else per_node // ((row.cp or 1) * (row.tp or 1)) if word == "hsdp" else ranks
    if not shard or ranks % shard:
        raise RefusedError(("groups do not divide the ranks", f"{word}: groups of {shard} among {ranks} ranks"))
    stage = 1 if groups else {"zero1": 1, "zero2": 2, "fsdp_grad_op": 2}.get(word, 3)
    player = whose.zero1 if stage == 1 else whose.zero if word in ("zero2", "zero3") else whose.fsdp
    return {"zero": stage, "data_parallel": player, "dp_shard": shard, "dp_replicate": ranks // shard}


def _recompute(row: RunRow, software: Described) -> str:
    """act_ckpt in the plan's words."""
    by_itself = software.selective == "attention" and row.flash_attn == "y"
    return "none" if row.act_ckpt == "selective" and by_itself else row.act_ckpt


def _stack_of(row: RunRow, name: str, device: Device) -> Stack:
    """The stack with the row's changes; attention by `flash_attn`, unless the row names its kernel."""
    stack, stated = _stack(name), row.of("stack")
    if "attention" not in stated:
        stack = with_attention(stack, flash=row.flash_attn, device=device)
    if not stated:
        return stack
    data = merged(stack.model_dump(exclude_unset=True), stated)
    return Stack.parse(data, f"line {row.line}", StackError)


def _known(row: RunRow, stack: str) -> str:
    """How well the stack describes the software that the row names, if any."""
    if row.stack or any(not one.family for one in named_in(row.framework, _stack(stack).describes)):
        return "described"
    return "unknown" if row.framework else "assumed"


_stack = cache(Stack.load)


def with_attention(stack: Stack, *, flash: str | None, device: Device) -> Stack:
    """The stack with unfused attention where a row says n, a tiled kernel where it says y.

    A tiled kernel whose speed nobody measured on the device is taken as flash-attention 2.
    """
    attention = stack.attention
    tiled = attention.kernel != "math" if flash is None else flash == "y"
    if not tiled:
        kernel = "math"
    elif attention.kernel == "math" or not _measured(attention, device):
        kernel = "flash2"
    else:
        return stack
    if kernel == attention.kernel:
        return stack
    return stack.copy_with(attention=AttentionBackend.model_validate({"kernel": kernel}))


def _measured(attention: AttentionBackend, device: Device) -> bool:
    stated = attention.forward_efficiency or attention.backward_efficiency
    if stated:
        return device.architecture in stated
    return any(attention.kernel in curve.kernels for curve in Calibration.for_device(device).attention)


# Families whose layers are not softmax attention over the past, by their papers or config.json
_NOT_ATTENTION: Final = (
    (r"minimax-?(text-?)?0?1\b|minimax-?m1", "lightning attention in seven of eight layers"),  # arXiv 2501.08313
    (r"qwen-?3-?next|qwen-?3\.5|kimi-?linear", "gated delta layers (config.json: linear_attention)"),
    (r"ring-?(mini-)?linear|ling-?linear|minicpm-?sala", "linear attention"),
    (r"\brwkv|\bretnet|hyena|\bxlstm|\bgla-", "recurrence instead of attention"),
    (r"recurrent-?gemma|\bgriffin|\bhawk\b", "recurrent blocks beside attention"),  # arXiv 2402.19427
    (r"\bjamba|\bzamba|\bsamba|falcon-?(mamba|h1)|codestral-?mamba|granite-?4.*\bh\b|bamba", "state-space layers"),
)
_NOT_DECODER: Final = r"\b(bert|roberta|deberta|modernbert|t5|mt5|flan-?t5|ul2|bart|whisper|vit|clip|dit|unet)\b"
_ADAPTERS: Final = re.compile(r"\bpeft\b|\badapters?\b", re.IGNORECASE)  # of another kind than LoRA
# A state-space model of no published pattern, and states in host memory that no column of a plan describes
_STATE_SPACE: Final = re.compile(r"--hybrid-layer-pattern|--mamba-|\bmamba", re.IGNORECASE)
_OFFLOAD: Final = re.compile("offload", re.IGNORECASE)


def inexpressible(row: RunRow) -> Iterator[tuple[str, str]]:
    """(kind, detail) of each feature that a model or plan here cannot express."""
    yield from beyond_models(row)
    if (row.ep or 1) > 1 and (row.n_experts or 1) == 1:
        yield "expert parallelism without experts", f"ep = {row.ep}"
    known = preset_of(row)
    if "pattern" not in row.of("model") and not (known and known.pattern) and _STATE_SPACE.search(row.notes):
        yield "layers without attention", "a state-space model by its notes, of no published pattern"
    if states(_OFFLOAD, note_text(row)) and not any(key.startswith("offload") for key in row.of("plan")):
        yield "offload", "stated in the notes"


def beyond_models(row: RunRow) -> Iterator[tuple[str, str]]:
    """(kind, detail) of each feature of the row's model that models here do not have."""
    name = re.sub(r"[\s_/]+", "-", row.model_name.casefold())
    for pattern, mechanism in _NOT_ATTENTION:
        if re.search(pattern, name):
            yield "layers without attention", mechanism
            break
    if found := re.search(_NOT_DECODER, name):
        yield "no decoder", f"{found[0]}: a model that is more, or other, than one stack of causal layers"
    if "peft" not in row.of("plan") and _ADAPTERS.search(f"{row.model_name} {row.framework} {note_text(row)}"):
        yield "adapters", "most parameters are frozen, by its name or notes"
