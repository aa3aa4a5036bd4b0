"""Where a serving answer's inputs come from, and what is assumed for lack of a measurement."""

from __future__ import annotations

from typing import Final

from simulator.predict.prediction import Source
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.mixers import hybrid_notes
from simulator.work.collectives import Links, calibrated
from simulator.work.collectives import source as links_source

ASSUMPTIONS: Final = (
    "reading the cache reaches the bandwidth of the attention kernel's calibration at any batch size, and one kernel's floor",
    "weights that are narrower than their products reach the 16-bit product's share of bandwidth",
    "an engine's own small all-reduces take what one table on H100 says; other collectives are NCCL's",
    "every answer has the length that the request states",
)
_OF_EXPERTS: Final = "routing is even: a step reads the experts that its tokens reach on average"
_OF_LATENTS: Final = "attention over latents reaches what the attention kernel's calibration says of its widest heads"
_OF_MTP: Final = "modules of multi-token prediction are not loaded"
_OF_GUESSES: Final = "every guess is accepted with the stated probability, whatever was guessed before it"
# DeepSeek's and Qwen 3's checkpoints in fp8 have a scale a block of 128 × 128 (weight_block_size in their config.json); engines refuse
# slices of other widths (vLLM, model_executor/layers/quantization/fp8.py; SGLang likewise)
_BLOCK: Final = 128
_OF_BLOCKS: Final = (
    'a GPU has {} columns of an expert, no whole blocks of 128: a checkpoint scaled by blocks takes experts = "dealt"'
)
_OF_HALF: Final = "the GPU multiplies no bf16: what is not quantised is in fp16"


_OF_POOLS: Final = (
    "a prompt's cache is handed over when all of it is computed, at the speed of NCCL's send and receive",
)


def assumptions(costs: StepCosts, *, handed_over: bool = False) -> tuple[str, ...]:
    """Those that an answer rests on."""
    model, plan = costs.model, costs.plan
    half = plan.compute_dtype == "fp16" and not costs.cluster.device.peak("bf16")
    found = [*ASSUMPTIONS, *([_OF_HALF] if half else ()), *(_OF_POOLS if handed_over else ())]
    found += [_OF_EXPERTS] if model.experts is not None else []
    found += hybrid_notes(model)
    found += [_OF_LATENTS] if model.latent is not None else []
    found += [_OF_GUESSES] if plan.speculative != "none" else []
    found += [_OF_MTP] if model.mtp_layers and plan.speculative != "mtp" else []
    columns = model.experts.d_ff // (plan.tp * plan.pcp) if model.experts and plan.experts == "split" else 0
    return tuple([*found, _OF_BLOCKS.format(columns)] if plan.weights == "fp8" and columns % _BLOCK else found)


def sources(costs: StepCosts, calibration: Calibration, cluster: Cluster, curves: LinkCurves) -> tuple[Source, ...]:
    """Provenance of every input."""
    model, stack = costs.model, costs.stack
    date = f", {calibration.provenance.date}" if calibration.provenance.date else ""
    near = "ideal" if curves.ideal_links else "calibrated" if calibrated(Links.of(cluster), curves) else "datasheet"
    return (
        Source(what="model", kind="given", detail=f"{model.name}, {model.num_parameters:,} parameters"),
        Source(what="device", kind="datasheet", detail=cluster.device.name),
        Source(
            what="kernels", kind=calibration.kind, detail=f"{calibration.name}: {calibration.provenance.machine}{date}"
        ),
        Source(what="links", kind=near, detail=links_source(cluster, curves, nccl=stack.software())),
        Source(what="stack", kind="assumed", detail=f"{stack.name}: {stack.framework}"),
    )
