"""Rules that fill what a table of measured runs leaves open. They look at columns and flags, never at an id or a source.

docs/reference/runs-table.md states every rule in words; a test holds the two lists of stacks together.
"""

from __future__ import annotations

import re
from dataclasses import replace

from runs_table import nemo
from runs_table.frameworks import FrameworkRule
from runs_table.published import published, structure
from runs_table.sizes import with_counts
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.hosts import usual_host
from simulator.spec.model import Model
from simulator.studies.backtest.models import family_of, with_sizes
from simulator.studies.backtest.rows import RunRow

# Machines that the notes name, and the preset cluster each is.
# A DGX's network is part of what it is; a GPU's alone is not.
MACHINES: tuple[tuple[str, str], ...] = (
    (r"\bA3 VM", "gcp-a3-high"),
    (r"\bJean Zay A100", "jean-zay-a100-8"),
    (r"\b4 ?x ?100Gb RoCE/node", "hgx-a100-80-8-roce-4x100"),
    (r"\bDGX-H100\b", "dgx-h100-8"),
    (r"\bSelene A100\b|\bDGX nodes\b.* as used by NVIDIA", "selene"),
)


# Amazon's instances of each GPU; only they have its NICs (EFA).
_AMAZON = {
    "a100-sxm4-40gb": "aws-p4d",
    "a100-sxm4-80gb": "aws-p4de",
    "h100-sxm5-80gb": "aws-p5",
    "h200-sxm": "aws-p5en",
    "b200-sxm": "aws-p6-b200",
    "b300-sxm": "aws-p6-b300",
}
_EFA = re.compile(r"\bEFA\b|\bp[456](?:d|de|e|en)?\.48xlarge|\bp6-b[23]00\b")


def machine(row: RunRow) -> str | None:
    """The preset cluster that a row's notes name, if any."""
    named = next((preset for pattern, preset in MACHINES if re.search(pattern, row.notes)), None)
    if named is not None and (row.n_gpus or 0) % Cluster.load(named).gpus_per_node:
        named = None  # a part of a node
    amazon = _AMAZON.get(Device.resolve(row.gpu)) if _EFA.search(f"{row.notes} {row.intra_link}") else None
    return named or amazon


def intra_kind(row: RunRow) -> str | None:
    """The links between a node's GPUs where a row says that they are PCIe; None leaves them to the GPU's usual host."""
    found = re.search(r"\bpcie ?-?(?:gen)? ?([3-6])?", row.intra_link, re.IGNORECASE)
    if found is None or re.search(r"nvl|nvswitch|xgmi", row.intra_link, re.IGNORECASE):
        return None
    older = Device.load(row.gpu).architecture in ("volta", "ampere", "ada", "cdna2")
    return "pcie4" if found[1] in ("3", "4") or (found[1] is None and older) else "pcie5"


def network_bytes_per_s(row: RunRow) -> float | None:
    """What a node sends one way, if the row says so; None leaves it to the GPU's usual host."""
    gbps = row.inter_link_gbps_per_node
    return None if gbps is None else gbps * 1e9 / 8


# Jobs of several racks take 16 of a rack's 18 trays, so that degrees that are powers of two stay inside a rack.
_RACKS = ("gb200", "gb300")
_RACK_GPUS = 64


def rack_gpus(row: RunRow) -> int | None:
    """GPUs of a rack's NVLink domain that a job of several racks takes; None: all there are."""
    several = (row.n_gpus or 0) > _RACK_GPUS and (row.n_gpus or 0) % _RACK_GPUS == 0
    return _RACK_GPUS if several and Device.resolve(row.gpu) in _RACKS else None


def filled_node(row: RunRow) -> int | None:
    """GPUs of a node that a job takes: as stated, or, where the job's do not fill such nodes, the most that do."""
    stated, gpus = row.gpus_per_node, row.n_gpus or 1
    usual = stated or Cluster.load(usual_host(Device.resolve(row.gpu))).gpus_per_node
    if gpus <= usual or gpus % usual == 0:
        return stated
    return max(size for size in range(1, usual + 1) if gpus % size == 0)


_NOTED_VOCABULARY = re.compile(r"\bvocab ~?(\d+)k\b")


def filled(row: RunRow) -> RunRow:
    """The row with blank sizes as its notes, its model's name or the published model of that name state them.

    A vocabulary that a published launcher changes is that one's.

    Other blanks stay.
    """
    noted = _NOTED_VOCABULARY.search(row.notes)
    vocab = int(noted[1]) * 1000 if noted else None
    return with_counts(with_sizes(replace(row, vocab=nemo.vocabulary(row) or row.vocab or vocab)))


def published_mixture(row: RunRow) -> Model | None:
    """The published mixture of experts that a row's name and width are of.

    What the columns leave open (latent attention, shared experts, dense layers, modules of multi-token prediction) is its.
    """
    model = published(row)
    return model if model is not None and model.experts is not None and (row.n_experts or 1) > 1 else None


