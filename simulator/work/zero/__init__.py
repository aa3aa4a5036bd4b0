"""ZeRO: what each implementation shards, what stays resident on a GPU, what travels and which passes it adds.

Letters: Ψ parameters, N shard ranks. Sources: arXiv 1910.02054 (the stages), torch 2.13 `_fully_shard` (FSDP2),
`fsdp/_flat_param.py` (FSDP1), `nn/parallel/distributed.py` (DDP), DeepSpeed `runtime/zero`, Megatron-Core
`distributed/param_and_grad_buffer.py`; told in docs/background/memory.md.
"""

from simulator.work.zero.communication import communication
from simulator.work.zero.hops import Hop
from simulator.work.zero.local_steps import agreement
from simulator.work.zero.resident import (
    buffer_tensors,
    gradient_tensors,
    model_state_bytes,
    optimizer_tensors,
    resident_bytes,
    resident_tensors,
    stepped_numels,
)
from simulator.work.zero.unit_comm import UnitComm
from simulator.work.zero.units import (
    ParameterUnit,
    expert_shard_ranks,
    flat_numels,
    gathered_sizes,
    keeps_layers,
    keeps_root,
    pieces,
    shard_ranks,
    stepped_numel,
    units,
)

__all__ = [
    "Hop",
    "ParameterUnit",
    "UnitComm",
    "agreement",
    "buffer_tensors",
    "communication",
    "expert_shard_ranks",
    "flat_numels",
    "gathered_sizes",
    "gradient_tensors",
    "keeps_layers",
    "keeps_root",
    "model_state_bytes",
    "optimizer_tensors",
    "pieces",
    "resident_bytes",
    "resident_tensors",
    "shard_ranks",
    "stepped_numel",
    "stepped_numels",
    "units",
]
