"""The one list of rules, in the order in which faults are reported."""

from __future__ import annotations

from typing import Any, Final

from simulator.parallel.legality import blocks, degrees, experts, heads, memory, offload, precision, traffic, tuning
from simulator.parallel.legality.pipeline import PIPELINE
from simulator.parallel.legality.rule import Rule
from simulator.parallel.legality.software import SOFTWARE

RULES: Final[tuple[Rule[Any], ...]] = (
    # the plan alone
    *degrees.PLAN,
    *experts.PLAN,
    *offload.PLAN,
    *traffic.PLAN,
    *precision.PLAN,
    *tuning.PLAN,
    *memory.PLAN,
    *blocks.PLAN,
    # with the cluster
    *degrees.CLUSTER,
    *precision.CLUSTER,
    # with the model
    *heads.MODEL,
    *precision.MODEL,
    *tuning.MODEL,
    *experts.MODEL,
    *PIPELINE,
    # with all that meets in a run
    *blocks.MODULES,
    *offload.MODELLED,
    *memory.MODELLED,
    blocks.WHOLE_BACKWARDS,
    *offload.HOSTS,
    *precision.RUN,
    *experts.RUN,
    blocks.NEAR_PEERS,
    offload.EVEN_NODES,
    # with the framework that should run it
    *SOFTWARE,
)
