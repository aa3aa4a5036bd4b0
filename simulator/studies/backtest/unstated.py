"""Facts that a step depends on and tables rarely state: expert load and dispatch, adapters, counted FLOP.

`also` and `counted_otherwise` are what may have been besides: a prediction stands without them, its interval reaches to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from simulator.parallel.pipeline.layers import by_cost
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.measured import step_seconds
from simulator.studies.backtest.notes import techniques, trained
from simulator.studies.backtest.rows import RunRow

UNTRAINED: Final = "untrained"  # `expert_imbalance` in a stack's defaults: its benchmarks train for some twenty steps
VOCABULARIES: Final = (50_304, 32_000, 128_256)  # GPT-2's padded, Llama 2's, Llama 3's
_COLLAPSED: Final = 0.92  # experiments/untrained_routing.py: 3.7 of at most 4 with 8 experts, 7.3 of at most 8 with 16
# Settings that say which layers a stage has
SPLIT: Final = frozenset(
    ("stage_layers", "first_stage_layers", "last_stage_layers", "embedding_as_layer", "head_as_layer")
)
# End of the 90 % for what options cost that no prediction holds, deterministic kernels among them: attention's backward then reaches
# 37.9 % less throughput (arXiv 2601.21824, abstract)
_UNMODELLED: Final = 1.6
# As published recipes combine what launchers offer for experts (experiments/runs_table/megatron_bridge_recipes.csv)
_TUNED: Final[tuple[Mapping[str, Any], ...]] = (
    {"plan.dispatcher": "deep_ep"},
    {"plan.dispatcher": "deep_ep", "plan.expert_overlap": True},
    {"plan.dispatcher": "deep_ep", "plan.cuda_graphs": ("full_iteration",)},
)


def untrained(row: RunRow) -> float:
    """The busiest expert's tokens over the mean in the first steps from random weights, where nothing forces balance."""
    return max(1.0, _COLLAPSED * (row.n_experts or 1) / (row.top_k or 1))


def routed(row: RunRow) -> RunRow:
    """The row with its text for untrained routing as a number."""
    word = row.of("plan").get("expert_imbalance") == UNTRAINED
    return _with(row, {"plan.expert_imbalance": untrained(row)}) if word else row


def adapted(row: RunRow) -> tuple[RunRow, ...]:
    """The row in each possible reading of its notes, if its columns do not state adapters, with other settings from the notes."""
    return tuple(_with(row, {**fields, **techniques(row)}) for fields in trained(row))


def adapters_of(row: RunRow) -> str:
    """`lora of rank 8 on q v`, as the row has them."""
    plan = row.of("plan")
    targets = plan.get("lora_targets", ())
    return f"{plan.get('peft')} of rank {plan.get('lora_rank')} on {' '.join(targets if isinstance(targets, tuple) else ())}"


def also(row: RunRow, stack: Stack) -> Iterator[RunRow]:
    """Further variants of the row: stages, expert exchanges and routing that it does not state; kernels of programs nobody described."""
    stated, unknown = row.of("plan"), stack.known == "unknown"
    if (row.pp or 1) > 1 and (SPLIT | {"virtual_stages"}).isdisjoint(stated):
        yield from _staged(row, unknown=unknown)
    if unknown and stated.get("base_weights") == "gptq" and "dequantised" not in row.of("stack"):
        yield _with(row, {"stack.dequantised": "operators"})
    if (row.n_experts or 1) == 1:
        return
    if "dispatcher" not in stated and (row.ep or 1) > 1:
        yield from (_with(row, change) for change in _TUNED)
    # programs that route by torch's own operators have no switch that forces balance; some pad all experts to the busiest one's rows
    if "expert_imbalance" not in stated and stack.kernels.expert_rows != "sorted":
        padded = {"stack.expert_rows": "stacked"} if unknown and "expert_rows" not in row.of("stack") else {}
        yield _with(row, {"plan.expert_imbalance": untrained(row)} | padded)


def _staged(row: RunRow, *, unknown: bool) -> Iterator[RunRow]:
    """Interleaved down to a layer a chunk, as published recipes are; in a program nobody described, stages dealt by what they compute."""
    layers, stages, width = row.n_layers or 0, row.pp or 1, row.d_model or 0
    if row.vpp is None and layers > stages and layers % stages == 0:
        yield replace(row, vpp=layers // stages)
    if unknown and (row.vpp or 1) == 1:
        dealt = by_cost(layers, (4 * width + 3 * (row.d_ff or 0)) * width, (row.vocab or 0) * width, stages)
        if len({*dealt}) > 1:
            yield _with(row, {"plan.stage_layers": dealt})


def counted_otherwise(row: RunRow, model: Model, gpus: int) -> float:
    """Measured seconds if TFLOP/s of a run that recomputes all count that too, over the seconds if they do not; else 1."""
    if row.metric not in ("model_tflops_per_gpu", "mfu") or row.act_ckpt != "full" or row.flop_convention:
        return 1.0
    usual, hardware = (step_seconds(row, gpus, one, model) for one in ("full_attention", "hardware_2021"))
    return hardware / usual if usual and hardware else 1.0


def beyond(factor: float) -> float:
    """An end of an interval, over its middle, where the run had options that no prediction holds."""
    return math.exp(math.copysign(math.hypot(math.log(factor), math.log(_UNMODELLED)), factor - 1))


def _with(row: RunRow, settings: Mapping[str, Any]) -> RunRow:
    return replace(row, settings=tuple({**dict(row.settings), **settings}.items())) if settings else row
