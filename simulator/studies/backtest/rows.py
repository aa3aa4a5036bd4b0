"""Rows: what a reader of tables hands over, typed, one a record. docs/reference/ has the columns of each table.

`line` is the physical line where the record starts (the header is line 1). Every other field is a column unless it says
otherwise; None (or "") where the table is silent. Units are the table's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from simulator.base.errors import Fault

Metric = Literal["step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s", "model_tflops_per_gpu", "mfu"]
MemoryMetric = Literal[
    "peak_allocated_gib",
    "peak_active_gib",
    "peak_reserved_gib",
    "max_gpu_ram_gb",
    "nvidia_smi_used_gb",
    "gpu_memory_gb",
    "oom",
]
YesNo = Literal["y", "n"]
FlopConvention = Literal["full_attention", "half_attention_all_weights", "hardware_2021"]
# Words of `precision` that say how fp8 is scaled, and the plan's `fp8_recipe`
FP8_RECIPES: Final = {"fp8_mx": "mxfp8", "fp8_rowwise": "rowwise", "fp8_blockwise": "blockwise"}
Strategy = Literal["single", "ddp", "fsdp2_full", "fsdp2_noreshard", "hsdp", "tp"]
Dtype = Literal["fp32", "bf16", "fp16"]
Setting = tuple[
    str, object
]  # a key behind its noun (`plan.reduce_dtype`, `stack.attention.kernel`, `model.norm`), its value

# The table's names (nccl-tests' programs) -> ours
KINDS: dict[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A record that cannot be read: where it starts, its id if it has one, and everything that is wrong with it."""

    line: int
    id: str
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One measured run.

    stack, model, machine: files of topologies/ by name. unmodelled: options of the run that no prediction holds, in one cell.
    excluded: why no prediction can hold the row at all, as `kind: detail`.
    mem_metric_detail: what stands in parentheses behind mem_metric. settings: of the columns that are keys of a plan, a stack
    or a model. unread: what the table says in words that nobody knows; it costs nothing else.
    """

    line: int
    id: str
    source: str = ""
    source_location: str = ""
    framework: str = ""
    model_name: str = ""
    n_layers: int | None = None
    d_model: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_ff: int | None = None
    mlp_kind: str = ""
    vocab: int | None = None
    seq_len: int | None = None
    n_experts: int | None = None
    top_k: int | None = None
    gpu: str = ""
    n_gpus: int | None = None
    gpus_per_node: int | None = None
    intra_link: str = ""
    inter_link_gbps_per_node: float | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    vpp: int | None = None
    zero_or_fsdp: str = ""
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = ""
    act_ckpt: str = ""
    flash_attn: YesNo | None = None
    seq_parallel: YesNo | None = None
    compile: YesNo | None = None
    metric: Metric | None = None
    value: float | None = None
    mem_metric: MemoryMetric | None = None
    mem_metric_detail: str = ""
    mem_value: float | None = None
    notes: str = ""
    stack: str = ""
    model: str = ""
    machine: str = ""
    nvlink_domain_size: int | None = None
    num_micro_batches: int | None = None
    flop_convention: FlopConvention | None = None
    unmodelled: str = ""
    excluded: str = ""
    settings: tuple[Setting, ...] = ()
    unread: tuple[str, ...] = ()

    def of(self, noun: str) -> dict[str, object]:
        """Settings of "plan", "stack", "model" or "fabric", as nested as its file."""
        found: dict[str, object] = {}
        for key, value in self.settings:
            owner, *path = key.split(".")
            if owner == noun:
                into = found
                for part in path[:-1]:
                    into = into.setdefault(part, {})  # type: ignore[assignment]  # a table of the same noun
                into[path[-1]] = value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One tracked step."""

    line: int
    row: str
    model: str = ""
    n_params: int | None = None
    n_layers: int | None = None
    d_model: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_ff: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    world: int | None = None
    strategy: Strategy = "single"
    replicate: int | None = None
    tp: int | None = None
    ac: Literal["none", "full", "selective"] = "none"
    store_dtype: Dtype = "fp32"
    param_dtype: Dtype = "fp32"
    reduce_dtype: Dtype | None = None
    opt_dtype: Dtype | None = None
    amp: Literal["none", "bf16", "fp16"] = "none"
    opt_impl: Literal["adamw_foreach", "adamw_loop", "adamw_fused"] = "adamw_foreach"
    attn: Literal["", "sdpa_repeat", "flash_gqa", "eff_repeat"] = ""
    ddp_bucket_view: bool | None = None
    device: Literal["cpu", "cuda"] = "cuda"
    tool: str = ""
    peak_bytes: int | None = None
    peak_phase: str = ""
    param: int | None = None
    sharded_param: int | None = None
    unsharded_param: int | None = None
    grad: int | None = None
    sharded_grad: int | None = None
    activation: int | None = None
    optstate: int | None = None
    temp: int | None = None
    all_gather: int | None = None
    reduce_scatter: int | None = None
    buffer: int | None = None
    inputs_other: int | None = None
    ddp_buckets: int | None = None
    start_bytes: int | None = None
    after_fwd_bytes: int | None = None
    after_bwd_bytes: int | None = None
    peak_fwd: int | None = None
    peak_bwd: int | None = None
    peak_opt: int | None = None
    track_seconds: float | None = None
    real_peak_bytes: int | None = None
    real_profiler_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One figure of a measured server, in the unit that the row states.

    stack: a file of topologies/stacks by name. dp: engines behind one queue. num_requests: that the figure was taken over.
    prefill_tp, prefill_dp: of engines that only compute prompts. client: the program that sent the requests. shortest: a request's tokens over the stated ones, at least.
    """

    line: int
    id: str
    source: str = ""
    source_location: str = ""
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    gpu: str = ""
    n_gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None
    prefill_tp: int | None = None
    prefill_dp: int | None = None
    precision: str = ""
    kv_precision: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    concurrency_or_rate: str = ""
    num_requests: int | None = None
    client: str = ""
    shortest: float | None = None
    metric: str = ""
    value: float | None = None
    unit: str = ""
    stack: str = ""
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measured size.

    degraded: why the run was broken in reality. left_out: why a fit of links passes it over. usual_network: the network that
    the row does not name is that of the GPU's usual machine.
    """

    line: int
    source: str = ""
    location: str = ""
    collective: str = ""
    gpu: str = ""
    n_gpus: int | None = None
    n_nodes: int | None = None
    gpus_per_node: int | None = None
    intra_link: str = ""
    inter_link_gbps_per_node: float | None = None
    nccl_version: str = ""
    algo_env: str = ""
    proto_env: str = ""
    size_bytes: int = 0
    time_us: float = 0.0
    algbw_GBps: float | None = None  # noqa: N815  the columns are named so
    busbw_GBps: float | None = None  # noqa: N815
    in_place: str = ""
    notes: str = ""
    degraded: str = ""
    left_out: str = ""
    usual_network: YesNo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table from a reader. unread: its unknown columns, each with the closest known ones."""

    name: str
    kind: Literal["runs", "memory", "collectives", "serving"]
    rows: tuple[RunRow | MemoryRow | CollectiveRow | ServingRow | BadRow, ...]
    unread: tuple[str, ...] = ()
