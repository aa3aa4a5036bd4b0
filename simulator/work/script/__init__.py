"""StepScript: the order of a step, written once, and each implementation of data parallelism in a file of its own.

Letters: Ψ parameters, N shard ranks. Sources: arXiv 1910.02054 (the ZeRO stages), and the frameworks' own code, named in
each implementation's file; told in docs/background/memory.md and docs/background/schedules.md.

To add an implementation, write its file beside these and import it here: CONTRIBUTING.md has an example.
"""

from simulator.base.registry import IMPLEMENTATIONS
from simulator.work.script.ddp import DDP
from simulator.work.script.deepspeed import DEEPSPEED
from simulator.work.script.fsdp1 import FSDP1
from simulator.work.script.fsdp2 import FSDP2
from simulator.work.script.implementation import Implementation, implementation_of, register
from simulator.work.script.internevo import INTERNEVO
from simulator.work.script.local_sgd import agreement
from simulator.work.script.megatron import MEGATRON
from simulator.work.script.nanotron import NANOTRON
from simulator.work.script.queries import (
    communication,
    gradient_tensors,
    model_state_bytes,
    paged_bytes,
    resident_bytes,
    resident_tensors,
    units,
    update_kernels,
)
from simulator.work.script.resident import optimizer_tensors, stepped_numels
from simulator.work.script.sharding import (
    flat_numels,
    gathered_sizes,
    keeps_layers,
    keeps_root,
    pieces,
    shard_ranks,
    stepped_numel,
)
from simulator.work.script.step import step_script
from simulator.work.script.unit_comm import Hop, UnitComm, last_of
from simulator.work.script.zero_redundancy import ZERO_REDUNDANCY

for _one in (
    DDP,
    FSDP1,
    FSDP2,
    ZERO_REDUNDANCY,
    DEEPSPEED,
    MEGATRON,
    NANOTRON,
    INTERNEVO,
):  # in the order in which people see them
    register(_one)

__all__ = [
    "IMPLEMENTATIONS", "Hop", "Implementation", "UnitComm", "agreement", "communication", "flat_numels",
    "gathered_sizes", "gradient_tensors", "implementation_of", "keeps_layers", "keeps_root", "last_of",
    "model_state_bytes", "optimizer_tensors", "paged_bytes", "pieces", "register", "resident_bytes", "resident_tensors",
    "shard_ranks", "step_script", "stepped_numel", "stepped_numels", "units", "update_kernels",
]  # fmt: skip
