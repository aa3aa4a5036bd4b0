"""NCCL's words in its variables and its tuner's files."""

from __future__ import annotations

from typing import Final

ALGORITHMS: Final = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
PROTOCOLS: Final = ("ll", "ll128", "simple")
FUNCTIONS: Final = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
}
