"""Legal plans at random: schedules, degrees, data parallelism, offload, experts, on machines of every kind. One seed, one plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from simulator.base.errors import InputError
from simulator.play.lower import Lowering, lower
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

DENSE: Mapping[str, Any] = {
    "name": "dense",
    "family": "llama",
    "num_layers": 8,
    "d_model": 512,
    "num_heads": 8,
    "num_kv_heads": 4,
    "d_ff": 1024,
    "vocab_size": 4096,
}
EXPERTS = {"num_experts": 8, "top_k": 2, "d_ff": 256, "shared_d_ff": 256, "first_dense_layers": 1}
MODELS = tuple(
    Model.model_validate({**DENSE, **more})
    for more in (
        {},
        {"d_model": 2048, "d_ff": 5632, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 32000},
        {"experts": EXPERTS},
    )
)
# (preset, nodes): switches, bridges, PCIe trees with and without peer access, cube meshes, xGMI, racks
MACHINES = (
    ("hgx-h100-8", 2),
    ("dgx-a100-80-8", 1),
    ("dgx-a100-80-8", 2),
    ("pcie-a40-8", 1),
    ("pcie-a40-8", 2),
    ("pcie-rtx4090-4", 2),
    ("pcie-h100-8", 2),
    ("pcie-l40s-8", 1),
    ("dgx1-v100-8", 1),
    ("mi300x-8", 1),
    ("mi250x-8", 1),
    ("dgx-b200-8", 2),
    ("gcp-a3-high", 2),
    ("aws-p4d", 2),
    ("gh200-1", 8),
)
STACKS = (
    "torch-2.6-eager",
    "torchtitan-2024-compiled",
    "maxtext-2024",
    "megatron-core-2025-exposed",
    "megatron-core-2025",
    "deepspeed-0.14",
    "megatron-2022",
    "nemo-24",
)
SCHEMES = (
    ("ddp", 0),
    ("fsdp1", 2),
    ("fsdp1", 3),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("zero_redundancy", 1),
    ("deepspeed", 1),
    ("deepspeed", 2),
    ("deepspeed", 3),
    ("megatron", 0),
    ("megatron", 1),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model, a plan and a cluster that fit together. nccl: settings of NCCL, by name."""

    model: Model
    plan: Plan
    cluster: Cluster
    nccl: Mapping[str, str] = field(default_factory=dict)

    def lowered(self) -> Lowering:
        stack = Stack.load(self.plan.stack)
        if self.nccl:
            stack = stack.copy_with(nccl_env=dict(self.nccl))
        calibration = Calibration.for_device(self.cluster.device)
        curves = calibration.links or default_curves()
        return lower(self.model, self.plan, self.cluster, stack, calibration, curves)


def drawn(seed: int, **nccl: str) -> Drawn:
    """The first legal one that the seed gives."""
    random = Random(seed)  # noqa: S311  no secrets
    while True:
        cluster, model = Cluster.load(*random.choice(MACHINES)), random.choice(MODELS)
        fields = _fields(random, model, cluster.num_devices)
        try:
            found = Drawn(model, Plan.model_validate(fields), cluster, nccl)
            found.lowered()
        except (InputError, ValueError):
            continue
        return found


def _fields(random: Random, model: Model, num_devices: int) -> dict[str, Any]:
    degrees, left = {}, num_devices
    for axis in random.sample(("tp", "pp", "cp"), 3):
        degrees[axis] = random.choice([degree for degree in (1, 1, 2, 4, 8) if left % degree == 0])
        left //= degrees[axis]
    scheme, zero = random.choice(SCHEMES)
    shards = random.choice([left, left, *(count for count in (1, 2, 4) if left % count == 0)]) if zero else 1
    fields = {
        **degrees,
        "data_parallel": scheme,
        "zero": zero,
        "dp_replicate": left // shards,
        "dp_shard": shards,
        "sequence_parallel": degrees["tp"] > 1 and random.random() < 0.6,
        **_workload(random),
        **(_schedule(random, degrees["pp"]) if degrees["pp"] > 1 else {}),
    }
    if model.experts is not None:
        fields |= {"ep": random.choice((1, 2, 4, 8)), "etp": random.choice((1, degrees["tp"]))}
        fields |= {"dispatcher": random.choice(("all_to_all", "all_gather", "deep_ep"))}
    return fields | (_offload(random) if random.random() < 0.25 else {})


def _workload(random: Random) -> dict[str, Any]:
    return {
        "seq_len": random.choice((256, 1024, 4096)),
        "micro_batch_size": random.choice((1, 1, 2, 4)),
        "num_micro_batches": random.randint(1, 14),
        "recompute": random.choice(("none", "full", "selective", "every_k")),
        "recompute_every": 2,
        "forward_prefetch": random.randint(0, 2),
        "backward_prefetch": random.randint(0, 2),
        "limit_all_gathers": random.random() < 0.9,
        "sync_every_micro_batch": random.choice((None, None, True, False)),
        "sync_every_steps": random.choice((1,) * 9 + (4,)),
        "cp_exchange": random.choice(("ring", "all_to_all")),
        "rank_order": random.choice(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "dp-pp-cp-tp")),
        "stack": random.choice(STACKS),
    }


def _schedule(random: Random, pp: int) -> dict[str, Any]:
    name = random.choice(("1f1b", "gpipe", "interleaved", "zb_h1", "dualpipe", "dualpipe_v"))
    if name == "interleaved":
        return {"schedule": name, "virtual_stages": 2, "num_micro_batches": pp * random.randint(1, 5)}
    if name in ("dualpipe", "dualpipe_v"):
        chunks = 2 if name == "dualpipe_v" else 1
        return {"schedule": name, "virtual_stages": chunks, "num_micro_batches": 2 * (pp + random.randint(0, 5))}
    return {"schedule": name}


def _offload(random: Random) -> dict[str, Any]:
    return {
        "offload": {
            "optimizer": random.choice(("none", "host", "host")),
            "parameters": random.choice(("none", "host")),
            "activations": random.choice(("none", "host")),
            "prefetch": random.randint(0, 3),
            "overlap": random.random() < 0.7,
        }
    }