def mixture_fields(row: RunRow) -> dict[str, object]:
    """Structure of a mixture of experts; the column d_ff is the width of one expert."""
    columns = {"num_experts": row.n_experts, "top_k": row.top_k, "d_ff": row.d_ff}
    known = published_mixture(row)
    if known is None or known.experts is None:
        return {**family_fields(row), "experts": columns}
    fields = known.model_dump(exclude={"name", "sources", "num_layers", "max_positions", *_OF_COLUMNS})
    dense = min(known.experts.first_dense_layers, (row.n_layers or 1) - 1)
    experts = {**known.experts.model_dump(), **columns, "first_dense_layers": dense}
    sizes = {"d_ff": known.d_ff, "vocab_size": row.vocab or known.vocab_size}
    if _NO_MTP.search(row.notes):
        sizes |= {"mtp_layers": 0, "mtp_passes": 1}
    return {**fields, "experts": experts, **sizes, **({"head_dim": known.head_dim} if known.latent is None else {})}


_OF_COLUMNS = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "experts")
_NO_MTP = re.compile(r"\bw/o MTP\b")
_EXPERT_OVERLAP = re.compile(r"A2A overlap=on")
_EXPERT_RANKS = re.compile(r"\bETP ?=? ?(\d+)\b")
_DISPATCHERS = (
    (re.compile(r"dispatcher ?[=:] ?\S*(deep-?ep|hybrid-?ep|uccl|nvshmem)", re.IGNORECASE), "deep_ep"),
    (re.compile(r"dispatcher ?[=:] ?all-?gather", re.IGNORECASE), "all_gather"),
    (re.compile(r"dispatcher ?[=:] ?all-?to-?all", re.IGNORECASE), "all_to_all"),
)
_CAPACITY = re.compile(r"expert capacity ([0-9.]+) padded")
# Megatron-Bridge's apply_moe_token_drop (training/utils/moe_token_drop.py) pads to a capacity of 1 unless told otherwise
_TOKENS_DROPPED = re.compile(r"\bvariant: tokendrop\b")


def overlaps_experts(row: RunRow) -> bool:
    """The notes say that experts' all-to-alls run beside another micro-batch; Megatron needs virtual stages for it."""
    return bool(_EXPERT_OVERLAP.search(row.notes))


def sequence_parallel(row: RunRow, rule: FrameworkRule) -> bool:
    """Ranks of tp hold parts of the tokens between the regions that they split."""
    return (row.tp or 1) > 1 and (row.seq_parallel == "y" if row.seq_parallel else rule.sequence_parallel)


def expert_plan(row: RunRow, rule: FrameworkRule) -> dict[str, object]:
    """How experts are placed and filled."""
    if (row.n_experts or 1) <= 1:
        return {}
    capacity = _CAPACITY.search(row.notes)
    noted = _noted_experts(row)
    drops = 1.0 if _TOKENS_DROPPED.search(row.notes) else rule.expert_capacity
    dropped = {} if drops is None or noted.get("dispatcher") == "deep_ep" else {"expert_capacity_factor": drops}
    return {
        "ep": row.ep or 1,
        # ranks that all hold the same tokens would compute the same experts
        "etp": (row.tp or 1) if rule.splits_experts or not sequence_parallel(row, rule) else 1,
        **noted,
        "expert_overlap": overlaps_experts(row),
        **({"expert_capacity_factor": float(capacity[1])} if capacity else dropped),
        **_layout(row),
    }


def _noted_experts(row: RunRow) -> dict[str, object]:
    """Degree and dispatcher that the notes state."""
    degree = _EXPERT_RANKS.search(row.notes)
    stated = {"etp": int(degree[1]) if degree else None, "dispatcher": noted_dispatcher(row)}
    return {name: value for name, value in stated.items() if value is not None}


def noted_dispatcher(row: RunRow) -> str | None:
    """The one that the notes state, the usual one too."""
    return next((word for pattern, word in _DISPATCHERS if pattern.search(row.notes)), None)


def _layout(row: RunRow) -> dict[str, object]:
    """Layers of a pipeline whose last position has a module of multi-token prediction and two losses beside the head.

    As Megatron-Bridge's recipes of DeepSeek-V3 lay it out: the last position has as few layers as the others allow, then
    the first ("Et*4|(t*4|)*14tmL" in 16 positions, "Et|(tt|)*30mL" in 32).
    """
    known, positions, layers = published_mixture(row), (row.pp or 1) * (row.vpp or 1), row.n_layers or 1
    if known is None or not known.mtp_layers or (row.pp or 1) == 1 or not 3 <= positions <= layers:
        return {}
    most = -(-layers // positions)
    last = max(0, layers - most * (positions - 1))
    first = layers - last - most * (positions - 2)
    return {"stage_layers": (first, *(most,) * (positions - 2), last)} if first >= 0 else {}


def ends_as_layers(row: RunRow, rule: FrameworkRule) -> dict[str, object]:
    """Megatron-Core deals layers evenly or refuses: what comes out even with embedding and loss was counted with both."""
    pp, layers = row.pp or 1, row.n_layers or 1
    positions = pp * (row.vpp or 1)
    if pp == 1 or not rule.counts_ends or layers % positions == 0 or (layers + 2) % positions:
        return {}
    return {"embedding_as_layer": True, "head_as_layer": True}


def family_fields(row: RunRow) -> dict[str, object]:
    """Structure of the model beyond its sizes: by name, else like GPT-3 for an ungated MLP and like Llama for SwiGLU."""
    return structure(row) or family_of(row)
