"""LoRA adapters that an engine serves beside its model: what they hold, and what they add to a layer.

A matrix [n, k] gets x A B with A [k, r] and B [r, n] of the adapter that a sequence asks for. As in Punica (arXiv 2310.18547) and
the engines that took its kernels over, one kernel makes x A of all sequences and one adds their products with B, for all
matrices of one input together; each adapter that a step reaches is read once. Matrices of attention and of dense MLPs have
adapters, experts have none (vLLM's and SGLang's targets). tp splits A or B as it splits the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.base.errors import Fault
from simulator.base.kernels import DTYPE_BYTES, Kernel
from simulator.parallel.model_shard import ModelShard
from simulator.spec.model import LayerKind
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import StageShard
from simulator.work.ops.graph import stream

_ENDS = ("out", "down")  # matrices that have an input of their own


def _matrices(part: ModelShard, kind: LayerKind) -> Iterator[tuple[str, int, int]]:
    """(which input it has, n, k) of each matrix with adapters."""
    for name, shape in part.parameter_shapes(kind):
        module, *rest = name.split(".")
        if module in ("attention", "mlp") and len(shape) == 2 and rest[-1] == "weight":
            yield f"{module} {rest[0] if rest[0] in _ENDS else ''}", *shape


def lora_bytes(shard: StageShard, plan: InferencePlan) -> int:
    """Of all adapters on one GPU of a stage."""
    numbers = sum(n + k for kind in shard.part.layer_kinds for _, n, k in _matrices(shard.part, kind))
    return plan.lora_adapters * plan.lora_rank * numbers * DTYPE_BYTES[plan.compute_dtype]


def adapters_reached(adapters: int, sequences: int) -> float:
    """Adapters that so many sequences ask for, on average, where each is as likely."""
    return adapters * (1 - (1 - 1 / adapters) ** sequences)


def lora_kernels(part: ModelShard, kind: LayerKind, plan: InferencePlan, tokens: int) -> tuple[Kernel, ...]:
    """Two for each input of a layer. Tokens are taken to be of as many sequences, which reads prompts' adapters too often."""
    found: dict[str, list[tuple[int, int]]] = {}
    for which, n, k in _matrices(part, kind):
        found.setdefault(which, []).append((n, k))
    e, r = DTYPE_BYTES[plan.compute_dtype], plan.lora_rank
    reached = adapters_reached(plan.lora_adapters, tokens)
    kernels: list[Kernel] = []
    for matrices in found.values():
        outputs, inputs = sum(n for n, _ in matrices), matrices[0][1]
        narrow = len(matrices) * tokens * r * 4  # in fp32 between the two
        kernels += [
            stream("copy", int(reached * r * inputs) * len(matrices) * e + tokens * inputs * e, narrow),
            stream("copy", int(reached * r * outputs) * e + narrow + tokens * outputs * e, tokens * outputs * e),
        ]
    return tuple(kernels)


def lora_faults(plan: InferencePlan) -> list[Fault]:
    """Adapters without a rank."""
    if plan.lora_rank or plan.lora_adapters == 1:
        return []
    problem = f"{plan.lora_adapters} adapters without a rank"
    return [Fault(place="inference: lora_adapters", problem=problem, remedy="lora_rank = 16, or leave it out")]
