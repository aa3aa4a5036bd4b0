"""A mixture's layer as inference engines run it: what is copied, quantised and reduced, by their code.

t tokens of d channels go to k of E experts. vLLM's and SGLang's product reads rows by index and writes k rows a token, which one kernel
sums (fused_moe.py); TensorRT-LLM writes the rows by expert first (expandInputRowsKernel). Shared experts' part is added before the one
all-reduce behind both (vLLM, deepseek_v2.py: reduce_results=False).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
from typing_extensions import override

from simulator.base.kernels import Gemm, Kernel, Stream
from simulator.play.lower.work import Clock
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import InferencePlan
from simulator.studies.serving.blocks import ForwardOps, forward_blocks, forward_ops
from simulator.studies.serving.cost import Cost
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.kernels import multiplied, stored_as
from simulator.studies.serving.plan import Weights
from simulator.studies.serving.shards import stage_shards

TOKENS = 1000
MODEL = Model.load("deepseek-v3")
D = MODEL.d_model


def layer(stack: str, plan: InferencePlan, model: Model = MODEL, kind: str = "layer") -> ForwardOps:
    return forward_ops(stage_shards(model, plan)[0], plan, Stack.load(stack))[kind]


def kernels(ops: ForwardOps, name: str) -> tuple[Kernel, ...]:
    return next((found for op, _, found, _ in ops.at(TOKENS) if op == name), ())


def reduced(ops: ForwardOps) -> list[int]:
    return [each.num_bytes for _, _, _, exchanges in ops.at(TOKENS) for each in exchanges if each.kind == "all_reduce"]


@pytest.mark.parametrize("experts", ["split", "dealt"])
@pytest.mark.parametrize("stack", ["vllm-2025", "sglang-2025", "tensorrt-llm-2025"])
def test_a_layer_with_shared_experts_reduces_twice(stack: str, experts: Literal["split", "dealt"]) -> None:
    """Behind attention, and behind all experts together: as a layer without experts does."""
    plan = InferencePlan(tp=8, experts=experts)
    assert reduced(layer(stack, plan)) == [2 * TOKENS * D] * 2
    assert reduced(layer(stack, plan, kind="dense_layer")) == [2 * TOKENS * D] * 2


@pytest.mark.parametrize(
    ("stack", "weights", "written"),
    [
        ("vllm-2025", "fp8", 0),
        ("sglang-2025", "bf16", 0),
        ("tensorrt-llm-2025", "bf16", 2),
        ("tensorrt-llm-2025", "fp8", 1),
    ],
)
def test_rows_of_experts_are_written_once_or_not_at_all(stack: str, weights: Weights, written: int) -> None:
    """written: bytes of a number of the rows that one kernel writes by expert."""
    assert MODEL.experts is not None
    rows = MODEL.experts.top_k * TOKENS
    ops = layer(stack, InferencePlan(tp=8, weights=weights))
    (summed,) = kernels(ops, "unpermute")
    assert isinstance(summed, Stream)
    assert (summed.read_bytes, summed.write_bytes) == (2 * rows * D, 2 * TOKENS * D)
    copies = [kernel for name in ("permute", "sorted", "unsorted") for kernel in kernels(ops, name)]
    assert [(one.read_bytes, one.write_bytes) for one in copies if isinstance(one, Stream)] == (
        [(2 * TOKENS * D, written * rows * D)] if written else []
    )


class Seen(StepCosts):
    """Keeps the kernels whose prices it makes."""

    seen: tuple[Kernel, ...] = ()

    @override
    def _kernels(self, kernels: Sequence[Kernel], clock: Clock, factor: float = 1.0) -> Cost:
        self.seen += tuple(kernels)
        return super()._kernels(kernels, clock, factor)


def priced(plan: InferencePlan) -> tuple[Kernel, ...]:
    """Every kernel of a layer on H200s without attention's, as its weights are stored."""
    cluster = Cluster.load("hgx-h200-8")
    calibration, stack = Calibration.for_device(cluster.device), Stack.load(plan.stack)
    costs = Seen(MODEL, plan, cluster, stack, calibration, default_curves())
    costs._ops(costs._forward["layer"], TOKENS, costs._clock, narrow=True)
    return costs.seen


def test_tokens_are_quantised_before_they_become_rows() -> None:
    """Of the products that a token passes each reads its own copy in fp8: d channels of a token once for all its k experts."""
    found = priced(InferencePlan(tp=8, weights="fp8"))
    read = [one.num_bytes for one in found if isinstance(one, Stream) and one.op == "quantise"]
    assert max(read) == (2 + 1) * TOKENS * D


def test_routers_multiply_what_they_get() -> None:
    """ReplicatedLinear with quant_config=None, in 16 bits: nothing is widened, nothing quantised."""
    assert MODEL.experts is not None
    found = priced(InferencePlan(tp=8, weights="fp8"))
    router = [one for one in found if isinstance(one, Gemm) and one.n == MODEL.experts.num_experts]
    assert [one.dtype for one in router] == ["bf16"]
    assert not [one for one in found if isinstance(one, Stream) and one.op == "widen"]


def test_engines_turn_and_clamp_in_one_kernel_each() -> None:
    """gpt-oss scales its positions and clamps gates, for which Megatron-Core has chains of operators: engines have none."""
    model = Model.load("gpt-oss-120b")
    plan = InferencePlan()
    names = [name for name, _, found, _ in layer("vllm-2025", plan, model).at(TOKENS) for _ in found]
    assert names.count("q.rotated") == names.count("k.rotated") == 1
    assert {"clamped", "q.swapped"}.isdisjoint(names)
    assert {
        op.name for op in forward_blocks(stage_shards(model, plan)[0], plan, Stack.load("vllm-2025"), 1)["layer"].ops
    } >= {"experts.up"}


def test_of_wide_weights_nothing_changes_but_the_numbers_read() -> None:
    """rows says how many rows are quantised, and nothing else."""
    product = Gemm(m=64, n=512, k=256, dtype="bf16", batch=8, grouped=True)
    known = multiplied(Cluster.load("hgx-h200-8").device)
    (cast, _), (fewer, _) = (stored_as((product,), "fp8", known, rows=rows) for rows in (None, 100))
    assert (cast.num_bytes, fewer.num_bytes) == (3 * 8 * 64 * 256, 3 * 100 * 256)
    assert stored_as((product,), "bf16", known, rows=100) == (product,)
