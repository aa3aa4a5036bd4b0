"""Offload: what a plan keeps below HBM, what travels between the tiers in a step, and what a transfer costs.

Letters: Ψ parameters, N shard ranks, S = Ψ/N. Sources: ZeRO-Offload (arXiv 2101.06840), ZeRO-Infinity (arXiv
2104.07857), DeepSpeed `runtime/zero`, torch 2.13 `_fully_shard` (CPUOffloadPolicy); told in docs/background/offload.md.
"""

from simulator.work.offload.hierarchy import Object, Tier, hierarchy, place
from simulator.work.offload.moves import Moves, UnitMoves, moves
from simulator.work.offload.tier_usage import tier_usage
from simulator.work.offload.transfers import SIGMA, Transfers

__all__ = ["SIGMA", "Moves", "Object", "Tier", "Transfers", "UnitMoves", "hierarchy", "moves", "place", "tier_usage"]
